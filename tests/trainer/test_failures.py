"""What only one rank of two meets ends both at once, with one reason that names the rank and its host."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import parallel_jobs as jobs
import pytest
import torch.distributed as dist
from trainer_helpers import make_batch

import warm
from ports import held_port, number_of
from stored_runs import tiny_model
from verbatim.config import make_config
from verbatim.core.errors import ModelError, RunStopped, UsageError
from verbatim.run import trainer_ranks
from verbatim.run.make_trainer import make_trainer
from verbatim.run.trainer_ranks import open_ranks
from verbatim.trainer import trainer as trainer_module
from verbatim.trainer.logprobs import TargetLogprobs
from verbatim.trainer.parallel import failures
from waiting import HANGS, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.realtime]

DEADLINE = 2 * HANGS
"""Seconds: whoever is found to wait for it has failed."""
NAMED = rf"rank {{}} of the trainer \(process \d+ on {re.escape(socket.gethostname())}\)"
FAULTY = Path(__file__).with_name("faulty_rank.py")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to run in, where `fault.json` is what happens to rank 1. Ranks have as long as they need to say what is
    wrong with them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(failures, "GRACE", HANGS)
    monkeypatch.setattr(failures, "_LEAVE_SECONDS", HANGS)
    monkeypatch.setattr(trainer_ranks, "_PATIENCE", HANGS)
    monkeypatch.setattr(trainer_ranks, "start", start_faulty)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def start_faulty(command, *, environment, stdout, stderr):
    """As `children.start`, of `python -m MODULE ARGUMENTS` with the fault that there is."""
    assert command[1] == "-m"
    return warm.Popen(
        [sys.executable, str(FAULTY), *command[2:]],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


def plant(**fault):
    Path("fault.tmp").write_text(json.dumps(fault))
    Path("fault.tmp").rename("fault.json")


def config_of(model):
    return make_config(
        {
            "model": {"name": str(model)},
            "max_steps": 9,
            "orchestrator": {"train": {"env": [{"id": "guess_number"}]}, "seq_len": 64},
            "trainer": {"device": "cpu", "packing": "rows", "parallel": {"processes": 2, "deadline": DEADLINE}},
        }
    )


@contextlib.contextmanager
def two(model):
    """The trainer of rank 0, with rank 1 in a process of its own, as a run has them."""
    config = config_of(model)
    with open_ranks(config, Path("logs")) as ranks:
        trainer = make_trainer(config, "run", model, ranks=ranks)
        trainer.ranks_for_tests = ranks
        yield trainer


def log():
    return Path("logs/trainer-rank-1.log").read_text()


def test_a_full_disk_on_one_host_is_named_by_all_and_the_run_goes_on_from_the_last_checkpoint(place, qwen):
    with two(qwen) as trainer:
        trainer.train_batch(make_batch(0))
        for folder in ("weights", "trainer"):
            Path("good", folder).mkdir(parents=True)
        trainer.save_weights(Path("good/weights"))
        trainer.save_state(Path("good/trainer"))
        expected = trainer.train_batch(make_batch(1))
        plant(disk=True)
        with pytest.raises(RunStopped, match=NAMED.format(1) + r": No space left on device \(.*00002-of-0"):
            trainer.save_state(Path("bad"))
        Path("fault.json").unlink()
        trainer.save_state(Path("next"))  # nothing is left over that would keep them from each other
    again = jobs.trainer_of(Path("good/weights"), None, dtype="float32", optim=config_of(qwen).trainer.optim)
    again.load_state(Path("good/trainer"))
    found = again.train_batch(make_batch(1))
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize(
    "kind, error, said",
    [
        ("usage", UsageError, "a bad record"),
        ("system", RunStopped, r"Input/output error \(/dev/shm/x\)"),
        ("bug", RunStopped, "KeyError: 'no such layer'"),
    ],
)
def test_an_error_in_the_pass_of_one_rank_ends_both_at_once(place, qwen, kind, error, said):
    with pytest.raises(error, match=NAMED.format(1) + " failed: " + said), two(qwen) as trainer:
        trainer.train_batch(make_batch(0))
        plant(**{"pass": kind})
        trainer.train_batch(make_batch(1))
    assert "Traceback" in log()


def test_an_error_in_the_pass_of_rank_0_ends_the_other_at_once(place, qwen, monkeypatch):
    """Rank 0 itself goes on: it answers the orchestrator, and waits to be told that the run is over."""
    hidden = TargetLogprobs.hidden
    with pytest.raises(UsageError, match="a bad record"), two(qwen) as trainer:
        trainer.train_batch(make_batch(0))
        monkeypatch.setattr(TargetLogprobs, "hidden", _raises(UsageError("a bad record")))
        with pytest.raises(UsageError, match=r"^a bad record$"):
            trainer.train_batch(make_batch(1))
        monkeypatch.setattr(TargetLogprobs, "hidden", hidden)
        wait_until(lambda: "processes end" in log())
        with pytest.raises(RunStopped, match="the trainer's processes have ended: a bad record"):
            trainer.train_batch(make_batch(1))
        raise UsageError("a bad record")
    assert re.search(r"processes end: " + NAMED.format(0) + " failed: a bad record", log())


def test_a_refusal_that_only_rank_0_sees_ends_the_other_at_once(place, qwen, monkeypatch):
    monkeypatch.setattr(trainer_module, "load_model", _raises(ModelError("no such folder here")))
    with pytest.raises(ModelError, match=r"^no such folder here$"), two(qwen):
        pass


def test_a_refusal_that_only_rank_1_sees_is_a_refusal_that_names_it(place, qwen):
    plant(load=True)
    with pytest.raises(UsageError, match=NAMED.format(1) + " failed: no such file on this host"), two(qwen):
        pass


@pytest.mark.parametrize(
    "fault, said",
    [
        ({"start": True}, r"rank 1 of the trainer ended with status 3"),
        ({"config": True}, r"rank 1 of the trainer failed: another version of verbatim"),
    ],
)
def test_a_rank_that_fails_before_they_have_met_is_named_at_once(place, qwen, fault, said):
    plant(**fault)
    with pytest.raises((RunStopped, UsageError), match="(?s)" + said), two(qwen):
        pass


def test_a_rank_that_says_why_and_ends_between_two_looks_of_rank_0_is_named_with_its_reason(place, qwen, monkeypatch):
    said = "rank 1 of the trainer failed: another version"

    def says_why_and_ends(store):
        failures.Failures(store, 1, 2).tell(UsageError("another version"))
        return {1: "ended with status 2"}

    store = dist.HashStore()
    with pytest.raises(UsageError, match=said):
        failures.Failures(store, 0, 2, ended=lambda: says_why_and_ends(store)).introduce()

    def start(command, *, environment, **files):
        """A process that has been ready, has said why and has ended once rank 0 looks whether it has ended."""
        host, _, port = environment[trainer_ranks.STORE].rpartition(":")
        store = dist.TCPStore(host, int(port), is_master=False)
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait()
        process.poll = lambda: (store.set("ready/1", ""), says_why_and_ends(store), 2)[-1]
        return process

    monkeypatch.setattr(trainer_ranks, "start", start)
    with pytest.raises(UsageError, match=said), open_ranks(config_of(qwen), Path("logs")):
        pass


def test_a_killed_rank_is_named_at_once(place, qwen):
    with pytest.raises(RunStopped, match=NAMED.format(1) + " was ended by SIGKILL"), two(qwen) as trainer:
        trainer.train_batch(make_batch(0))
        plant(**{"pass": "kill"})
        trainer.train_batch(make_batch(1))


def test_a_rank_that_hangs_is_named_when_the_deadline_has_passed(place, qwen, monkeypatch):
    """Which is long until it hangs, and short from then on."""
    hidden = TargetLogprobs.hidden

    def with_a_short_deadline(*arguments, **rest):
        wait_until(Path("hangs").exists)
        jobs.shorten_deadline(trainer.ranks_for_tests, 1)
        return hidden(*arguments, **rest)

    said = NAMED.format(1) + r" kept the other processes waiting for 1 s \(trainer\.parallel\.deadline\)"
    with pytest.raises(RunStopped, match=said), two(qwen) as trainer:
        trainer.train_batch(make_batch(0))
        plant(**{"pass": "hang"})
        monkeypatch.setattr(failures, "GRACE", 0.2)
        monkeypatch.setattr(TargetLogprobs, "hidden", with_a_short_deadline)
        trainer.train_batch(make_batch(1))


GUESS = """\
[model]
name = "{model}"
[warm_start]
steps = 3
batch_size = 4
conversations = 8
[orchestrator]
seq_len = 384
[[orchestrator.train.env]]
id = "guess_number"
max_turns = 3
[trainer]
device = "cpu"
[trainer.parallel]
deadline = {deadline}
"""


@pytest.mark.parametrize(
    "fault, status, said",
    [
        ({"rank": "0", "load": True}, 2, "error: no such file on this host: config.json"),
        ({"rank": "1", "load": True}, 2, f"error: {NAMED.format(1)} failed: no such file on this host"),
        ({"rank": "0", "between": True}, 2, "error: a bad sample"),
        ({"rank": "0", "pass": "system"}, 1, r"stopped: Input/output error \(/dev/shm/x\)"),
        ({"rank": "1", "pass": "usage"}, 2, f"error: {NAMED.format(1)} failed: a bad record"),
        ({"rank": "1", "pass": "bug"}, 1, f"stopped: {NAMED.format(1)} failed: KeyError"),
    ],
)
def test_processes_of_a_launcher_end_at_once_with_the_same_status(place, tmp_path_factory, fault, status, said):
    """Rank 0 holds the store, as with Slurm's srun; nothing kills the others."""
    Path("guess.toml").write_text(GUESS.format(model=tiny_model(tmp_path_factory), deadline=DEADLINE))
    plant(**fault)
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    with held_port() as held:
        variables["MASTER_PORT"] = str(number_of(held))
        started = [
            start_faulty(
                [sys.executable, "-m", "verbatim.cli", "sft", "guess.toml"],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                environment={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(2)
        ]
        try:
            outputs = [process.communicate(timeout=HANGS)[0].decode() for process in started]
        finally:
            for process in started:
                process.kill()
    assert [process.returncode for process in started] == [status, status], outputs
    assert re.search(said, " ".join(outputs[0].split())), outputs[0]


def _raises(error):
    def raising(*arguments, **rest):
        raise error

    return raising
