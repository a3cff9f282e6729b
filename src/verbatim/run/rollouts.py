"""Builds the parts that run episodes: sampler, renderer, limits, and the episode runner."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from verbatim.config import BackendSettings, find_backend, import_object, settings_for
from verbatim.config.cluster import ClusterConfig
from verbatim.config.schema import EnvConfig, OrchestratorConfig, RendererConfig, RunConfig
from verbatim.config.sections import table_of
from verbatim.core.errors import ComponentError, UsageError
from verbatim.core.records.experts import Routing
from verbatim.core.sampling import SamplingParams
from verbatim.environments.environment import Environment
from verbatim.inference import SAMPLERS, BackendInputs
from verbatim.inference.backends import SERVERS
from verbatim.inference.chat.client import ChatConnection, OpenAI
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.pool.settings import ServerSettings
from verbatim.inference.sampler import Sampler
from verbatim.inference.sending import WeightSender
from verbatim.models.native.cores import CoreShare
from verbatim.models.renderers.renderer import Renderer
from verbatim.models.source import find_source, is_adapter, rank_of
from verbatim.rollouts import EpisodeLimits, EpisodeRunner, EpisodeStats, LocalRunner, RolloutSetup
from verbatim.rollouts.backends import RUNNERS, RunnerInputs


def make_setups(
    orchestrator: OrchestratorConfig,
    environments: Mapping[str, tuple[EnvConfig, Environment]],
    sampler: Sampler,
    renderer: Renderer,
    slots: asyncio.Semaphore,
    teacher: ChatConnection | None = None,
    runner: EpisodeRunner | None = None,
    episode_stats: EpisodeStats | None = None,
    run_id: str = "",
    routing: Routing | None = None,
    *,
    trains: bool = False,
) -> dict[str, RolloutSetup]:
    """The setup of each environment's rollouts, by label.

    Args:
        orchestrator: Sampling parameters and limits.
        environments: The environments with their tables, by label.
        sampler: The policy's sampler.
        renderer: The renderer of the policy's model.
        slots: Limits the number of episodes that run at once, over all environments.
        teacher: A chat server that generates the turns instead of the sampler.
        runner: Runs the episodes. None to run them in this process.
        episode_stats: Counts the episodes of all environments.
        run_id: The run's name, for the episodes.
        routing: The expert routing that recorded experts must match.
        trains: True if the samples are trained on; the sampler then also returns kept sets.
    """
    episode_stats = episode_stats or EpisodeStats()
    return {
        label: RolloutSetup(
            env=label,
            environment=environment,
            sampler=sampler,
            renderer=renderer,
            params=_params(orchestrator, env, trains),
            limits=limits_of(orchestrator, env),
            slots=slots,
            teacher=teacher,
            runner=runner or LocalRunner(),
            episode_stats=episode_stats,
            run_id=run_id,
            routing=routing,
        )
        for label, (env, environment) in environments.items()
    }


def limits_of(orchestrator: OrchestratorConfig, env: EnvConfig) -> EpisodeLimits:
    """The limits of an environment's episodes."""
    return EpisodeLimits(
        max_turns=env.max_turns,
        max_total_completion_tokens=env.max_total_completion_tokens,
        max_context=orchestrator.seq_len,
        timeout=orchestrator.episode_timeout,
        tool_timeout=orchestrator.tool_timeout,
        tool_output_limit=orchestrator.tool_output_limit,
        tool_error=orchestrator.tool_error,
        max_malformed_retries=orchestrator.max_malformed_retries,
    )


def _params(orchestrator: OrchestratorConfig, env: EnvConfig, trains: bool) -> SamplingParams:
    sampling = env.sampling or orchestrator.sampling
    return sampling.training_params if trains else sampling.params


@contextlib.asynccontextmanager
async def open_runner(
    orchestrator: OrchestratorConfig,
    environments: Mapping[str, Mapping[str, tuple[EnvConfig, Environment]]],
    sampler: Sampler,
    renderer: Renderer,
    teacher: OpenAI | None = None,
    logs: Path | None = None,
    cluster: ClusterConfig | None = None,
) -> AsyncIterator[EpisodeRunner]:
    """Open the episode runner.

    Args:
        orchestrator: The table [orchestrator], whose `rollout` table says where episodes run.
        environments: The environments by purpose ("train", "eval") and label.
        sampler: The policy's sampler.
        renderer: The renderer of the policy's model.
        teacher: A chat server that generates the training episodes instead of the sampler.
        logs: The folder for the output of environments that run in other processes on this machine. None to discard the
            output.
        cluster: The table [cluster], if the run has one.

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
    from verbatim.rollouts.workers.episodes import RemoteSetup

    setups = {
        (purpose, label): RemoteSetup(
            env=label,
            name=env.id or str(env.import_path),
            args=env.args,
            params=_params(orchestrator, env, purpose == "train"),
            limits=limits_of(orchestrator, env),
            teacher=teacher if purpose == "train" else None,
        )
        for (purpose, label), env in elsewhere.items()
    }
    # Isolated environments need worker processes, even if the backend is "local".
    name = "processes" if rollout.backend == "local" and elsewhere else rollout.backend
    backend = find_backend(name, RUNNERS, what=rollout.what)
    inputs = RunnerInputs(
        setups=setups, sampler=sampler, renderer=renderer, workers=rollout.workers, logs=logs, cluster=cluster
    )
    async with backend.function(inputs, settings_for(rollout, name, backend)) as runner:
        yield runner


def plays_elsewhere(orchestrator: OrchestratorConfig, env: EnvConfig) -> bool:
    """True if this environment's episodes run in other processes."""
    return orchestrator.rollout.backend != "local" or env.isolated


