"""Keeps a trainer's exchange folder in step with the orchestrator's, on a thread of the trainer's process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import socket
import threading
import time
from typing import Any

from verbatim.core.errors import RunStopped, UsageError
from verbatim.core.machine_faults import describe
from verbatim.trainer.transport.exchange import FIRST_WAIT, LONGEST_WAIT, READY, Exchange, answer_name, message_name
from verbatim.trainer.transport.files import publish_json
from verbatim.trainer.transport.heartbeat import BEAT_SECONDS
from verbatim.trainer.transport.mirror.link import Broken, Busy, CannotWrite, Link, SessionGone
from verbatim.trainer.transport.mirror.protocol import SESSIONS
from verbatim.trainer.transport.trainer_messages import IN_RUN

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05
_AGAIN_SECONDS = 1.0
"""Seconds until a trainer asks again whether the one before it is gone."""
_ALIVE_SECONDS = 8.0
"""Seconds after which a trainer that still gives signs of life is not the one before this one, killed a moment ago."""
_UNANSWERED = 10 * BEAT_SECONDS
"""Seconds after which a heartbeat without an answer is given up."""
_FAREWELL = 5.0
"""Seconds that the orchestrator's host has to hear that this trainer ends."""


class Mirror:
    """A context manager: while the block runs, messages come, answers and what they name go, and so do heartbeats.

    Args:
        link: To the orchestrator's host; not yet open.
        exchange: This host's, opened.
        checkpoint: The checkpoint that this trainer begins from, as it is named there; None at the start of a run.
    """

    def __init__(self, link: Link, exchange: Exchange, checkpoint: str | None) -> None:
        self._link, self._exchange, self._checkpoint = link, exchange, checkpoint
        self._session = f"{SESSIONS}/{exchange.folder.name}"
        self._ending = threading.Event()
        self._answered = threading.Event()
        """Set once the orchestrator's host has taken this trainer, or has asked it to wait."""
        self._why = ""
        self._failure: BaseException | None = None
        self._trouble: str | None = None
        """Why the last heartbeat did not pass; None where it did."""
        self._thread = threading.Thread(target=self._main, name="mirror", daemon=True)

    def __enter__(self) -> Mirror:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._why = "" if error is None else describe(error) or type(error).__name__
        self._ending.set()
        self._thread.join(2 * _FAREWELL)

    def look(self) -> None:
        """Raise what ended the mirror: the orchestrator's host refuses it, or a disk is full."""
        if self._failure is not None and not self._ending.is_set():
            raise self._failure

    def wait_until_answered(self) -> None:
        """Wait until the orchestrator's host has taken this trainer, or has asked it to wait for another one's end.

        Raises:
            UsageError: it refuses this trainer; more as `look`.
        """
        while not self._answered.wait(_LOOK_SECONDS):
            self.look()

    @property
    def trouble(self) -> str:
        """Why no heartbeats come, as the end of a sentence; empty while they do."""
        return f"; {self._trouble}" if self._trouble is not None else ""

    def _main(self) -> None:
        try:
            asyncio.run(self._carry())
        except BaseException as error:  # noqa: BLE001  raised by `look`, in the thread that serves
            self._failure = error

    async def _carry(self) -> None:
        async with self._link:
            try:
                while not await self._carry_session():
                    if self._exchange.is_attached:
                        raise RunStopped(
                            f"the orchestrator that this trainer served has ended; another one listens at "
                            f"{self._link.url}: start the trainer again"
                        )
                    logger.info("%s has been started again", self._link.url)
            except Exception as error:
                self._why = self._why or describe(error)
                raise
            finally:
                with contextlib.suppress(Exception):  # maybe nothing hears it; the heartbeats end too
                    async with asyncio.timeout(_FAREWELL):
                        await self._link.insist("DELETE", self._session, {"why": self._why})

    async def _carry_session(self) -> bool:
        """Whether this trainer has ended; otherwise the orchestrator has been started again."""
        who = f"process {os.getpid()} on {socket.gethostname()}"
        beginning = {"who": who, "checkpoint": self._checkpoint}
        tasks = [asyncio.create_task(self._until_ending())]
        try:
            tasks.append(asyncio.create_task(self._begin(beginning)))
            if not await _first_done(tasks):
                return True
            tasks[1:] = [asyncio.create_task(work()) for work in (self._beat, self._fetch_messages, self._send_answers)]
            await _first_done(tasks)
            return True
        except SessionGone:
            return False
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _until_ending(self) -> None:
        while not self._ending.is_set():  # noqa: ASYNC110  it is set by another thread
            await asyncio.sleep(_LOOK_SECONDS)

    async def _begin(self, beginning: dict[str, Any]) -> None:
        until, told = time.monotonic() + _ALIVE_SECONDS, False
        while True:
            try:
                await self._link.insist("POST", self._session, beginning)
                self._answered.set()
                return
            except Busy as busy:
                if not busy.alive:
                    self._answered.set()
                elif time.monotonic() > until:
                    raise UsageError(f"{self._link.url}: {busy}") from None
                if not told:
                    told = True
                    logger.info("waiting: %s", busy)
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _beat(self) -> None:
        """Exchange heartbeats. One that cannot be written, here or there, costs itself alone: room may be made."""
        while True:
            full: str | None = None
            try:
                async with asyncio.timeout(_UNANSWERED):
                    await self._exchange_beats()
                trouble = None
            except (Broken, TimeoutError) as failure:
                trouble = f"the connection to {self._link.url} is broken: {str(failure) or 'no answer'}"
            except CannotWrite as failure:
                trouble = full = str(failure)
            except OSError as error:
                trouble = full = f"this host cannot write: {describe(error)}"
            if full is not None and full != self._trouble:
                logger.warning("heartbeats do not pass, and go on: %s", full)
            self._trouble = trouble
            await asyncio.sleep(BEAT_SECONDS)

    async def _exchange_beats(self) -> None:
        exchange = self._exchange
        try:
            beat = await asyncio.to_thread(exchange.trainer_beat.read_bytes)
        except FileNotFoundError:
            return
        reply = await self._link.ask("PUT", f"{self._session}/beat", beat)
        if reply["orchestrator"] is not None:
            await asyncio.to_thread(publish_json, exchange.orchestrator_beat, reply["orchestrator"])
        if reply["attached"]:
            exchange.attach()

    async def _fetch_messages(self) -> None:
        number = 1
        while True:
            route = f"{self._session}/messages/{number}"
            message = (await self._link.insist("GET", route))["message"]
            if message is not None:
                self._exchange.attach()  # whoever sends is attached; the heartbeat may say so later
                size, sha256 = message
                path = self._exchange.messages / message_name(number)
                await self._link.download(f"{route}/content", path, size, sha256)
                number += 1

    async def _send_answers(self) -> None:
        exchange = self._exchange
        await self._send(exchange.folder / READY, "ready")
        number = 1
        while True:
            path = exchange.answers / answer_name(number)
            await self._send(path, f"answers/{number}")
            path.unlink(missing_ok=True)
            number += 1

    async def _send(self, path: Any, route: str) -> None:
        """An answer, as soon as it is there, after the folders that it names."""
        seconds = FIRST_WAIT
        while not path.exists():
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, LONGEST_WAIT)
        data = await asyncio.to_thread(path.read_bytes)
        for folder in _folders(json.loads(data)):
            source = self._exchange.run / folder
            await self._link.upload(self._exchange.folder.name, folder, source)
            if source.parent == self._exchange.states:
                await asyncio.to_thread(shutil.rmtree, source, ignore_errors=True)
        await self._link.insist("PUT", f"{self._session}/{route}", data)


async def _first_done(tasks: list[asyncio.Task[None]]) -> bool:
    """Wait for one of the tasks; whether it was another one than the first. Raises what it raised."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
    return tasks[0] not in done


def _folders(value: Any) -> list[str]:
    """The folders of the run that a trainer's answer names, and that the orchestrator's host does not have."""
    found = value.get("result", value) if isinstance(value, dict) else None
    named = [found] if isinstance(found, dict) and IN_RUN in found else list((found or {}).values())
    folders = [entry[IN_RUN] for entry in named if isinstance(entry, dict) and IN_RUN in entry]
    return [folder for folder in folders if not folder.startswith("checkpoints/")]
