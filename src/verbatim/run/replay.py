"""Trains one step of a run again from the stored data, and compares the results. It never writes into the run folder.

```
checkpoint before the step -> trainer -> the stored steps in between -> the step
    -> metrics, logprobs, gradients and weights, compared with the stored ones
```
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verbatim.config import dump_config, load_config
from verbatim.config.schema import RunConfig
from verbatim.core.errors import CheckpointError, UsageError
from verbatim.core.imports import search_beside
from verbatim.core.records.trained_tokens import TrainedTokens
from verbatim.core.trajectory_json import plain
from verbatim.core.types import TrainingSample
from verbatim.logs.checkpoints import CONFIG, Checkpoint, find_damage
from verbatim.logs.checkpoints.stored_config import changed_keys
from verbatim.run.build import needs_first_model
from verbatim.run.make_trainer import make_trainer, threads_of
from verbatim.run.precision import resolve_dtypes
from verbatim.run.replay_compare import (
    MetricDifference,
    TokenDifference,
    WeightDifference,
    compare_metrics,
    compare_tokens,
    compare_weights,
)
from verbatim.run.replay_data import (
    ReplayPlan,
    StoredStep,
    changed_samples,
    plan_replay,
    read_step,
    stored_samples,
)
from verbatim.run.tables import component_tables

if TYPE_CHECKING:
    from verbatim.trainer.trainer import Trainer

_BATCH = (
    "advantage",
    "length_penalty",
    "filters",
    "trajectory_strategy",
    "formulate_mode",
    "on_break",
    "seq_len",
    "max_off_policy_steps",
)
"""Keys of [orchestrator] and of its environments that affect how an already sampled batch is trained."""
_ROUNDING = {"float32": 1e-4, "bfloat16": 5e-2}
"""Tolerance by trainer.dtype: the largest difference between two ways of computing the same logprob."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A replayed step, compared with the stored one."""

    step: int
    run: Path
    checkpoint: int
    """The step from whose checkpoint the replay started."""
    changes: tuple[str, ...]
    """The keys that were overridden, as "key: then -> now"."""
    num_tokens: int
    """Number of tokens trained in the replay."""
    metrics: Mapping[str, MetricDifference]
    """Every trainer metric that is both stored and computed again, by name."""
    logprobs: TokenDifference
    gradients: TokenDifference
    weights: WeightDifference | None
    """The comparison of the weights after the step; None if the run has no checkpoint of the step."""
    rounding: float
    """Differences no larger than this are treated as rounding."""

    @property
    def is_exact(self) -> bool:
        """True if everything is bitwise identical."""
        return (
            all(metric.is_exact for metric in self.metrics.values())
            and self.logprobs.is_exact
            and self.gradients.is_exact
            and (self.weights is None or self.weights.is_exact)
        )

    @property
    def is_same(self) -> bool:
        """True if everything is identical up to rounding."""
        return (
            all(metric.is_within(self.rounding) for metric in self.metrics.values())
            and self.logprobs.is_within(self.rounding)
            and self.gradients.is_within(self.rounding)
            and (self.weights is None or self.weights.largest <= self.rounding)
        )


def replay(run: Path, step: int, overrides: Sequence[str] = ()) -> Replay:
    """Train a step again.

    Args:
        run: The run folder. It is only read, so the run may still be active.
        step: The step to replay. The steps between the checkpoint before it and this step are trained again first.
        overrides: Keys changed for this step only, as on the command line: `["--trainer.optim.lr", "1e-5"]`.

    Raises:
        UsageError: the step cannot be replayed, or a changed key has no effect on a stored batch.
        CheckpointError: the stored data is damaged, or does not reproduce the original batch.
    """
    plan = plan_replay(run.resolve(), step)
    search_beside(plan.run / CONFIG)
    config = load_config(plan.config_file, tables=component_tables())
    changed = load_config(plan.config_file, overrides, component_tables()) if overrides else config
    changed, _ = resolve_dtypes(changed, stored=config.model_dump())  # "auto" here means the run's own dtype
    changes = tuple(changed_keys(changed, dump_config(config)))
    _refuse_idle(changes)
    stored = {number: read_step(plan.run, number) for number in plan.steps}
    # Keys of the orchestrator change credit, filters or samples, so credit, filters and samples are computed again from
    # the rewards.
    credited_again = any(change.startswith("orchestrator.") for change in changes)
    samples = (changed_samples if credited_again else stored_samples)(stored[step], changed)
    with _threads(config), tempfile.TemporaryDirectory(prefix="verbatim-replay-") as scratch:
        trainer = _trainer_before(plan, config, changed if changes else None, stored, Path(scratch))
        tokens: list[TrainedTokens] = []
        metrics = trainer.train_batch(samples, tokens.append)
        return _compared(plan, stored[step], changes, samples, metrics, tokens[0], trainer, config, Path(scratch))


