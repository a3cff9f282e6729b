"""Says before a run starts how long its steps and the whole run will take on this machine, and what memory it needs.

Sampler and trainer run for some seconds in a process of their own (`speed_trial`). Episodes are taken to be as long
as the environments' demonstrations. How many tokens the trainer computes depends on how much the members of a group
share, so durations are ranges: from groups whose members are all alike to groups that share only their prompt.
"""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.console import Console

from verbatim.config import dump_config
from verbatim.config.schema import RunConfig
from verbatim.core.children import run_program, text_of
from verbatim.core.errors import UsageError
from verbatim.core.types import TrainingSample
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.logs.monitors.live import LiveView
from verbatim.models.catalog import folder_of
from verbatim.models.native.cores import own_cores
from verbatim.run.environments import Environments, demonstrations, imitated_samples
from verbatim.run.make_trainer import shares_cores
from verbatim.run.rollouts import inference_settings, make_renderer

logger = logging.getLogger(__name__)

LARGE = 50_000_000
"""Bytes of weights from which a model's speed is measured: with a smaller model, a run's first step says as much
sooner."""
_CONVERSATIONS = 64
"""Maximum number of demonstrations that stand for episodes."""
_PATIENCE = 300.0
"""Timeout of the measurement in seconds."""


@dataclass(frozen=True, kw_only=True)
class TrialOrder:
    """What `speed_trial` measures."""

    config: str
    """The run's configuration in TOML. Its classes are made for the backend, so they cannot be pickled."""
    model: str
    """Folder of the model's weights."""
    conversations: list[list[TrainingSample]]
    """The training samples of conversations that are like the run's episodes."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What `speed_trial` measured, and the sizes of a batch."""

    threads: int
    """Threads of each side during the measurement."""
    sequences: int
    """Number of sequences decoded together."""
    sampled_per_second: float
    prompts_per_second: float
    """Prompt tokens that the sampler computes per second."""
    trained_per_second: float
    """Tokens that the trainer computes per second, forward and backward."""
    warm_start_per_second: float | None
    """The same for the warm start, which trains all weights; None if there is no warm start."""
    sampler_bytes: int
    """Most memory of the sampler's process."""
    trainer_bytes: int
    """Most memory of the trainer's process, for the largest micro-batch that a batch may have."""
    sampled_per_episode: float
    """Mean number of sampled tokens in an episode."""
    fewest_trained: int
    """Tokens that the trainer computes for a batch if all members of a group are alike."""
    most_trained: int
    """The same if the members of a group share only what is not sampled."""
    warm_start_tokens: int
    """Tokens that the trainer computes for a step of the warm start; 0 without a warm start."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The expected durations in seconds; ranges are (shortest, longest)."""

    sampling: float
    """Sampling a batch while the trainer computes too."""
    training: tuple[float, float]
    """Training on a batch while the sampler computes too."""
    step: tuple[float, float]
    warm_start: float
    evaluations: float
    """All evaluations together."""
    num_evaluations: int
    run: tuple[float, float]


def announce(config: RunConfig, environments: Environments, console: Console) -> None:
    """Measure, and print three lines. Prints nothing for runs that are not measured (`is_measured`) and environments
    without demonstrations; a measurement that fails is a warning.

    Raises:
        UsageError: a demonstration cannot be rendered.
    """
    if not is_measured(config):
        return
    model = folder_of(str(config.model.name))
    conversations = like_episodes(config, environments, model)
    if not conversations:
        return
    order = TrialOrder(config=dump_config(config), model=str(model), conversations=conversations)
    with LiveView(console).stage("measuring this machine"):
        trial = _measured(order)
    if trial is not None:
        for line in lines(config, trial, expected(config, trial, cores=own_cores(), shares=shares_cores(config))):
            console.print(line, soft_wrap=True)


def is_measured(config: RunConfig) -> bool:
    """True if this process starts both sides on this machine's CPU, with a model of at least `LARGE` bytes in a
    folder."""
    engine = inference_settings(config)
    if not isinstance(engine, TorchSettings) or engine.urls or engine.shares_device or config.model.name is None:
        return False
    if config.trainer.parallel.processes > 1 or config.trainer.compile or (config.cluster and config.cluster.roles):
        return False
    folder = Path(folder_of(config.model.name))
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
    return size >= LARGE and _on_cpu(config.trainer.device) and _on_cpu(engine.device)


def _on_cpu(device: str) -> bool:
    from verbatim.models.loading import resolve_device

    return resolve_device(device).type == "cpu"


def like_episodes(config: RunConfig, environments: Environments, model: str | Path) -> list[list[TrainingSample]]:
    """The samples of some demonstrations; empty if no environment has any."""
    from verbatim.models.loading import load_tokenizer

    try:
        shown = demonstrations(environments, _CONVERSATIONS, config.seed)[:_CONVERSATIONS]
    except UsageError:
        return []  # their lengths are unknown
    renderer = make_renderer(config.orchestrator.renderer, load_tokenizer(model))
    return [list(built.samples) for built in islice(imitated_samples(config, shown, renderer), 64) if built.samples]


