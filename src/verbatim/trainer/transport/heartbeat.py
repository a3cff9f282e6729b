"""Sends and checks heartbeats between processes with counters, independent of wall clocks.

Each side increments a counter in its own file. The other side measures on its own monotonic clock how long the counter
has not changed, so it does not matter if the hosts' clocks differ or jump.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from verbatim.core.errors import RunStopped
from verbatim.trainer.transport.files import publish_json, read_published_json

BEAT_SECONDS = 0.5
"""Seconds between two beats."""

FIRST_BEAT = 120.0
"""Minimum timeout in seconds for the first beat: before this beat the process imports its libraries, which takes long
on a busy machine."""
_ATTENTION = 1.0
"""Expected time in seconds between two checks of the other side. If a check comes later, the excess does not count as
silence."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One heartbeat."""

    pid: int
    """Process id of the sender."""
    beats: int
    """Number of beats so far."""
    progress: int
    """Counter that increases whenever the process's main work moves on."""
    doing: str
    """Current activity, for messages: "training on batch 3"."""
    wants_to_stop: bool
    """True if this process was asked to end."""


def read_beat(path: Path) -> Beat | None:
    """The last heartbeat; None if there is none yet or the file is damaged, in which case the next beat replaces it."""
    try:
        return Beat(**read_published_json(path) or {})
    except (RunStopped, TypeError):
        return None


class Heartbeat:
    """Publishes heartbeats of this process from a thread, until the `with` block ends.

    Args:
        path: The file to publish to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._beats = 0
        self._progress = 0
        self._doing = "starting"
        self._wants_to_stop = False
        self._ended = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._main, name="heartbeat", daemon=True)
        self._thread.start()

    def progress(self, doing: str) -> None:
        """Record that the main work has moved on to the activity `doing`. The next beat publishes it."""
        self._progress += 1
        self._doing = doing

    def ask_to_stop(self) -> None:
        """Let the next beat tell the other side that this process was asked to end."""
        self._wants_to_stop = True

    def __enter__(self) -> Heartbeat:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _main(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self._beat()
            except MemoryError:
                continue  # the next beat may have enough memory again

    def _beat(self) -> None:
        self._beats += 1
        try:
            beat = Beat(
                pid=os.getpid(),
                beats=self._beats,
                progress=self._progress,
                doing=self._doing,
                wants_to_stop=self._wants_to_stop,
            )
            publish_json(self._path, dataclasses.asdict(beat))
        except OSError:
            return  # a full disk or a removed folder: the other side notices that beats stop


class PeerWatch:
    """Watches the other side's heartbeat.

    Args:
        path: The other side's heartbeat file.
        name: Name of the other side in messages: "the trainer".
        heartbeat_timeout: Seconds without a beat until the other process counts as dead or frozen; at least
            `FIRST_BEAT` for the first beat.
        stall_timeout: Seconds without progress until the other process counts as stuck.
        clock: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        heartbeat_timeout: float,
        stall_timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._name, self._clock = path, name, clock
        self._heartbeat_timeout, self._stall_timeout = heartbeat_timeout, stall_timeout
        self._beats = self._progress = -1
        self._beat_seen = self._progress_seen = clock()
        self._asked = clock()
        self._who, self._doing = name, "starting"
        self.wants_to_stop = False
        """True if the other side was asked to end."""

    def fault(self) -> str | None:
        """Say, for an error message, what is wrong with the other side; None if nothing is wrong. Call this at least
        once a second."""
        now = self._clock()
        # Time during which this process itself was stopped does not count: a frozen container or a debugger may have
        # stopped both sides.
        blind, self._asked = max(0.0, now - self._asked - _ATTENTION), now
        self._beat_seen += blind
        self._progress_seen += blind
        seen = read_beat(self._path)
        if seen is not None:
            self._who = f"{self._name} (process {seen.pid})"
            self._doing, self.wants_to_stop = seen.doing, seen.wants_to_stop
            if seen.beats != self._beats:
                self._beats, self._beat_seen = seen.beats, now
            if seen.progress != self._progress:
                self._progress, self._progress_seen = seen.progress, now
        silent, stuck = now - self._beat_seen, now - self._progress_seen
        if silent > (self._heartbeat_timeout if self._beats >= 0 else max(self._heartbeat_timeout, FIRST_BEAT)):
            return f"{self._who} has given no sign of life for {silent:.0f} s; its last report was: {self._doing}"
        if stuck > self._stall_timeout:
            return f"{self._who} is stuck: for {stuck:.0f} s it has been {self._doing}"
        return None
