"""What a pool needs of a worker: one process, on this machine or another, that runs episodes."""

from __future__ import annotations

from typing import Protocol

from verbatim.rollouts.runner import EpisodeTask

START_TIMEOUT = 120.0
"""Seconds for a worker to start and to make its environments."""


class WorkerLost(Exception):
    """The worker is gone, and the episodes that it ran with it; says how."""


class CannotTravel(Exception):
    """What an environment put into an example or into its record cannot be sent to a worker, or back; says why."""


class Worker(Protocol):
    """One process. It is started once, runs any number of episodes side by side, and is closed once, also where it
    did not start."""

    async def start(self) -> int:
        """Start it and have it make its environments. Returns its process id, on its host.

        Raises:
            UsageError: it cannot be started; says why and what to change. It is closed all the same.
        """

    async def run(self, label: str, task: EpisodeTask) -> bytes:
        """One episode of the environment with this label, as `episodes.pack` wrote it. Cancelling the call cancels the
        episode.

        Raises:
            WorkerLost: the worker is gone.
            CannotTravel: the episode was not run: its example cannot be sent.
        """

    def kill(self) -> None:
        """End it at once. What it runs ends with `WorkerLost`."""

    async def close(self) -> None:
        """End it, if it still runs, and wait until nothing of it is left."""
