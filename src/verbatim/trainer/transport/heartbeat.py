"""Sends and checks heartbeats between processes, by counting, independent of wall clocks.

Each side counts up in a file of its own. The other side measures, on its own monotonic clock, for how long a count has
stood still; so it does not matter whether clocks agree, or jump.
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
"""Seconds until the first beat, where `heartbeat_timeout` is shorter: before it, Python imports what the process needs,
which takes long on a busy machine."""
_ATTENTION = 1.0
"""Seconds between two checks of the other side: if a check comes later, the excess does not count as its silence."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One heartbeat."""

    pid: int
    beats: int
    """Beats so far."""
    progress: int
    """Counts up whenever the process's main work moves on."""
    doing: str
    wants_to_stop: bool
    """Whether this process was asked to end."""


def read_beat(path: Path) -> Beat | None:
    """The last heartbeat; None if there is none yet, or the file is damaged: then the next one replaces it."""
    try:
        return Beat(**read_published_json(path) or {})
    except (RunStopped, TypeError):
        return None


class Heartbeat:
    """Publishes that this process lives, and what it does, on a thread of its own, until the block ends.

    Args:
        path: Its file.
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
        """The process's main work moved on, and does this now. The next beat publishes that."""
        self._progress += 1
        self._doing = doing

    def ask_to_stop(self) -> None:
        """Tell the other side that this process was asked to end."""
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
                continue  # there may be room for the next one

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
            return  # a full disk, or a folder that was removed: the other side notices that nothing comes


class PeerWatch:
    """Watches the other side's heartbeat.

    Args:
        path: The other side's file.
        name: What messages call it: "the trainer".
        heartbeat_timeout: Seconds without a beat after which its process is taken for dead or frozen; at least
            `FIRST_BEAT` before the first one.
        stall_timeout: Seconds without progress after which it is taken for stuck.
        clock: Seconds of a monotonic clock.
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
        """Whether the other side was asked to end."""

    def fault(self) -> str | None:
        """What is wrong with the other side; None if nothing is. Call it regularly."""
        now = self._clock()
        blind, self._asked = max(0.0, now - self._asked - _ATTENTION), now
        self._beat_seen += blind  # this process stood still, and perhaps both did: a frozen container, a debugger
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
            return f"{self._who} has given no sign of life for {silent:.0f} s; the last was that it is {self._doing}"
        if stuck > self._stall_timeout:
            return f"{self._who} is stuck: for {stuck:.0f} s it has been {self._doing}"
        return None
