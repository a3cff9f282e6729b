"""Two processes: whichever ends, whenever and however, the other one ends too, and the run can go on."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import warm
from e2e.tiny_runs import (
    LOTS,
    TOML,
    assert_ledger_adds_up,
    build_tiny_model,
    train_lines,
    trajectory_lines,
    workplace,
)
from verbatim.cli.main import main
from verbatim.core.errors import RunStopped
from verbatim.logs.checkpoints import read_json
from verbatim.run import trainer_process
from verbatim.run.logs import last_lines, log_to_file
from waiting import HANGS, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.realtime]

# What happens when is written in outcome.json: {"run": ..., "episode": 9, "strike": ["trainer", "me"], "signal": 9}.
FATAL = '''
import asyncio
import json
import logging
import os
from pathlib import Path

from lots import Lots
from verbatim.algorithms.losses import LOSSES

calls = 0


def loss(inputs):
    """The default one, which has something to say at first."""
    global calls
    calls += 1
    if calls == 1:
        logging.getLogger("loss").warning("the disk hums")
    return LOSSES["default"](inputs)


class Fatal(Lots):
    """At the start of the given episode of this process, sends the signal; then the plan is done with. While the file
    `hold` is there, no episode of the fourth batch begins: the run cannot end before a test has looked."""

    started = 0

    async def start(self, example, seed):
        self.started += 1
        plan = Path("outcome.json")
        if plan.exists():
            outcome = json.loads(plan.read_text())
            if outcome["episode"] == self.started:
                plan.unlink()
                for victim in outcome["strike"]:
                    beat = next(Path(outcome["run"]).glob("exchange/*/trainer.json"))
                    os.kill(os.getpid() if victim == "me" else json.loads(beat.read_text())["pid"], outcome["signal"])
        while self.started > 24 and Path("hold").exists():
            await asyncio.sleep(0.01)
        return await super().start(example, seed)
'''

# While there is a file `poison`, the loss is NaN from the thirteenth trajectory of a process on.
POISON = """
import dataclasses
from pathlib import Path

from verbatim.algorithms.losses import LOSSES

seen = 0


def loss(inputs):
    global seen
    seen += 1
    out = LOSSES["default"](inputs)
    return dataclasses.replace(out, loss=out.loss * float("nan")) if seen > 12 and Path("poison").exists() else out
"""

MODULES = {"lots": LOTS, "fatal": FATAL, "poison": POISON}
STEPS, BATCH = 8, 8
INSIDE = ("--trainer.separate-process", "false")
"""A run may go on in one process: that costs a test no start of another one."""
NEVER_MISSED = 2 * HANGS
"""Seconds without a heartbeat: more than a test may take."""
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Path]:
    """The current directory: `run.toml` is deterministic and synchronous, `overlapping.toml` is neither."""
    root = tmp_path_factory.mktemp("processes")
    text = TOML.format(model=build_tiny_model(root / "model"))
    text = text.replace("separate_process = false\n", "").replace("max_steps = 2", f"max_steps = {STEPS}")
    text += 'import_path = "fatal.Fatal"\nargs = { delay = 0.02 }\n[checkpoint]\ninterval = 2\n'
    text += '[trainer.loss]\ntype = "custom"\nimport_path = "fatal.loss"\n'
    text = text.replace("max_async_level = 0", f"max_async_level = 0\nheartbeat_timeout = {NEVER_MISSED}")
    with workplace(root / "place", MODULES) as folder:
        (folder / "run.toml").write_text(text.replace("[inference.torch]", "[inference.torch]\ndeterministic = true"))
        (folder / "overlapping.toml").write_text(text.replace("max_async_level = 0", "max_async_level = 1"))
        try:
            yield folder
        finally:  # what a failed test left
            for left in processes_of(folder):
                os.kill(left, signal.SIGKILL)


def typed(*arguments: object) -> tuple[int, str]:
    """`verbatim ...` in this process, so that only its trainer has to be started; its status and what it said."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main([*map(str, arguments)])
    text = said.getvalue()
    assert "Traceback" not in text, text
    return status, text


