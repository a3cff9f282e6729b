"""Defines the `Worker` protocol (a worker is a process, on this or another machine, that runs episodes), and helpers
for its implementations."""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verbatim.core.ctrl_c import users_errors
from verbatim.core.texts import error_text
from verbatim.rollouts.runner import EpisodeTask

START_TIMEOUT = 600.0
"""Timeout in seconds for starting a worker and creating its environments. It is long because a cluster may first have
to add a node, and because imports alone take minutes on a machine that is busy."""


class WorkerLost(Exception):
    """Raised when the worker and its running episodes are lost; the message says how."""


class CannotBeSent(Exception):
    """Raised when an example or a record holds values that cannot be pickled; the message says why."""


class Worker(Protocol):
    """One process that runs episodes. It is started once, runs any number of episodes concurrently, and is closed once,
    even if it could not be started."""

    async def start(self) -> int:
        """Start the process, and create its environments. Returns the process id on the process's host.

        Raises:
            UsageError: the worker cannot be started; the message says why and what to change. The worker must be closed
                in this case too.
        """

    async def run(self, label: str, task: EpisodeTask) -> bytes:
        """Run an episode of the environment with this label, and return the result of `episodes.pack`. If this call is
        cancelled, the episode is cancelled too.

        Raises:
            WorkerLost: the worker was lost.
            CannotBeSent: the example cannot be sent, so the episode was not run.
        """

    def kill(self) -> None:
        """Kill the process. Its running episodes end with `WorkerLost`."""

    async def close(self) -> None:
        """End the worker if it is still running, and wait until its processes have ended."""


def dumped(value: Any) -> bytes:
    """Pickle a value that may contain the user's objects. Raises CannotBeSent if one of these objects raises an
    exception."""
    with users_errors(lambda error: CannotBeSent(error_text(error, 500))):
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def loaded(packed: bytes) -> Any:
    """Unpickle the result of `dumped`, which comes from a process of this run. Raises CannotBeSent if an object raises
    an exception."""
    with users_errors(lambda error: CannotBeSent(error_text(error, 500))):
        return pickle.loads(packed)  # noqa: S301  (from our own process)


@dataclass(frozen=True, kw_only=True)
class WorkerContext:
    """The working directory and the search path of the run's process, which its workers adopt."""

    folder: str
    """The working directory."""
    search_path: tuple[str, ...]
    """The entries of `sys.path`, as absolute paths."""

    @classmethod
    def current(cls) -> WorkerContext:
        """Return the working directory and the search path of this process."""
        return cls(folder=str(Path.cwd()), search_path=tuple(os.path.abspath(entry) for entry in sys.path))

    def apply(self) -> None:
        """Adopt the context on another host, as far as its folders exist there, so that relative paths and imports
        resolve in the same way. Packages installed on that host take precedence."""
        if Path(self.folder).is_dir():
            os.chdir(self.folder)
        known = set(map(os.path.abspath, sys.path))
        sys.path.extend(entry for entry in self.search_path if entry not in known)

    def apply_exactly(self) -> None:
        """Adopt the context in another process of the same machine: the same search path, in the same order."""
        os.chdir(self.folder)
        sys.path[:] = self.search_path
