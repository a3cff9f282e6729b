"""Exchanges heartbeats, messages and answers between orchestrator and trainer through a folder."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verbatim.trainer.transport.files import publish_bytes, publish_json, read_published_json
from verbatim.trainer.transport.heartbeat import read_beat
from verbatim.trainer.transport.trainer_link import TrainerReady
from verbatim.trainer.transport.trainer_messages import (
    TrainerMessage,
    message_parts,
    read_message,
    ready_from_json,
    to_json,
)

_CURRENT = "current"
READY = "ready.json"
FIRST_WAIT, LONGEST_WAIT = 0.001, 0.02
"""Seconds between two looks for a file; doubled while nothing comes."""


class Exchange:
    """One session: one trainer, one orchestrator. The module `trainer_messages` lists its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = folder.parent.parent
        """The run folder on this host."""
        self.messages = folder / "messages"
        self.answers = folder / "answers"
        self.states = folder / "states"
        self.trainer_beat = folder / "trainer.json"
        self.orchestrator_beat = folder / "orchestrator.json"
        self.config = folder / "config.toml"
        self.cores = folder / "cores"
        self._attached = folder / "attached"

    # ---- the trainer's side

    @classmethod
    def open(cls, root: Path, session: str | None = None) -> Exchange:
        """Begin a session as the one trainer of a run; anything that was there before is removed."""
        shutil.rmtree(root, ignore_errors=True)
        if root.is_file():
            root.unlink()
        exchange = cls(root / (session or secrets.token_hex(8)))
        for folder in (exchange.messages, exchange.answers, exchange.states):
            folder.mkdir(parents=True)
        publish_bytes(root / _CURRENT, exchange.folder.name.encode())
        return exchange

    def ready(self, ready: TrainerReady) -> None:
        """Say that messages may come."""
        publish_json(self.folder / READY, to_json(ready, self.run))

    def wait_for_message(self, number: int, look: Callable[[], None]) -> TrainerMessage:
        """The message of this number, as soon as it is there; its file is removed.

        Args:
            number: From 1.
            look: Called while waiting; ends the wait by raising.
        """
        path = self.messages / message_name(number)
        seconds = FIRST_WAIT
        while not path.exists():
            look()
            time.sleep(seconds)
            seconds = min(2 * seconds, LONGEST_WAIT)
        message = read_message(path)
        path.unlink()
        return message

    def answer(self, number: int, value: Any) -> None:
        """Publish the answer to a message."""
        publish_json(self.answers / answer_name(number), value)

    # ---- the orchestrator's side

    def remove_temporary(self) -> None:
        """Remove what a trainer that has ended was writing when it was killed."""
        for path in self.folder.rglob(".*.tmp"):
            path.unlink(missing_ok=True)

    @classmethod
    def current(cls, root: Path) -> Exchange | None:
        """The session of the trainer that started last; None if there is none yet, or it is being set up.

        After a loss of power its files may be empty or hold anything: they count as missing.
        """
        try:
            name = (root / _CURRENT).read_text(encoding="ascii", errors="replace")
        except FileNotFoundError:
            return None
        return cls(root / name) if re.fullmatch(r"\w+", name) else None

    def read_ready(self) -> TrainerReady | None:
        """The state of the trainer; None before it is ready."""
        value = read_published_json(self.folder / READY)
        return None if value is None else ready_from_json(value, self.run)

    def beats(self) -> int | None:
        """The number of the trainer's heartbeats; None before the first."""
        beat = read_beat(self.trainer_beat)
        return None if beat is None else beat.beats

    @property
    def is_attached(self) -> bool:
        """Whether an orchestrator is, or was, served."""
        return self._attached.exists()

    def attach(self) -> bool:
        """Become the orchestrator of this session; False if another process was before."""
        try:
            os.close(os.open(self._attached, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def send(self, number: int, message: TrainerMessage) -> None:
        """Hand over a message.

        Raises:
            OSError: the system refused to write; the number is still free.
        """
        publish_bytes(self.messages / message_name(number), message_parts(message))

    def take_answer(self, number: int) -> Any | None:
        """The answer to a message, once; None if it is not there yet."""
        path = self.answers / answer_name(number)
        value = read_published_json(path)
        if value is not None:
            with contextlib.suppress(OSError):
                path.unlink()
        return value


def message_name(number: int) -> str:
    """The file of a message."""
    return f"{number:06d}.safetensors"


def answer_name(number: int) -> str:
    """The file of the answer to it."""
    return f"{number:06d}.json"