@contextlib.contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """`verbatim ...` in a process of its own, which does not outlive the block."""
    running = subprocess.Popen(
        [sys.executable, "-m", "verbatim.cli", *map(str, arguments)],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=ONE_THREAD,
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def processes_of(run: Path) -> list[int]:
    """Processes other than this one that were started for this run and have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if int(folder.name) != os.getpid() and any(str(run) in argument for argument in arguments):
                found.append(int(folder.name))
    return found


def end_of(run: Path) -> None:
    """Nothing of the run is left, though no heartbeat is missed within the time that a test may take."""
    wait_until(lambda: processes_of(run) == [])


def outcome(run: Path, episode: int, *strike: str, number: int = signal.SIGKILL) -> None:
    plan = {"run": str(run), "episode": episode, "strike": strike, "signal": int(number)}
    Path("outcome.json").write_text(json.dumps(plan))


def final_weights(run: Path) -> bytes:
    return (run / "final" / "model.safetensors").read_bytes()


def assert_same_run(run: Path, expected: Path) -> None:
    """The same weights and optimizer to the bit; every step and every trajectory once, and the same ones."""
    assert final_weights(run) == final_weights(expected)
    state = f"checkpoints/step_{STEPS:06d}/trainer/optimizer.safetensors"
    assert (run / state).read_bytes() == (expected / state).read_bytes()
    assert [line["step"] for line in train_lines(run)] == list(range(1, STEPS + 1))
    mine, theirs = trajectory_lines(run), trajectory_lines(expected)
    said = [(t["trajectory_id"], [turn["completion_ids"] for turn in t["turns"]]) for t in mine]
    assert said == [(t["trajectory_id"], [turn["completion_ids"] for turn in t["turns"]]) for t in theirs]
    assert_ledger_adds_up(run)
    assert read_json(run / "summary.json")["steps"] == STEPS


@pytest.fixture(scope="module")
def unstopped(place: Path) -> Path:
    """What everything must come to: one process, and nothing happens."""
    run = place / "unstopped"
    assert typed("rl", "run.toml", "--run-dir", run, *INSIDE)[0] == 0
    assert all(line["metrics"]["grad_norm"] > 0 for line in train_lines(run))
    return run


# ---- one run, ended five times


@pytest.fixture(scope="module")
def survivor(place: Path, unstopped: Path) -> tuple[Path, dict[str, tuple[int, str]]]:
    """A run that was ended in every way there is, at moments that chance chose; and what it said each time."""
    run, chance, said = place / "survivor", random.Random(20), {}
    again = ["rl", "run.toml", "--run-dir", run, "--resume"]

    with process(*again[:-1]) as running:  # while the trainer's process is only just beginning
        wait_until(lambda: (run / "exchange" / "current").exists())
        running.kill()
        running.wait()
        end_of(run)

    outcome(run, chance.randint(2, 8), "me", number=signal.SIGINT)
    said["ctrl-c"] = typed(*again)
    end_of(run)

    outcome(run, chance.randint(2, 16), "me")
    with process(*again) as running:
        assert running.wait(timeout=HANGS) == -signal.SIGKILL
        end_of(run)

    outcome(run, chance.randint(2, 16), "trainer")
    said["trainer"] = typed(*again)
    end_of(run)

    outcome(run, chance.randint(2, 16), "trainer", "me")
    with process(*again) as running:
        assert running.wait(timeout=HANGS) == -signal.SIGKILL
        end_of(run)

    said["finished"] = typed(*again)
    assert not Path("outcome.json").exists()
    return run, said


def test_a_run_that_was_killed_everywhere_ends_as_the_one_that_was_never_stopped(survivor, unstopped: Path):
    run, said = survivor
    assert said["finished"][0] == 0
    assert_same_run(run, unstopped)
    assert processes_of(run) == []


def test_a_killed_trainer_is_named_with_its_signal_and_the_end_of_its_log(survivor):
    run, said = survivor
    status, text = said["trainer"]
    assert status == 1
    assert re.search(r"stopped: the trainer \(process \d+\) was ended by SIGKILL\n", text)
    quoted = text.partition(f"the last lines of {run / 'logs' / 'trainer.log'}:\n")[2]
    assert "WARNING the disk hums" in quoted
    assert f"to continue:  verbatim rl {run}/config.toml --resume {run}" in text


def test_ctrl_c_ends_both_processes_with_a_checkpoint(survivor):
    status, text = survivor[1]["ctrl-c"]
    assert status == 130
    assert "ending after this step, with a checkpoint" in text
    assert "to continue:" in text


def test_an_overlapping_run_that_was_killed_trains_every_step_and_group_once(place: Path):
    run, chance = place / "overlapping", random.Random(21)
    arguments = ["rl", "overlapping.toml", "--run-dir", run]
    outcome(run, chance.randint(20, 28), "trainer")
    assert typed(*arguments)[0] == 1
    end_of(run)
    outcome(run, chance.randint(2, 16), "me")
    with process(*arguments, "--resume") as running:
        assert running.wait(timeout=HANGS) == -signal.SIGKILL
        end_of(run)
    assert typed(*arguments, "--resume", *INSIDE)[0] == 0
    assert [line["step"] for line in train_lines(run)] == list(range(1, STEPS + 1))
    trained = Counter(t["group_id"] for t in trajectory_lines(run))
    assert trained == {f"train-{n}": 4 for n in range(STEPS * BATCH // 4)}
    last = assert_ledger_adds_up(run)
    assert last["ledger/pending"] == 0
    assert last["staleness/max"] <= 2


# ---- a trainer that is there and does nothing, or the wrong thing


class Patient(trainer_process.PeerWatch):
    """A short one, but it takes no trainer for frozen that is only slow: before the signal is sent."""

    def __init__(self, path: Path, *, heartbeat_timeout: float, **options) -> None:
        assert heartbeat_timeout == NEVER_MISSED  # as configured; the trainer's own watch keeps that
        super().__init__(path, heartbeat_timeout=2.0, **options)

    def fault(self) -> str | None:
        found = super().fault()
        return None if Path("outcome.json").exists() else found


def test_a_frozen_trainer_is_named_and_ended(place: Path, unstopped: Path, monkeypatch):
    run = place / "frozen"
    outcome(run, 12, "trainer", number=signal.SIGSTOP)
    monkeypatch.setattr(trainer_process, "PeerWatch", Patient)
    status, text = typed("rl", "run.toml", "--run-dir", run)
    assert status == 1
    assert re.search(r"stopped: the trainer \(process \d+\) has given no sign of life for \d+ s", text)
    assert processes_of(run) == []
    assert typed("rl", "run.toml", "--run-dir", run, "--resume", *INSIDE)[0] == 0
    assert_same_run(run, unstopped)


def test_a_loss_that_is_no_number_stops_the_run_which_goes_on_when_it_is_mended(place: Path):
    run = place / "poisoned"
    arguments = [
        "rl",
        "overlapping.toml",
        "--run-dir",
        run,
        "--max-steps",
        "3",
        "--trainer.loss",
        '{type = "custom", import_path = "poison.loss"}',
    ]
    Path("poison").touch()
    status, text = typed(*arguments)
    Path("poison").unlink()
    assert status == 1
    assert "stopped: the trainer: optimizer step 1: the loss is nan on 1 trajectories: train-" in text
    assert [line["step"] for line in train_lines(run)] == [1]
    assert (run / "checkpoints" / "step_000001" / "manifest.json").is_file()
    assert processes_of(run) == []
    assert typed(*arguments, "--resume", *INSIDE)[0] == 0
    assert [line["step"] for line in train_lines(run)] == [1, 2, 3]
    assert_ledger_adds_up(run)


def test_a_sampler_that_keeps_a_stale_layer_stops_the_run_before_it_samples_with_it(place: Path, monkeypatch):
    from verbatim.inference.embedded import engine as torch_engine

    replace = torch_engine.replace_weights

    def stale(model, weights) -> None:
        replace(model, {name: value for name, value in weights.items() if "layers.0." not in name})

    run = place / "stale"
    arguments = ["rl", "run.toml", "--run-dir", run, *INSIDE]
    with monkeypatch.context() as patched:
        patched.setattr(torch_engine, "replace_weights", stale)
        status, text = typed(*arguments, "--max-steps", "2")
    assert status == 1
    assert "the sampler does not hold policy version 1, which it was told to load: its logprobs differ by" in text
    assert [line["step"] for line in train_lines(run)] == [1]
    versions = {v for t in trajectory_lines(run) for turn in t["turns"] for v in turn["policy_versions"]}
    assert versions == {0}
    assert (run / "checkpoints" / "step_000001" / "manifest.json").is_file()
    assert typed(*arguments, "--max-steps", "2", "--resume")[0] == 0
    assert [line["step"] for line in train_lines(run)] == [1, 2]
    assert_ledger_adds_up(run)


# ---- a damaged checkpoint


def test_a_damaged_newest_checkpoint_is_said_and_the_one_before_is_used(place: Path, unstopped: Path, capfd):
    run = place / "damaged"
    shutil.copytree(unstopped, run)
    shutil.rmtree(run / "final")
    weights = run / "checkpoints" / f"step_{STEPS:06d}" / "weights" / "model.safetensors"
    whole = bytearray(weights.read_bytes())
    whole[len(whole) // 2] ^= 1
    weights.unlink()  # it may share its bytes with other names
    weights.write_bytes(whole)
    capfd.readouterr()
    status, ours = typed("rl", "run.toml", "--run-dir", run, "--resume")
    text = " ".join([*capfd.readouterr().out.split(), *ours.split()])  # the trainer's process, and this one
    assert status == 0
    assert "is damaged and not used: weights/model.safetensors has a different SHA-256" in text
    assert f"continuing after step {STEPS - 2}" in text
    assert_same_run(run, unstopped)


# ---- started separately


def test_trainer_and_orchestrator_are_started_one_by_one_stopped_at_either_side_and_go_on(place: Path, unstopped: Path):
    run = place / "one_by_one"
    resumed = ["run.toml", "--run-dir", run, "--resume"]

    # The orchestrator is there first; Ctrl-C at the trainer, of which the other one hears within a second.
    new = resumed[:-1]
    Path("hold").touch()
    with process("orchestrator", *new) as orchestrator:
        wait_until((run / "logs" / "orchestrator.log").exists)
        status, text = typed("trainer", *new, "--max-steps", STEPS + 1)
        assert status == 2
        assert f"a different configuration; stored -> given: max_steps: {STEPS} -> {STEPS + 1}" in text
        with process("trainer", *new) as trainer:
            metrics = run / "metrics.jsonl"
            wait_until(lambda: metrics.exists() and '"kind": "train"' in metrics.read_text())
            trainer.send_signal(signal.SIGINT)
            told = trainer.communicate(timeout=HANGS)[0]
            said = orchestrator.communicate(timeout=HANGS)[0]
    Path("hold").unlink()
    assert (trainer.returncode, orchestrator.returncode) == (130, 130)
    assert "Traceback" not in said + told
    assert "asking the orchestrator to end the run, with a checkpoint" in told
    done = len(train_lines(run))
    assert 1 <= done < STEPS
    assert (run / "checkpoints" / f"step_{done:06d}" / "manifest.json").is_file()
    assert "verbatim trainer" in said
    assert "verbatim orchestrator" in said

    # The trainer is there first; Ctrl-C at the orchestrator.
    with process("trainer", *resumed) as trainer:
        wait_until(lambda: list(run.glob("exchange/*/ready.json")))
        status, text = typed("orchestrator", *resumed, "--seed", 1)
        assert status == 2
        assert "the other process of the run" in text
        assert "seed: 0 -> 1" in text
        outcome(run, 3, "me", number=signal.SIGINT)
        assert typed("orchestrator", *resumed)[0] == 130
        assert "Traceback" not in trainer.communicate(timeout=HANGS)[0]
    assert trainer.returncode == 0
    assert len(train_lines(run)) < STEPS

    assert typed("rl", *resumed, *INSIDE)[0] == 0
    assert_same_run(run, unstopped)
    assert processes_of(run) == []


TRAINER_ASKED = """
    import sys, time
    from pathlib import Path
    from verbatim.cli import trainer_command
    from verbatim.core.plain_console import PlainConsole
    from verbatim.trainer.transport.exchange import Exchange

    class Heart:
        ask_to_stop = staticmethod(lambda: print("asked", flush=True))

    exchange = Exchange.open(Path(sys.argv[1]))
    if sys.argv[2] == "attached":
        exchange.attach()
    with trainer_command._asked_to_end(exchange, Heart, PlainConsole()) as stopped:
        try:
            print("ready", flush=True)
            time.sleep(600)
        except KeyboardInterrupt as error:
            print(f"left by {error}", flush=True)
"""


@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")])
def test_a_trainer_asks_its_orchestrator_to_end_and_without_one_it_leaves(tmp_path: Path, number, name: str):
    def started(attached: str) -> subprocess.Popen[str]:
        return warm.Popen(
            [sys.executable, "-c", textwrap.dedent(TRAINER_ASKED), tmp_path / attached, attached],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    with started("alone") as alone, started("attached") as attached:
        assert (alone.stdout.readline(), attached.stdout.readline()) == ("ready\n", "ready\n")
        alone.send_signal(number)
        attached.send_signal(number)
        assert alone.communicate(timeout=HANGS)[0] == f"left by {name}\n"
        assert alone.returncode == 0
        assert attached.stdout.readline() == "asked\n"
        assert "asking the orchestrator to end the run, with a checkpoint" in attached.stdout.readline()
        assert attached.poll() is None
        attached.send_signal(number)
        assert attached.wait(timeout=HANGS) == 130


# ---- what one process says of the other


def test_of_a_log_only_what_the_last_process_said_at_its_end_is_quoted(tmp_path: Path):
    log = tmp_path / "trainer.log"
    for number in (1, 2):
        with contextlib.suppress(RunStopped), log_to_file(log):
            for line in range(10):
                logging.getLogger("test").warning("process %d, line %d", number, line)
            raise RunStopped("the disk is full\nthe last lines of another log:\n    ...")
    head, *quoted = last_lines(log).lstrip("\n").splitlines()
    assert head == f"the last lines of {log}:"
    assert [line.partition(" WARNING ")[2] for line in quoted[:-1]] == [f"process 2, line {n}" for n in range(3, 10)]
    assert quoted[-1].endswith(" ERROR ended: the disk is full")


def test_a_log_in_which_the_last_process_said_nothing_is_said_to_be_silent(tmp_path: Path):
    log = tmp_path / "trainer.log"
    assert last_lines(log) == ""
    with contextlib.suppress(RunStopped), log_to_file(log):
        raise RunStopped("long ago")
    with log_to_file(log):
        pass
    assert last_lines(log) == f"\nits log {log} has no further records"
