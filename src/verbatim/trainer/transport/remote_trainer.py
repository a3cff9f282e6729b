"""The orchestrator's side of a trainer in another process, which the orchestrator reaches through an exchange
folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from verbatim.core.errors import RunStopped
from verbatim.core.types import TrainingSample
from verbatim.inference.sending import SendOrder, SendReport
from verbatim.trainer.transport.exchange import FIRST_WAIT, LONGEST_WAIT, Exchange
from verbatim.trainer.transport.trainer_link import StepReport
from verbatim.trainer.transport.trainer_messages import TrainerMessage, path_from_json, report_from_json

_LOOK_SECONDS = 0.25
"""Seconds between two checks that the trainer still runs."""


class RemoteTrainer:
    """A `TrainerLink` that writes messages and waits for answers.

    Args:
        exchange: The session, to which this process is attached.
        fault: Returns what is wrong with the trainer, or None; called regularly while waiting.
    """

    def __init__(self, exchange: Exchange, *, fault: Callable[[], str | None]) -> None:
        self._exchange = exchange
        self._fault = fault
        self._sending = asyncio.Lock()
        self._sent = 0

    async def train(self, samples: Sequence[TrainingSample], version: int, *, checkpoint: bool = False) -> StepReport:
        """Send a batch and wait for the report on its step."""
        message = TrainerMessage(kind="train", version=version, samples=tuple(samples), checkpoint=checkpoint)
        report = report_from_json(await self._execute(message), self._exchange.run)
        if report.state is not None:
            self._check_state_folder(report.state)
        return report

    async def save(self, folder: Path, version: int) -> None:
        """Have the trainer write its state into the exchange folder, then move that state into `folder`."""
        left = path_from_json(await self._execute(TrainerMessage(kind="save", version=version)), self._exchange.run)
        assert left is not None
        self._check_state_folder(left)
        await asyncio.to_thread(_move_content, left, folder)

    async def send(self, order: SendOrder) -> SendReport:
        """Have the trainer send its weights after it has trained on the batches handed over so far."""
        message = TrainerMessage(kind="send", version=order.version, order=order)
        return SendReport(**await self._execute(message))

    async def watch(self) -> None:
        """Check the trainer regularly.

        Raises:
            RunStopped: the trainer is gone or stuck.
        """
        while True:
            if (fault := self._fault()) is not None:
                raise RunStopped(fault)
            await asyncio.sleep(_LOOK_SECONDS)

    async def close(self) -> None:
        """Tell the trainer to end. The code that started the trainer has to wait for its end."""
        with contextlib.suppress(OSError):  # if the disk fails, the trainer still notices that heartbeats stop
            await self._send(TrainerMessage(kind="stop"))

    async def _execute(self, message: TrainerMessage) -> Any:
        number = await self._send(message)
        # Answers are polled often, for low latency; the trainer's health is checked only 4 times a second, because that
        # reads files.
        seconds, unobserved = FIRST_WAIT, 0.0
        while (answer := self._exchange.take_answer(number)) is None:
            if unobserved >= _LOOK_SECONDS and (fault := self._fault()) is not None:
                answer = self._exchange.take_answer(number)  # the trainer may have answered before it ended
                if answer is None:
                    raise RunStopped(fault)
                break
            unobserved = unobserved + seconds if unobserved < _LOOK_SECONDS else 0.0
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, LONGEST_WAIT)
        if "error" in answer:
            raise RunStopped(f"the trainer: {answer['error']}")
        return answer["result"]

    def _check_state_folder(self, state: Path) -> None:
        """Refuse a state folder outside the exchange: the folder's content is moved away, which would empty any folder
        named here."""
        states = self._exchange.states.resolve()
        if state.parent.resolve() != states:
            raise RunStopped(f"the trainer reports that it left its state in {state}, expected a folder in {states}")

    async def _send(self, message: TrainerMessage) -> int:
        async with self._sending:  # the lock is fair, so the trainer gets batches in the order of the calls
            number = self._sent + 1
            writing = asyncio.ensure_future(asyncio.to_thread(self._exchange.send, number, message))
            try:
                await asyncio.shield(writing)
            finally:  # also if cancelled: the number is used up once the message is written
                await asyncio.wait({writing})
                if writing.exception() is None:
                    self._sent = number
            return number


def _move_content(source: Path, target: Path) -> None:
    for part in source.iterdir():
        os.rename(part, target / part.name)
    source.rmdir()
