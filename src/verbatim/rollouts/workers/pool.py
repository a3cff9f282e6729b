"""Distributes episodes over workers. The episodes of a lost worker run again with the same seeds."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from verbatim.core.errors import RecordError, RunStopped, UsageError
from verbatim.core.tasks import cancel_all, run_together
from verbatim.core.texts import cut, error_text, printable
from verbatim.core.types import StopReason, Trajectory
from verbatim.rollouts import supervised
from verbatim.rollouts.draws import CountingSampler, Draws
from verbatim.rollouts.episode import CLOSING
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.runner import EpisodeTask, RolloutSetup
from verbatim.rollouts.workers.episodes import unpack
from verbatim.rollouts.workers.worker import CannotBeSent, Worker, WorkerLost

logger = logging.getLogger(__name__)

GRACE = CLOSING + 3 * supervised.GRACE
"""Number of seconds after an episode's deadline at which its worker is considered stuck, and therefore lost. An episode
that merely ignores its cancellation is abandoned and closed before its worker is considered stuck."""
MOST_ATTEMPTS = 3
"""Number of workers that an episode may lose before it fails. The last attempt runs on a worker that runs no other
episode: if that worker is lost too, the episode itself must be the cause."""
MOST_ALONE = 4
"""Maximum number of episodes that may each have a whole worker at the same time. If there are more workers than this,
the maximum is the number of workers."""
LONGEST_PAUSE = 10.0
"""Maximum pause in seconds before a lost worker is replaced (see `pause_before_replacement`)."""
SAY_EVERY = 60.0
"""Seconds between two messages about workers that have not started yet."""


@dataclass(eq=False)
class _StartedWorker:
    """A worker that has been started, and its state."""

    worker: Worker
    pid: int
    num_running: int = 0
    is_lost: bool = False


class WorkerPool:
    """An `EpisodeRunner` that sends each episode to the worker with the fewest running episodes.

    Args:
        make: Creates a worker without starting it. The argument is True for a worker that runs one episode at a time.
        sampler: Receives the workers' requests.
        workers: Number of workers.
        what: What a worker is called in messages, such as "Ray actor".
    """

    def __init__(self, make: Callable[[bool], Worker], sampler: CountingSampler, *, workers: int, what: str) -> None:
        self._make, self._sampler, self._num_wanted, self._what = make, sampler, workers, what
        self._workers: list[_StartedWorker] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._alone = asyncio.Semaphore(max(workers, MOST_ALONE))
        self._num_to_run_alone = 0
        self._spare: list[_StartedWorker] = []
        self._changed = asyncio.Event()
        self._why = ""
        self._num_lost_in_a_row = 0
        self.num_lost = 0
        """Number of workers lost so far."""
        self.num_rerun = 0
        """Number of episodes that were started again so far because their worker was lost."""

    @property
    def pids(self) -> list[int]:
        """Process id of each worker on the worker's host."""
        return [started.pid for started in self._workers]

    @property
    def num_running(self) -> list[int]:
        """Number of episodes running on each worker, in the order of `pids`."""
        return [started.num_running for started in self._workers]

    def metrics(self) -> Mapping[str, float]:
        """Return the number of workers, of workers lost since the start, and of episodes started again since the
        start."""
        return {
            "rollout/workers": len(self._workers),
            "rollout/workers_lost": self.num_lost,
            "rollout/episodes_rerun": self.num_rerun,
        }

    async def start(self) -> None:
        """Start all workers. Raises UsageError if a worker cannot be started."""
        saying = asyncio.create_task(self._say_how_many(), name="workers-that-start")
        try:
            await run_together(self._add() for _ in range(self._num_wanted))
        finally:
            saying.cancel()

    async def _say_how_many(self) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(SAY_EVERY)
            logger.warning(
                "waiting for a %s to start: %d of %d have started after %d s",
                self._what,
                len(self._workers),
                self._num_wanted,
                time.monotonic() - began,
            )

    async def close(self) -> None:
        """End every worker."""
        await cancel_all(self._starting)
        for started in self._workers:
            self._close(started.worker)
        self._workers.clear()
        self._close_spare()
        while self._closing:
            await asyncio.wait(self._closing)

    async def run(self, setup: RolloutSetup, task: EpisodeTask, recorder: Recorder) -> Trajectory:
        """Run an episode; if its worker is lost, run it again on a different worker. Raises RunStopped if no worker is
        left and none can be started."""
        why = ""
        for number in range(1, MOST_ATTEMPTS + 1):
            self.num_rerun += number > 1
            try:
                if 1 < number == MOST_ATTEMPTS:
                    return await self._run_alone(setup, task, recorder)
                return await self._run_on(await self._least_busy(), setup, task, recorder)
            except WorkerLost as lost:
                why = str(lost)
        error = f"worker: {why} (the last of {MOST_ATTEMPTS} workers lost with this episode)"
        return _failed_record(task, recorder, error)

    async def _least_busy(self) -> _StartedWorker:
        while not self._workers:
            if not self._starting:
                raise RunStopped(f"no {self._what} is left to run episodes, and none can be started: {self._why}")
            self._changed.clear()
            await self._changed.wait()
        return min(self._workers, key=lambda started: started.num_running)

    async def _run_alone(self, setup: RolloutSetup, task: EpisodeTask, recorder: Recorder) -> Trajectory:
        """Run the episode on a worker that runs no other episode. If no such worker can be started, run the episode on
        a worker with other episodes."""
        self._num_to_run_alone += 1
        try:
            async with self._alone:
                try:
                    started = self._spare.pop() if self._spare else await self._start(alone=True)
                except UsageError as error:
                    logger.warning("no %s could be started for one episode: %s", self._what, printable(str(error)))
                    return await self._run_on(await self._least_busy(), setup, task, recorder)
                try:
                    return await self._run_on(started, setup, task, recorder)
                finally:
                    if started.is_lost:
                        self._close(started.worker)
                    else:  # kept for the next such episode, which then need not wait for a new worker
                        self._spare.append(started)
        finally:
            self._num_to_run_alone -= 1
            if not self._num_to_run_alone:
                self._close_spare()

    async def _run_on(
        self, started: _StartedWorker, setup: RolloutSetup, task: EpisodeTask, recorder: Recorder
    ) -> Trajectory:
        current = self._sampler.open(recorder)
        started.num_running += 1
        try:
            async with asyncio.timeout(setup.limits.timeout + GRACE):
                packed = await started.worker.run(setup.env, dataclasses.replace(task, session=current.session))
        except CannotBeSent as error:
            return _failed_record(task, recorder, f"environment: the example cannot be sent to a worker: {error}")
        except (WorkerLost, TimeoutError) as error:
            why = str(error) or f"it did not end an episode within {GRACE:g} s of its deadline"
            self._lose(started, why)
            await current.end()  # before `num_tokens` is read: it counts the tokens of requests in flight
            recorder.lose(current.num_tokens)
            raise WorkerLost(why) from error
        except asyncio.CancelledError:
            await current.end()
            raise
        finally:
            started.num_running -= 1
            self._sampler.close_attempt(current)
        self._num_lost_in_a_row = 0
        await current.end()  # a cancellation may still be on its way to the engine
        try:
            trajectory, late = unpack(packed)
        except CannotBeSent as error:
            return _failed_record(
                task, recorder, f"environment: its record cannot be read in the run's process: {error}"
            )
        return _received(trajectory, late, setup, current, recorder)

    # ---- workers come and go

    async def _start(self, *, alone: bool = False) -> _StartedWorker:
        worker = self._make(alone)
        try:
            pid = await worker.start()
        except BaseException:
            self._close(worker)  # by a task of the pool, because the caller may be cancelled
            raise
        return _StartedWorker(worker, pid)

    async def _add(self) -> None:
        self._workers.append(await self._start())
        self._changed.set()

    def _lose(self, started: _StartedWorker, why: str) -> None:
        """Record the loss of a worker and replace it. Several episodes may report the loss of the same worker."""
        if started.is_lost:
            return
        started.is_lost = True
        started.worker.kill()  # it may be stuck and not dead
        self.num_lost += 1
        self._num_lost_in_a_row += 1
        self._why = why
        logger.warning(
            "a %s was lost; its %d episodes are run again: %s", self._what, started.num_running, printable(why)
        )
        if started not in self._workers:
            return
        self._workers.remove(started)
        self._close(started.worker)
        # Usually one is started; more if earlier replacements could not be started.
        for _ in range(self._num_wanted - len(self._workers) - len(self._starting)):
            starting = asyncio.create_task(self._replace(), name="start-worker")
            self._starting.add(starting)
            starting.add_done_callback(self._ended)

    async def _replace(self) -> None:
        await asyncio.sleep(pause_before_replacement(self._num_lost_in_a_row, self._num_wanted))
        try:
            await self._add()
        except UsageError as error:
            self._why = str(error)
            logger.warning(
                "no other %s could be started, %d are left: %s", self._what, len(self._workers), printable(str(error))
            )

    def _ended(self, starting: asyncio.Task[None]) -> None:
        self._starting.discard(starting)
        self._changed.set()

    def _close_spare(self) -> None:
        while self._spare:
            self._close(self._spare.pop().worker)

    def _close(self, worker: Worker) -> None:
        closing = asyncio.create_task(worker.close(), name="close-worker")
        self._closing.add(closing)
        closing.add_done_callback(self._closed)

    def _closed(self, closing: asyncio.Task[None]) -> None:
        self._closing.discard(closing)
        if not closing.cancelled() and (error := closing.exception()) is not None:
            logger.warning("a %s could not be ended: %s", self._what, printable(error_text(error)))


