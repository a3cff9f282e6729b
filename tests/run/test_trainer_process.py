"""A run beside which its progress is told."""

import asyncio
import contextlib
import importlib
from types import SimpleNamespace

import pytest

from run.orchestrator.loop_runs import nothing_left_behind
from verbatim.config.load import make_config
from verbatim.core import spare
from verbatim.core.errors import ModelError
from verbatim.rollouts.main_loop import run_main
from verbatim.run.trainer_process import keep_trainer, while_telling
from waiting import HANGS


def test_a_model_that_is_not_there_is_refused_before_a_trainer_is_kept(monkeypatch):
    kept = []
    monkeypatch.setattr(spare, "is_allowed", lambda: True)
    monkeypatch.setattr(spare, "keep", lambda imports: kept.append(1))
    config = make_config({"model": {"name": "./nowhere"}, "orchestrator.train.env": [{"id": "guess_number"}]})
    with pytest.raises(ModelError, match=r"there is no model folder './nowhere'"):
        keep_trainer(config, contextlib.nullcontext())
    assert kept == []


def test_what_is_imported_for_the_copy_is_told_until_it_is_made(monkeypatch):
    order = []

    @contextlib.contextmanager
    def told():
        order.append("told")
        yield
        order.append("over")

    monkeypatch.setattr(spare, "is_allowed", lambda: True)
    monkeypatch.setattr(spare, "keep", lambda imports: order.append("copied"))
    monkeypatch.setattr(importlib, "import_module", lambda name: order.append("imported"))
    config = make_config({"model": {"build": {}}, "orchestrator.train.env": [{"id": "guess_number"}]})
    keep_trainer(config, told())
    assert [what for i, what in enumerate(order) if order[i - 1] != what] == ["told", "imported", "over", "copied"]


class Told:
    """An orchestrator and the side of a trainer, whose heartbeat may fail."""

    def __init__(self, error=None):
        self.error, self.told, self.step = error, [], 3
        self.asked_to_stop = asyncio.Event()
        self.request_stop = self.asked_to_stop.set
        self.side = SimpleNamespace(progress=self.progress, wants_to_stop=lambda: True)

    def progress(self, doing):
        self.told.append(doing)
        if self.error is not None:
            raise self.error


@pytest.mark.slow
async def test_progress_is_told_while_the_work_goes_on_and_the_trainer_may_ask_for_its_end():
    told = Told()

    async def work():
        await asyncio.wait_for(told.asked_to_stop.wait(), HANGS)
        return True

    async with nothing_left_behind():
        assert await while_telling(told.side, told, work())
    assert told.told == ["at work, after 3 steps"]


@pytest.mark.slow
async def test_progress_that_cannot_be_told_ends_the_run_with_the_reason():
    told, ended = Told(MemoryError()), []

    async def work():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async with nothing_left_behind():
        with pytest.raises(MemoryError):
            await while_telling(told.side, told, work())
    assert ended == [True]


@pytest.mark.slow
@pytest.mark.parametrize("error", [None, MemoryError()])
async def test_what_the_work_raises_is_raised(error):
    async def work():
        raise ValueError("no")

    told = Told(error)
    async with nothing_left_behind():
        with pytest.raises(ValueError, match="no"):
            await while_telling(told.side, told, work())


@pytest.mark.parametrize("error", [KeyboardInterrupt("enough"), SystemExit(3)])
def test_an_exit_that_a_monitor_raises_ends_the_run_and_is_not_logged_as_a_stray_tasks(caplog, error):
    def on_step():
        raise error

    async def work():
        await asyncio.to_thread(on_step)

    told = Told()
    with pytest.raises(type(error)) as caught:
        run_main(while_telling(told.side, told, work()))
    assert caught.value is error
    assert not caplog.records
