"""Runs the training loop step by step: batch, train, weights, metrics, evaluation, checkpoint.

A step is one batch trained and published. Two tasks overlap, the producer (producer.py) and the consumer (here):

```
producer   groups = await dispatcher.next_batch()      finished rollouts
           batch  = assemble_group(...) for each       credit -> filters -> samples
           batch  = await add_logprob_streams(batch)   with a teacher: its logprobs
           report = trainer.train(samples)             handed over without waiting for the result

consumer   report = await report                       one step, a new policy version
           ledger                                      the batch's tokens are settled
           await weight_sync.load(report)              the sampler switches to the new version, and the canary
                                                       checks that it matches the trainer's
           ledger.check(pending)                       sampled = trained + dropped + pending
```

How far the producer may run ahead depends only on the policy version: rollouts for batch n start with version n - k or
newer (k = `max_async_level`), so at most k + 1 batches are between the dispatcher and the ledger.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verbatim.core.errors import VerbatimError
from verbatim.core.tasks import cancel_all
from verbatim.core.trajectories import Ledger
from verbatim.environments.environment import Environment
from verbatim.inference.sampler import Sampler, watch_engine
from verbatim.inference.teacher import Teacher
from verbatim.rollouts import EpisodeStats, RolloutSetup
from verbatim.run.orchestrator import gc_policy
from verbatim.run.orchestrator.assemble import GroupRules
from verbatim.run.orchestrator.device_handoff import DeviceHandoff
from verbatim.run.orchestrator.dispatcher import Dispatcher
from verbatim.run.orchestrator.eval_progress import EvalProgress
from verbatim.run.orchestrator.evaluate import Evaluation, evaluate, plan
from verbatim.run.orchestrator.loop_lag import LoopLag
from verbatim.run.orchestrator.producer import Producer, Submitted
from verbatim.run.orchestrator.schedule import Checkpointer, Observer, RunSchedule
from verbatim.run.orchestrator.sending_trainer import SendingTrainer
from verbatim.run.orchestrator.step_metrics import StepMetrics
from verbatim.run.orchestrator.weight_sync import WeightSync
from verbatim.trainer.transport import StepReport, TrainerLink
from verbatim.trainer.transport.canary import Probes

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Orchestrator:
    """Owns the step counter and the ledger; everything else is passed in."""

    schedule: RunSchedule
    sampler: Sampler
    trainer: TrainerLink
    dispatcher: Dispatcher
    ledger: Ledger
    rules: Mapping[str, GroupRules]
    environments: Mapping[str, Environment]
    observer: Observer
    checkpointer: Checkpointer
    probes: Probes | None = None
    """The trainer's logprobs of the probes under the sampler's initial weights; None if these are not compared."""
    logprob_models: Mapping[str, Teacher] = field(default_factory=dict)
    sending: SendingTrainer | None = None
    """The trainer, if it sends its weights to the sampler's servers."""
    episode_stats: EpisodeStats = field(default_factory=EpisodeStats)
    progress: EvalProgress = field(default_factory=EvalProgress)
    """Receives every evaluation, and decides which evaluation is the best and whether the run ends early."""

    def __post_init__(self) -> None:
        self._stopping = asyncio.Event()  # set when no further batch may be handed over, for any reason
        self._asked_to_end = asyncio.Event()  # set on a requested stop, which also cuts an evaluation short
        self._turns = DeviceHandoff(self.sampler, is_shared=self.schedule.shares_device)
        self._producer = Producer(
            schedule=self.schedule,
            dispatcher=self.dispatcher,
            trainer=self.trainer,
            rules=self.rules,
            logprob_models=self.logprob_models,
            episode_stats=self.episode_stats,
            turns=self._turns,
            stopping=self._stopping,
        )
        self._weight_sync = WeightSync(
            self.sampler, self.probes, self.schedule.canary_tolerance, cuts=self.schedule.checks_kept_sets
        )
        self._metrics = StepMetrics(
            sampler=self.sampler,
            dispatcher=self.dispatcher,
            ledger=self.ledger,
            rules=self.rules,
            environments=self.environments,
            observer=self.observer,
        )
        self._saved = self._evaluated = -1
        self.step = 0
        """Number of steps done, that is, of batches trained and published. It is also the policy version in use."""
        self.weights: Path | None = None
        """The folder of the weights in use; None before the first step of this process."""
        self.has_learned = False
        """True once a token with a gradient has been trained."""

    @property
    def stopped_early(self) -> str | None:
        """Why the run ended before its last step; None if the run has not ended, or has taken all its steps."""
        return self.progress.stop_reason if self.step < self.schedule.max_steps else None

    def ending(self) -> dict[str, Any]:
        """The part of the summary about evaluations: the best evaluation, and why the run ended before its last
        step."""
        known = {"stopped_early": self.stopped_early, "best": self.progress.state_dict()["best"]}
        return {name: value for name, value in known.items() if value is not None}

    def request_stop(self) -> None:
        """End after the batches that the trainer already has, with a checkpoint."""
        self._asked_to_end.set()
        self._stopping.set()

    async def run(self) -> bool:
        """Train until `max_steps`, or until a stop is requested.

        Returns:
            True if the run is complete: all steps were taken, the examples are used up, or early stopping ended it.

        Raises:
            RunStopped: the run cannot continue. What was trained so far is settled, and is in a checkpoint if the
                trainer can still write it.
        """
        lag, checks = LoopLag(), asyncio.create_task(gc_policy.spot_checks(), name="spot-checks")
        try:
            await self._weight_sync.check_first()
            if self.step == 0:
                # The checkpoint is saved before the evaluation, so that the initial model has a checkpoint if it proves
                # to be the best.
                await self._save()
                if await self._evaluate():
                    await asyncio.to_thread(self._mark_best)
            self._saved = self.step
            self._metrics.begin(lag)
            if self.stopped_early is None:
                self.dispatcher.start(version=self.step, batch=self.step)
                await self._train()
            finished = await self._came_to_its_end()
            if finished:
                self.ledger.drop({"unused_at_end": self.dispatcher.discard()})
                self.ledger.check(pending=0)
            if self._saved != self.step:
                await self._save()
            return finished
        finally:
            lag.close()
            await cancel_all([checks])
            await self.dispatcher.stop()

    async def _came_to_its_end(self) -> bool:
        """True if no step is left to take. If the run ends before its last step, the final policy is evaluated
        first."""
        taken, why = self.step >= self.schedule.max_steps, self.stopped_early
        if why is None and not taken and not self._stopping.is_set():
            why = self.dispatcher.drained
        await self.dispatcher.stop()
        if why is not None:
            logger.warning("the run ends after %d of %d steps: %s", self.step, self.schedule.max_steps, why)
            if self._evaluated != self.step and await self._evaluate(is_last=True):
                self._saved = -1  # the checkpoint of this step lacks the new best evaluation: write it again
        return taken or why is not None

    async def _train(self) -> None:
        """Consume the producer's batches until there are no more."""
        producer = asyncio.create_task(self._producer.run(self.step), name="producer")
        watch = asyncio.create_task(self._watch(), name="watch")
        try:
            while (submitted := await self._next_submitted(producer, watch)) is not None:
                await self._finish_step(submitted)
                self._turns.step_is_over()
                gc_policy.step_is_over(self.dispatcher.num_held)
            await producer
        except (VerbatimError, OSError):
            # This is an external failure: completed batches are valid, so they go into a checkpoint.
            self._stopping.set()
            await asyncio.gather(producer, self.dispatcher.stop(), return_exceptions=True)
            await self._keep_what_was_trained()
            raise
        finally:
            await cancel_all([producer, watch, *(submitted.report for submitted in self._producer.submitted)])

    async def _watch(self) -> None:
        """Raise the cause once the trainer or the sampler fails for good. Returns without an error once both watches
        end."""
        watches = [asyncio.ensure_future(watch) for watch in (self.trainer.watch(), watch_engine(self.sampler))]
        try:
            while True:
                done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
                for watch in done:
                    watch.result()
                    watches.remove(watch)
        finally:
            await cancel_all(watches)

    async def _next_submitted(self, producer: asyncio.Task[None], watch: asyncio.Task[None]) -> Submitted | None:
        """The earliest batch that is not settled; None if there will be no more batches."""
        while not self._producer.submitted:
            if producer.done():
                return None
            self._producer.more.clear()
            more = asyncio.ensure_future(self._producer.more.wait())
            try:
                await asyncio.wait({more, producer, watch}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await cancel_all([more])
            if watch.done():
                watch.result()
        return self._producer.submitted[0]

    async def _finish_step(self, submitted: Submitted) -> None:
        """Wait for the trainer's report on a batch, then settle it, load the weights, log, evaluate and store."""
        began = time.perf_counter()
        report = await submitted.report
        waited = time.perf_counter() - began
        # The evaluation after this step may end the run, so no batch is handed over until it is done.
        if self.progress.early_stopping is not None and self.schedule.is_evaluated(report.version):
            self._producer.may_hand_over.clear()
        self._settle(submitted, report)
        # The state is taken now, so that it matches the step of the state that the trainer has stored.
        state = self.state_dict() if report.state is not None else None
        timings = {"time/wait_for_trainer": waited, **self._turns.to_sampler()}
        try:
            seconds = await self._load_weights(report)
            self.dispatcher.advance(self.step)
        except (VerbatimError, OSError):
            await self._record(submitted, report, {})  # the step was trained, so it is logged
            raise
        sent = {**self._weight_sync.metrics(), **(self.sending.metrics() if self.sending is not None else {})}
        await self._record(submitted, report, {**timings, "time/weight_sync": seconds, **sent})
        is_best = self.schedule.is_evaluated(self.step) and await self._evaluate_between()
        if state is not None:
            await self._keep(report, {**state, **self._evaluations()}, is_best=is_best)

    async def _evaluate_between(self) -> bool:
        """Run the evaluation after a step, and let the producer continue."""
        is_best = await self._evaluate()
        if self.stopped_early is not None:
            self._stopping.set()
        self._producer.may_hand_over.set()
        return is_best

    async def _keep(self, report: StepReport, state: Mapping[str, Any], *, is_best: bool) -> None:
        """Write the checkpoint of this step, or remove the trainer's state for it: a checkpoint written only for an
        evaluation is kept only if that evaluation is the best so far."""
        assert report.state is not None
        if is_best or self.schedule.is_kept(report.version):
            await self.checkpointer.save(report.version, self.trainer, state, report.state)
            self._saved = report.version
        else:
            await asyncio.to_thread(shutil.rmtree, report.state, ignore_errors=True)

    async def _load_weights(self, report: StepReport) -> float:
        """Load the new version into the sampler. Returns the time taken in seconds."""
        began = time.perf_counter()
        async with self._producer.handover:
            try:
                await self._weight_sync.load(report)
            except BaseException:
                self._stopping.set()  # before the lock is released: no batch may be handed over after a failed check
                raise
            finally:
                if self.sending is not None:
                    self.sending.go_on(report.version)
        assert report.version == self.step
        return time.perf_counter() - began

    async def _record(self, submitted: Submitted, report: StepReport, timings: Mapping[str, float]) -> None:
        await self._metrics.record(submitted, report, timings, waiting=len(self._producer.submitted))

    def _settle(self, submitted: Submitted, report: StepReport) -> None:
        """Settle the batch's tokens in the ledger, and count the step."""
        expected = sum(group.num_trained_tokens for group in submitted.batch)
        assert report.num_trained_tokens == expected, (
            f"the trainer was given {expected} tokens and trained {report.num_trained_tokens}"
        )
        self.has_learned |= any(
            bool(s.trained("advantages").any()) if self.schedule.learns_from_advantages else s.num_trained_tokens > 0
            for group in submitted.batch
            for s in group.samples
        )
        for group in submitted.batch:
            self.ledger.settle_group(group.group.index, trained=group.num_trained_tokens, dropped=group.dropped)
        self.ledger.masked_by_loss += int(report.metrics.get("masked_by_loss", 0))
        self.dispatcher.settled()
        self._producer.submitted.popleft()
        self.step += 1
        self.weights = report.weights

    async def _keep_what_was_trained(self) -> None:
        """Settle the batches that the trainer can still finish, and then write a checkpoint if possible."""
        if self.sending is not None:
            self.sending.stop_sending()
        while self._producer.submitted:
            submitted = self._producer.submitted[0]
            try:
                report = await submitted.report
            except (VerbatimError, OSError):
                break
            self._settle(submitted, report)
            await self._record(submitted, report, {})
        if self._saved == self.step:
            return
        try:
            await self._save()
        except (VerbatimError, OSError) as error:
            why = str(error).partition("\n")[0]  # further lines quote a log that the run's final error quotes too
            logger.warning("no checkpoint of the state after %d steps could be written: %s", self.step, why)

    async def _evaluate(self, *, is_last: bool = False) -> bool:
        """Evaluate the policy in use; the weights stay unchanged until the evaluation is done. A requested stop cuts
        the evaluation short, except after the last step. Returns True if the best evaluation is tracked and this
        evaluation is the best so far."""
        is_last, found = is_last or self.step == self.schedule.max_steps, dict[str, Evaluation]()
        for setup in self.schedule.eval_setups:
            planned = plan(setup, episodes=self.schedule.eval_episodes, most=self.schedule.eval_examples)
            running = asyncio.ensure_future(evaluate(setup, planned, seed=self.schedule.eval_seed))
            stop = asyncio.ensure_future(self._asked_to_end.wait())
            try:
                with self._evaluating(setup, len(planned[0]) * planned[1]):
                    await asyncio.wait({running, stop}, return_when=asyncio.FIRST_COMPLETED)
                    if not running.done() and not is_last:
                        return False
                    found[setup.env] = await running
            finally:
                await cancel_all([running, stop])
            await asyncio.to_thread(self.observer.on_eval, self.step, found[setup.env])
        self._evaluated = self.step
        return bool(found) and self.progress.observe(self.step, found)

    def _evaluating(self, setup: RolloutSetup, total: int) -> AbstractContextManager[object]:
        """While the block runs, show the observer how many episodes have ended."""
        before = setup.episode_stats.num_episodes
        return self.observer.stage(
            f"evaluating {setup.env}", total, count=lambda: min(total, setup.episode_stats.num_episodes - before)
        )

    def _mark_best(self) -> None:
        best = self.progress.state_dict()["best"]
        assert best is not None
        self.checkpointer.mark_best(self.step, best)

    async def _save(self) -> None:
        await self.checkpointer.save(self.step, self.trainer, self.state_dict())
        self._saved = self.step

    def state_dict(self) -> dict[str, Any]:
        """The loop's state as plain JSON values."""
        return {
            "step": self.step,
            "has_learned": self.has_learned,
            "dispatcher": self.dispatcher.state_dict(),
            "ledger": self.ledger.state_dict(),
            "pending_tokens": self.dispatcher.num_pending_tokens,
            **self._evaluations(),
        }

    def _evaluations(self) -> dict[str, Any]:
        return {"evaluations": {"last": self._evaluated, **self.progress.state_dict()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Tokens that were in flight when the state was saved are dropped as cancelled,
        because their groups are sampled again."""
        self.step = state["step"]
        self.has_learned = state["has_learned"]
        self.dispatcher.load_state_dict(state["dispatcher"])
        self.ledger.load_state_dict(state["ledger"])
        self._evaluated = state["evaluations"]["last"]
        self.progress.load_state_dict(state["evaluations"])
        self.ledger.drop({"cancelled": state["pending_tokens"]})
        self.ledger.check(pending=0)
