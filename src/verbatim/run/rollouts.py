"""What runs the episodes of a run: the sampler, the renderer, the limits, and the process they run in."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from verbatim.config import import_object
from verbatim.config.schema import EnvConfig, OrchestratorConfig, RendererConfig, RunConfig, SamplingConfig
from verbatim.environments.base import Environment
from verbatim.inference import SAMPLERS
from verbatim.inference.base import Sampler, SamplingParams
from verbatim.inference.chat.client import Connection, OpenAI
from verbatim.renderers.base import Renderer
from verbatim.rollouts import EpisodeLimits, EpisodeRunner, EpisodeTally, LocalRunner, RolloutSetup


def sampling_params(sampling: SamplingConfig) -> SamplingParams:
    """The engine's parameters."""
    return SamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
    )


def make_setups(
    orchestrator: OrchestratorConfig,
    environments: Mapping[str, tuple[EnvConfig, Environment]],
    sampler: Sampler,
    renderer: Renderer,
    slots: asyncio.Semaphore,
    teacher: Connection | None = None,
    runner: EpisodeRunner | None = None,
    tally: EpisodeTally | None = None,
    run_id: str = "",
) -> dict[str, RolloutSetup]:
    """How each environment's episodes are run; a `teacher` speaks instead of the sampler, a `runner` runs them
    elsewhere, and one `tally` counts the episodes of all environments."""
    tally = tally or EpisodeTally()
    return {
        label: RolloutSetup(
            env=label,
            environment=environment,
            sampler=sampler,
            renderer=renderer,
            params=sampling_params(env.sampling or orchestrator.sampling),
            limits=_limits(orchestrator, env),
            slots=slots,
            teacher=teacher,
            runner=runner or LocalRunner(),
            tally=tally,
            run_id=run_id,
        )
        for label, (env, environment) in environments.items()
    }


def _limits(orchestrator: OrchestratorConfig, env: EnvConfig) -> EpisodeLimits:
    return EpisodeLimits(
        max_turns=env.max_turns,
        max_context=orchestrator.seq_len,
        timeout=orchestrator.episode_timeout,
        tool_timeout=orchestrator.tool_timeout,
        tool_output_limit=orchestrator.tool_output_limit,
        tool_error=orchestrator.tool_error,
        max_malformed_retries=orchestrator.max_malformed_retries,
    )


@contextlib.asynccontextmanager
async def open_runner(
    orchestrator: OrchestratorConfig,
    environments: Mapping[str, Mapping[str, tuple[EnvConfig, Environment]]],
    sampler: Sampler,
    renderer: Renderer,
    teacher: OpenAI | None = None,
    logs: Path | None = None,
) -> AsyncIterator[EpisodeRunner]:
    """Who runs the episodes, for as long as the block lasts.

    Args:
        orchestrator: Says where they run.
        environments: By purpose ("train", "eval") and label.
        sampler: Whose tokens.
        renderer: Of its model.
        teacher: Who speaks instead of the sampler in training.
        logs: The folder for what environments in processes of this machine print; None keeps nothing of it.

    Raises:
        UsageError: Ray, its actors or a worker process cannot be started.
    """
    rollout = orchestrator.rollout
    elsewhere = {
        (purpose, label): env
        for purpose, made in environments.items()
        for label, (env, _) in made.items()
        if plays_elsewhere(orchestrator, env)
    }
    if not elsewhere:
        yield LocalRunner()
        return
    from verbatim.rollouts.workers.episodes import RemoteSetup

    setups = {
        (purpose, label): RemoteSetup(
            env=label,
            name=env.id or str(env.import_path),
            args=env.args,
            params=sampling_params(env.sampling or orchestrator.sampling),
            limits=_limits(orchestrator, env),
            teacher=teacher if purpose == "train" else None,
        )
        for (purpose, label), env in elsewhere.items()
    }
    if rollout.backend == "ray":
        from verbatim.rollouts.ray.runner import ray_runner

        async with ray_runner(
            setups, sampler, renderer, workers=rollout.workers, cpus_per_worker=rollout.cpus_per_worker,
            address=rollout.address, host=rollout.host, port=rollout.port,
        ) as actors:  # fmt: skip
            yield actors
        return
    from verbatim.rollouts.processes.runner import process_runner

    async with process_runner(
        setups, sampler, renderer, workers=rollout.workers, memory_mb=rollout.worker_memory_mb, logs=logs
    ) as processes:
        yield processes


def plays_elsewhere(orchestrator: OrchestratorConfig, env: EnvConfig) -> bool:
    """Whether this environment's episodes run in other processes."""
    return orchestrator.rollout.backend != "local" or env.isolated


def make_renderer(renderer: RendererConfig, tokenizer: Any) -> Renderer:
    """The configured renderer.

    Raises:
        UsageError: no such renderer.
        ModelError: the model's tokenizer or chat template does not fit it.
    """
    from verbatim.renderers import create_renderer

    return create_renderer(renderer.name, tokenizer, tools=renderer.tools)


def make_sampler(
    config: RunConfig, source: str | Path, *, policy_version: int = 0, num_threads: int | None = None
) -> Any:
    """The configured rollout engine with the weights in `source`."""
    engine = import_object(SAMPLERS[config.inference.backend])
    return engine(
        source,
        config=config.inference,
        context_length=config.orchestrator.seq_len,
        policy_version=policy_version,
        num_threads=num_threads,
    )
