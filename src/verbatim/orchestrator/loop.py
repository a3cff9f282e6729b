"""The run, step by step: batch, train, weights, metrics, evaluation, checkpoint. Two tasks that overlap:

```
producer   groups = await dispatcher.next_batch()      rollouts that finished
           batch  = assemble_group(...) for each       credit -> filters -> samples
           batch  = await add_teacher_logprobs(batch)                 with a teacher: its logprobs
           report = trainer.train(samples)             handed over, not waited for

consumer   report = await report                       one batch, a new policy version
           ledger                                      its tokens end
           await sampler.update_weights(...)           the new version samples from here on
           await canary                                or it does not sample
           ledger.check(pending)                       sampled = trained + dropped + pending
```

How far the producer may be ahead is decided by the weights alone: rollouts for batch n start with version n - k or
newer, so at most k + 1 batches are between the dispatcher and the ledger.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args, runtime_checkable

from verbatim.credit.base import function_name
from verbatim.credit.chunk_returns import TURN_REWARDS_SUM
from verbatim.curriculum import Flatness
from verbatim.environments.base import Environment, succeeded
from verbatim.errors import RunStopped, VerbatimError
from verbatim.inference.base import Sampler, watch_engine
from verbatim.inference.teacher import Teacher
from verbatim.orchestrator.assemble import (
    AssembledGroup,
    GroupRules,
    assemble_group,
    rollout_metrics,
    truncation_metrics,
)
from verbatim.orchestrator.dispatcher import Dispatcher
from verbatim.orchestrator.evaluate import Evaluation, evaluate
from verbatim.orchestrator.loop_lag import LoopLag
from verbatim.orchestrator.teacher import add_teacher_logprobs
from verbatim.rollouts import EpisodeTally, RolloutSetup
from verbatim.trajectories import Ledger
from verbatim.transport import StepReport, TrainerLink
from verbatim.transport.canary import Probes, find_mismatch
from verbatim.types import Group

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """What the loop tells the outside. Called on a thread, one call at a time."""

    def on_step(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        """Batch `step` was trained."""

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """The policy after `step` batches was evaluated."""


class EngineStats(Protocol):
    """What an engine has done since it started."""

    @property
    def sampled_tokens(self) -> int:
        """Tokens drawn."""

    @property
    def busy_seconds(self) -> float:
        """Time with at least one sequence in flight."""


@runtime_checkable
class ReportsStats(Protocol):
    """A sampler that knows how busy it was."""

    def stats(self) -> EngineStats:
        """The figures so far."""


class Checkpointer(Protocol):
    """Where the loop leaves what continuing needs."""

    async def save(
        self, step: int, trainer: TrainerLink, state: Mapping[str, Any], trainer_state: Path | None = None
    ) -> None:
        """Keep the state after `step` batches.

        Args:
            step: Batches trained and settled.
            trainer: Asked for its part, where `trainer_state` is None.
            state: The loop's own part.
            trainer_state: Where the trainer left its part already, to be moved away.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class RunSchedule:
    """How long, and how often."""

    max_steps: int
    """Batches in all."""
    eval_setups: Sequence[RolloutSetup]
    """What is evaluated; empty = nothing."""
    eval_interval: int
    """Batches between evaluations."""
    eval_episodes: int
    """Episodes of each."""
    eval_seed: int
    """Of its episodes."""
    checkpoint_interval: int
    """Batches between checkpoints."""
    learns_from_advantages: bool = True
    """Whether a token with the advantage 0 teaches nothing: no teacher is followed, and the loss is one of ours."""
    canary_tolerance: float = 1e-4
    """Largest mean difference of the sampler's logprobs from the trainer's after a weight update."""


@dataclass(kw_only=True, eq=False)
class _Submitted:
    """A batch that the trainer has."""

    number: int
    batch: list[AssembledGroup]
    report: asyncio.Task[StepReport]
    wait_for_batch: float
    """Seconds that the producer waited for its rollouts."""


