"""A trainer that sends its weights begins no batch before the version that it holds was sent, or will not be."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from verbatim.core.errors import RunStopped
from verbatim.inference.sending import SendOrder, SendReport, WeightStore
from verbatim.run.orchestrator.sending_trainer import SendingTrainer


class Link:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.fails: str | None = None

    async def train(self, samples: Any, version: int, *, checkpoint: bool = False) -> Any:
        self.calls.append(f"train {version}")
        await asyncio.sleep(0)
        if self.fails == f"train {version}":
            raise RunStopped("the loss is nan")
        return f"report {version}"

    async def send(self, order: SendOrder) -> SendReport:
        self.calls.append(f"send {order.version}")
        await asyncio.sleep(0)
        if self.fails == f"send {order.version}":
            raise RunStopped("rank 1 is gone")
        return SendReport(num_bytes=8, seconds=2.0, seconds_meeting=0.5)


@pytest.fixture
def link() -> Link:
    return Link()


@pytest.fixture
def trainer(link: Link) -> SendingTrainer:
    return SendingTrainer(link, WeightStore(host="127.0.0.1", port=1, on="here"))


def order(version: int) -> SendOrder:
    return SendOrder(version=version, group="1", size=2, kind="gloo", seconds=1.0)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_batches_that_are_handed_over_wait_for_the_version_before(link: Link, trainer: SendingTrainer):
    first, second, third = (asyncio.create_task(trainer.train([], version)) for version in (1, 2, 3))
    assert await first == "report 1"
    await settle()
    assert link.calls == ["train 1"]
    await trainer.send(order(1))
    assert await second == "report 2"
    trainer.go_on(1)  # the update to version 1 is over only now: it says nothing about version 2
    await settle()
    assert link.calls == ["train 1", "send 1", "train 2"]
    trainer.go_on(2)  # no replica was there to receive it
    assert await third == "report 3"
    assert link.calls == ["train 1", "send 1", "train 2", "train 3"]


async def test_the_version_with_which_a_run_begins_is_sent_before_any_batch(link: Link, trainer: SendingTrainer):
    await trainer.send(order(7))
    assert await trainer.train([], 8) == "report 8"


@pytest.mark.parametrize("fails", ["train 1", "send 1"])
async def test_nothing_waits_for_a_version_that_failed(link: Link, trainer: SendingTrainer, fails: str):
    """The others are asked for, and say themselves that they are not trained."""
    link.fails = fails
    first, second = (asyncio.create_task(trainer.train([], version)) for version in (1, 2))
    if fails == "train 1":
        with pytest.raises(RunStopped):
            await first
    else:
        await first
        with pytest.raises(RunStopped):
            await trainer.send(order(1))
    assert await second == "report 2"


async def test_a_run_that_stops_lets_all_batches_go(link: Link, trainer: SendingTrainer):
    first, second, third = (asyncio.create_task(trainer.train([], version)) for version in (1, 2, 3))
    await first
    trainer.stop_sending()
    assert [await second, await third] == ["report 2", "report 3"]


async def test_what_was_sent_is_in_the_metrics_of_its_step_alone(trainer: SendingTrainer):
    assert trainer.metrics() == {"weights/broadcast": 0.0}
    await trainer.send(order(1))
    assert trainer.metrics() == {
        "weights/broadcast": 1.0,
        "weights/broadcast_bytes": 8,
        "time/weight_broadcast": 2.0,
        "time/weight_meeting": 0.5,
    }
    assert trainer.metrics() == {"weights/broadcast": 0.0}
