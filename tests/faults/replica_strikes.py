"""Short runs over two real vLLM servers, which are killed and frozen at chosen moments; what became of such a run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from e2e.tiny_runs import FILTERS, num_sampled, train_lines, trajectory_lines
from faults.tiny_places import is_leftover
from verbatim.config.schema import BuildConfig
from verbatim.core.trajectory_json import trajectory_from_json
from verbatim.inference.embedded.whole_sequence import sequence_logprobs
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model

PYTHON = Path(os.environ.get("VERBATIM_VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()
MARK = "VERBATIM_TEST_OF_REPLICAS"
STEPS, BATCH, GROUP, TURNS = 16, 8, 4, 3
TOLERANCE = 5e-5
"""Largest |delta logprob| between sampler and trainer, float32."""
LONGEST = 3600
"""Seconds until a run counts as hung."""

TALKS = f'''
import asyncio
from pathlib import Path

from verbatim import Example
from verbatim.environments import Episode, Reply


class Talk(Episode):
    """{TURNS} turns about nothing; earns something between 0 and 1 by its seed: every group has a gradient."""

    messages = ({{"role": "user", "content": "guess"}},)

    def __init__(self, seed):
        self.reward, self.turns = seed % 100 / 100, 0

    async def reply(self, message):
        self.turns += 1
        return Reply(messages=[{{"role": "user", "content": "higher"}}], done=self.turns == {TURNS})

    async def score(self, trajectory):
        return self.reward


class Talks:
    """Episodes begin while there is no file `hold`; the first one leaves the file `began`."""

    def examples(self, split):
        return [Example(id=f"talk-{{n}}") for n in range(5)]

    async def start(self, example, seed):
        if Path("mine", "config.toml").exists():  # the checks, which start one too, are over
            Path("began").touch()
        while Path("hold").exists():
            await asyncio.sleep(0.1)
        return Talk(seed)
'''

RUN = f"""\
max_steps = {{steps}}
[model]
name = "{{model}}"
[orchestrator]
batch_size = {BATCH}
group_size = {GROUP}
seq_len = 384
max_async_level = 1
sampling = {{{{ max_tokens = 20 }}}}
[trainer.optim]
lr = 1e-3
[checkpoint]
interval = 1
keep_last = {STEPS + 1}
[inference]
backend = "vllm"
[inference.vllm]
python = "{{python}}"
replicas = 2
update_timeout = 60
health_timeout = 30
stall_timeout = 20
args = ["--enforce-eager", "--block-size", "32", "--num-gpu-blocks-override", "512"]
env = {{{{ VLLM_CPU_KVCACHE_SPACE = "1", OMP_NUM_THREADS = "1", VLLM_CPU_OMP_THREADS_BIND = "nobind" }}}}
{FILTERS}[[orchestrator.train.env]]
import_path = "talks.Talks"
"""

SIZES = BuildConfig(
    hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=64, vocab_size=512, context_length=384
)
"""Heads of 32, because vLLM's kernels for CPUs know none of 16."""

MOMENTS = ("start", "update", "between", "restart")
"""Once the first episode has begun; once new weights are published; between two updates; while the other replica, which
was struck just before, is away."""


@dataclasses.dataclass(frozen=True)
class Strike:
    """What happens to a replica.

    Args:
        blow: SIGKILL or SIGSTOP.
        part: "server" or "engine": which of its processes.
        moment: One of `MOMENTS`.
        step: Not before so many steps.
        delay: Seconds after the moment.
        replica: Which one; of a "restart" the one that was not struck just before.
    """

    blow: signal.Signals
    part: str
    moment: str
    step: int
    delay: float
    replica: int


LATEST = {"start": 2.0, "update": 0.4, "between": 4.0, "restart": 25.0}
"""Most seconds after each moment."""
MOST_STEPS = 3
"""Most steps that a strike's delay lasts."""


def plan(number: int) -> list[Strike]:
    """Two kills and a freeze, in any order, at three of the moments."""
    chance = random.Random(number)
    moments = [MOMENTS[(3 * number + i) % 4] for i in range(3)]
    chance.shuffle(moments)
    moments.sort(key=lambda moment: moment != "start")  # there is one start
    if moments[0] == "restart":
        moments.append(moments.pop(0))
    blows = [signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]
    chance.shuffle(blows)
    return [
        Strike(
            blow,
            chance.choice(["server", "engine"]),
            moment,
            0 if moment == "start" else 1 + 5 * i,
            chance.uniform(0, LATEST[moment]),
            chance.randrange(2),
        )
        for i, (blow, moment) in enumerate(zip(blows, moments, strict=True))
    ]