class Orchestrator:
    """Owns the step counter and the ledger; everything else it is given."""

    def __init__(
        self,
        *,
        schedule: RunSchedule,
        sampler: Sampler,
        trainer: TrainerLink,
        dispatcher: Dispatcher,
        ledger: Ledger,
        rules: Mapping[str, GroupRules],
        environments: Mapping[str, Environment],
        observer: Observer,
        checkpointer: Checkpointer,
        probes: Probes | None = None,
        teacher: Teacher | None = None,
        tally: EpisodeTally | None = None,
    ) -> None:
        self._schedule = schedule
        self._sampler = sampler
        self._trainer = trainer
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._rules = rules
        self._environments = environments
        self._observer = observer
        self._checkpointer = checkpointer
        self._probes = probes
        self._teacher = teacher
        self._tally = tally or EpisodeTally()
        self._warned_of_turn_rewards: set[str] = set()
        self._stopping = asyncio.Event()
        self._submitted: deque[_Submitted] = deque()
        self._more = asyncio.Event()
        self._syncing = asyncio.Lock()
        self._saved = -1
        self._sampled_before = ledger.sampled
        self._stats_before = (0, 0.0)
        self._finished_at = 0.0
        self.step = 0
        """Batches trained so far; also the policy version in use."""
        self.weights: Path | None = None
        """The folder of the weights in use; None before the first batch of this process."""
        self.has_learned = False
        """Whether a token was trained that teaches something."""

    def request_stop(self) -> None:
        """End after what the trainer has now, with a checkpoint."""
        self._stopping.set()

    async def run(self) -> bool:
        """Train until `max_steps`, or until a stop is requested.

        Returns:
            Whether it came to its end: all steps were taken, or the examples are used up.

        Raises:
            RunStopped: the run cannot go on. What was trained until then is settled, and in a checkpoint if the trainer
                can still write one.
        """
        lag = LoopLag()
        try:
            if self._probes is not None:
                await self._check_canary(self._probes, before=None)
            if self.step == 0:
                await self._save()
                await self._evaluate()
            self._saved = self.step
            self._dispatcher.start(version=self.step, batch=self.step)
            await self._train(lag)
            cut_short = self.step < self._schedule.max_steps and not self._stopping.is_set()
            drained = self._dispatcher.drained if cut_short else None
            finished = self.step >= self._schedule.max_steps or drained is not None
            await self._dispatcher.stop()
            if drained is not None:
                logger.warning("the run ends after %d of %d batches: %s", self.step, self._schedule.max_steps, drained)
                if self.step % self._schedule.eval_interval:  # not evaluated yet
                    await self._evaluate()
            if finished:
                self._ledger.drop({"unused_at_end": self._dispatcher.discard()})
                self._ledger.check(pending=0)
            if self._saved != self.step:
                await self._save()
            return finished
        finally:
            lag.close()
            await self._dispatcher.stop()

    async def _train(self, lag: LoopLag) -> None:
        producer = asyncio.create_task(self._produce(), name="producer")
        watch = asyncio.create_task(self._watch(), name="watch")
        self._finished_at = time.perf_counter()
        try:
            while (submitted := await self._next_submitted(producer, watch)) is not None:
                await self._finish_step(submitted, lag)
            await producer
        except (VerbatimError, OSError):
            # Somebody else's fault: what the trainer has trained is whole, and kept.
            self._stopping.set()
            await asyncio.gather(producer, self._dispatcher.stop(), return_exceptions=True)
            await self._keep_what_was_trained(lag)
            raise
        finally:
            await _end([producer, watch, *(submitted.report for submitted in self._submitted)])

    async def _watch(self) -> None:
        """Raise why, once the trainer or the engine can do nothing more; else it ends with neither."""
        watches = [asyncio.ensure_future(watch) for watch in (self._trainer.watch(), watch_engine(self._sampler))]
        try:
            while True:
                done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
                for watch in done:
                    watch.result()
                    watches.remove(watch)
        finally:
            await _end(watches)

    # ---- the producer

    async def _produce(self) -> None:
        """Hand batches to the trainer, in order, as they fill up."""
        for number in range(self.step, self._schedule.max_steps):
            began = time.perf_counter()
            groups = await self._next_batch_or_stop()
            if groups is None:
                return
            waited = time.perf_counter() - began
            batch = await asyncio.to_thread(self._assemble, groups, number)
            if self._teacher is not None:
                batch = await add_teacher_logprobs(batch, self._teacher)
            samples = [sample for group in batch for sample in group.samples]
            due = (number + 1) % self._schedule.checkpoint_interval == 0 and number + 1 < self._schedule.max_steps
            async with self._syncing:  # its last tokens may be by weights that the canary has not seen yet
                if self._stopping.is_set():
                    return
                report = asyncio.create_task(
                    self._trainer.train(samples, version=number + 1, checkpoint=due), name=f"batch-{number}"
                )
                self._submitted.append(_Submitted(number=number, batch=batch, report=report, wait_for_batch=waited))
            self._more.set()

    def _assemble(self, groups: Sequence[Group], number: int) -> list[AssembledGroup]:
        batch = []
        for group in groups:
            rules = self._rules[group.env]
            self._warn_of_turn_rewards(group, rules)
            assembled = assemble_group(group, rules, number)
            for before, after in zip(group.trajectories, assembled.group.trajectories, strict=True):
                if before.error is None and after.error is not None:
                    self._tally.failed(after)
            batch.append(assembled)
        return batch

    def _warn_of_turn_rewards(self, group: Group, rules: GroupRules) -> None:
        """Say once for each environment that rewards are given which change nothing."""
        if rules.reads_turn_rewards or group.env in self._warned_of_turn_rewards:
            return
        if any(
            turn.reward and not trajectory.info.get(TURN_REWARDS_SUM)
            for trajectory in group.completed for turn in trajectory.turns
        ):  # fmt: skip
            self._warned_of_turn_rewards.add(group.env)
            logger.warning(
                "environment %r rewards turns, and the advantage %s does not read turn rewards: beside what `score` "
                'says they change nothing. Take [orchestrator.advantage] type = "chunk_returns"; or let `score` return '
                "None, then the reward is their sum; or add them up in `score` and set turn_rewards_sum_to_reward = "
                "True on the episode", group.env, function_name(rules.advantage),
            )  # fmt: skip

    async def _next_batch_or_stop(self) -> list[Group] | None:
        batch = asyncio.ensure_future(self._dispatcher.next_batch())
        stop = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({batch, stop}, return_when=asyncio.FIRST_COMPLETED)
            groups = batch.result() if batch.done() else None
            return None if self._stopping.is_set() else groups  # not settled, they are run again after a resume
        finally:
            await _end([batch, stop])

    # ---- the consumer

    async def _next_submitted(self, producer: asyncio.Task[None], watch: asyncio.Task[None]) -> _Submitted | None:
        """The earliest batch that is not settled; None when there will be no other."""
        while not self._submitted:
            if producer.done():
                return None
            self._more.clear()
            more = asyncio.ensure_future(self._more.wait())
            try:
                await asyncio.wait({more, producer, watch}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _end([more])
            if watch.done():
                watch.result()
        return self._submitted[0]

    async def _finish_step(self, submitted: _Submitted, lag: LoopLag) -> None:
        began = time.perf_counter()
        report = await submitted.report
        waited = time.perf_counter() - began
        before = self._probes
        self._settle(submitted, report)
        state = self.state_dict() if report.state is not None else None
        try:
            seconds = await self._sync_weights(report, before)
            self._dispatcher.advance(self.step)
        except (VerbatimError, OSError):
            await self._record(submitted, report, {}, lag)
            raise
        await self._record(
            submitted, report, {"time/wait_for_trainer": waited, "time/weight_sync": seconds}, lag
        )
        if self.step % self._schedule.eval_interval == 0 or self.step == self._schedule.max_steps:
            await self._evaluate()
        if state is not None:
            await self._checkpointer.save(report.version, self._trainer, state, report.state)
            self._saved = report.version

    async def _sync_weights(self, report: StepReport, before: Probes | None) -> float:
        """The new version samples from here on. Returns the seconds that it took."""
        began = time.perf_counter()
        async with self._syncing:
            try:
                await self._sampler.update_weights(report.weights, report.version)
                assert report.version == self.step == self._sampler.policy_version
                if report.probes is not None:
                    await self._check_canary(report.probes, before=before)
            except BaseException:
                self._stopping.set()  # before anything else is handed over
                raise
        return time.perf_counter() - began

    async def _record(
        self, submitted: _Submitted, report: StepReport, timings: Mapping[str, float], lag: LoopLag
    ) -> None:
        pending = self._dispatcher.num_pending_tokens
        self._ledger.check(pending)
        now, late = time.perf_counter(), lag.read()
        seconds, self._finished_at = now - self._finished_at, now
        metrics = {
            **report.metrics,
            **self._ledger.metrics(pending),
            "policy_version": report.version,
            "time/step": seconds,
            "time/wait_for_batch": submitted.wait_for_batch,
            **timings,
            "queue/groups_in_flight": self._dispatcher.num_running,
            "queue/groups_ready": self._dispatcher.num_ready,
            "queue/batches_submitted": len(self._submitted),
            "loop/lag_mean": late.mean,
            "loop/lag_max": late.longest,
            **self._sampler_metrics(seconds),
            **self._dispatcher.metrics(),
        }
        filtered, stale = self._dispatcher.take_filtered(), self._dispatcher.take_stale()
        await asyncio.to_thread(self._tell, submitted, metrics, filtered, stale)

    def _tell(
        self, submitted: _Submitted, metrics: Mapping[str, float], filtered: Sequence[tuple[Flatness, Group]],
        stale: Sequence[Group],
    ) -> None:  # fmt: skip
        batch, number = submitted.batch, submitted.number
        oldest = max(rules.max_off_policy_steps for rules in self._rules.values())
        everything = {
            **rollout_metrics(batch, number, self._successes(batch), oldest),
            **truncation_metrics(batch, self._rules),
            **metrics,
        }
        counts = {(env, kind): 0 for env in self._rules for kind in get_args(Flatness)}
        for kind, group in filtered:
            counts[group.env, kind] += len(group.completed)
        everything |= {f"filtered_rollouts/{env}/{kind}": count for (env, kind), count in counts.items()}
        everything["staleness/dropped"] += sum(len(group.completed) for group in stale)
        groups = [*(g.group for g in batch), *(group for _, group in filtered), *stale]
        self._observer.on_step(number + 1, everything, groups)

    def _settle(self, submitted: _Submitted, report: StepReport) -> None:
        """The batch's tokens end. From here on, `step` counts it."""
        expected = sum(group.num_trained_tokens for group in submitted.batch)
        assert report.num_trained_tokens == expected, (
            f"the trainer was given {expected} tokens and trained {report.num_trained_tokens}"
        )
        self.has_learned |= any(
            bool(s.advantages[s.loss_mask].any()) if self._schedule.learns_from_advantages else s.num_trained_tokens > 0
            for group in submitted.batch for s in group.samples
        )  # fmt: skip
        for group in submitted.batch:
            self._ledger.settle_group(group.group.index, trained=group.num_trained_tokens, dropped=group.dropped)
        self._ledger.masked_by_loss += int(report.metrics.get("masked_by_loss", 0))
        self._dispatcher.settled()
        self._submitted.popleft()
        self.step += 1
        self.weights = report.weights
        self._probes = report.probes

    async def _check_canary(self, published: Probes, *, before: Probes | None) -> None:
        """Refuse to sample with weights that are not the ones that the trainer published.

        Raises:
            RunStopped: the sampler's logprobs of the probes are not the trainer's.
        """
        found = [(await self._sampler.prompt_logprobs(ids))[1:] for ids in published.token_ids]
        fault = find_mismatch(published, found, before=before, tolerance=self._schedule.canary_tolerance)
        if fault is not None:
            raise RunStopped(
                f"the sampler does not hold policy version {self.step}, which it was told to load: {fault}. It samples "
                "nothing more. If it computes in another precision than the trainer, raise inference.canary_tolerance"
            )

    async def _keep_what_was_trained(self, lag: LoopLag) -> None:
        """Settle the batches that the trainer still finishes, and write a checkpoint if it can."""
        while self._submitted:
            submitted = self._submitted[0]
            try:
                report = await submitted.report
            except (VerbatimError, OSError):
                break
            self._settle(submitted, report)
            await self._record(submitted, report, {}, lag)
        if self._saved == self.step:
            return
        try:
            await self._save()
        except (VerbatimError, OSError) as error:
            why = str(error).partition("\n")[0]  # the log that it may quote is quoted where the run ends
            logger.warning("no checkpoint of the state after %d batches could be written: %s", self.step, why)

    def _sampler_metrics(self, seconds: float) -> dict[str, float]:
        """Of the time since the last step. An engine that does not know when it is busy is taken to be always busy."""
        if not isinstance(self._sampler, ReportsStats):
            sampled, self._sampled_before = self._ledger.sampled - self._sampled_before, self._ledger.sampled
            return {"sampler/tokens_per_second": sampled / seconds if seconds > 0 else 0.0}
        stats, before = self._sampler.stats(), self._stats_before
        self._stats_before = (stats.sampled_tokens, stats.busy_seconds)
        busy = stats.busy_seconds - before[1]
        return {
            "sampler/tokens_per_second": (stats.sampled_tokens - before[0]) / busy if busy > 0 else 0.0,
            "time/sampler_idle": max(0.0, seconds - busy),
        }

    def _successes(self, batch: Sequence[AssembledGroup]) -> dict[str, bool]:
        return {
            t.trajectory_id: succeeded(self._environments[t.env], t) for g in batch for t in g.group.trajectories
        }

    async def _evaluate(self) -> None:
        """Measure the policy in use; the weights stay as they are until it is done. A stop cuts it short,
        unless it is the last one."""
        for setup in self._schedule.eval_setups:
            running = asyncio.ensure_future(
                evaluate(setup, episodes=self._schedule.eval_episodes, seed=self._schedule.eval_seed)
            )
            stop = asyncio.ensure_future(self._stopping.wait())
            try:
                await asyncio.wait({running, stop}, return_when=asyncio.FIRST_COMPLETED)
                if not running.done() and self.step < self._schedule.max_steps:
                    return
                await running
            finally:
                await _end([running, stop])
            await asyncio.to_thread(self._observer.on_eval, self.step, running.result())

    async def _save(self) -> None:
        await self._checkpointer.save(self.step, self._trainer, self.state_dict())
        self._saved = self.step

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "step": self.step,
            "has_learned": self.has_learned,
            "dispatcher": self._dispatcher.state_dict(),
            "ledger": self._ledger.state_dict(),
            "pending_tokens": self._dispatcher.num_pending_tokens,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Tokens that were in flight then are dropped as cancelled: their groups are
        sampled again."""
        self.step = state["step"]
        self.has_learned = state.get("has_learned", self.step > 0)  # a state of an earlier version does not say
        self._dispatcher.load_state_dict(state["dispatcher"])
        self._ledger.load_state_dict(state["ledger"])
        self._ledger.drop({"cancelled": state["pending_tokens"]})
        self._ledger.check(pending=0)
        self._sampled_before = self._ledger.sampled


async def _end(unfinished: Sequence[asyncio.Future[Any]]) -> None:
    """Cancel what is not done, and wait for it: nothing runs on, and no exception of theirs stays unread."""
    for future in unfinished:
        future.cancel()
    await asyncio.gather(*unfinished, return_exceptions=True)
