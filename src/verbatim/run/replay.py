"""Trains one step of a run again, from what is stored of it, and compares; writes nothing into the run.

```
checkpoint before the step -> trainer -> the stored steps in between -> the step
    -> metrics, logprobs, gradients and weights, beside those of then
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
"""Keys of [orchestrator] and of its environments that say what becomes of a batch that is there."""
_ROUNDING = {"float32": 1e-4, "bfloat16": 5e-2}
"""The largest difference between two ways to compute one logprob, by trainer.dtype."""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A step beside what it was."""

    step: int
    run: Path
    checkpoint: int
    """The step whose checkpoint it began at."""
    changes: tuple[str, ...]
    """The keys that are not those of then, "key: then -> now"."""
    num_tokens: int
    """Trained tokens, of the replay."""
    metrics: Mapping[str, MetricDifference]
    """Every metric of the trainer that both have, by name."""
    logprobs: TokenDifference
    gradients: TokenDifference
    weights: WeightDifference | None
    """None where the run has no checkpoint of this step."""
    rounding: float
    """Differences up to this are those of rounding."""

    @property
    def is_exact(self) -> bool:
        """Whether everything is the same bit for bit."""
        return (
            all(metric.is_exact for metric in self.metrics.values())
            and self.logprobs.is_exact
            and self.gradients.is_exact
            and (self.weights is None or self.weights.is_exact)
        )

    @property
    def is_same(self) -> bool:
        """Whether it is the same up to rounding."""
        return (
            all(metric.is_within(self.rounding) for metric in self.metrics.values())
            and self.logprobs.is_within(self.rounding)
            and self.gradients.is_within(self.rounding)
            and (self.weights is None or self.weights.largest <= self.rounding)
        )


def replay(run: Path, step: int, overrides: Sequence[str] = ()) -> Replay:
    """Train the step again.

    Args:
        run: The run's folder. Nothing in it is written, and the run may be at work.
        step: Which step; the steps between the checkpoint before it and itself are trained again first.
        overrides: Keys that change in this step alone, as on the command line: `["--trainer.optim.lr", "1e-5"]`.

    Raises:
        UsageError: the step cannot be replayed, or such a key changes nothing in a batch that is there.
        CheckpointError: what is stored is damaged, or does not give the batch of then.
    """
    plan = plan_replay(run.resolve(), step)
    search_beside(plan.run / CONFIG)
    config = load_config(plan.config_file, tables=component_tables())
    changed = load_config(plan.config_file, overrides, component_tables()) if overrides else config
    changed, _ = resolve_dtypes(changed, stored=config.model_dump())
    changes = tuple(changed_keys(changed, dump_config(config)))
    _refuse_idle(changes)
    stored = {number: read_step(plan.run, number) for number in plan.steps}
    anew = any(change.startswith("orchestrator.") for change in changes)
    samples = (changed_samples if anew else stored_samples)(stored[step], changed)
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
            {key: said[0] for key, said in found.items()},
            ids,
        ),
        gradients=compare_tokens(
            stored.outcomes, lambda outcome: outcome.gradients, {key: said[1] for key, said in found.items()}, ids
        ),
        weights=weights,
        rounding=_ROUNDING[config.trainer.dtype],
    )


_NOT_OF_A_STEP = ("lora", "parallel", "separate_process")
"""Keys of [trainer] that a replay refuses to change: the weights have the adapters' shape, and it trains in one
process."""


def _refuse_idle(changes: Sequence[str]) -> None:
    """Keys that cannot change what becomes of a batch that was sampled long ago."""
    for change in changes:
        key = change.partition(":")[0]
        parts = key.split(".")
        of_batch = parts[0] == "orchestrator" and any(part in _BATCH for part in parts)
        if not (of_batch or (parts[0] == "trainer" and parts[1] not in _NOT_OF_A_STEP)):
            names = ", ".join(f"orchestrator.{name}" for name in _BATCH)
            raise UsageError(
                f"--replay trains a batch that is stored, on the weights of then: {change} changes "
                "nothing in it; keys that may change: trainer.* but for trainer.lora and "
                f"trainer.parallel (it trains in one process), {names}"
            )


def _trainer_before(
    plan: ReplayPlan, config: RunConfig, changed: RunConfig | None, stored: Mapping[int, StoredStep], scratch: Path
) -> Trainer:
    """A trainer that is where the run was before the step: with the configuration of then it trains the steps in
    between, and one with the changed keys takes over its state."""
    between = plan.steps[:-1]
    left = (config.max_steps - plan.checkpoint.step) * config.trainer.optimizer_steps_per_batch  # as the run went on
    if changed is not None and not between:
        return _trainer(plan, changed, plan.checkpoint.folder, left)
    trainer = _trainer(plan, config, plan.checkpoint.folder, left)
    for step in between:
        trainer.train_batch(stored_samples(stored[step], config))
    if changed is None:
        return trainer
    trainer.save_weights(scratch / "before" / "weights")
    trainer.save_state(scratch / "before" / "trainer")
    del trainer
    return _trainer(plan, changed, scratch / "before", left - len(between) * config.trainer.optimizer_steps_per_batch)


def _trainer(plan: ReplayPlan, config: RunConfig, state: Path, left: int) -> Trainer:
    """A trainer in this process with a checkpoint's weights and state; `left`: optimizer steps that the run's schedule
    had from there on."""
    from verbatim.models.loading import load_tokenizer

    weights = state / "weights"
    first = _first_model(config, plan.run) if needs_first_model(config) else weights
    base = first if config.trainer.lora is not None else weights
    alone = config.trainer.parallel.model_copy(update={"processes": 1, "sequence": 1})
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"parallel": alone})})
    trainer = make_trainer(config, "run", base, first=first, ranks=None, tokenizer=load_tokenizer(base))
    if trainer.adapters is not None:
        trainer.load_adapters(weights)
    steps = config.trainer.optimizer_steps_per_batch
    trainer.load_state(state / "trainer", left=left)
    trainer.schedule.total = max(trainer.schedule.total, trainer.schedule.num_done + steps)
    return trainer


def _first_model(config: RunConfig, run: Path) -> Path:
    """The model that the run began with, as it lies there: nothing is made."""
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
    """As many threads as the trainer had: sums are in the same order."""
    import torch

    from verbatim.trainer.local import set_num_threads

    before = torch.get_num_threads()
    set_num_threads(threads_of(config, config.trainer.num_threads))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def as_json(replayed: Replay) -> dict[str, Any]:
    """The replay as plain JSON values; NaN and infinities are texts, as in logs."""
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