def _compared(
    plan: ReplayPlan,
    stored: StoredStep,
    changes: tuple[str, ...],
    samples: Sequence[TrainingSample],
    metrics: Mapping[str, float],
    tokens: TrainedTokens,
    trainer: Trainer,
    config: RunConfig,
    scratch: Path,
) -> Replay:
    """Compare metrics, per-token values and, if there is a checkpoint of the step, weights."""
    found = {
        (sample.trajectory_id, turn): (logprobs, gradients)
        for sample, turn, logprobs, gradients in tokens.by_turn(samples)
    }
    records = {outcome.trajectory.trajectory_id: outcome.trajectory for outcome in stored.outcomes}
    ids = {key: records[key[0]].turns[key[1]].completion_ids for key in found}
    then = plan.run / "checkpoints" / f"step_{plan.step:06d}"
    weights = None
    if then.is_dir() and find_damage(then) is None:
        trainer.save_weights(scratch / "weights")
        weights = compare_weights(Checkpoint(step=plan.step, folder=then).weights, scratch / "weights")
    return Replay(
        step=plan.step,
        run=plan.run,
        checkpoint=plan.checkpoint.step,
        changes=changes,
        num_tokens=len(tokens.logprobs),
        metrics=compare_metrics(stored.metrics or {}, metrics),
        logprobs=compare_tokens(
            stored.outcomes,
            lambda outcome: outcome.trainer_logprobs,
            {key: values[0] for key, values in found.items()},
            ids,
        ),
        gradients=compare_tokens(
            stored.outcomes, lambda outcome: outcome.gradients, {key: values[1] for key, values in found.items()}, ids
        ),
        weights=weights,
        rounding=_ROUNDING[config.trainer.dtype],
    )


_NOT_OF_A_STEP = ("lora", "parallel", "separate_process")
"""Keys of [trainer] that a replay refuses to change: the weights have the adapters' shape, and a replay trains in a
single process."""


def _refuse_idle(changes: Sequence[str]) -> None:
    """Refuse changes to keys that have no effect on a batch that is already sampled."""
    for change in changes:
        key = change.partition(":")[0]
        parts = key.split(".")
        of_batch = parts[0] == "orchestrator" and any(part in _BATCH for part in parts)
        if not (of_batch or (parts[0] == "trainer" and parts[1] not in _NOT_OF_A_STEP)):
            names = ", ".join(f"orchestrator.{name}" for name in _BATCH)
            raise UsageError(
                f"--replay trains a stored batch, starting from the weights of that step: {change} would have no "
                "effect; keys that may change: trainer.* except trainer.lora and trainer.parallel (a replay "
                f"trains in one process), {names}"
            )


def _trainer_before(
    plan: ReplayPlan, config: RunConfig, changed: RunConfig | None, stored: Mapping[int, StoredStep], scratch: Path
) -> Trainer:
    """A trainer in the state that the run's trainer had before the step.

    The steps in between are trained with the original configuration. If keys change, a second trainer with the changed
    configuration then takes over the first trainer's state.
    """
    between = plan.steps[:-1]
    left = (config.max_steps - plan.checkpoint.step) * config.trainer.optimizer_steps_per_batch  # as it was then
    if changed is not None and not between:
        return _trainer(plan, changed, plan.checkpoint.folder, left)
    trainer = _trainer(plan, config, plan.checkpoint.folder, left)
    for step in between:
        trainer.train_batch(stored_samples(stored[step], config))
    if changed is None:
        return trainer
    trainer.save_weights(scratch / "before" / "weights")
    trainer.save_state(scratch / "before" / "trainer")
    del trainer  # free the first trainer's memory before the second loads
    return _trainer(plan, changed, scratch / "before", left - len(between) * config.trainer.optimizer_steps_per_batch)


def _trainer(plan: ReplayPlan, config: RunConfig, state: Path, left: int) -> Trainer:
    """A trainer in this process with a checkpoint's weights and state. `left` is the number of optimizer steps that the
    run's learning-rate schedule had left at that point."""
    from verbatim.models.loading import load_tokenizer

    weights = state / "weights"
    first = _first_model(config, plan.run) if needs_first_model(config) else weights
    base = first if config.trainer.lora is not None else weights
    # A replay is a single process, however many ranks trained the run.
    alone = config.trainer.parallel.model_copy(update={"processes": 1, "sequence": 1})
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"parallel": alone})})
    trainer = make_trainer(config, "run", base, first=first, ranks=None, tokenizer=load_tokenizer(base))
    if trainer.adapters is not None:
        trainer.load_adapters(weights)
    steps = config.trainer.optimizer_steps_per_batch
    trainer.load_state(state / "trainer", left=left)
    # The step to replay may lie beyond the schedule of the stored configuration.
    trainer.schedule.total = max(trainer.schedule.total, trainer.schedule.num_done + steps)
    return trainer


def _first_model(config: RunConfig, run: Path) -> Path:
    """The model from which the run started. It must exist already; nothing is built."""
    made = "warm_start" if config.warm_start is not None else "model" if config.model.name is None else None
    if made is None:
        from verbatim.models.catalog import folder_of

        return Path(folder_of(str(config.model.name)))
    damage = find_damage(run / made) if (run / made).is_dir() else "it is missing"
    if damage is not None:
        raise CheckpointError(f"{run / made}, the model that the run began with, cannot be used: {damage}")
    return run / made


@contextlib.contextmanager
def _threads(config: RunConfig) -> Iterator[None]:
    """Use as many threads as the run's trainer, so that sums are computed in the same order."""
    import torch

    from verbatim.trainer.local import set_num_threads

    before = torch.get_num_threads()
    set_num_threads(threads_of(config, config.trainer.num_threads))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def as_json(replayed: Replay) -> dict[str, Any]:
    """The replay as plain JSON values; NaN and infinities become strings, as in the logs."""
    found: dict[str, Any] = plain(
        {
            "run": str(replayed.run),
            "step": replayed.step,
            "checkpoint": replayed.checkpoint,
            "changes": list(replayed.changes),
            "num_tokens": replayed.num_tokens,
            "is_exact": replayed.is_exact,
            "is_same": replayed.is_same,
            "metrics": {name: dataclasses.asdict(metric) for name, metric in replayed.metrics.items()},
            "logprobs": replayed.logprobs.as_json(),
            "gradients": replayed.gradients.as_json(),
            "weights": None if replayed.weights is None else dataclasses.asdict(replayed.weights),
        }
    )
    return found
