"""Defines the `Worker` protocol: one process, on this or another machine, that runs episodes."""

from __future__ import annotations

from typing import Protocol

from verbatim.rollouts.runner import EpisodeTask

START_TIMEOUT = 120.0
"""Seconds for a worker to start and to create its environments."""


class WorkerLost(Exception):
    """The worker and its running episodes are lost; the message says how."""


class CannotBeSent(Exception):
    """An example or a record holds values that cannot be pickled; the message says why."""


class Worker(Protocol):
    """One process. It is started once, runs any number of episodes concurrently, and is closed once, even if it did not
    start."""

    async def start(self) -> int:
        """Start it and create its environments. Returns its process id on its host.

        Raises:
            UsageError: it cannot be started; says why and what to change. It still has to be closed.
        """

    async def run(self, label: str, task: EpisodeTask) -> bytes:
        """Run an episode of the environment with this label; returns the result of `episodes.pack`. Cancelling the call
        cancels the episode.

        Raises:
            WorkerLost: the worker was lost.
            CannotBeSent: the example cannot be sent; the episode was not run.
        """

    def kill(self) -> None:
        """Kill it. Its running episodes end with `WorkerLost`."""

    async def close(self) -> None:
        """End it, if it still runs, and wait until its processes have ended."""
