"""Finds the data from which a step is replayed: a checkpoint before it, the stored trajectories, the logged metrics.

A step's file holds the batch: every trajectory with its ids, logprobs, versions, experts, advantages, teacher logprobs
and the outcome of each turn, in batch order. The samples follow from these data, the micro-batches follow from the
samples, and the trainer draws no random numbers. So the state of the checkpoint before the step determines the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import numpy as np

from verbatim.config.schema import RunConfig
from verbatim.core.errors import CheckpointError, UsageError
from verbatim.core.records.fields import TEACHER
from verbatim.core.texts import ranges
from verbatim.core.trajectories import TrajectoryOutcome, build
from verbatim.core.trajectories.outcome import TRAINED
from verbatim.core.types import Group, TrainingSample, Trajectory
from verbatim.logs.checkpoints import CONFIG, Checkpoint, CheckpointStore, find_damage
from verbatim.logs.monitors.metrics_log import read_history
from verbatim.logs.monitors.trajectory_log import TRAJECTORIES
from verbatim.logs.outcomes.files import own_files_in, read_outcomes
from verbatim.run.build import logprob_models, make_rules
from verbatim.run.environments import Environments
from verbatim.run.orchestrator.assemble import assemble_group


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredStep:
    """The data that the run stored for a step."""

    step: int
    outcomes: Sequence[TrajectoryOutcome]
    """The outcomes in the step's file, in order: the outcomes of the batch, then the outcomes of trajectories that were
    dropped before they reached a batch."""
    metrics: Mapping[str, float] | None
    """The step's row in the metrics log; None if there is no such row."""


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """The data from which a step is replayed."""

    run: Path
    step: int
    checkpoint: Checkpoint
    """The newest undamaged checkpoint before the step."""

    @property
    def steps(self) -> range:
        """The steps to train, in order: the steps after the checkpoint, up to `step`."""
        return range(self.checkpoint.step + 1, self.step + 1)

    @property
    def config_file(self) -> Path:
        """The configuration under which the step was trained: the configuration of the first checkpoint at or after the
        step, or else the run's current configuration."""
        store = CheckpointStore(self.run / "checkpoints", read_only=True)
        copies = [store.folder / f"step_{step:06d}" / CONFIG for step in store.steps() if step >= self.step]
        return next((copy for copy in copies if copy.is_file()), self.run / CONFIG)


def plan_replay(run: Path, step: int) -> ReplayPlan:
    """Find the data from which this step can be replayed.

    Raises:
        UsageError: there is no such run, or a checkpoint or file is missing; the message lists the steps that can be
            replayed.
    """
    if not (run / CONFIG).is_file() and not (run / "checkpoints").is_dir():
        raise UsageError(f"there is no run in {run}; expected its folder: --run-dir runs/NAME/latest")
    store = CheckpointStore(run / "checkpoints", read_only=True)
    steps, files = store.steps(), own_files_in(run / TRAJECTORIES)
    can = [
        number
        for number in files
        if any(all(between in files for between in range(base + 1, number + 1)) for base in steps if base < number)
    ]
    there = (
        f"steps that can be replayed: {ranges(can) or 'none'} (checkpoints: {ranges(steps) or 'none'}; files of "
        f"trajectories: {ranges(list(files)) or 'none'})"
    )
    if step not in can:
        keep = "" if step in files else "; monitor.keep_trajectory_steps and max_trajectory_gb say how many are kept"
        raise UsageError(
            f"step {step} of {run} cannot be replayed: it needs a checkpoint before it, and the trajectory "
            f"files of every step since that checkpoint; {there}{keep}"
        )
    damages = []  # a damaged checkpoint is skipped, because an older one may do
    for base in reversed([number for number in steps if number < step]):
        folder = store.folder / f"step_{base:06d}"
        if (damage := find_damage(folder)) is None:
            missing = [number for number in range(base + 1, step + 1) if number not in files]
            if not missing:
                return ReplayPlan(run=run, step=step, checkpoint=Checkpoint(step=base, folder=folder))
            damages.append(f"the files of steps {ranges(missing)} are missing after step {base}")
        else:
            damages.append(f"{folder}: {damage}")
    raise UsageError(f"step {step} of {run} cannot be replayed: {'; '.join(damages)}")


