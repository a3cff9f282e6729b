"""Builds the trainer's side of a run: the model that it begins with, and what it needs to train it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from verbatim.checkpoints import CheckpointStore, RunFolder
from verbatim.config.schema import RunConfig
from verbatim.run.environments import Environments
from verbatim.run.parts import make_loss
from verbatim.trainer.worker import TrainerWorker
from verbatim.transport import TrainerReady, WeightFolders
from verbatim.transport.canary import PROBE_LENGTH


def open_trainer(
    config: RunConfig, environments: Callable[[], Environments], folder: RunFolder, console: Console, *, states: Path
) -> tuple[TrainerWorker, TrainerReady]:
    """A trainer that holds the newest checkpoint of the run, or the model the run begins with.

    Args:
        config: The run's configuration.
        environments: Asked only where a model has to be built or warm-started.
        folder: The run folder.
        console: Is told how the preparation goes on.
        states: Where the trainer leaves its parts of checkpoints.
    """
    from verbatim.models.loading import load_tokenizer
    from verbatim.run.prepare import prepare_model
    from verbatim.trainer.trainer import Trainer

    found = CheckpointStore(folder.checkpoints, read_only=True).latest()
    source = found.folder / "weights" if found else prepare_model(config, environments(), folder.path, console)
    trainer = Trainer(
        source,
        config.trainer,
        loss=make_loss(config),
        total_optimizer_steps=config.max_steps * config.trainer.optimizer_steps_per_batch,
        tokenizer=load_tokenizer(source),
        seq_len=config.orchestrator.seq_len,
    )
    if found is not None:
        trainer.load_state(found.folder / "trainer")
    worker = TrainerWorker(
        trainer,
        version=found.step if found is not None else 0,
        weights=WeightFolders(folder.weights.resolve(), keep=config.orchestrator.max_async_level + 2),
        states=states.resolve(),
        probe_length=min(PROBE_LENGTH, config.orchestrator.seq_len),
    )
    ready = TrainerReady(
        version=worker.version,
        weights=str(source.resolve() if source.exists() else source),  # the other process may stand elsewhere
        checkpoint=found.folder.resolve() if found is not None else None,
        probes=worker.probe(),
    )
    return worker, ready


def threads_of(config: RunConfig, own: int | None) -> int | None:
    """Threads for one side's matrix products; None = torch's own setting, all cores.

    Where both sides compute at the same time, each gets its half of the cores: two teams of threads on the same cores
    wait for each other.
    """
    if own is not None:
        return own
    if config.orchestrator.max_async_level == 0 or "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, len(os.sched_getaffinity(0)) // 2)
