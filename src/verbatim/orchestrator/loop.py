"""The run, step by step: batch, train, weights, metrics, evaluation, checkpoint.

```
groups  = await dispatcher.next_batch()          rollouts that finished
batch   = assemble_group(...) for each           credit -> filters -> samples
report  = await trainer.train(samples)           one batch, a new policy version
          await sampler.update_weights(...)      the new version samples from here on
          ledger.check(pending)                  sampled = trained + dropped + pending
```
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from verbatim.environments.base import Environment, succeeded
from verbatim.errors import VerbatimError
from verbatim.inference.base import Sampler
from verbatim.orchestrator.assemble import AssembledGroup, Rules, assemble_group, rollout_metrics
from verbatim.orchestrator.dispatcher import Dispatcher
from verbatim.orchestrator.evaluate import Evaluation, evaluate
from verbatim.rollouts import RolloutSetup
from verbatim.trajectories import Ledger
from verbatim.transport import StepReport, TrainerLink
from verbatim.types import Group, TrainingSample


class Observer(Protocol):
    """What the loop tells the outside."""

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

    async def save(self, step: int, trainer: TrainerLink, state: Mapping[str, Any]) -> None:
        """Keep the state after `step` batches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
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


class Orchestrator:
    """Owns the step counter and the ledger; everything else it is given."""

    def __init__(
        self,
        *,
        plan: Plan,
        sampler: Sampler,
        trainer: TrainerLink,
        dispatcher: Dispatcher,
        ledger: Ledger,
        rules: Mapping[str, Rules],
        environments: Mapping[str, Environment],
        observer: Observer,
        checkpointer: Checkpointer,
    ) -> None:
        self._plan = plan
        self._sampler = sampler
        self._trainer = trainer
        self._dispatcher = dispatcher
        self._ledger = ledger
        self._rules = rules
        self._environments = environments
        self._observer = observer
        self._checkpointer = checkpointer
        self._stopping = asyncio.Event()
        self._training = False
        self._saved = 0
        self._sampled_before = ledger.sampled
        self._stats_before = (0, 0.0)
        self.step = 0
        """Batches trained so far; also the policy version in use."""

    def request_stop(self) -> None:
        """End after what is being done now, with a checkpoint."""
        self._stopping.set()

    async def run(self) -> bool:
        """Train until `max_steps`, or until a stop is requested.

        Returns:
            Whether all steps were taken.
        """
        if self.step == 0:
            await self._save()
            await self._evaluate()
        self._saved = self.step
        self._dispatcher.start(version=self.step, batch=self.step)
        try:
            while self.step < self._plan.max_steps and not self._stopping.is_set():
                if not await self._one_step():
                    break
                if self.step % self._plan.checkpoint_interval == 0 and self.step < self._plan.max_steps:
                    await self._save()
        except (VerbatimError, OSError):
            # The fault is somebody else's: what was trained is whole, and kept. Not while the trainer was at work:
            # it may have taken some of the optimizer steps of a batch.
            await self._dispatcher.stop()
            if not self._training and self._saved != self.step:
                await self._save()
            raise
        finally:
            held = await self._dispatcher.stop()
        finished = self.step >= self._plan.max_steps
        if finished:
            self._ledger.drop({"unused_at_end": held})
            self._ledger.check(pending=0)
        if self._saved != self.step:
            await self._save()
        return finished

    async def _one_step(self) -> bool:
        started = time.perf_counter()
        groups = await self._next_batch_or_stop()
        if groups is None:
            return False  # a stop was asked for
        batch_ready = time.perf_counter()
        batch = [assemble_group(i, group, self._rules[group.env], self.step) for i, group in groups]
        samples: list[TrainingSample] = [sample for group in batch for sample in group.samples]
        self._training = True
        report = await self._trainer.train(samples, version=self.step + 1)
        self._settle(batch, report)
        self._dispatcher.settled()
        self.step += 1
        self._training = False
        trained = time.perf_counter()
        await self._sampler.update_weights(report.weights, report.version)
        synced = time.perf_counter()
        assert report.version == self.step == self._sampler.policy_version
        pending = self._dispatcher.num_pending_tokens
        self._ledger.check(pending)
        metrics = {
            **rollout_metrics(batch, self.step - 1, self._successes(batch)),
            **report.metrics,
            **self._ledger.metrics(pending),
            "policy_version": report.version,
            "time/wait_for_batch": batch_ready - started,
            "time/train": trained - batch_ready,
            "time/weight_sync": synced - trained,
            "queue/groups_in_flight": self._dispatcher.num_running,
            "queue/groups_ready": self._dispatcher.num_ready,
            "sampler/tokens_per_second": self._sampler_speed(synced - started),
        }
        metrics["time/step"] = time.perf_counter() - started
        self._observer.on_step(self.step, metrics, [group.group for group in batch])
        if self.step % self._plan.eval_interval == 0 or self.step == self._plan.max_steps:
            await self._evaluate()
        self._dispatcher.advance(self.step)
        return True

    def _sampler_speed(self, seconds: float) -> float:
        """Tokens per second that the engine was busy since the last step; over the step where it cannot say."""
        if not isinstance(self._sampler, ReportsStats):
            sampled, self._sampled_before = self._ledger.sampled - self._sampled_before, self._ledger.sampled
            return sampled / seconds
        stats, before = self._sampler.stats(), self._stats_before
        self._stats_before = (stats.sampled_tokens, stats.busy_seconds)
        busy = stats.busy_seconds - before[1]
        return (stats.sampled_tokens - before[0]) / busy if busy > 0 else 0.0

    async def _next_batch_or_stop(self) -> list[tuple[int, Group]] | None:
        batch = asyncio.ensure_future(self._dispatcher.next_batch())
        stop = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({batch, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if batch.done():
            return batch.result()
        batch.cancel()
        return None

    def _settle(self, batch: Sequence[AssembledGroup], report: StepReport) -> None:
        expected = sum(group.num_trained_tokens for group in batch)
        assert report.num_trained_tokens == expected, (
            f"the trainer was given {expected} tokens and trained {report.num_trained_tokens}"
        )
        for group in batch:
            self._ledger.settle_group(group.index, trained=group.num_trained_tokens, dropped=group.dropped)
        self._ledger.masked_by_loss += int(report.metrics.get("masked_by_loss", 0))

    def _successes(self, batch: Sequence[AssembledGroup]) -> dict[str, bool]:
        return {
            t.trajectory_id: succeeded(self._environments[t.env], t) for g in batch for t in g.group.trajectories
        }

    async def _evaluate(self) -> None:
        for setup in self._plan.eval_setups:
            result = await evaluate(setup, episodes=self._plan.eval_episodes, seed=self._plan.eval_seed)
            self._observer.on_eval(self.step, result)

    async def _save(self) -> None:
        await self._checkpointer.save(self.step, self._trainer, self.state_dict())
        self._saved = self.step

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "step": self.step,
            "dispatcher": self._dispatcher.state_dict(),
            "ledger": self._ledger.state_dict(),
            "pending_tokens": self._dispatcher.num_pending_tokens,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Tokens that were in flight then are dropped as cancelled: their groups are
        sampled again."""
        self.step = state["step"]
        self._dispatcher.load_state_dict(state["dispatcher"])
        self._ledger.load_state_dict(state["ledger"])
        self._ledger.drop({"cancelled": state["pending_tokens"]})
        self._ledger.check(pending=0)
        self._sampled_before = self._ledger.sampled