def _measured(order: TrialOrder) -> Trial | None:
    """The measurement; None if it failed, which is logged."""
    command = [sys.executable, "-m", "verbatim.run.speed_trial"]
    try:
        done = run_program(command, timeout=_PATIENCE, given=pickle.dumps(order))
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("how long a step will take could not be measured: %s", error)
        return None
    if done.returncode:
        last = (text_of(done.stderr).strip().splitlines() or ["it printed no error"])[-1]
        logger.warning("how long a step will take could not be measured: %.300s", last)
        return None
    return Trial(**json.loads(done.stdout))


def expected(config: RunConfig, trial: Trial, *, cores: int, shares: bool) -> Expected:
    """The durations that follow from a measurement.

    Each side was measured with the threads that it has while both compute. A side that computes alone has all cores if
    the sides share them; its speed is assumed to grow with them.

    Args:
        config: The run's configuration.
        trial: The measurement.
        cores: Number of cores of the run.
        shares: True if an idle side leaves its cores to the other (`shares_cores`).
    """
    orchestrator = config.orchestrator
    alone = max(1.0, cores / trial.threads) if shares else 1.0
    sampled = orchestrator.batch_size * trial.sampled_per_episode
    sampling = sampled / trial.sampled_per_second
    sampling += max(0.0, trial.most_trained - sampled) / trial.prompts_per_second
    fewest, most = (tokens / trial.trained_per_second for tokens in (trial.fewest_trained, trial.most_trained))

    def step(training: float) -> float:
        if orchestrator.max_async_level == 0:
            return sampling + training
        shorter, longer = sorted((sampling, training))
        return shorter + (longer - shorter) / alone

    warm_start = 0.0
    if config.warm_start is not None and trial.warm_start_per_second is not None:
        # All cores, because the sampler has not started.
        each = trial.warm_start_tokens / trial.warm_start_per_second / max(1.0, cores / trial.threads)
        warm_start = config.warm_start.steps * each
    evaluation, count = orchestrator.eval, 0
    if evaluation is not None:
        count = 1 + config.max_steps // evaluation.interval + bool(config.max_steps % evaluation.interval)
    episodes = evaluation.episodes if evaluation is not None else 0
    evaluations = count * episodes / orchestrator.batch_size * sampling / alone
    shortest, longest = step(fewest), step(most)
    rest = warm_start + evaluations
    return Expected(
        sampling=sampling,
        training=(fewest, most),
        step=(shortest, longest),
        warm_start=warm_start,
        evaluations=evaluations,
        num_evaluations=count,
        run=(config.max_steps * shortest + rest, config.max_steps * longest + rest),
    )


def lines(config: RunConfig, trial: Trial, found: Expected) -> Sequence[str]:
    """The announcement."""
    batch = config.orchestrator.batch_size
    parts = [f"{config.max_steps} steps"]
    if found.warm_start:
        parts.append(f"a warm start of {duration(found.warm_start)}")
    if found.num_evaluations:
        parts.append(f"{found.num_evaluations} evaluations of {duration(found.evaluations / found.num_evaluations)}")
    return (
        f"speed       sampler {trial.sampled_per_second:,.0f} tokens/s ({trial.sequences} sequences), trainer "
        f"{trial.trained_per_second:,.0f} tokens/s, {_threads(trial.threads)}, measured here and now",
        f"expected    a step takes {_range(found.step)} (sampling {batch} episodes of "
        f"{trial.sampled_per_episode:.0f} tokens {duration(found.sampling)}, training "
        f"{trial.fewest_trained:,} to {trial.most_trained:,} tokens {_range(found.training)}), the run "
        f"{_range(found.run)}: {', '.join(parts)}",
        f"memory      sampler {trial.sampler_bytes / 1e9:.1f} GB, trainer at most {trial.trainer_bytes / 1e9:.1f} GB"
        f"{_free(trial.sampler_bytes + trial.trainer_bytes)}",
    )


def duration(seconds: float) -> str:
    """A duration for people.

    >>> duration(7.4), duration(75), duration(5000)
    ('7 s', '75 s', '83 min')
    """
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _threads(count: int) -> str:
    return "on one thread each" if count == 1 else f"on {count} threads each"


def _range(seconds: tuple[float, float]) -> str:
    (first, unit), (last, other) = (duration(x).split() for x in seconds)
    if (first, unit) == (last, other):
        return f"{last} {other}"
    return f"{first} to {last} {other}" if unit == other else f"{first} {unit} to {last} {other}"


def _free(needed: float) -> str:
    """What the machine has, as the end of a sentence; "" if the system does not say."""
    try:
        found = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return ""
    free = next((int(line.split()[1]) * 1024 for line in found if line.startswith("MemAvailable")), None)
    if free is None:
        return ""
    return f"; {free / 1e9:.1f} GB are free" + (", which is too little" if needed > free else "")
