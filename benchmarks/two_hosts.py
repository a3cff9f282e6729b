"""Prints what a host without the run folder costs, over loopback: bytes per second, and seconds per step.

`python benchmarks/two_hosts.py [--mib 256] [--rounds 100]` prints one JSON line: how fast a folder of weights goes up
and comes down, how fast the same file is copied and hashed, and how long a batch and its answer without weights take,
in one folder and between two hosts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from verbatim.core.errors import RunStopped
from verbatim.trainer.transport import StepReport
from verbatim.trainer.transport.exchange import Exchange
from verbatim.trainer.transport.heartbeat import Heartbeat
from verbatim.trainer.transport.mirror.app import MirrorApp
from verbatim.trainer.transport.mirror.link import Link
from verbatim.trainer.transport.mirror.protocol import RUN, SESSIONS, files_of
from verbatim.trainer.transport.mirror.server import Listen, serve_mirror
from verbatim.trainer.transport.mirror.trainer_side import Mirror
from verbatim.trainer.transport.remote_trainer import RemoteTrainer
from verbatim.trainer.transport.trainer_messages import to_json

KEY, SESSION = "a-key-of-16-bytes", "00112233445566ff"


@contextlib.contextmanager
def serving(run: Path, offers: dict[str, dict[str, tuple[int, str]]]) -> Iterator[str]:
    app = MirrorApp(run, config="", offers=offers, keep=2, key=KEY)
    with serve_mirror(app, Listen(host="127.0.0.1", port=0, key=KEY)) as server:
        yield server.url


async def carry(root: Path, mib: int) -> dict[str, float]:
    """MiB per second, each way; and of a copy and a SHA-256 of the same file."""
    here, checkpoint, there = root / "here", root / "here" / "checkpoints" / "step_000001", root / "there"
    checkpoint.mkdir(parents=True)
    there.mkdir()
    with (checkpoint / "model").open("wb") as file:
        for _ in range(mib):
            file.write(os.urandom(2**20))
    began = time.perf_counter()
    shutil.copyfile(checkpoint / "model", root / "copy")
    files = files_of(checkpoint)
    local = time.perf_counter() - began
    with serving(here, {"checkpoints/step_000001": files}) as url:
        async with Link(url, KEY) as link:
            began = time.perf_counter()
            await link.download(f"{RUN}/files", there / "model", *files["model"], file="checkpoints/step_000001/model")
            down = time.perf_counter() - began
            await link.insist("POST", f"{SESSIONS}/{SESSION}", {"checkpoint": "checkpoints/step_000001"})
            began = time.perf_counter()
            await link.upload(SESSION, "weights/v000001", there)
            up = time.perf_counter() - began
    return {"copy_and_hash_mib_s": mib / local, "down_mib_s": mib / down, "up_mib_s": mib / up}


async def exchange_rounds(orchestrators: Exchange, trainers: Exchange, rounds: int) -> float:
    """Median seconds of a batch and its answer; the trainer does nothing."""

    def answer() -> None:
        with contextlib.suppress(RunStopped):
            for number in range(1, rounds + 1):
                trainers.wait_for_message(number, lambda: None)
                report = StepReport(version=number, weights=Path("none"), num_trained_tokens=0, metrics={})
                trainers.answer(number, {"result": to_json(report, trainers.run)})

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    link, seconds = RemoteTrainer(orchestrators, fault=lambda: None), []
    for number in range(1, rounds + 1):
        began = time.perf_counter()
        await link.train([], number)
        seconds.append(time.perf_counter() - began)
    thread.join()
    return statistics.median(seconds)


async def rounds_between_hosts(root: Path, rounds: int) -> float:
    """The same, between two hosts."""
    here, there = root / "rounds", Exchange.open(root / "rounds_there" / "exchange", SESSION)
    (there.folder / "ready.json").write_text(json.dumps({"version": 0, "weights": "none"}))
    here.mkdir()
    with serving(here, {}) as url, Heartbeat(there.trainer_beat), Mirror(Link(url, KEY), there, None):
        while (current := await asyncio.to_thread(_begun, here)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return await exchange_rounds(current, there, rounds)


def _begun(run: Path) -> Exchange | None:
    current = Exchange.current(run / "exchange")
    return current if current is not None and (current.folder / "ready.json").exists() else None


async def measure(mib: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        one = Exchange.open(root / "one" / "exchange", SESSION)
        return {
            **await carry(root, mib),
            "round_s_one_folder": await exchange_rounds(one, one, rounds),
            "round_s_two_hosts": await rounds_between_hosts(root, rounds),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    print(json.dumps({name: round(value, 4) for name, value in asyncio.run(measure(args.mib, args.rounds)).items()}))


if __name__ == "__main__":
    main()
