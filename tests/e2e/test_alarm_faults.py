"""Faults planted in runs with a real trainer and a real sampler, and the alarm that names each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from e2e.tiny_runs import LOTS, TOML, build_tiny_model, train_lines, workplace
from verbatim.cli.main import main
from verbatim.logs.monitors import Alarm, read_alarms

pytestmark = pytest.mark.slow

PLANTED = '''
import asyncio
import dataclasses
import time
from pathlib import Path

from lots import Lot, Lots
from verbatim.inference.embedded.engine import TorchSampler
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.algorithms.losses import LOSSES


class Wrong(TorchSampler):
    """Gives the logprobs of another distribution than the one that it samples from."""

    def __init__(self, inputs, settings: TorchSettings):
        super().__init__(inputs.model, config=TorchSettings(max_batch_size=8), context_length=inputs.context_length,
                         policy_version=inputs.policy_version)

    async def generate(self, request):
        completion = await super().generate(request)
        return dataclasses.replace(completion, logprobs=completion.logprobs * 1.2)


class Pace:
    """Lets one side wait for three times as long as the other one has worked since, however fast the machine is."""

    def __init__(self):
        self.released = None

    def seconds(self):
        return 0.1 if self.released is None else 3 * (time.monotonic() - self.released)

    def release(self):
        self.released = time.monotonic()


def num_trained():
    metrics = Path("mine/metrics.jsonl")
    return metrics.read_text().count('"kind": "train"') if metrics.exists() else 0


class SlowEpisodes(Lots):
    """The episodes of a batch begin when the batch before is trained, and the trainer has waited."""

    def __init__(self):
        super().__init__()
        self.num_started, self.pace, self.released = 0, Pace(), [asyncio.Event() for _ in range(9)]

    async def start(self, example, seed):
        batch, first = divmod(self.num_started, 16)
        self.num_started += 1
        if first:
            await self.released[batch].wait()
            return Lot(seed)
        while num_trained() < batch:
            await asyncio.sleep(0.005)
        await asyncio.sleep(self.pace.seconds())
        self.pace.release()
        self.released[batch].set()
        return Lot(seed)


class Counted(Lots):
    """Each episode that is scored makes the file `scored` longer."""

    async def start(self, example, seed):
        episode = await super().start(example, seed)
        score = episode.score

        async def counted(trajectory):
            with open("scored", "a") as file:
                file.write(".")
            return await score(trajectory)

        episode.score = counted
        return episode


num_losses, pace = 0, Pace()


def slow_loss(inputs):
    """At the first trajectory of a batch the trainer lets the sampler play the next one, and then wait."""
    global num_losses
    if not Path("scored").exists():  # it is only tried, before the run
        return LOSSES["default"].function(inputs)
    batch, first = divmod(num_losses, 16)
    num_losses += 1
    if not first:
        while len(Path("scored").read_text()) < 16 * min(batch + 2, 7):
            time.sleep(0.005)
        time.sleep(pace.seconds())
        pace.release()
    return LOSSES["default"].function(inputs)
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def alarms(
    folder: Path,
    model: Path,
    tables: str,
    replaced: Mapping[str, str],
    status: int = 0,
    environment: str = "lots.Lots",
) -> list[Alarm]:
    """Those of `verbatim rl` on the tiny run, with keys replaced and these tables behind its environment."""
    with workplace(folder, {"lots": LOTS, "planted": PLANTED}):
        text = TOML.format(model=model)
        for key, value in {"batch_size": "16", **replaced}.items():
            (line,) = [line for line in text.splitlines() if line.startswith(f"{key} = ")]
            text = text.replace(line, f"{key} = {value}")
        Path("run.toml").write_text(text + f'import_path = "{environment}"\n' + tables)
        assert main(["rl", "run.toml", "--run-dir", "mine"]) == status
    return read_alarms(folder / "mine" / "alarms.jsonl")


def test_a_learning_rate_that_is_far_too_high_collapses_the_entropy_and_ends_the_run(tmp_path: Path, model: Path):
    """Rewards are chance, so that nothing is gained by it."""
    stop = '[monitor.alarms]\nstop = ["entropy_collapse"]\n'
    (alarm,) = alarms(tmp_path, model, stop, {"max_steps": "60", "lr": "1e-1"}, status=4)
    steps = train_lines(tmp_path / "mine")
    assert alarm.name == "entropy_collapse" and len(steps) == alarm.step < 60
    assert "trainer.optim.lr (now 0.1)" in alarm.advice
    entropies = [line["metrics"]["entropy"] for line in steps]
    assert np.median(entropies[-8:]) < 0.05 * np.median(entropies[:8])


def test_a_sampler_whose_logprobs_are_of_another_distribution_is_named(tmp_path: Path, model: Path):
    """The canary does not see it: it asks for logprobs of given tokens."""
    found = alarms(tmp_path, model, '[inference]\nbackend = "planted.Wrong"\n', {"max_steps": "9"})
    alarm = next(alarm for alarm in found if alarm.name == "mismatch_kl")
    assert alarm.step == 8 and alarm.trajectory_ids
    assert alarm.cause.startswith("sampler and trainer compute different logprobs for the same tokens, even at")


@pytest.mark.realtime
@pytest.mark.parametrize(
    ("name", "environment", "tables"),
    [
        ("trainer_idle", "planted.SlowEpisodes", ""),
        ("sampler_idle", "planted.Counted", '[trainer.loss]\ntype = "planted.slow_loss"\n'),
    ],
)
def test_a_side_that_waits_is_named(tmp_path: Path, model: Path, name: str, environment: str, tables: str):
    """It waits three quarters of each step; steps are short, so 0.05 s count."""
    tables += f"[monitor.alarms.{name}]\nseconds = 0.05\nshare = 0.4\nsteps = 5\n"
    found = alarms(
        tmp_path,
        model,
        tables,
        {"max_steps": "7", "max_async_level": "1", "separate_process": "true"},
        environment=environment,
    )
    assert [alarm.name for alarm in found if alarm.state == "raised"] == [name]


def test_pools_that_run_dry_are_named(tmp_path: Path, model: Path):
    """Every group earns more than 0.01 on average, and half of the examples come back when none is left."""
    pools = "[orchestrator.buffer]\neasy_threshold = 0.01\neasy_fraction = 0.5\n"
    found = alarms(tmp_path, model, pools, {"max_steps": "4"})
    alarm = next(alarm for alarm in found if alarm.name == "pools_dry")
    assert alarm.cause == "the examples are solved"
    assert "orchestrator.buffer.easy_threshold (now 0.01)" in alarm.advice
