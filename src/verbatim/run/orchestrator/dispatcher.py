"""Keeps as many rollouts in flight as the staleness rule allows, and hands them out in batches."""

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
"""The run stops once online difficulty filtering has dropped this many batches' worth of groups in a row."""

MOST_AT_ONCE = 128
"""Maximum number of groups launched in one pass of the event loop: a new policy version may allow thousands."""

PATIENCE = 0.5
"""How long a batch waits for an older group that would otherwise be lost, as a share of a batch: 0.5 waits until
another half batch of groups has finished."""


@dataclass(kw_only=True, eq=False)
class Dispatcher:
    """Launches groups, collects them, and hands them out batch by batch.

    Launching: every open place in the batches up to `staleness.newest_batch` may have one group in flight. If online
    difficulty filtering replaces groups, a place may have `oversampling_factor` groups in flight, because some of them
    will be dropped. At most `oversampling_factor` batches' worth of groups are in flight. The examples of all these
    groups are drawn immediately. Their episodes are created only when they will find slots soon, one group at a time,
    while fewer than `rollouts.group.MOST_IN_LINE` episodes wait for a slot.

    Handing out: a batch takes the finished groups with the lowest launch indices, as soon as there are enough. It does
    not wait for groups that were launched earlier and still run, except for a group that would be older than
    `max_off_policy_steps` in the next batch. The batch waits for such a group until another half batch has finished, if
    that much is in flight; the sampler keeps working meanwhile. With `max_async_level = 0` every batch consists of the
    groups that were launched first, no matter how long they take.

    Groups left over wait for the next batch. Groups that would be older than `max_off_policy_steps` in the next batch
    are dropped as `stale`, and other groups are launched in their place.

    `state_dict` lists the groups that were launched but not settled, so that a resume loses nothing: these groups are
    run again, with the same seeds.
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
        # Rollouts from further ahead would be too old by the time they are trained.
        self.max_async_level = min(self.max_async_level, self.max_off_policy_steps)
        self._max_running = max(1, round(self.oversampling_factor * self.groups_per_batch))
        self._groups_per_place = self.oversampling_factor if self.online_difficulty_filtering else 1.0
        self._patience = math.ceil(PATIENCE * self.groups_per_batch)
        self._dropped: list[tuple[Flatness | None, Group]] = []
        self._filtered_in_a_row = 0
        self._version = 0
        self._next_batch = 0
        self._again: list[ScheduledExample] = []  # drawn before a resume or a `discard`; launched before new ones
        self._drawn: deque[Launched] = deque()
        """Groups in flight whose episodes have not been created yet."""
        self._running: dict[asyncio.Task[Group], Begun] = {}
        """Groups in flight whose episodes have been created."""
        self._num_in_line = 0
        """Number of episodes of `_running` that wait for a slot."""
        self._in_flight = InFlight()
        """The groups of `_drawn` and `_running`, by the policy version at their launch."""
        self._goes_on = self._begins = False
        """True if `_draw`, or `_begin`, is scheduled to continue in the next pass of the event loop."""
        self._ready: list[FinishedGroup] = []
        self._taken: deque[list[FinishedGroup]] = deque()
        self._failures_in_a_row = 0
        self._failure: BaseException | None = None
        self.drained: str | None = None
        """Why nothing more can be launched; None as long as something can."""
        self._stopped = False
        self._changed = asyncio.Event()

    @property
    def num_pending_tokens(self) -> int:
        """Number of sampled tokens that are not settled yet, in episodes in flight and in finished groups."""
        return sum(launched.num_sampled_tokens for launched in self._held())

    @property
    def num_running(self) -> int:
        """Number of groups in flight, including groups that have no episodes yet."""
        return len(self._in_flight)

    @property
    def num_ready(self) -> int:
        """Number of finished groups that wait for a batch."""
        return len(self._ready)

    @property
    def num_held(self) -> int:
        """Number of episodes created but not settled: waiting for a slot, running, or ended."""
        return (len(self._running) + len(self._ready) + sum(map(len, self._taken))) * self.group_size

    def start(self, version: int, batch: int) -> None:
        """Start launching. `version` is the policy version in use; `batch` is the number of the first batch to be
        formed."""
        self._version, self._next_batch = version, batch
        self._launch()

    def advance(self, version: int) -> None:
        """Note that this policy version is in use now, and launch the groups that it allows."""
        self._version = version
        self._launch()

    async def next_batch(self) -> list[Group] | None:
        """The next full batch of groups, in launch order.

        May be called before earlier batches are settled. Returns None when the examples are used up: the groups left do
        not fill a batch, and no more groups can be launched.

        Raises:
            RunStopped: every rollout of two batches in a row failed, or online filtering drops everything.
            Exception: there is a bug in the code of a rollout; faults of the rollout itself are stored on its
                trajectory.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if self._is_due():
                break
            if self.drained is not None and not self._in_flight:
                return None
            self._changed.clear()  # if nothing is in flight, the next policy version will launch more
            await self._changed.wait()
        taken, self._ready = self._ready[: self.groups_per_batch], self._ready[self.groups_per_batch :]
        self._taken.append(taken)
        self._next_batch += 1
        self._drop_stale(self._ready)
        self._launch()
        return [ended.group for ended in taken]

    def _is_due(self) -> bool:
        """True if the next batch can be handed out now."""
        if len(self._ready) < self.groups_per_batch:
            return False
        last, oldest = self._ready[self.groups_per_batch - 1].drawn.index, self._next_batch - self.max_off_policy_steps
        if self.max_async_level == 0:
            first = self._in_flight.first_since(oldest)
            return first is None or first > last
        lost = self._in_flight.first(oldest)  # this is the earliest group that only this batch could still train
        if lost is None or lost > last:
            return True
        # Wait for up to `_patience` more groups, unless fewer groups than that are in flight behind the batch's last
        # group.
        short = self.groups_per_batch + self._patience - len(self._ready)
        return short <= 0 or self._in_flight.num_later(last) < short

    def settled(self) -> None:
        """Note that the earliest batch handed out is settled in the ledger, and update the difficulty of the batch's
        examples."""
        for ended in self._taken.popleft():
            self._judge(ended.drawn, ended.group)

    def _judge(self, drawn: ScheduledExample, group: Group) -> None:
        rewards = [trajectory.reward for trajectory in group.scored if trajectory.reward is not None]
        if rewards:
            self.schedule.pools.observe(drawn.env, drawn.example.id, statistics.fmean(rewards))

    def _held(self) -> list[Launched]:
        """Every group that was launched but is not settled."""
        ended = (one for batch in self._taken for one in batch)
        return [*self._drawn, *self._running.values(), *self._ready, *ended]

    async def stop(self) -> None:
        """Cancel the groups in flight. Their tokens stay pending; the groups are sampled again when the run is
        resumed."""
        self._stopped = True
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def discard(self) -> int:
        """After `stop` at the end of a run, forget all groups that are not settled, and return the number of their
        tokens. If the run is extended later, these groups are sampled again."""
        held = self.num_pending_tokens
        self._again += [launched.drawn for launched in self._held()]
        self._drawn, self._running, self._ready, self._taken = deque(), {}, [], deque()
        self._in_flight.clear()
        return held

    def _launch(self) -> None:
        self._draw()
        self._begin()

    def _draw(self) -> None:
        """Draw the examples of all groups that may be in flight now."""
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
        """Create the episodes of the oldest groups in `_drawn`, as long as few episodes wait for a slot: more episodes
        would only use memory."""
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
        """Note that an episode got its slot."""
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
        """Stop the run at any exception in a callback of the event loop; the loop itself would only log the
        exception."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001  (next_batch raises it)
            self._failure = self._failure or error
            self._changed.set()

    def _has_room(self) -> bool:
        """True if one more group may be in flight now."""
        batches = min(newest_batch(self._version, self.max_async_level) + 1, self.max_steps) - self._next_batch
        empty_places = batches * self.groups_per_batch - len(self._ready)
        wanted = round(empty_places * self._groups_per_place)
        # Groups that will be too old for the next batch do not count, because they will not fill a place.
        num_useful = self._in_flight.num_since(self._next_batch - self.max_off_policy_steps)
        return len(self._in_flight) < self._max_running and num_useful < wanted

    def _finished(self, task: asyncio.Task[Group]) -> None:
        with self._failing():
            self._collect(task)

    def _collect(self, task: asyncio.Task[Group]) -> None:
        """Take over a finished group: it is ready for a batch, or is dropped because its rewards are all equal."""
        if self._stopped:
            return  # the group stays in `_running`, so that its tokens stay pending
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
            self._not_running(task)  # only now: until the group is in `_ready`, an exception must not lose its tokens
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
                f"every rollout of the last {self._failures_in_a_row} groups failed; the last error: {last}"
            )
        self._launch()

    def _not_running(self, task: asyncio.Task[Group]) -> None:
        ended = self._running.pop(task)
        self._in_flight.remove(ended.drawn.index, ended.version)

    def _filter(self, run: GroupRun, group: Group, kind: Flatness) -> None:
        """Settle a group without a gradient as dropped. Another group is launched in its place."""
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
        """Drop the finished groups that would be too old in the next batch, so that they do not take the place of
        others."""
        if self._next_batch >= self.max_steps:
            return  # without a next batch, the groups count as unused, not as stale
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
        """Metrics, since the last call, of the difficulty pools and of the episode runners."""
        runners = {name: value for setup in self.setups.values() for name, value in setup.runner.metrics().items()}
        return {**self.schedule.pools.metrics(), **runners}

    def take_dropped(self) -> list[tuple[Flatness | None, Group]]:
        """The groups dropped since the last call, each with the kind of group that online difficulty filtering found;
        None instead of the kind for groups that were too old."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values: the state of the schedule of examples, and every group that was launched but is not
        settled."""
        held = [*self._again, *(launched.drawn for launched in self._held())]
        return {
            "schedule": self.schedule.state_dict(),
            "held": [
                {"index": draw.index, "env": draw.env, "example_id": draw.example.id}
                for draw in sorted(held, key=lambda draw: draw.index)
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. The groups listed in the state are run again first."""
        self.schedule.load_state_dict(state["schedule"])
        self._again = [self.schedule.lookup(h["env"], h["example_id"], h["index"]) for h in state["held"]]


def _why_useless(trajectory: Trajectory) -> str:
    if trajectory.error is not None:
        return trajectory.error
    return "no reward: `score` returned None, and neither `score_group` nor a turn gave one"
