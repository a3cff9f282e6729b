"""How many processes train is settled before any is started."""

import os
import re
from types import SimpleNamespace

import pytest
import torch

from verbatim.config import make_config
from verbatim.core.errors import ConfigError, RunStopped, UsageError
from verbatim.run import trainer_ranks
from verbatim.run.trainer_ranks import is_led, num_processes, open_ranks

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


def config_of(**trainer):
    return make_config(
        {
            "model": {"name": "somewhere"},
            "orchestrator": {"train": {"env": [{"id": "guess_number"}]}},
            "trainer": {"device": "cpu", **trainer},
        }
    )


def launched(monkeypatch, rank, size):
    for name, value in zip(LAUNCHER, (rank, size, rank), strict=True):
        monkeypatch.setenv(name, str(value))


def test_one_process_starts_nothing(tmp_path):
    with open_ranks(config_of(), tmp_path / "logs") as ranks:
        assert ranks is None
    assert not (tmp_path / "logs").exists()


@pytest.mark.slow
@pytest.mark.realtime
def test_a_process_that_does_not_come_is_named_at_the_deadline_and_ended(monkeypatch, tmp_path):
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\necho waiting for a file system >&2\nexec sleep 1000000\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(trainer_ranks, "sys", SimpleNamespace(executable=str(hanging)))
    monkeypatch.setattr(trainer_ranks, "_START_SECONDS", 0.5)
    said = r"rank 1 of the trainer \(process (\d+)\) did not start within 1 s \(trainer\.parallel\.deadline\)"
    with (
        pytest.raises(RunStopped, match=said) as caught,
        open_ranks(config_of(parallel={"processes": 2, "deadline": 1}), tmp_path / "logs"),
    ):
        pass
    pid = int(re.search(said, str(caught.value))[1])
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_launcher_says_how_many_processes_there_are_and_who_leads(monkeypatch):
    launched(monkeypatch, 1, 4)
    assert num_processes(config_of(), may_be_launched=True) == 4
    assert num_processes(config_of(parallel={"processes": 4}), may_be_launched=True) == 4
    assert is_led()
    with pytest.raises(UsageError, match=r"trainer\.parallel\.processes = 2, but 4 processes were launched"):
        num_processes(config_of(parallel={"processes": 2}), may_be_launched=True)
    launched(monkeypatch, 0, 4)
    assert not is_led()


def test_the_trainer_of_a_run_does_not_take_its_parents_launcher_for_its_own(monkeypatch):
    launched(monkeypatch, 0, 4)
    assert num_processes(config_of(parallel={"processes": 2}), may_be_launched=False) == 2


def test_more_processes_than_cuda_devices_are_refused(monkeypatch):
    monkeypatch.setattr(trainer_ranks, "_use_cuda", lambda config: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert num_processes(config_of(parallel={"processes": 2}), may_be_launched=False) == 2
    with pytest.raises(UsageError, match=r"processes = 3, but there are 2 CUDA devices here"):
        num_processes(config_of(parallel={"processes": 3}), may_be_launched=False)


@pytest.mark.parametrize(
    "trainer, said",
    [
        ({"separate_process": False}, r"parallel\.processes = 2 needs separate_process = true"),
    ],
)
def test_what_several_processes_cannot_do_is_refused_with_the_configuration(trainer, said):
    with pytest.raises(ConfigError, match=said):
        config_of(parallel={"processes": 2}, **trainer)
