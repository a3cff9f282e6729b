"""Orders the work of a trainer that sends its weights to the sampler's servers: a version is sent before the next batch
changes it.

```
train(1)    handed over, trained, published: a report
send(1)     the sampler's update asks for it, once its servers have paused
train(2)    handed over any time; begins when version 1 was sent, or when the update is over without it
```
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from verbatim.core.types import TrainingSample
from verbatim.inference.sending import SendOrder, SendReport, WeightStore
from verbatim.trainer.transport import StepReport, TrainerLink


class SendingTrainer:
    """A `TrainerLink`, and the `WeightSender` of its sampler.

    Args:
        link: To the trainer, which executes one request after the other.
        store: Where the trainer meets the servers.
    """

    def __init__(self, link: TrainerLink, store: WeightStore) -> None:
        self._link = link
        self._store = store
        self._turn = asyncio.Lock()
        self._held: int | None = None
        """The version that the trainer holds, or is about to, until its update is over."""
        self._may_train = asyncio.Event()
        self._may_train.set()
        self._holds_back = True
        self._sent: SendReport | None = None

    @property
    def store(self) -> WeightStore:
        """Where the servers meet the trainer."""
        return self._store

    async def train(self, samples: Sequence[TrainingSample], version: int, *, checkpoint: bool = False) -> StepReport:
        """As `TrainerLink.train`, once the version before was sent, or will not be."""
        async with self._turn:  # first come, first served
            await self._may_train.wait()
            if self._holds_back:
                self._held = version
                self._may_train.clear()
            try:
                return await self._link.train(samples, version, checkpoint=checkpoint)
            except BaseException:
                self._may_train.set()  # there is no version to send
                raise

    async def send(self, order: SendOrder) -> SendReport:
        """Have the trainer send its weights; then the next batch may begin.

        Raises:
            RunStopped: the trainer is gone, or one of its processes failed.
        """
        try:
            self._sent = await self._link.send(order)
        finally:
            self.go_on(order.version)
        return self._sent

    def go_on(self, version: int) -> None:
        """The update to this version is over: where it was not sent until now, it is not sent any more."""
        if version == self._held:
            self._may_train.set()

    def stop_sending(self) -> None:
        """Nothing is sent any more: batches do not wait."""
        self._holds_back = False
        self._may_train.set()

    def metrics(self) -> dict[str, float]:
        """What came of the sending since the call before."""
        sent, self._sent = self._sent, None
        if sent is None:
            return {"weights/broadcast": 0.0}
        return {
            "weights/broadcast": float(sent.fault is None),
            "weights/broadcast_bytes": sent.num_bytes,
            "time/weight_broadcast": sent.seconds,
            "time/weight_meeting": sent.seconds_meeting,
        }

    async def save(self, folder: Path, version: int) -> None:
        """As `TrainerLink.save`."""
        await self._link.save(folder, version)

    async def watch(self) -> None:
        """As `TrainerLink.watch`."""
        await self._link.watch()

    async def close(self) -> None:
        """As `TrainerLink.close`."""
        self.stop_sending()
        await self._link.close()
