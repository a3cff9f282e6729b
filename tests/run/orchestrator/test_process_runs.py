"""Whole runs whose episodes are played in child processes: the same trajectories, and every token accounted for."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from byte_renderer import ByteRenderer
from e2e.tiny_runs import LOTS, TOML, build_tiny_model, num_sampled, train_lines, trajectory_lines, workplace
from rollouts.players import Doublings, SecondTurnsWait, scripted, two_turns
from run.orchestrator.loop_runs import Coins, HeldInTheMiddle, go_on_and_check, make, nothing_left_behind
from verbatim.cli.main import main
from verbatim.config import load_config
from verbatim.core.errors import ConfigError, RunStopped
from verbatim.inference import SamplingParams
from verbatim.rollouts import EpisodeLimits
from verbatim.rollouts.backends import RunnerInputs
from verbatim.rollouts.processes.runner import process_runner
from verbatim.rollouts.workers.episodes import RemoteSetup
from verbatim.run.tables import component_tables
from waiting import HANGS, until, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.realtime]

FLIPS = "run.orchestrator.test_process_runs.Flips"
PROCESSES = ["--orchestrator.rollout.backend", "processes", "--orchestrator.rollout.workers", "1"]
ISOLATED = ["--orchestrator.train.env.0.isolated", "true", "--orchestrator.rollout.workers", "1"]


class Flips(Coins):
    """Coins that a file keeps from being made again."""

    def __init__(self, folder: str):
        super().__init__()
        if (Path(folder) / "refuse").exists():
            raise RuntimeError("the bank is closed")


@contextlib.asynccontextmanager
async def in_processes(orchestrator, sampler, name, **args):
    """The orchestrator of `loop_runs.make`, its episodes in two processes."""
    remote = RemoteSetup(env="coins", name=name, args=args, params=SamplingParams(), limits=EpisodeLimits())
    inputs = RunnerInputs(setups={("train", "coins"): remote}, sampler=sampler, renderer=ByteRenderer(), workers=2)
    async with process_runner(inputs) as player:
        dispatcher = orchestrator.dispatcher
        dispatcher.setups = {
            label: dataclasses.replace(setup, runner=player) for label, setup in dispatcher.setups.items()
        }
        yield player.pools["train", "coins"]


def trajectories(notes):
    return [t for _, _, groups in notes.steps for g in groups for t in g.trajectories]


def said(trajectory):
    return trajectory.trajectory_id, trajectory.reward, [t.completion_ids.tolist() for t in trajectory.turns]


async def test_a_run_in_processes_trains_the_trajectories_of_a_local_one_also_when_one_dies(tmp_path):
    """From the second batch on the second turns wait; then a process is killed in the middle of them."""
    local, expected, _ = make(tmp_path, sampler=scripted(), environment=Doublings(), max_length=500)
    assert await local.run()
    sampler = SecondTurnsWait(first=12)
    orchestrator, notes, _ = make(tmp_path, sampler=sampler, environment=Doublings(), max_length=500)
    ledger = orchestrator.ledger_for_tests
    async with nothing_left_behind(), in_processes(orchestrator, sampler, "rollouts.players.Doublings") as pool:
        running = asyncio.create_task(orchestrator.run())
        await until(lambda: sampler.num_waiting == 6)
        os.kill(pool.pids[0], signal.SIGKILL)
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
    assert last["rollout/workers_lost/coins"] == 1
    assert last["ledger/dropped/lost_worker"] == ledger.sampled - trained > 0


async def test_a_run_whose_processes_are_all_gone_stops_and_can_be_resumed(tmp_path):
    sampler = HeldInTheMiddle(8)
    orchestrator, notes, _ = make(tmp_path, sampler=sampler, steps=6)
    async with nothing_left_behind(), in_processes(orchestrator, sampler, FLIPS, folder=str(tmp_path)) as pool:
        running = asyncio.create_task(orchestrator.run())
        await until(lambda: sampler.num_in_flight >= 4 and orchestrator.step >= 1)
        (tmp_path / "refuse").touch()
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(RunStopped, match=r"no worker process of environment 'coins' is left .*the bank is closed"):
            await running
    assert orchestrator.step >= 1
    await go_on_and_check(notes, tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("processes") / "model")


def what_was_sampled(run, env="lots.Lots"):
    return sorted(
        (t["trajectory_id"], t["reward"], [(turn["completion_ids"], turn["logprobs"]) for turn in t["turns"]])
        for t in trajectory_lines(run)
        if t["env"] == env
    )


def evals(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["metrics"]) for line in lines if line["kind"] == "eval"]


def test_verbatim_rl_in_processes_writes_what_a_local_run_writes(model, tmp_path, capfd):
    loud = LOTS.replace(
        "    async def score(self, trajectory):\n",
        '    async def score(self, trajectory):\n        print("\\x1b[31mscored in", __import__("os").getpid())\n',
    )
    with workplace(tmp_path / "work", {"lots": loud}) as folder:
        text = TOML.replace("[inference.torch]\n", "[inference.torch]\ndeterministic = true\n").format(model=model)
        (folder / "run.toml").write_text(
            text + 'import_path = "lots.Lots"\n[orchestrator.eval]\nepisodes = 5\ninterval = 2\n'
        )
        for name, options in (("local", []), ("processes", PROCESSES), ("isolated", ISOLATED)):
            capfd.readouterr()
            assert main(["rl", "run.toml", "--run-dir", name, *options]) == 0
            assert ("scored in" in capfd.readouterr().out) == (name == "local")
        for name in ("processes", "isolated"):
            assert what_was_sampled(folder / name) == what_was_sampled(folder / "local")
            assert evals(folder / name) == evals(folder / "local")
            last = train_lines(folder / name)[-1]["metrics"]
            assert (last["rollout/workers"], last["rollout/workers_lost"]) == (1, 0)
            assert last["ledger/sampled"] == sum(map(num_sampled, trajectory_lines(folder / name))) > 0
            log = (folder / name / "logs" / "environments" / "lots_Lots.log").read_text()
            assert log.count("scored in") == 2 * 8 + 2 * 5 and str(os.getpid()) not in log
        assert "rollout/workers" not in train_lines(folder / "local")[-1]["metrics"]
        assert main(["rl", "run.toml", "--resume", "processes", "--max-steps", "3", *PROCESSES]) == 0
        assert len(train_lines(folder / "processes")) == 3
        results = []
        for options in ([], PROCESSES):
            capfd.readouterr()
            final = str(folder / "local" / "final")
            assert main(["eval", "run.toml", "--model", final, "--json", *options]) == 0
            results.append(capfd.readouterr().out.replace("scored in", "").split("{", 1)[1])
        assert json.loads("{" + results[0]) == json.loads("{" + results[1])


HARMFUL = """
import os, time
from lots import Lot, Lots