class ReplicaRun:
    """A run in a folder of its own.

    Args:
        folder: Where it is made.
        model: Its weights.
        python: That of an environment with vLLM.
        steps: How many it has.
    """

    def __init__(self, folder: Path, model: Path, *, python: Path = PYTHON, steps: int = STEPS) -> None:
        self._place, self._model, self._steps = folder, model, steps
        self.folder = folder / "mine"
        folder.mkdir(parents=True)
        (folder / "talks.py").write_text(TALKS)
        (folder / "run.toml").write_text(RUN.format(model=model, python=python, steps=steps))
        self._out = folder / "said"
        self.seconds = 0.0

    def go(self, strikes: list[Strike]) -> list[str]:
        """Run it with these strikes. What was wrong with its end."""
        began = time.monotonic()
        self._deadline = began + LONGEST
        with (
            self._out.open("wb") as out,
            subprocess.Popen(
                [sys.executable, "-m", "verbatim.cli", "rl", "run.toml", "--run-dir", "mine"],
                cwd=self._place,
                stdout=out,
                stderr=out,
                env={
                    **os.environ,
                    MARK: str(self._place),
                    "COLUMNS": "1000",
                    "PYTHONPATH": os.pathsep.join([str(self._place), *sys.path]),
                },
            ) as run,
        ):
            self._run = run
            try:
                self._strike_all(strikes)
                status = run.wait(max(1, self._deadline - time.monotonic()))
            except (TimeoutError, subprocess.TimeoutExpired) as late:
                return [f"hung: {late}; {self.said()[-3000:]}"]
            finally:
                run.kill()
                self.seconds = time.monotonic() - began
        if status != 0:
            return [f"status {status}: {self.said()[-3000:]}"]
        return self.wrong()

    def said(self) -> str:
        """What it printed and logged."""
        logs = (self.folder / "logs").glob("*.log")
        return "".join(path.read_text(errors="replace") for path in [self._out, *sorted(logs)])

    # ---- strikes

    def _strike_all(self, strikes: list[Strike]) -> None:
        struck: list[int] = []
        for strike in strikes:
            replica = 1 - struck[-1] if strike.moment == "restart" else strike.replica
            if strike.moment == "start":
                self._until(lambda: (self._place / "began").exists())
            elif strike.moment == "restart":
                self._until(lambda: len(self._lost()) == len(struck))
            else:
                self._until(lambda step=strike.step: self._num_steps() >= step)
                self._hold_until(lambda: len(self._back()) == len(struck))
                if strike.moment == "update":
                    known = self._published()
                    self._until(lambda known=known: self._published() > known, every=0.002)
            self._wait(strike)
            self._hold_until(functools.partial(self._is_there, replica, strike.part))
            for pid in self._processes_of(replica, strike.part):
                os.kill(pid, strike.blow)
            struck.append(replica)
            said = f"{strike.blow.name} {strike.part} of {replica}, {strike.moment}, step {self._num_steps()}"
            print(said, flush=True)

    def _wait(self, strike: Strike) -> None:
        """The strike's delay; less where steps are so fast that the run would be over first."""
        late = time.monotonic() + strike.delay
        self._until(lambda: time.monotonic() >= late or self._num_steps() >= strike.step + MOST_STEPS, every=0.05)

    def _until(self, holds: Callable[[], Any], every: float = 0.1) -> None:
        while not holds():
            if self._run.poll() is not None or time.monotonic() > self._deadline:
                raise TimeoutError(f"status {self._run.poll()}")
            time.sleep(every)

    def _hold_until(self, holds: Callable[[], Any]) -> None:
        """No episode begins until then: the run waits for the next strike."""
        if not holds():
            (self._place / "hold").touch()
            try:
                self._until(holds)
            finally:
                (self._place / "hold").unlink()

    def _num_steps(self) -> int:
        path = self.folder / "metrics.jsonl"
        return path.read_text().count('"kind": "train"') if path.exists() else 0

    def _published(self) -> int:
        return max((int(path.name[1:]) for path in (self.folder / "weights").glob("v*")), default=0)

    def _lost(self) -> list[str]:
        return re.findall(r"replica (\d) is lost", (self.folder / "logs" / "orchestrator.log").read_text())

    def _back(self) -> list[str]:
        return re.findall(r"replica (\d) serves", (self.folder / "logs" / "orchestrator.log").read_text())

    def _is_there(self, replica: int, part: str) -> bool:
        return bool(self._processes_of(replica, part))

    def _processes_of(self, replica: int, part: str) -> list[int]:
        servers = [
            pid
            for pid, command in self.processes()
            if b"-m\0vllm.entrypoints" in command
            and b"subreaper.py" not in command
            and self._log_of(pid) == f"replica_{replica}.log"
        ]
        if part == "server":
            return servers
        return [pid for pid, command in self.processes() if b"EngineCore" in command and _parent(pid) in servers]

    @staticmethod
    def _log_of(pid: int) -> str:
        with contextlib.suppress(OSError):
            return Path(os.readlink(f"/proc/{pid}/fd/1")).name
        return ""

    def processes(self) -> Iterator[tuple[int, bytes]]:
        """Id and command of every process of this run that is left: what it starts has its environment, and what the
        tests' warm processes fork for it, its folder."""
        mark = f"{MARK}={self._place}".encode()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and (
                    mark in (entry / "environ").read_bytes() or os.readlink(entry / "cwd") == str(self._place)
                ):
                    yield int(entry.name), (entry / "cmdline").read_bytes()

    # ---- its end

    def _until_warm_servers_end(self) -> None:
        """Those of the tests, not of the run: each ends when it reads that the process it served has ended."""
        late = time.monotonic() + LONGEST
        warm = (b"warm_server.py", b"double_server.py")
        while any(name in command for _, command in self.processes() for name in warm) and time.monotonic() < late:
            time.sleep(0.05)

    def metrics(self) -> dict[str, float]:
        """Those of the last step."""
        return train_lines(self.folder)[-1]["metrics"]

    def wrong(self) -> list[str]:
        """What is wrong with what it has left."""
        self._until_warm_servers_end()
        found = [f"process {pid} is left: {command!r}" for pid, command in self.processes()]
        steps = [line["step"] for line in train_lines(self.folder)]
        if steps != list(range(1, self._steps + 1)):
            found.append(f"steps {steps}")
        groups = Counter(t["group_id"] for t in trajectory_lines(self.folder))
        if groups != {f"train-{n}": GROUP for n in range(self._steps * BATCH // GROUP)}:
            found.append(f"groups {dict(groups)}")
        found += self._unbalanced()
        found += [
            f"{path} was left" for path in self.folder.rglob("*") if is_leftover(path) or path.name.endswith(".weights")
        ]
        largest, num_tokens = self.largest_delta()
        if not largest <= TOLERANCE:
            found.append(f"|delta logprob| {largest:.2g} over {num_tokens} tokens")
        return found

    def _unbalanced(self) -> list[str]:
        last = self.metrics()
        dropped = {name.removeprefix("ledger/dropped/"): n for name, n in last.items() if "ledger/dropped/" in name}
        in_file = sum(map(num_sampled, trajectory_lines(self.folder)))
        thrown_away = dropped.get("cancelled", 0) + dropped.get("lost_replica", 0)
        found = []
        if last["ledger/sampled"] != last["ledger/trained"] + last["ledger/masked_by_loss"] + sum(dropped.values()):
            found.append("the ledger does not add up")
        if last["ledger/pending"] or last["ledger/sampled"] != in_file + thrown_away:
            found.append(f"{in_file} sampled tokens are in the trajectories")
        if dropped.get("lost_replica", 0) != last["replicas/tokens_lost"]:
            found.append(f"tokens lost: {dropped} and {last['replicas/tokens_lost']}")
        if last["replicas/failed_checks"]:
            found.append("a check failed, and no weights were wrong")
        for line in train_lines(self.folder):
            for i in range(2):
                metrics = line["metrics"]
                if metrics[f"replica/{i}/serving"] and metrics[f"replica/{i}/policy_version"] != line["step"]:
                    found.append(f"step {line['step']}: replica {i} serves {metrics[f'replica/{i}/policy_version']}")
        return found and [*found, json.dumps({n: v for n, v in last.items() if n.startswith(("ledger", "replicas/"))})]

    def largest_delta(self) -> tuple[float, int]:
        """Largest |delta logprob| of the sampled tokens under the weights of the version that each is marked with, and
        the number of tokens; infinity where the version before would do as well: then versions would show nothing."""
        trainer = _Trainer(self.folder, self._model)
        mine, before, num_tokens = [0.0], [0.0], 0
        for written in trajectory_lines(self.folder):
            for turn in trajectory_from_json(written).turns:
                assert turn.logprobs is not None and turn.policy_versions is not None
                num_tokens += len(turn.completion_ids)
                for version in np.unique(turn.policy_versions):
                    where = turn.policy_versions == version
                    for other, largest in ((version, mine), (version - 1, before)):
                        if other >= 0:
                            expected = trainer.logprobs(int(other), turn.prompt_ids, turn.completion_ids)
                            largest.append(float(np.abs(turn.logprobs - expected)[where].max()))
        return (max(mine) if max(before) > 10 * TOLERANCE else np.inf), num_tokens


class _Trainer:
    """Computes logprobs with the weights that the trainer saved at each step."""

    def __init__(self, run: Path, model: Path) -> None:
        self._run, self._model = run, model
        self._loaded: dict[int, CausalLM] = {}

    def logprobs(self, version: int, prompt_ids: np.ndarray, completion_ids: np.ndarray) -> np.ndarray:
        if version not in self._loaded:
            saved = self._run / "checkpoints" / f"step_{version:06d}" / "weights"
            self._loaded[version] = CausalLM(load_model(saved if version else self._model))
        ids = torch.from_numpy(np.concatenate([prompt_ids, completion_ids]).astype(np.int64))
        return sequence_logprobs(self._loaded[version], ids, 1.0).numpy()[len(prompt_ids) :]


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
