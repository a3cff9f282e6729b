"""Keeps rollouts in flight: as many as the staleness rule allows, handed out batch by batch."""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
from bisect import insort
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verbatim.algorithms.curriculum import ExampleSchedule, Flatness, ScheduledExample, flatness
from verbatim.core.errors import NothingToSample, RunStopped
from verbatim.core.trajectories import Ledger
from verbatim.core.types import Group, Trajectory
from verbatim.rollouts import GroupRun, RolloutSetup
from verbatim.rollouts.group import MOST_IN_LINE
from verbatim.run.orchestrator.in_flight import Begun, FinishedGroup, InFlight, Launched
from verbatim.run.orchestrator.staleness import newest_batch, too_old

MOST_FILTERED_BATCHES = 50
"""A run in which online difficulty filtering drops this many batches' worth of groups in a row is dead."""

MOST_AT_ONCE = 128
"""Groups that are launched before the event loop turns: new weights may start thousands."""

PATIENCE = 0.5
"""A batch goes without an unfinished group that would be lost by it, once this share of a batch more than it needs is
finished."""


@dataclass(kw_only=True, eq=False)
class Dispatcher:
    """Launches groups, collects them, and hands them out batch by batch.

    Launching: from the batch that comes next up to `staleness.newest_batch`, each place that no finished group fills
    may have one group in flight. Where online difficulty filtering replaces groups it may have `oversampling_factor`
    of them, because some will be dropped. At most `oversampling_factor` batches of groups are in flight. The examples
    of all of them are drawn, and their episodes are made where they can find places soon: a group at a time, while
    fewer than `rollouts.group.MOST_IN_LINE` episodes wait in line.

    Handing out: a batch takes the finished groups that were launched first, as soon as there are enough of them. A
    group that was launched earlier and still runs does not hold it. Only where going without that group would lose it,
    because it will be older than `max_off_policy_steps` in the batch after, the batch first lets half a batch more
    finish, if so much is in flight: the group may be among them, and the sampler works on meanwhile. With
    `max_async_level = 0` every batch is the groups that were launched first, however long they take.

    What is left over waits for the next batch. Once it is older than `max_off_policy_steps` there, it is dropped as
    `stale` and another group is launched in its place.

    What was launched and not yet handed out is in `state_dict`, so that nothing in flight is lost by a resume: those
    groups are run again, with their own seeds.
    """

    schedule: ExampleSchedule
    setups: Mapping[str, RolloutSetup]
    ledger: Ledger
    group_size: int
    groups_per_batch: int
    max_async_level: int
    max_off_policy_steps: int
    oversampling_factor: float
    run_seed: int
    max_steps: int
    online_difficulty_filtering: bool = False
    needs_rewards: bool = True

    def __post_init__(self) -> None:
        self.max_async_level = min(self.max_async_level, self.max_off_policy_steps)  # older ones are never trained
        self._max_running = max(1, round(self.oversampling_factor * self.groups_per_batch))
        self._groups_per_place = self.oversampling_factor if self.online_difficulty_filtering else 1.0
        self._patience = math.ceil(PATIENCE * self.groups_per_batch)
        self._dropped: list[tuple[Flatness | None, Group]] = []
        self._filtered_in_a_row = 0
        self._version = 0
        self._next_batch = 0
        self._again: list[ScheduledExample] = []
        self._drawn: deque[Launched] = deque()
        """Groups in flight that have not begun."""
        self._running: dict[asyncio.Task[Group], Begun] = {}
        """Groups in flight that have."""
        self._num_in_line = 0
        """Episodes of theirs that wait for a place."""
        self._in_flight = InFlight()
        """Both, by the weights that they were launched with."""
        self._goes_on = self._begins = False
        """Whether `_draw`, or `_begin`, was put off to the next turn of the event loop."""
        self._ready: list[FinishedGroup] = []
        self._taken: deque[list[FinishedGroup]] = deque()
        self._failures_in_a_row = 0
        self._failure: BaseException | None = None
        self.drained: str | None = None
        """Why nothing more can be launched; None while something can."""
        self._stopped = False
        self._changed = asyncio.Event()

    @property
    def num_pending_tokens(self) -> int:
        """Tokens it answers for: of episodes in flight, and of finished groups that are not settled."""
        return sum(launched.num_sampled_tokens for launched in self._held())

    @property
    def num_running(self) -> int:
        """Groups in flight, those included that have not begun."""
        return len(self._in_flight)

    @property
    def num_ready(self) -> int:
        """Finished groups that wait for a batch."""
        return len(self._ready)

    @property
    def num_held(self) -> int:
        """Episodes that wait for a place, run or have ended, and are not settled."""
        return (len(self._running) + len(self._ready) + sum(map(len, self._taken))) * self.group_size

    def start(self, version: int, batch: int) -> None:
        """Begin to launch: weights of this version are in use and this batch is the first to be formed."""
        self._version, self._next_batch = version, batch
        self._launch()

    def advance(self, version: int) -> None:
        """Weights of this version are in use now; launch what may start."""
        self._version = version
        self._launch()

    async def next_batch(self) -> list[Group] | None:
        """The next whole batch of groups, in the order in which they were launched.

        Batches may be taken before the ones before are settled. None when the examples are used up: the groups that
        are left do not make a batch, and no other can be launched.

        Raises:
            RunStopped: every rollout of two batches in a row failed, or online filtering drops everything.
            Exception: a bug inside a rollout; faults of the rollout itself are on its trajectory.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if self._is_due():
                break
            if self.drained is not None and not self._in_flight:
                return None
            self._changed.clear()  # where nothing is in flight, new weights will start what is missing
            await self._changed.wait()
        taken, self._ready = self._ready[: self.groups_per_batch], self._ready[self.groups_per_batch :]
        self._taken.append(taken)
        self._next_batch += 1
        self._drop_stale(self._ready)
        self._launch()
        return [ended.group for ended in taken]

    def _is_due(self) -> bool:
        """Whether the next batch is handed out as things stand."""
        if len(self._ready) < self.groups_per_batch:
            return False
        last, oldest = self._ready[self.groups_per_batch - 1].drawn.index, self._next_batch - self.max_off_policy_steps
        if self.max_async_level == 0:
            first = self._in_flight.first_since(oldest)
            return first is None or first > last
        lost = self._in_flight.first(oldest)  # what this batch could train, and not the one after it
        if lost is None or lost > last:
            return True
        short = self.groups_per_batch + self._patience - len(self._ready)
        return short <= 0 or self._in_flight.num_later(last) < short

    def settled(self) -> None:
        """The earliest batch that was handed out is in the ledger; its examples are judged."""
        for ended in self._taken.popleft():
            self._judge(ended.drawn, ended.group)

    def _judge(self, drawn: ScheduledExample, group: Group) -> None:
        rewards = [trajectory.reward for trajectory in group.scored if trajectory.reward is not None]
        if rewards:
            self.schedule.pools.observe(drawn.env, drawn.example.id, statistics.fmean(rewards))

    def _held(self) -> list[Launched]:
        """Every group that was launched and is not settled."""
        ended = (one for batch in self._taken for one in batch)
        return [*self._drawn, *self._running.values(), *self._ready, *ended]

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
        self._again += [launched.drawn for launched in self._held()]
        self._drawn, self._running, self._ready, self._taken = deque(), {}, [], deque()
        self._in_flight.clear()
        return held

    def _launch(self) -> None:
        self._draw()
        self._begin()

    def _draw(self) -> None:
        """Draw the examples of all groups that may be in flight."""
        num_drawn = 0
        while not self._goes_on and self._has_room() and not self._stopped and self.drained is None:
            if num_drawn == MOST_AT_ONCE:
                self._goes_on = True
                asyncio.get_running_loop().call_soon(self._go_on)
                return
            num_drawn += 1
            try:
                drawn = self._again.pop(0) if self._again else self.schedule.draw()
            except NothingToSample as end:
                self.drained = str(end)
                self._changed.set()
                return
            self._drawn.append(Launched(drawn=drawn, version=self._version))
            self._in_flight.add(drawn.index, self._version)

    def _begin(self) -> None:
        """Make the episodes of the groups that were drawn first, as long as the line for places is short: more of them
        would hold memory and do nothing."""
        while self._drawn and self._num_in_line < MOST_IN_LINE and not self._stopped:
            launched = self._drawn[0]
            drawn = launched.drawn
            run = GroupRun(
                self.setups[drawn.env],
                drawn.example,
                index=drawn.index,
                size=self.group_size,
                run_seed=self.run_seed,
                on_sampled=self.ledger.sampled_tokens,
                on_dropped=self.ledger.drop,
                on_placed=self._placed,
            )
            self._drawn.popleft()
            task = asyncio.create_task(run.run(), name=run.group_id)
            self._running[task] = Begun(run=run, drawn=drawn, version=launched.version)
            self._num_in_line += run.num_in_line
            task.add_done_callback(self._finished)

    def _placed(self) -> None:
        """An episode has its place: the line is shorter."""
        self._num_in_line -= 1
        if self._drawn and not self._begins:
            self._begins = True
            asyncio.get_running_loop().call_soon(self._begin_more)

    def _begin_more(self) -> None:
        self._begins = False
        with self._failing():
            self._begin()

    def _go_on(self) -> None:
        self._goes_on = False
        with self._failing():
            self._launch()

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """The run stops with whatever goes wrong within, in a callback of the event loop, which would only log it."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001  (next_batch raises it)
            self._failure = self._failure or error
            self._changed.set()

    def _has_room(self) -> bool:
        """Whether one more group may be in flight now."""
        batches = min(newest_batch(self._version, self.max_async_level) + 1, self.max_steps) - self._next_batch
        empty_places = batches * self.groups_per_batch - len(self._ready)
        wanted = round(empty_places * self._groups_per_place)
        num_useful = self._in_flight.num_since(self._next_batch - self.max_off_policy_steps)
        return len(self._in_flight) < self._max_running and num_useful < wanted

    def _finished(self, task: asyncio.Task[Group]) -> None:
        with self._failing():
            self._collect(task)

    def _collect(self, task: asyncio.Task[Group]) -> None:
        if self._stopped:
            return  # it stays in `_running`: its tokens are still held
        self._changed.set()
        error = RunStopped(f"{task.get_name()} was cancelled from inside") if task.cancelled() else task.exception()
        if error is not None:
            self._failure = self._failure or error
            return
        begun, group = self._running[task], task.result()
        run, drawn = begun.run, begun.drawn
        kind = flatness(group) if self.online_difficulty_filtering else None
        if kind is None:
            ended = FinishedGroup(run=run, drawn=drawn, version=begun.version, group=group)
            insort(self._ready, ended, key=lambda one: one.drawn.index)
            self._not_running(task)  # until here it is held, whatever goes wrong: its tokens stay pending
            self._filtered_in_a_row = 0
            self._drop_stale([ended])
        else:
            self._not_running(task)
            self._filter(run, group, kind)
            self._judge(drawn, group)
        useful = group.scored if self.needs_rewards else group.completed
        self._failures_in_a_row = 0 if useful else self._failures_in_a_row + 1
        if self._failures_in_a_row >= 2 * self.groups_per_batch:
            last = _why_useless(group.trajectories[-1])
            self._failure = RunStopped(
                f"every rollout of the last {self._failures_in_a_row} groups failed; the last one said: {last}"
            )
        self._launch()

    def _not_running(self, task: asyncio.Task[Group]) -> None:
        ended = self._running.pop(task)
        self._in_flight.remove(ended.drawn.index, ended.version)

    def _filter(self, run: GroupRun, group: Group, kind: Flatness) -> None:
        """A group that teaches nothing ends here; another one is launched in its place."""
        self.ledger.settle_group(run.index, trained=0, dropped={"difficulty": run.num_sampled_tokens})
        self._dropped.append((kind, group))
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row >= MOST_FILTERED_BATCHES * self.groups_per_batch:
            self._failure = self._failure or RunStopped(
                f"online difficulty filtering dropped the last {self._filtered_in_a_row} groups, the last one as "
                f'"{kind}" (all its rewards are {group.scored[0].reward}): nothing is left to learn from. Choose '
                "other examples, or switch it off: orchestrator.buffer.online_difficulty_filtering = false"
            )

    def _drop_stale(self, waiting: Sequence[FinishedGroup]) -> None:
        """Those of these finished groups that would be too old in the next batch end here, before one takes the place
        of a group that is not."""
        if self._next_batch >= self.max_steps:
            return  # nothing is trained any more: it is unused, however old
        stale = [one for one in waiting if too_old(one.group, self._next_batch, self.max_off_policy_steps)]
        if not stale:
            return
        gone = set(stale)
        self._ready = [ended for ended in self._ready if ended not in gone]
        for ended in stale:
            run, group = ended.run, ended.group
            failed = sum(t.num_sampled_tokens for t in group.trajectories if t.error is not None)
            dropped = {"stale": run.num_sampled_tokens - failed, "error": failed}
            self.ledger.settle_group(run.index, trained=0, dropped=dropped)
            self._dropped.append((None, group))
            self._judge(ended.drawn, group)

    def metrics(self) -> dict[str, float]:
        """Difficulty pools, since this was last asked; and the metrics of the episode runners."""
        runners = {name: value for setup in self.setups.values() for name, value in setup.runner.metrics().items()}
        return {**self.schedule.pools.metrics(), **runners}

    def take_dropped(self) -> list[tuple[Flatness | None, Group]]:
        """The groups that ended without a batch since this was last asked: dropped by online difficulty filtering, with
        the kind, or (None) too old."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values: the schedule, and every group that was launched and is not settled."""
        held = [*self._again, *(launched.drawn for launched in self._held())]
        return {
            "schedule": self.schedule.state_dict(),
            "held": [
                {"index": draw.index, "env": draw.env, "example_id": draw.example.id}
                for draw in sorted(held, key=lambda draw: draw.index)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`; held groups are run again first."""
        self.schedule.load_state_dict(state["schedule"])
        self._again = [self.schedule.lookup(h["env"], h["example_id"], h["index"]) for h in state["held"]]


def _why_useless(trajectory: Trajectory) -> str:
    if trajectory.error is not None:
        return trajectory.error
    return "no reward: `score` returned None, and neither `score_group` nor a turn gave one"
