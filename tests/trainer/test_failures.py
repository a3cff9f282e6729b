"""What only one rank of two meets ends both at once, with one reason that names the rank and its host."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import parallel_jobs as jobs
import pytest
from trainer_helpers import make_batch

from verbatim.config import make_config
from verbatim.errors import ModelError, RunStopped, UsageError
from verbatim.run.make_trainer import make_trainer
from verbatim.run.trainer_ranks import open_ranks
from verbatim.trainer import trainer as trainer_module
from verbatim.trainer.logprobs import TargetLogprobs

pytestmark = pytest.mark.slow

DEADLINE = 400
"""Seconds: whoever is found to wait for it has failed."""
SOON = 150
"""Seconds for a start and an end on a busy machine."""
NAMED = rf"rank {{}} of the trainer \(process \d+ on {re.escape(socket.gethostname())}\)"

FAULTY = '''
"""Python imports this at its start: rank 1 gets the fault that fault.json names, as soon as fault.json is there."""
import json
import os
from pathlib import Path

def fault():
    return json.loads(Path("fault.json").read_text()) if Path("fault.json").exists() else {}

if os.environ.get("RANK") == fault().get("rank", "1") and "VERBATIM_FAULTS" in os.environ:
    import errno
    import signal
    import time

    from verbatim.errors import ModelError, UsageError
    from verbatim.trainer import optimizer_state, trainer
    from verbatim.trainer.logprobs import TargetLogprobs

    hidden, save_file, load_model = TargetLogprobs.hidden, optimizer_state.save_file, trainer.load_model

    def pass_(*arguments, **rest):
        match fault().get("pass"):
            case "usage":
                raise UsageError("a bad record")
            case "system":
                raise OSError(errno.EIO, "Input/output error", "/dev/shm/x")
            case "bug":
                raise KeyError("no such layer")
            case "hang":
                time.sleep(600)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return hidden(*arguments, **rest)

    def full(tensors, path, **rest):
        if fault().get("disk"):
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return save_file(tensors, path, **rest)

    def refusing(*arguments, **rest):
        if fault().get("load"):
            raise ModelError("no such file on this host: config.json")
        return load_model(*arguments, **rest)

    def bad(*arguments, **rest):
        raise UsageError("a bad sample")

    TargetLogprobs.hidden, optimizer_state.save_file, trainer.load_model = pass_, full, refusing
    if fault().get("between"):
        trainer.check_samples = bad
    if fault().get("start"):
        os._exit(3)
    if fault().get("config"):
        import verbatim.config

        def unreadable(*arguments, **rest):
            raise ModelError("another version of verbatim")

        verbatim.config.make_config = unreadable
'''


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to run in, where `fault.json` is what happens to rank 1."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERBATIM_FAULTS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "faulty").mkdir()
    (tmp_path / "faulty" / "sitecustomize.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path / "faulty")
    return tmp_path


def plant(**fault):
    Path("fault.tmp").write_text(json.dumps(fault))
    Path("fault.tmp").rename("fault.json")


def config_of(model, deadline=DEADLINE):
    return make_config({
        "model": {"name": str(model)}, "max_steps": 9,
        "orchestrator": {"train": {"env": [{"id": "guess_number"}]}, "seq_len": 64},
        "trainer": {"device": "cpu", "packing": "rows", "parallel": {"processes": 2, "deadline": deadline}},
    })  # fmt: skip


@contextlib.contextmanager
def two(model, deadline=DEADLINE):
    """The trainer of rank 0, with rank 1 in a process of its own, as a run has them."""
    config = config_of(model, deadline)
    with open_ranks(config, Path("logs")) as ranks:
        yield make_trainer(config, "run", model, ranks=ranks)


@contextlib.contextmanager
def soon():
    began = time.monotonic()
    yield
    assert time.monotonic() - began < SOON


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
        with soon(), pytest.raises(RunStopped, match=NAMED.format(1) + r": No space left on device \(.*00002-of-0"):
            trainer.save_state(Path("bad"))
        Path("fault.json").unlink()
        trainer.save_state(Path("next"))  # nothing is left over that would keep them from each other
    again = jobs.trainer_of(Path("good/weights"), None, dtype="float32", optim=config_of(qwen).trainer.optim)
    again.load_state(Path("good/trainer"))
    found = again.train_batch(make_batch(1))
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.parametrize("kind, error, said", [
    ("usage", UsageError, "a bad record"),
    ("system", RunStopped, r"Input/output error \(/dev/shm/x\)"),
    ("bug", RunStopped, "KeyError: 'no such layer'"),
])  # fmt: skip
def test_an_error_in_the_pass_of_one_rank_ends_both_at_once(place, qwen, kind, error, said):
    with pytest.raises(error, match=NAMED.format(1) + " failed: " + said), soon(), two(qwen) as trainer:
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
        with soon():
            while "processes end" not in log():
                time.sleep(0.1)
        with pytest.raises(RunStopped, match="the trainer's processes have ended: a bad record"):
            trainer.train_batch(make_batch(1))
        raise UsageError("a bad record")
    assert re.search(r"processes end: " + NAMED.format(0) + " failed: a bad record", log())


def test_a_refusal_that_only_rank_0_sees_ends_the_other_at_once(place, qwen, monkeypatch):
    monkeypatch.setattr(trainer_module, "load_model", _raises(ModelError("no such folder here")))
    with pytest.raises(ModelError, match=r"^no such folder here$"), soon(), two(qwen):
        pass


def test_a_refusal_that_only_rank_1_sees_is_a_refusal_that_names_it(place, qwen):
    plant(load=True)
    with pytest.raises(UsageError, match=NAMED.format(1) + " failed: no such file on this host"), soon(), two(qwen):
        pass


@pytest.mark.parametrize("fault, said", [
    ({"start": True}, r"rank 1 of the trainer ended with status 3"),
    ({"config": True}, r"rank 1 of the trainer failed: another version of verbatim"),
])  # fmt: skip
def test_a_rank_that_fails_before_they_have_met_is_named_at_once(place, qwen, fault, said):
    plant(**fault)
    with pytest.raises((RunStopped, UsageError), match="(?s)" + said), soon(), two(qwen):
        pass


def test_a_killed_rank_is_named_at_once(place, qwen):
    with pytest.raises(RunStopped, match=NAMED.format(1) + " was ended by SIGKILL"), soon(), two(qwen) as trainer:
        trainer.train_batch(make_batch(0))
        plant(**{"pass": "kill"})
        trainer.train_batch(make_batch(1))


def test_a_rank_that_hangs_is_named_when_the_deadline_has_passed(place, qwen):
    said = NAMED.format(1) + r" kept the other processes waiting for 4 s \(trainer\.parallel\.deadline\)"
    with pytest.raises(RunStopped, match=said), soon(), two(qwen, deadline=4) as trainer:
        trainer.train_batch(make_batch(0))
        plant(**{"pass": "hang"})
        trainer.train_batch(make_batch(1))


GUESS = """\
[model.build]
hidden_size = 32
num_layers = 2
num_heads = 2
num_kv_heads = 1
intermediate_size = 64
vocab_size = 512
[warm_start]
steps = 3
batch_size = 4
conversations = 8
[orchestrator]
seq_len = 512
[[orchestrator.train.env]]
id = "guess_number"
max_turns = 3
[trainer]
device = "cpu"
[trainer.parallel]
deadline = 400
"""


@pytest.mark.parametrize("fault, status, said", [
    ({"rank": "0", "load": True}, 2, "error: no such file on this host: config.json"),
    ({"rank": "1", "load": True}, 2, f"error: {NAMED.format(1)} failed: no such file on this host"),
    ({"rank": "0", "between": True}, 2, "error: a bad sample"),
    ({"rank": "0", "pass": "system"}, 1, r"stopped: Input/output error \(/dev/shm/x\)"),
    ({"rank": "1", "pass": "usage"}, 2, f"error: {NAMED.format(1)} failed: a bad record"),
    ({"rank": "1", "pass": "bug"}, 1, f"stopped: {NAMED.format(1)} failed: KeyError"),
])  # fmt: skip
def test_processes_of_a_launcher_end_at_once_with_the_same_status(place, fault, status, said):
    """Rank 0 holds the store, as with Slurm's srun; nothing kills the others."""
    Path("guess.toml").write_text(GUESS)
    plant(**fault)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "WORLD_SIZE": "2",
                 "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
    with soon():
        started = [
            subprocess.Popen([sys.executable, "-m", "verbatim.cli", "sft", "guess.toml"], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                             env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(2)
        ]  # fmt: skip
        try:
            outputs = [process.communicate(timeout=SOON)[0] for process in started]
        finally:
            for process in started:
                process.kill()
    assert [process.returncode for process in started] == [status, status], outputs
    assert re.search(said, " ".join(outputs[0].split())), outputs[0]


def _raises(error):
    def raising(*arguments, **rest):
        raise error

    return raising