class Harm(Lot):
    async def score(self, trajectory):
        if self.mode == "exit":
            os._exit(0)
        return await super().score(trajectory)

class Harms(Lots):
    def __init__(self, mode: str = ""):
        super().__init__()
        self.mode = mode

    async def start(self, example, seed):
        episode = Harm(seed)
        episode.mode = self.mode
        return episode
"""


def test_an_environment_that_exits_leaves_the_one_beside_it_as_it_is(model, tmp_path):
    """The weights change nothing here: nothing is learned fast enough to tell (lr = 0 would be refused)."""
    with workplace(tmp_path / "work", {"lots": LOTS, "harms": HARMFUL}) as folder:
        text = TOML.replace("[inference.torch]\n", "[inference.torch]\ndeterministic = true\n")
        text = text.replace("lr = 1e-2", "lr = 1e-12")
        (folder / "run.toml").write_text(
            text.format(model=model) + 'import_path = "lots.Lots"\n[[orchestrator.train.env]]\n'
            'import_path = "harms.Harms"\nisolated = true\n[orchestrator.rollout]\nworkers = 1\n'
        )
        small = ["--orchestrator.batch-size", "4", "--orchestrator.group-size", "2"]
        for name, options in (("quiet", []), ("loud", ["--orchestrator.train.env.1.args", '{ mode = "exit" }'])):
            with contextlib.redirect_stdout(None):
                assert main(["rl", "run.toml", "--run-dir", name, "--seed", "1", *small, *options]) == 0
        assert what_was_sampled(folder / "loud") == what_was_sampled(folder / "quiet") != []
        bad = [t for t in trajectory_lines(folder / "loud") if t["env"] == "harms.Harms"]
        assert bad and {t["error"] for t in bad} == {
            "worker: its process ended with status 0 (the last of 3 workers lost with this episode)"
        }
        failed = sum(line["metrics"].get("errors/worker", 0) for line in train_lines(folder / "loud"))
        assert failed == len(bad)


def test_ctrl_c_reaches_the_run_and_its_workers_end_with_it(model, tmp_path):
    """Pressed at the terminal, where the whole process group of the command hears it."""
    (tmp_path / "lots.py").write_text(LOTS)
    (tmp_path / "run.toml").write_text(TOML.format(model=model) + 'import_path = "lots.Lots"\nargs = { delay = 0.3 }\n')
    mark = f"VERBATIM_TEST_MARK={uuid.uuid4()}"
    name, _, value = mark.partition("=")
    run = subprocess.Popen(
        [sys.executable, "-m", "verbatim.cli", "rl", "run.toml", "--run-dir", "out", "--max-steps", "500", *PROCESSES],
        cwd=tmp_path,
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        metrics = tmp_path / "out" / "metrics.jsonl"
        wait_until(lambda: run.poll() is not None or (metrics.exists() and '"kind": "train"' in metrics.read_text()))
        assert run.poll() is None
        assert any("rollouts.processes.child" in command for command in marked(mark))  # its worker
        os.killpg(run.pid, signal.SIGINT)
        said, _ = run.communicate(timeout=HANGS)
    finally:
        run.kill()
    assert run.returncode == 130, said
    assert "--resume" in said and "lost" not in said
    lines = train_lines(tmp_path / "out")
    assert len(lines) < 500 and lines[-1]["metrics"]["rollout/workers_lost"] == 0
    assert any((tmp_path / "out" / "checkpoints").iterdir())
    assert marked(mark) == []


def marked(mark):
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
    return found


REFUSED = {
    "the keys of processes": (
        ["--orchestrator.rollout.backend", "processes", "--orchestrator.rollout.worker-memory-mb", "80"],
        "orchestrator.rollout.worker_memory_mb is now orchestrator.rollout.processes.worker_memory_mb",
    ),
    "the cluster's keys": (
        ["--orchestrator.rollout.backend", "ray", "--orchestrator.rollout.port", "80"],
        'unknown key "port" in [orchestrator.rollout]; it belongs to [cluster].',
    ),
    "Ray and isolated": (
        ["--orchestrator.rollout.backend", "ray", *ISOLATED],
        "train.env.0.isolated = true needs child processes on this machine, found rollout.backend",
    ),
    "Ray and a limit of memory": (
        ["--orchestrator.rollout.backend", "ray", "--orchestrator.rollout.ray.worker-memory-mb", "100"],
        'unknown key "worker_memory_mb" in [orchestrator.rollout.ray]; it belongs to [orchestrator.rollout.processes]',
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused(tmp_path, case):
    options, message = REFUSED[case]
    (tmp_path / "run.toml").write_text('[model]\nname = "m"\n[[orchestrator.train.env]]\nid = "guess_number"\n')
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "run.toml", options, component_tables())
    assert message in str(refused.value)
