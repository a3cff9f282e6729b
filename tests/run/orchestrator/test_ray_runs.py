"""Whole runs whose episodes are played by Ray actors: the same trajectories, and every token accounted for."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
import uuid
from pathlib import Path

import pytest

import ray_workers
import warm
from byte_renderer import ByteRenderer
from e2e.tiny_runs import LOTS, TOML, build_tiny_model, num_sampled, train_lines, trajectory_lines, workplace
from rollouts.players import Doublings, SecondTurnsWait, scripted, two_turns
from rollouts.ray_session import local_ray
from run.orchestrator.loop_runs import Coins, HeldInTheMiddle, go_on_and_check, make, nothing_left_behind
from verbatim.cli.main import main
from verbatim.core.errors import RunStopped
from verbatim.inference import SamplingParams
from verbatim.rollouts import EpisodeLimits
from verbatim.rollouts.backends import RunnerInputs
from verbatim.rollouts.ray.runner import ray_runner
from verbatim.rollouts.workers.episodes import RemoteSetup
from waiting import HANGS, until, wait_until

pytestmark = [pytest.mark.extras, pytest.mark.slow, pytest.mark.realtime]
__all__ = ["local_ray"]

RAY = ["--orchestrator.rollout.backend", "ray", "--orchestrator.rollout.workers", "2"]


COMMAND = """
import sys

from ray_workers import slow_starts
from verbatim.cli.main import main

with slow_starts():
    sys.exit(main(sys.argv[1:]))
