"""Real processes that train together, for tests: started once, and asked to run functions of a test module.

A function gets `(ranks, folder)` on rank 0 of the first `size` processes; the others take part by `make` and `follow`.
"""

import contextlib
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import warm
from waiting import HANGS

SECONDS = 3 * HANGS
"""After which a job, or a rank that waits for another one, is given up."""


@dataclass
class Crew:
    """`size` interpreters, which run jobs together, one after the other."""

    size: int
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="crew-")))
    processes: list = field(default_factory=list)
    jobs: int = 0

    def start(self):
        here = Path(__file__).parent
        paths = os.pathsep.join([str(here), *filter(None, sys.path)])
        for rank in range(self.size):
            with (self.folder / f"log-{rank}").open("ab") as log:
                self.processes.append(
                    warm.Popen(
                        [sys.executable, str(here / "parallel_ranks.py"), str(self.folder), str(rank)],
                        stdout=log,
                        stderr=log,
                        env={**os.environ, "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo"},
                    )
                )
        return self

    def run(self, function, *arguments, size=None, deadline=2 * SECONDS, seconds=SECONDS):
        """The JSON value that the function returned on rank 0 of the first `size` processes."""
        self.jobs += 1
        job = {
            "module": function.__module__,
            "name": function.__name__,
            "arguments": arguments,
            "size": size or self.size,
            "deadline": deadline,
        }
        _publish(self.folder / f"job-{self.jobs}", job)
        answer = self.folder / f"answer-{self.jobs}"
        until = time.monotonic() + seconds
        while not answer.exists():
            ended = [rank for rank, process in enumerate(self.processes) if process.poll() is not None]
            assert 0 not in ended and time.monotonic() < until, self.logs()
            time.sleep(0.01)
        found = json.loads(answer.read_text())
        assert "error" not in found, found["error"] + self.logs()
        return found["value"]

    def logs(self):
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("log-*")))

    def stop(self):
        for process in self.processes:
            process.kill()
            process.wait()
        shutil.rmtree(self.folder)


@contextlib.contextmanager
def crew(size):
    found = Crew(size).start()
    try:
        yield found
    finally:
        found.stop()


def _publish(path, value):
    path.with_suffix(".tmp").write_text(json.dumps(value))
    path.with_suffix(".tmp").rename(path)


def main(folder, rank):
    import torch
    import torch.distributed as dist

    from verbatim.trainer.parallel.ranks import Ranks

    torch.set_num_threads(1)
    number = 0
    while True:
        number += 1
        path = folder / f"job-{number}"
        while not path.exists():
            if os.getppid() == 1:
                return
            time.sleep(0.01)
        job = json.loads(path.read_text())
        if rank >= job["size"]:
            continue
        store = dist.FileStore(str(folder / f"store-{number}"), job["size"])
        ranks = Ranks(store, rank=rank, size=job["size"], deadline=job["deadline"])
        function = getattr(importlib.import_module(job["module"]), job["name"])
        try:
            answer = {"value": function(ranks, *job["arguments"])}
        except BaseException:  # noqa: BLE001  (the test that asked is told)
            answer = {"error": traceback.format_exc()}
        if rank == 0:
            _publish(folder / f"answer-{number}", answer)
        elif "error" in answer:
            sys.stderr.write(answer["error"])
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
