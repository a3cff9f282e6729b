"""Orders the requests to a trainer that sends its weights to the sampler's servers: a version must be sent before
training on the next batch changes the weights.

```
train(1)    handed over, trained, published; returns a report
send(1)     requested by the sampler's update, once its servers have paused
train(2)    may be handed over at any time; starts once version 1 was sent, or once the update ended without sending
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
        link: The link to the trainer, which executes one request at a time.
        store: The store through which trainer and servers connect.
    """

    def __init__(self, link: TrainerLink, store: WeightStore) -> None:
        self._link = link
        self._store = store
        self._turn = asyncio.Lock()
        self._held: int | None = None
        """The version that the trainer holds or is about to hold, until the sampler's update to it is over."""
        self._may_train = asyncio.Event()
        self._may_train.set()
        self._holds_back = True
        self._sent: SendReport | None = None

    @property
    def store(self) -> WeightStore:
        """The store through which trainer and servers connect."""
        return self._store

    async def train(self, samples: Sequence[TrainingSample], version: int, *, checkpoint: bool = False) -> StepReport:
        """Same as `TrainerLink.train`, but starts once the previous version has been sent or no longer needs to be
        sent."""
        async with self._turn:  # first come, first served
            await self._may_train.wait()
            if self._holds_back:
                self._held = version
                self._may_train.clear()
            try:
                return await self._link.train(samples, version, checkpoint=checkpoint)
            except BaseException:
                self._may_train.set()  # the step failed, so there is no version to send
                raise

    async def send(self, order: SendOrder) -> SendReport:
        """Have the trainer send its weights. After this the next batch may start.

        Raises:
            RunStopped: the trainer is gone, or one of its ranks failed.
        """
        try:
            self._sent = await self._link.send(order)
        finally:
            self.go_on(order.version)  # also after a failure: training must not wait for weights that cannot be sent
        return self._sent

    def go_on(self, version: int) -> None:
        """Note that the update to this version is over. If the version has not been sent by now, it never will be."""
        if version == self._held:
            self._may_train.set()

    def stop_sending(self) -> None:
        """Stop sending, so that batches no longer wait."""
        self._holds_back = False
        self._may_train.set()

    def metrics(self) -> dict[str, float]:
        """The metrics of sending since the last call."""
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
        """Same as `TrainerLink.save`."""
        await self._link.save(folder, version)

    async def watch(self) -> None:
        """Same as `TrainerLink.watch`."""
        await self._link.watch()

    async def close(self) -> None:
        """Same as `TrainerLink.close`."""
        self.stop_sending()
        await self._link.close()
