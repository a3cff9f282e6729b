"""Keeps rollouts in flight: as many as the staleness rule allows, handed out batch by batch."""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from verbatim.curriculum import ExampleSchedule, Flatness, ScheduledExample, flatness
from verbatim.errors import NothingToSample, RunStopped
from verbatim.orchestrator.staleness import may_start
from verbatim.rollouts import GroupRun, RolloutSetup
from verbatim.trajectories import Ledger
from verbatim.types import Group

MOST_FILTERED_BATCHES = 50
"""A run in which online difficulty filtering drops this many batches' worth of groups in a row is dead."""


class Dispatcher:
    """Launches groups and collects them.

    A group is launched for the earliest batch that still needs one; whether it may start is decided by
    `staleness.may_start`. What was launched and not yet handed out is in `state_dict`, so that nothing in flight
    is lost by a resume: those groups are run again, with their own seeds.
    """

    def __init__(
        self,
        *,
        schedule: ExampleSchedule,
        setups: Mapping[str, RolloutSetup],
        ledger: Ledger,
        group_size: int,
        groups_per_batch: int,
        max_async_level: int,
        oversampling_factor: float,
        run_seed: int,
        num_batches: int,
        online_difficulty_filtering: bool = False,
        needs_rewards: bool = True,
    ) -> None:
        self._schedule = schedule
        self._setups = setups
        self._ledger = ledger
        self._group_size = group_size
        self._groups_per_batch = groups_per_batch
        self._max_async_level = max_async_level
        self._max_running = max(1, round(oversampling_factor * groups_per_batch))
        self._has_spares = online_difficulty_filtering and self._max_running > groups_per_batch
        self._run_seed = run_seed
        self._num_batches = num_batches
        self._online_difficulty_filtering = online_difficulty_filtering
        self._needs_rewards = needs_rewards
        self._filtered: list[tuple[Flatness, Group]] = []
        self._filtered_in_a_row = 0
        self._version = 0
        self._next_batch = 0
        self._again: list[ScheduledExample] = []
        self._running: dict[asyncio.Task[Group], tuple[GroupRun, ScheduledExample]] = {}
        self._ready: list[tuple[GroupRun, ScheduledExample, Group]] = []
        self._taken: deque[list[tuple[GroupRun, ScheduledExample, Group]]] = deque()
        self._failures_in_a_row = 0
        self._failure: BaseException | None = None
        self.drained: str | None = None
        """Why nothing more can be launched; None while something can."""
        self._stopped = False
        self._changed = asyncio.Event()

    @property
    def num_pending_tokens(self) -> int:
        """Tokens it answers for: of episodes in flight, and of finished groups that are not settled."""
        return sum(run.num_sampled_tokens for run, _ in self._running.values()) + sum(
            run.num_sampled_tokens for run, *_ in self._finished_groups()
        )

    @property
    def num_running(self) -> int:
        """Groups in flight."""
        return len(self._running)

    @property
    def num_ready(self) -> int:
        """Finished groups that wait for a batch."""
        return len(self._ready)

    def start(self, version: int, batch: int) -> None:
        """Begin to launch: weights of this version are in use and this batch is the first to be formed."""
        self._version, self._next_batch = version, batch
        self._launch()

    def advance(self, version: int) -> None:
        """Weights of this version are in use now; launch what may start."""
        self._version = version
        self._launch()

    async def next_batch(self) -> list[tuple[int, Group]] | None:
        """The next whole batch of groups, in the order of their numbers; those that finish first are taken.

        Batches may be taken before the ones before are settled. None when the examples are used up: the groups that
        are left do not make a batch, and no other can be launched.

        Raises:
            RunStopped: every rollout of two batches in a row failed, or online filtering drops everything.
            Exception: whatever broke inside a rollout that is no fault of the rollout's own.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if len(self._ready) >= self._groups_per_batch:
                break
            if self.drained is not None and not self._running:
                return None
            self._changed.clear()  # where nothing is in flight, new weights will start what is missing
            await self._changed.wait()
        taken, self._ready = self._ready[: self._groups_per_batch], self._ready[self._groups_per_batch :]
        self._taken.append(taken)
        self._next_batch += 1
        self._launch()
        return sorted(((run.index, group) for run, _, group in taken), key=lambda pair: pair[0])

    def settled(self) -> None:
        """The earliest batch that was handed out is in the ledger; its examples are judged."""
        for _, drawn, group in sorted(self._taken.popleft(), key=lambda taken: taken[0].index):
            self._judge(drawn, group)

    def _judge(self, drawn: ScheduledExample, group: Group) -> None:
        rewards = [trajectory.reward for trajectory in group.scored if trajectory.reward is not None]
        if rewards:
            self._schedule.pools.observe(drawn.env, drawn.example.id, statistics.fmean(rewards))

    def _finished_groups(self) -> list[tuple[GroupRun, ScheduledExample, Group]]:
        return [*(group for batch in self._taken for group in batch), *self._ready]

    async def stop(self) -> None:
        """Cancel what is in flight. Its tokens stay pending: its groups are sampled again when the run goes on."""
        self._stopped = True
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def discard(self) -> int:
        """After `stop`: nothing of what it holds will be trained. The tokens; a run that is made longer samples those
        groups again."""
        held = self.num_pending_tokens
        self._again += [drawn for _, drawn in self._running.values()]
        self._again += [drawn for _, drawn, _ in self._finished_groups()]
        self._running, self._ready, self._taken = {}, [], deque()
        return held

    def _launch(self) -> None:
        while len(self._running) < self._max_running and not self._stopped and self.drained is None:
            waiting = len(self._running) + len(self._ready)
            batch = self._next_batch + waiting // self._groups_per_batch
            if self._has_spares and len(self._ready) < self._groups_per_batch and self._next_batch < self._num_batches:
                batch = min(batch, self._num_batches - 1)  # of the last batch, too, some may be dropped
            if batch >= self._num_batches or not may_start(batch, self._version, self._max_async_level):
                return
            try:
                drawn = self._again.pop(0) if self._again else self._schedule.draw()
            except NothingToSample as end:
                self.drained = str(end)
                self._changed.set()
                return
            run = GroupRun(
                self._setups[drawn.env],
                drawn.example,
                index=drawn.index,
                size=self._group_size,
                run_seed=self._run_seed,
                on_sampled=self._ledger.sampled_tokens,
                on_lost=lambda num_tokens: self._ledger.drop({"lost_actor": num_tokens}),
            )
            task = asyncio.create_task(run.run(), name=run.group_id)
            self._running[task] = (run, drawn)
            task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[Group]) -> None:
        if self._stopped:
            return  # it stays in `_running`: its tokens are still held
        self._changed.set()
        error = RunStopped(f"{task.get_name()} was cancelled from inside") if task.cancelled() else task.exception()
        if error is not None:
            self._failure = self._failure or error
            return
        run, drawn = self._running.pop(task)
        group = task.result()
        kind = flatness(group) if self._online_difficulty_filtering else None
        if kind is None:
            self._ready.append((run, drawn, group))
            self._filtered_in_a_row = 0
        else:
            self._filter(run, group, kind)
            self._judge(drawn, group)
        useful = group.scored if self._needs_rewards else group.completed
        self._failures_in_a_row = 0 if useful else self._failures_in_a_row + 1
        if self._failures_in_a_row >= 2 * self._groups_per_batch:
            last = group.trajectories[-1].error or "no reward: `score` returned None, and no `score_group` gave one"
            self._failure = RunStopped(
                f"every rollout of the last {self._failures_in_a_row} groups failed; the last one said: {last}"
            )
        self._launch()

    def _filter(self, run: GroupRun, group: Group, kind: Flatness) -> None:
        """A group that teaches nothing ends here; another one is launched in its place."""
        self._ledger.settle_group(run.index, trained=0, dropped={"difficulty": run.num_sampled_tokens})
        self._filtered.append((kind, group))
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row >= MOST_FILTERED_BATCHES * self._groups_per_batch:
            self._failure = self._failure or RunStopped(
                f"online difficulty filtering dropped the last {self._filtered_in_a_row} groups, the last one as "
                f'"{kind}" (all its rewards are {group.scored[0].reward}): nothing is left to learn from. Choose '
                "other examples, or switch it off: orchestrator.buffer.online_difficulty_filtering = false"
            )

    def metrics(self) -> dict[str, float]:
        """Difficulty pools, since this was last asked; and what the players of the episodes say."""
        played = {name: value for setup in self._setups.values() for name, value in setup.player.metrics().items()}
        return {**self._schedule.pools.metrics(), **played}

    def take_filtered(self) -> list[tuple[Flatness, Group]]:
        """The groups that online difficulty filtering dropped since this was last asked."""
        filtered, self._filtered = self._filtered, []
        return filtered

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values: the schedule, and every group that was launched and is not settled."""
        held = [drawn for _, drawn in self._running.values()] + self._again
        held += [drawn for _, drawn, _ in self._finished_groups()]
        return {
            "schedule": self._schedule.state_dict(),
            "held": [
                {"index": draw.index, "env": draw.env, "example_id": draw.example.id}
                for draw in sorted(held, key=lambda draw: draw.index)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; held groups are run again first."""
        self._schedule.load_state_dict(state["schedule"])
        self._again = [self._schedule.lookup(h["env"], h["example_id"], h["index"]) for h in state["held"]]
