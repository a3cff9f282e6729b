"""The exchange folder, through which orchestrator and trainer pass heartbeats, messages and answers."""

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
"""Name of the file that holds the name of the current session's folder."""
READY = "ready.json"
FIRST_WAIT, LONGEST_WAIT = 0.001, 0.02
"""First and longest interval in seconds between two checks for a file; the interval doubles after each check."""


class Exchange:
    """One session of one trainer and one orchestrator. The module `trainer_messages` lists the session's files."""

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
        """Start a session as the only trainer of a run, after removing everything that an earlier session left."""
        shutil.rmtree(root, ignore_errors=True)
        if root.is_file():
            root.unlink()
        exchange = cls(root / (session or secrets.token_hex(8)))
        for folder in (exchange.messages, exchange.answers, exchange.states):
            folder.mkdir(parents=True)
        # The name of the session is written last, so that an orchestrator that finds the session also finds its
        # folders.
        publish_bytes(root / _CURRENT, exchange.folder.name.encode())
        return exchange

    def ready(self, ready: TrainerReady) -> None:
        """Publish the trainer's state; from now on the trainer accepts messages."""
        publish_json(self.folder / READY, to_json(ready, self.run))

    def wait_for_message(self, number: int, look: Callable[[], None]) -> TrainerMessage:
        """Wait for a message, remove the message's file and return the message.

        Args:
            number: The message's number, counted from 1.
            look: Called at each check; raises to end the wait.
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
        """Remove the temporary files of a trainer that was killed while it wrote them."""
        for path in self.folder.rglob(".*.tmp"):
            path.unlink(missing_ok=True)

    @classmethod
    def current(cls, root: Path) -> Exchange | None:
        """The session of the most recent trainer; None if there is no session yet, or if it is still being set up.

        After a power loss, the file that names the session may be empty or garbage; it then counts as missing.
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
        """True if an orchestrator has attached to this session, even if the orchestrator has ended since."""
        return self._attached.exists()

    def attach(self) -> bool:
        """Become the orchestrator of this session; False if another process has already attached."""
        try:
            os.close(os.open(self._attached, os.O_CREAT | os.O_EXCL))  # atomic: only one process can create it
        except FileExistsError:
            return False
        return True

    def send(self, number: int, message: TrainerMessage) -> None:
        """Send a message.

        Raises:
            OSError: the system refused to write; the message number can be used again.
        """
        publish_bytes(self.messages / message_name(number), message_parts(message))

    def take_answer(self, number: int) -> Any | None:
        """Read the answer to a message, and remove the answer's file; None if there is no answer yet."""
        path = self.answers / answer_name(number)
        value = read_published_json(path)
        if value is not None:
            with contextlib.suppress(OSError):
                path.unlink()
        return value


def message_name(number: int) -> str:
    """The file name of a message."""
    return f"{number:06d}.safetensors"


def answer_name(number: int) -> str:
    """The file name of the answer to a message."""
    return f"{number:06d}.json"
