"""A trainer that sends the weights of a `TinyModel`, on a thread of this process."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import torch

from verbatim.inference.sending import SendOrder, SendReport
from verbatim.trainer.parallel.publish import send_sharded
from verbatim.trainer.weight_sender import WeightBroadcaster


class GroupSender:
    """A `WeightSender`: that of a run, over a model without a trainer.

    Args:
        model: Whose weights are sent.
    """

    def __init__(self, model: Any) -> None:
        trainer: Any = SimpleNamespace(
            model=model, device=torch.device("cpu"), send_weights=lambda to: send_sharded(model, to, None)
        )
        self.broadcaster = WeightBroadcaster(trainer, "127.0.0.1")
        self.store = self.broadcaster.store
        self.orders: list[SendOrder] = []
        self.reports: list[SendReport] = []
        self.raises: Exception | None = None

    async def send(self, order: SendOrder) -> SendReport:
        self.orders.append(order)
        if self.raises is not None:
            raise self.raises
        self.reports.append(await asyncio.to_thread(self.broadcaster.send, order))
        return self.reports[-1]
