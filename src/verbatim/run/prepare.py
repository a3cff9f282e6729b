"""Prepares the model from which a run starts: builds or locates it, then warm-starts it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from verbatim.config.schema import RunConfig, WarmStartConfig
from verbatim.core.disk import keep_aside, making
from verbatim.core.types import TrainingSample
from verbatim.environments.resolve import corpus
from verbatim.logs.checkpoints import find_damage, write_manifest
from verbatim.logs.monitors.live import LiveView
from verbatim.models.build import build_model
from verbatim.models.catalog import folder_of
from verbatim.models.loading import load_tokenizer
from verbatim.models.renderers.renderer import Renderer
from verbatim.rollouts import derive_seed
from verbatim.run.environments import CORPUS, Environments, demonstrations, imitated_samples, to_imitate
from verbatim.run.make_trainer import make_trainer
from verbatim.run.rollouts import make_renderer
from verbatim.trainer.parallel.ranks import Ranks
from verbatim.trainer.warm_start import warm_start

logger = logging.getLogger(__name__)


def prepare_model(
    config: RunConfig, environments: Environments, folder: Path, console: Console, *, ranks: Ranks | None = None
) -> Path:
    """The folder or hub id of the weights of policy version 0. `ranks` are the processes that train together.

    Raises:
        UsageError: there are no demonstrations, or a data file cannot be read.
        ModelError: the model does not exist.
    """
    name = config.model.name
    source = Path(folder_of(name)) if name is not None else build_first_model(config, environments, folder, console)
    if config.warm_start is None:
        return source
    return _warm_start(config, config.warm_start, environments, source, folder, console, ranks)


def build_first_model(config: RunConfig, environments: Environments, folder: Path, console: Console) -> Path:
    """Build the model of [model.build] in the run folder, unless an earlier process has built it."""
    build_config = config.model.build
    assert build_config is not None
    target = folder / "model"
    if _is_whole(target):  # a process of this run that was killed before its first checkpoint left this
        return target
    texts = corpus(demonstrations(environments, CORPUS, config.seed))
    with making(target) as partial, LiveView(console).stage("building the model"):
        build_model(partial, build_config, texts, seed=derive_seed(config.seed, "model") % 2**32)
        write_manifest(partial)
    console.print(f"model       built in {target}", soft_wrap=True)
    return target


def _warm_start(
    config: RunConfig,
    settings: WarmStartConfig,
    environments: Environments,
    source: Path,
    folder: Path,
    console: Console,
    ranks: Ranks | None,
) -> Path:
    """Train the model on the conversations and save it in the run folder, unless an earlier process has done so."""
    target = folder / "warm_start"
    if _is_whole(target):
        console.print(f"warm start  already done, in {target}", soft_wrap=True)
        return target
    tokenizer = load_tokenizer(source)
    renderer = make_renderer(config.orchestrator.renderer, tokenizer)
    samples = _warm_start_samples(config, environments, renderer, console)
    with LiveView(console).stage("loading the model"):
        trainer = make_trainer(config, "warm_start", source, ranks=ranks, tokenizer=tokenizer)
    started = time.monotonic()

    def show(step: int, metrics: Mapping[str, float]) -> None:
        bar.update(step, note=f"loss {metrics['loss']:.3f}")
        if step == 1 or step % max(1, settings.steps // 5) == 0:
            console.print(f"warm start  optimizer step {step}/{settings.steps}  loss per token {metrics['loss']:.3f}")

    with LiveView(console).stage("warm start", settings.steps) as bar:
        warm_start(
            trainer,
            samples,
            steps=settings.steps,
            batch_size=settings.batch_size,
            seed=derive_seed(config.seed, "warm_start") % 2**32,
            on_step=show,
        )
    with making(target) as partial:
        trainer.save_weights(partial)
        write_manifest(partial)
    console.print(f"warm start  done in {time.monotonic() - started:.0f} s")
    return target


def _is_whole(folder: Path) -> bool:
    """True if an earlier process of the run completed this folder. A damaged folder is moved aside, so that it is made
    again."""
    if not folder.exists():
        return False
    damage = find_damage(folder)
    if damage is None:
        return True
    logger.warning(
        "%s is damaged: %s; it is being rebuilt, and the damaged folder is kept as %s",
        folder,
        damage,
        keep_aside(folder),
    )
    return False


def _warm_start_samples(
    config: RunConfig, environments: Environments, renderer: Renderer, console: Console
) -> list[list[TrainingSample]]:
    """The training samples of each conversation that fits into a sample."""
    samples: list[list[TrainingSample]] = []  # one list per conversation
    left_out = 0
    conversations = to_imitate(config, environments)
    console.print(f"warm start  rendering {len(conversations)} conversations")
    with LiveView(console).stage("rendering", len(conversations)) as bar:
        for number, built in enumerate(imitated_samples(config, conversations, renderer), start=1):
            left_out += built.dropped.get("over_length", 0)
            if built.samples:
                samples.append(built.samples)
            bar.update(number)
    if left_out:
        console.print(
            f"warm start  {left_out} tokens of turns beyond seq_len = {config.orchestrator.seq_len} are left out",
            style="yellow",
        )
    return samples