"""
"""`verbatim`, where Ray may take minutes to start."""

FLIPS = "run.orchestrator.test_ray_runs.Flips"


class Flips(Coins):
    """Coins that a file keeps from being made again."""

    def __init__(self, folder: str):
        super().__init__()
        if (Path(folder) / "refuse").exists():
            raise RuntimeError("the bank is closed")


@contextlib.asynccontextmanager
async def on_actors(orchestrator, sampler, name, **args):
    """The orchestrator of `loop_runs.make`, its episodes on two actors."""
    remote = RemoteSetup(env="coins", name=name, args=args, params=SamplingParams(), limits=EpisodeLimits())
    inputs = RunnerInputs(setups={("train", "coins"): remote}, sampler=sampler, renderer=ByteRenderer(), workers=2)
    async with ray_runner(inputs) as player:
        dispatcher = orchestrator.dispatcher
        dispatcher.setups = {
            label: dataclasses.replace(setup, runner=player) for label, setup in dispatcher.setups.items()
        }
        yield player


def trajectories(notes):
    return [t for _, _, groups in notes.steps for g in groups for t in g.trajectories]


async def test_a_run_on_actors_trains_the_trajectories_of_a_local_one_also_when_an_actor_dies(local_ray, tmp_path):
    """From the second batch on the second turns wait; then an actor dies in the middle of them."""
    local, expected, _ = make(tmp_path, sampler=scripted(), environment=Doublings(), max_length=500)
    assert await local.run()
    sampler = SecondTurnsWait(first=12)
    orchestrator, notes, _ = make(tmp_path, sampler=sampler, environment=Doublings(), max_length=500)
    ledger = orchestrator.ledger_for_tests
    async with (
        nothing_left_behind(),
        on_actors(orchestrator, sampler, "rollouts.players.Doublings") as player,
    ):
        running = asyncio.create_task(orchestrator.run())
        await until(lambda: sampler.num_waiting == 6)
        os.kill(player.pids[0], signal.SIGKILL)
        await until(lambda: ledger.dropped["lost_worker"])
        ledger.check(orchestrator.dispatcher.num_pending_tokens)
        sampler.go_on.set()
        assert await running
    assert sorted(map(said, trajectories(notes))) == sorted(map(said, trajectories(expected)))
    ledger.check(pending=0)
    trained = sum(t.num_sampled_tokens for t in trajectories(notes))
    assert ledger.sampled == sum(len(two_turns(request)) for request in sampler.requests)  # as the engine saw it
    assert ledger.dropped == {"lost_worker": ledger.sampled - trained}
    last = notes.steps[-1][1]
    assert (last["rollout/workers_lost"], last["rollout/episodes_rerun"]) == (1, 3)
    assert last["ledger/dropped/lost_worker"] == ledger.sampled - trained > 0


def said(trajectory):
    return trajectory.trajectory_id, trajectory.reward, [t.completion_ids.tolist() for t in trajectory.turns]


async def test_a_run_whose_actors_are_all_gone_stops_and_can_be_resumed(local_ray, tmp_path):
    sampler = HeldInTheMiddle(8)
    orchestrator, notes, _ = make(tmp_path, sampler=sampler, steps=6)
    async with nothing_left_behind(), on_actors(orchestrator, sampler, FLIPS, folder=str(tmp_path)) as player:
        running = asyncio.create_task(orchestrator.run())
        await until(lambda: sampler.num_in_flight >= 4 and orchestrator.step >= 1)
        (tmp_path / "refuse").touch()
        for pid in player.pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RunStopped, match=r"no Ray actor is left .*the bank is closed"):
            await running
    assert orchestrator.step >= 1
    await go_on_and_check(notes, tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("ray") / "model")


def what_was_sampled(run):
    return sorted(
        (t["trajectory_id"], t["reward"], [(turn["completion_ids"], turn["logprobs"]) for turn in t["turns"]])
        for t in trajectory_lines(run)
    )


def test_verbatim_rl_on_actors_writes_what_a_local_run_writes(local_ray, model, tmp_path):
    with workplace(tmp_path / "work", {"lots": LOTS}) as folder:
        text = TOML.replace("[inference.torch]\n", "[inference.torch]\ndeterministic = true\n").format(model=model)
        (folder / "run.toml").write_text(
            text + 'import_path = "lots.Lots"\n[orchestrator.eval]\nepisodes = 5\ninterval = 2\n'
        )
        for name, options in (("local", []), ("ray", RAY)):
            with contextlib.redirect_stdout(None):
                assert main(["rl", "run.toml", "--run-dir", name, *options]) == 0
        assert what_was_sampled(folder / "ray") == what_was_sampled(folder / "local")
        last = train_lines(folder / "ray")[-1]["metrics"]
        assert (last["rollout/workers"], last["rollout/workers_lost"]) == (2, 0)
        assert last["ledger/sampled"] == sum(map(num_sampled, trajectory_lines(folder / "ray"))) > 0
        assert "rollout/workers" not in train_lines(folder / "local")[-1]["metrics"]
        config = (folder / "ray" / "config.toml").read_text()
        assert "[orchestrator.rollout]" in config and 'backend = "ray"' in config
    assert local_ray.is_initialized()  # it was there before


def test_a_ray_that_a_run_started_ends_with_it(model, tmp_path):
    """Every process that the run started inherits a mark in its environment."""
    mark = f"VERBATIM_TEST_MARK={uuid.uuid4()}"
    (tmp_path / "lots.py").write_text(LOTS)
    (tmp_path / "run.toml").write_text(TOML.format(model=model) + 'import_path = "lots.Lots"\n')
    name, _, value = mark.partition("=")
    done = warm.run(
        [sys.executable, "-c", COMMAND, "rl", "run.toml", "--run-dir", "out", *RAY],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(ray_workers.__file__).parent), name: value},
        capture_output=True,
        text=True,
        timeout=4 * HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    ours = "waiting for a Ray actor to start: "  # on a machine that takes more than a minute
    assert [line for line in lines if "ray" in line.lower() and ours not in line] == []  # not a word of its own
    assert len(train_lines(tmp_path / "out")) == 2
    wait_until(lambda: marked(mark) == [])  # those that Ray had started see that it has ended


def marked(mark):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
    return found