def read_step(run: Path, step: int) -> StoredStep:
    """Read the stored data of a step.

    Raises:
        UsageError: the step's file or the metrics log is missing or damaged, or the file lacks some of the trained
            tokens.
    """
    file = own_files_in(run / TRAJECTORIES)[step]
    outcomes = [outcome for _, outcome in read_outcomes(file)]
    metrics: Mapping[str, float] | None = None
    if (run / "metrics.jsonl").is_file():
        logged = dict(read_history(run / "metrics.jsonl")[0])
        if step in logged:
            metrics = {name: float(value) for name, value in logged[step].items()}
    found = sum(outcome.num_trained_tokens for outcome in outcomes)
    if metrics is not None and "trained_tokens" in metrics and found != metrics["trained_tokens"]:
        raise UsageError(
            f"{file} has {found} of the {metrics['trained_tokens']:.0f} tokens that step {step} trained: "
            "only steps with monitor.trajectory_share = 1 can be replayed"
        )
    return StoredStep(step=step, outcomes=outcomes, metrics=metrics)


def stored_samples(stored: StoredStep, config: RunConfig) -> list[TrainingSample]:
    """The samples on which the step was trained, in batch order.

    Raises:
        CheckpointError: the stored trajectories no longer give the original samples.
    """
    rules = make_rules(config, _labels(config))
    samples: list[TrainingSample] = []
    for outcome in stored.outcomes:
        if not outcome.num_trained_tokens:
            continue
        rule = rules[outcome.trajectory.env]
        built = build(
            outcome.trajectory, strategy=rule.strategy, max_length=rule.max_length, needs_logprobs=rule.needs_logprobs
        )
        for turn, (now, then) in enumerate(zip(built.outcome.turns, outcome.turns, strict=True)):
            if now == then:
                continue
            raise CheckpointError(
                f"step {stored.step}: the samples of trajectory {outcome.trajectory.trajectory_id} differ from those "
                f"that were trained: turn {turn} was {then!r} and is {now!r} now; the configuration, or the "
                "version of Verbatim, has changed"
            )
        samples += with_teacher(built.samples, outcome, needs=TEACHER in logprob_models(config))
    return samples


def with_teacher(samples: Sequence[TrainingSample], outcome: TrajectoryOutcome, *, needs: bool) -> list[TrainingSample]:
    """Add the stored teacher logprobs to the samples, if they are needed.

    Raises:
        UsageError: the teacher logprobs are needed, but not stored.
    """
    if not needs:
        return list(samples)
    found = []
    for sample in samples:
        stream = np.full(len(sample), np.nan, dtype=np.float32)
        for turn in np.unique(sample.chunk_ids[sample.loss_mask]).tolist():
            logprobs = outcome.teacher_logprobs[turn] if outcome.teacher_logprobs else None
            if logprobs is None:
                raise UsageError(
                    f"trajectory {sample.trajectory_id}, turn {turn}: the teacher's logprobs are not stored: the "
                    "run did not compute them"
                )
            stream[sample.chunk_ids == turn] = logprobs
        found.append(dataclasses.replace(sample, logprob_streams={**sample.logprob_streams, TEACHER: stream}))
    return found


def changed_samples(stored: StoredStep, config: RunConfig) -> list[TrainingSample]:
    """The samples that this configuration makes from the stored batch: credit, filters and strategy are applied again.

    Groups that online difficulty filtering dropped stay dropped.
    """
    rules, samples = make_rules(config, _labels(config)), list[TrainingSample]()
    outcomes = {outcome.trajectory.trajectory_id: outcome for outcome in stored.outcomes}
    batch = [outcome.trajectory for outcome in stored.outcomes if outcome.reason != "difficulty"]
    for group_id, members in groupby(batch, key=lambda trajectory: trajectory.group_id):
        trajectories = tuple(_uncredited(cast(Trajectory, member)) for member in members)
        first = trajectories[0]
        group = Group(group_id=group_id, example_id=first.example_id, env=first.env, trajectories=trajectories)
        for sample in assemble_group(group, rules[first.env], stored.step - 1).samples:
            samples += with_teacher([sample], outcomes[sample.trajectory_id], needs=TEACHER in logprob_models(config))
    return samples


def _uncredited(trajectory: Trajectory) -> Trajectory:
    turns = tuple(turn if turn.advantage is None else turn.replace(advantage=None) for turn in trajectory.turns)
    return trajectory.replace(advantage=None, turns=turns)


def _labels(config: RunConfig) -> Environments:
    """The environments by label, without objects: the rules read only their tables."""
    nothing = cast(Any, None)
    return Environments(train={env.label: (env, nothing) for env in config.orchestrator.train.env}, eval={})


def turns_of(
    outcomes: Sequence[TrajectoryOutcome], value: Callable[[TrajectoryOutcome], Sequence[Any]]
) -> dict[tuple[str, int], Any]:
    """The stored value of each trained turn, by trajectory id and turn index."""
    return {
        (outcome.trajectory.trajectory_id, turn): stored
        for outcome in outcomes
        for turn, stored in enumerate(value(outcome))
        if stored is not None and outcome.turns[turn] == TRAINED
    }