def pause_before_replacement(num_lost_in_a_row: int, num_workers: int) -> float:
    """Return the pause in seconds: 0 for the first losses, so that each worker is replaced immediately. After that, the
    pause doubles until an episode ends, so that workers that keep crashing do not take all CPU time."""
    extra = num_lost_in_a_row - num_workers
    return min(LONGEST_PAUSE, 0.1 * 2 ** min(extra, 10)) if extra > 0 else 0.0


def _received(
    trajectory: Trajectory, late: RecordError | None, setup: RolloutSetup, ended: Draws, recorder: Recorder
) -> Trajectory:
    """Adjust the recorder's counts to a trajectory received from a worker, and return the trajectory."""
    if setup.teacher is not None:  # a teacher's answers are counted in the student's ids, which the worker computes
        recorder.count(trajectory.num_sampled_tokens)
    else:  # the worker may have requested an answer again that was lost on its way: the first one is dropped
        recorder.lose(ended.num_delivered - trajectory.num_sampled_tokens)
        # Cancelled requests are counted only in this process: the worker got no answer for them.
        unrecorded = trajectory.num_unrecorded_tokens + ended.num_cancelled
        trajectory = trajectory.replace(num_unrecorded_tokens=unrecorded)
    assert recorder.num_sampled_tokens == trajectory.num_sampled_tokens
    recorder.close()
    recorder.late = recorder.late or late
    return trajectory


def _failed_record(task: EpisodeTask, recorder: Recorder, error: str) -> Trajectory:
    """Create the trajectory of a failed episode: it has no turns, only the number of sampled tokens."""
    recorder.close()
    return Trajectory.of(
        task.identity,
        stop_reason=StopReason.API_ERROR,
        truncated=True,
        error=cut(error),
        num_unrecorded_tokens=recorder.num_sampled_tokens,
    )
