"""The sampler is started while the trainer prepares, where the weights that a run begins with are there already."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from verbatim.config import make_config
from verbatim.core.errors import UsageError
from verbatim.logs.checkpoints import ORCHESTRATOR, RunFolder
from verbatim.logs.uploads import NoUploads
from verbatim.run import trainer_process, training_run
from verbatim.run.build import named_weights
from verbatim.run.environments import Environments
from verbatim.run.tables import component_tables
from verbatim.run.training_run import TrainingRun
from waiting import HANGS

NAMED = {"model": {"name": "there"}, "orchestrator": {"train": {"env": [{"id": "guess_number"}]}}}


def config_of(**tables: Any) -> Any:
    return make_config({**NAMED, **tables}, {}, tables=component_tables(), caller="test")


def test_the_weights_of_a_model_that_is_named_are_known_as_the_trainer_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "there").symlink_to(tmp_path / "models")
    assert named_weights(config_of()) == str(tmp_path / "models")
    assert named_weights(config_of(model={"name": "owner/model"})) == "owner/model"
    assert named_weights(config_of(model={"build": {}})) is None
    assert named_weights(config_of(warm_start={"steps": 1})) is None


class Started:
    """A sampler that knows whether it was closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    async def close(self) -> None:
        self.closed.set()


def run_with_a_trainer_that_is_refused(
    config: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Started, dict[str, Any]]]:
    """The samplers that were started for the run until its trainer refused it."""
    made: list[tuple[Started, dict[str, Any]]] = []

    async def make_sampler(config: Any, weights: str, **how: Any) -> Started:
        made.append((Started(), {"weights": weights, **how}))
        return made[-1][0]

    @contextlib.contextmanager
    def refusing(config: Any, folder: Any, console: Any, meanwhile: Callable[[None], None]) -> Iterator[None]:
        meanwhile(None)
        raise UsageError("the trainer says no")
        yield

    monkeypatch.setattr(training_run, "make_sampler", make_sampler)
    monkeypatch.setattr(trainer_process, "trainer_child", refusing)
    run = TrainingRun(
        config=config,
        environments=Environments(train={}, eval={}),
        services={},
        monitors=[],
        watch=None,
        folder=RunFolder(folder, ORCHESTRATOR),
        console=Console(quiet=True),
        uploads=NoUploads(),
        started=0.0,
    )
    with pytest.raises(UsageError, match="the trainer says no"):
        run.run(lambda *given: True, "")
    return made


@pytest.mark.slow  # it imports torch
@pytest.mark.realtime
def test_a_sampler_that_is_not_needed_any_more_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = run_with_a_trainer_that_is_refused(config_of(), tmp_path, monkeypatch)
    for thread in threading.enumerate():
        if thread.name == "verbatim-starting":
            thread.join(HANGS)
    [(sampler, how)] = made
    assert sampler.closed.wait(HANGS)
    assert (how["weights"], how["policy_version"], how["sender"]) == ("there", 0, None)


@pytest.mark.parametrize(
    "tables",
    [
        {"model": {"build": {}}},
        {"warm_start": {"steps": 1}},
        {"inference": {"torch": {"urls": ["http://127.0.0.1:1"]}}},
    ],
)
def test_none_is_started_before_the_trainer_has_made_its_weights_or_on_servers(
    tables: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert run_with_a_trainer_that_is_refused(config_of(**tables), tmp_path, monkeypatch) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "verbatim-starting"]
