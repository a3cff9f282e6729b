"""Assembles batches from finished groups and hands them to the trainer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from verbatim.algorithms.credit.advantage import function_name
from verbatim.algorithms.credit.chunk_returns import TURN_REWARDS_SUM
from verbatim.core.tasks import cancel_all
from verbatim.core.types import Group
from verbatim.inference.teacher import Teacher
from verbatim.rollouts import EpisodeStats
from verbatim.run.orchestrator.assemble import AssembledGroup, GroupRules, assemble_group
from verbatim.run.orchestrator.device_handoff import DeviceHandoff
from verbatim.run.orchestrator.dispatcher import Dispatcher
from verbatim.run.orchestrator.logprob_streams import add_logprob_streams
from verbatim.run.orchestrator.schedule import RunSchedule
from verbatim.trainer.transport import StepReport, TrainerLink

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class Submitted:
    """A batch that the trainer has received."""

    number: int
    """The batch's number, counted from 0; the batch is trained in step `number + 1`."""
    batch: list[AssembledGroup]
    report: asyncio.Task[StepReport]
    wait_for_batch: float
    """Time that the producer waited for rollouts, in seconds."""


@dataclass(kw_only=True, eq=False)
class Producer:
    """Collects groups, assembles batches and hands them to the trainer, in order.

    The dispatcher limits how far the producer runs ahead.
    """

    schedule: RunSchedule
    dispatcher: Dispatcher
    trainer: TrainerLink
    rules: Mapping[str, GroupRules]
    """For each environment, the rules by which its groups become training samples."""
    logprob_models: Mapping[str, Teacher]
    """The models that score the samples, by the name of their logprob stream."""
    episode_stats: EpisodeStats
    """Records episodes for which no advantage can be computed."""
    turns: DeviceHandoff
    """Decides when the trainer may use a shared device."""
    stopping: asyncio.Event
    """Set to end `run` before the next hand-over."""
    submitted: deque[Submitted] = field(default_factory=deque)
    """Batches that the trainer has but that are not settled, oldest first."""
    more: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a batch has been handed over."""
    handover: asyncio.Lock = field(default_factory=asyncio.Lock)
    """A lock that is held during a hand-over, and while new weights are loaded: the last tokens of a batch may come
    from weights that the canary has not checked yet, so the batch waits for the result of the check."""
    may_hand_over: asyncio.Event = field(default_factory=asyncio.Event)
    """An event that is cleared after a step whose evaluation may end the run, until that evaluation is done. Otherwise
    the number of steps before an early stop would depend on how long the evaluation takes."""
    _warned_of_turn_rewards: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.may_hand_over.set()

    async def run(self, first: int) -> None:
        """Hand over the batches from number `first` on, as they become complete."""
        for number in range(first, self.schedule.max_steps):
            began = time.perf_counter()
            groups = await self._unless_stopping(self.dispatcher.next_batch())
            if groups is None:
                return
            waited = time.perf_counter() - began
            batch = await asyncio.to_thread(self._assemble, groups, number)
            if self.logprob_models:
                batch = await add_logprob_streams(batch, self.logprob_models)
            samples = [sample for group in batch for sample in group.samples]
            # With a shared device, the previous step's evaluation must be over before the sampler sleeps.
            await self._unless_stopping(self.turns.until_step_is_over())
            if not self.may_hand_over.is_set():
                await self._unless_stopping(self.may_hand_over.wait())
            due = self.schedule.may_be_kept(number + 1)
            async with self.handover:
                # This is checked twice: the sampler takes a while to fall asleep, and the run may be stopped meanwhile.
                if not self.stopping.is_set():
                    await self.turns.to_trainer()
                if self.stopping.is_set():
                    return
                report = asyncio.create_task(
                    self.trainer.train(samples, version=number + 1, checkpoint=due), name=f"batch-{number}"
                )
                self.submitted.append(Submitted(number=number, batch=batch, report=report, wait_for_batch=waited))
            self.more.set()

    async def _unless_stopping(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of the work, or None if the run stops first. Groups that are unfinished at that time are run again
        after a resume."""
        working = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait({working, stop}, return_when=asyncio.FIRST_COMPLETED)
            result = working.result() if working.done() else None
            return None if self.stopping.is_set() else result
        finally:
            await cancel_all([working, stop])

    def _assemble(self, groups: Sequence[Group], number: int) -> list[AssembledGroup]:
        """Assemble each group, and record the episodes that fail because no advantage can be computed."""
        batch = []
        for group in groups:
            rules = self.rules[group.env]
            self._warn_of_turn_rewards(group, rules)
            assembled = assemble_group(group, rules, number)
            for before, after in zip(group.trajectories, assembled.group.trajectories, strict=True):
                if before.error is None and after.error is not None:
                    self.episode_stats.failed(after)
            batch.append(assembled)
        return batch

    def _warn_of_turn_rewards(self, group: Group, rules: GroupRules) -> None:
        """Warn once per environment that its turn rewards have no effect."""
        if rules.reads_turn_rewards or group.env in self._warned_of_turn_rewards:
            return
        if any(
            turn.reward and not trajectory.info.get(TURN_REWARDS_SUM)
            for trajectory in group.completed
            for turn in trajectory.turns
        ):
            self._warned_of_turn_rewards.add(group.env)
            logger.warning(
                "environment %r gives turn rewards, but the advantage %s does not read them, so they have no effect "
                'next to the reward of `score`. Set [orchestrator.advantage] type = "chunk_returns"; or let `score` '
                "return None, so that the reward is their sum; or add them up in `score`, and set "
                "turn_rewards_sum_to_reward = True on the episode",
                group.env,
                function_name(rules.advantage),
            )