def make_renderer(renderer: RendererConfig, tokenizer: Any) -> Renderer:
    """Make the configured renderer.

    Raises:
        UsageError: there is no such renderer.
        ModelError: the model's tokenizer or chat template does not fit the renderer.
    """
    from verbatim.models.renderers import create_renderer

    return create_renderer(
        renderer.name,
        tokenizer,
        tools=renderer.tools,
        thinking_retention=renderer.thinking_retention,
        history=renderer.history,
        later_system=renderer.later_system,
    )


_SAMPLER_METHODS = ("generate", "update_weights", "prompt_logprobs", "close")
"""The methods that a sampler of any backend must have."""


async def make_sampler(
    config: RunConfig,
    source: str | Path,
    *,
    policy_version: int = 0,
    num_threads: int | None = None,
    logs: Path | None = None,
    sender: WeightSender | None = None,
    cores: CoreShare | None = None,
    kept_sets: bool = True,
) -> Sampler:
    """Make the configured sampler with the weights in `source`.

    Args:
        config: The run's configuration.
        source: A folder in Hugging Face format, or a hub id.
        policy_version: The policy version of these weights.
        num_threads: Number of threads for a sampler in this process, if its settings give no number. None for torch's
            default.
        logs: The folder for the output of sampler processes.
        sender: The trainer, if it sends its weights to the sampler's servers.
        cores: The cores that a sampler in this process shares with the trainer.
        kept_sets: True if the samples may be trained on; they then carry their kept sets if the run needs these.

    Raises:
        ComponentError: the backend did not return a sampler.
    """
    inference = config.inference
    backend = find_backend(inference.backend, SAMPLERS, what=inference.what)
    inputs = backend_inputs(
        config,
        source,
        policy_version=policy_version,
        num_threads=num_threads,
        logs=logs,
        sender=sender,
        cores=cores,
        kept_sets=kept_sets,
    )
    settings = settings_for(inference, inference.backend, backend)
    made = backend.function(inputs, settings)
    sampler: Sampler = await made if inspect.isawaitable(made) else made
    needed = (*_SAMPLER_METHODS, "sleep") if settings.shares_device else _SAMPLER_METHODS
    missing = [name for name in needed if not callable(getattr(sampler, name, None))]
    if missing:
        raise ComponentError(
            f"inference.backend = {inference.backend!r} gave a {type(sampler).__name__} without "
            f"{', '.join(missing)}; expected a verbatim.inference.Sampler"
        )
    return sampler


def backend_inputs(
    config: RunConfig,
    source: str | Path,
    *,
    policy_version: int = 0,
    num_threads: int | None = None,
    logs: Path | None = None,
    sender: WeightSender | None = None,
    cores: CoreShare | None = None,
    kept_sets: bool = True,
) -> BackendInputs:
    """The settings of the run that every inference backend needs. The parameters are the same as for `make_sampler`."""
    lora = config.trainer.lora
    return BackendInputs(
        model=source,
        context_length=config.orchestrator.seq_len,
        policy_version=policy_version,
        num_threads=num_threads,
        cores=cores,
        on_weight_update=config.inference.on_weight_update,
        return_routed_experts=config.inference.return_routed_experts,
        return_kept_sets=kept_sets and config.needs_kept_sets,
        adapter_rank=lora.r if lora is not None else rank_of(source) if is_adapter(source) else None,
        sender=sender,
        logs=logs,
    )


async def ask_servers_of(config: RunConfig) -> None:
    """Ask existing servers whether this run can sample from them, so that a problem is found before a warm start.

    A model that the run builds does not exist yet, so its servers are not queried.

    Raises:
        UsageError: the run cannot sample from a server; the message says what to type.
        SamplerFault: a server does not respond.
    """
    settings = inference_settings(config)
    if config.model.name is None or not isinstance(settings, ServerSettings) or not settings.urls:
        return
    from verbatim.inference.pool.servers import ask_servers

    inputs = backend_inputs(config, find_source(config.model.name))
    if config.inference.backend in SERVERS:
        await ask_servers(import_object(SERVERS[config.inference.backend])(inputs, settings))


def inference_settings(config: RunConfig) -> BackendSettings:
    """The settings of the configured inference backend."""
    inference = config.inference
    return settings_for(inference, inference.backend, find_backend(inference.backend, SAMPLERS, what=inference.what))


def check_backend(config: RunConfig) -> BackendSettings:
    """The settings of the inference backend, after checks against this machine (Python, keys, addresses) and this run.

    Raises:
        UsageError: a check failed; the message names the key, what was found, and what to type.
    """
    settings, lora = inference_settings(config), config.trainer.lora
    rank = None if lora is None else lora.r
    is_here = config.cluster is None or not config.cluster.places("sampler") or not isinstance(settings, TorchSettings)
    try:
        if is_here:  # a node may have a device that this machine does not have
            settings.check()
        settings.check_for(context_length=config.orchestrator.seq_len, adapter_rank=rank)
    except UsageError as error:
        raise UsageError(f"inference.{table_of(config.inference.backend)}.{error}") from error
    return settings


def rollout_settings(config: RunConfig) -> BackendSettings:
    """The settings of the configured rollout backend."""
    rollout = config.orchestrator.rollout
    return settings_for(rollout, rollout.backend, find_backend(rollout.backend, RUNNERS, what=rollout.what))
