"""From a configuration to everything a run is made of. The only place that knows all the parts."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbatim.cli.conversations import Conversation
from verbatim.cli.tables import component_tables
from verbatim.config import import_object, resolve
from verbatim.config.schema import (
    ComponentConfig,
    EnvConfig,
    OrchestratorConfig,
    RendererConfig,
    RunConfig,
    SamplingConfig,
)
from verbatim.curriculum import ExampleSchedule, PoolRules
from verbatim.environments.base import Demonstrates, Demonstration, Environment
from verbatim.environments.resolve import create_environment, demonstrations_of, examples_of
from verbatim.errors import ComponentError, ConfigError, EnvironmentFault, ModelError, TemplateFault
from verbatim.inference import SAMPLERS
from verbatim.inference.base import Sampler, SamplingParams
from verbatim.inference.chat.client import Connection, OpenAI
from verbatim.monitors.base import OpenMonitor
from verbatim.orchestrator.assemble import GroupRules
from verbatim.orchestrator.dispatcher import Dispatcher
from verbatim.orchestrator.staleness import capped_settings
from verbatim.renderers.base import Renderer
from verbatim.renderers.tool_support import USE_HERMES
from verbatim.rollouts import EpisodeLimits, EpisodeRunner, EpisodeTally, LocalRunner, RolloutSetup, derive_seed
from verbatim.trajectories import Ledger
from verbatim.types import Message

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Environments:
    """The environments of a run, made once."""

    train: Mapping[str, tuple[EnvConfig, Environment]]
    """By label."""
    eval: Mapping[str, tuple[EnvConfig, Environment]]
    """By label; empty without an [orchestrator.eval] table."""

    @property
    def by_label(self) -> dict[str, Environment]:
        """Those that are trained on."""
        return {label: environment for label, (_, environment) in self.train.items()}


def make_environments(config: RunConfig) -> Environments:
    """Import and construct every environment that the configuration names.

    Raises:
        ComponentError: one that cannot be imported or made.
        ConfigError: two with the same name.
    """
    orchestrator = config.orchestrator
    train = _make(orchestrator.train.env, "orchestrator.train.env")
    if orchestrator.eval is None:
        return Environments(train=train, eval={})
    return Environments(train=train, eval=_make(orchestrator.eval.env, "orchestrator.eval.env") or train)


def _make(envs: Sequence[EnvConfig], where: str) -> dict[str, tuple[EnvConfig, Environment]]:
    made: dict[str, tuple[EnvConfig, Environment]] = {}
    for env in envs:
        if env.label in made:
            raise ConfigError(f"{where}: two environments are called {env.label!r}; give one of them a name = \"...\"")
        made[env.label] = (env, create_environment(env.id or str(env.import_path), env.args))
    return made


def demonstrations(environments: Environments, count: int, seed: int) -> list[tuple[str, Demonstration]]:
    """Scripted conversations of the training environments that offer them, at least `count` in all, with labels.

    Raises:
        ComponentError: no environment offers any.
    """
    everyone = environments.by_label
    offering = {label: env for label, env in everyone.items() if isinstance(env, Demonstrates)} or everyone
    share = -(-count // len(offering))
    return [
        (label, demonstration)
        for label, environment in offering.items()
        for demonstration in demonstrations_of(
            environment, label, share, derive_seed(seed, "demonstrations", label) % 2**32
        )
    ]


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


def make_monitors(config: RunConfig) -> dict[str, OpenMonitor]:
    """The monitors of [monitor], by the name of their table; none of them is started.

    Raises:
        UsageError: a package that one of them needs is missing, or it refuses its knobs.
    """
    table = component_tables().monitors
    return {
        key: resolve(component, table, what="monitor", where=f"monitor.{key}")
        for key, component in config.monitor.components.items()
    }


_READ_NO_TURN_REWARDS = ("default", "normalized", "rloo")
"""Advantages that are made of each rollout's reward alone."""


def make_rules(config: RunConfig, environments: Environments) -> dict[str, GroupRules]:
    """How each environment's groups become samples."""
    tables, orchestrator = component_tables(), config.orchestrator
    off = _filters_without_sense(config)
    filters: dict[str, Any] = {}
    for i, component in enumerate(orchestrator.filters):
        if component.type in off:
            continue
        name = _filter_name(component, filters)
        rule = resolve(component, tables.filters, what="filter", where=f"orchestrator.filters.{i}")
        if getattr(rule, "action", None) not in ("drop", "monitor"):
            raise ComponentError(
                f'orchestrator.filters.{i}: {name} has no action "drop" or "monitor"; expected a frozen dataclass with '
                "an `action` field and `__call__(trajectory) -> bool`"
            )
        filters[name] = rule
    return {
        label: GroupRules(
            advantage=resolve(
                env.advantage or orchestrator.advantage,
                tables.advantages,
                what="advantage",
                where="orchestrator.advantage",
            ),
            length_penalty=env.length_penalty or orchestrator.length_penalty,
            filters=filters,
            strategy=env.trajectory_strategy or orchestrator.trajectory_strategy,
            on_break=env.on_break or orchestrator.on_break,
            max_length=orchestrator.seq_len,
            max_off_policy_steps=orchestrator.max_off_policy_steps,
            needs_logprobs=orchestrator.training_mode != "sft",
            needs_rewards=config.needs_rewards,
            reads_turn_rewards=(
                orchestrator.training_mode != "rl"  # nothing is promised of rewards there
                or (env.advantage or orchestrator.advantage).type not in _READ_NO_TURN_REWARDS
            ),
            truncated_sampling=(
                orchestrator.training_mode != "sft" and (env.sampling or orchestrator.sampling).is_truncated
            ),
        )
        for label, (env, _) in environments.train.items()
    }


def _filters_without_sense(config: RunConfig) -> set[str]:
    """With a teacher rollouts teach whatever they earned, and the texts that are imitated have no logprobs."""
    off = {"zero_advantage"} if config.follows_a_teacher else set()
    return off | {"gibberish"} if config.orchestrator.training_mode == "sft" else off


def _filter_name(component: ComponentConfig, taken: Mapping[str, Any]) -> str:
    """What metrics call a filter: a built-in by its type, a custom one by its function or class; numbered from the
    second of one name on.

    Example: two filters "repetition" and one "my_filters.TooLong" are `repetition`, `repetition_2` and `TooLong`.
    """
    name = component.type
    if component.import_path is not None:
        name = component.import_path.replace(":", ".").rpartition(".")[2]
    numbered = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
    return next(candidate for candidate in numbered if candidate not in taken)


def make_dispatcher(
    config: RunConfig, environments: Environments, setups: Mapping[str, RolloutSetup], ledger: Ledger
) -> Dispatcher:
    """What keeps rollouts in flight."""
    orchestrator = config.orchestrator
    _warn_of_useful_flat_groups(config)
    for sentence in capped_settings(orchestrator):
        logger.warning("%s", sentence)
    schedule = ExampleSchedule(
        {label: examples_of(environment, label, "train") for label, environment in environments.by_label.items()},
        {label: env.ratio for label, (env, _) in environments.train.items()},
        seed=derive_seed(config.seed, "schedule"),
        pool_rules=PoolRules(**orchestrator.buffer.model_dump(exclude={"online_difficulty_filtering"})),
    )
    return Dispatcher(
        schedule=schedule,
        setups=setups,
        ledger=ledger,
        group_size=orchestrator.group_size,
        groups_per_batch=orchestrator.batch_size // orchestrator.group_size,
        max_async_level=orchestrator.max_async_level,
        max_off_policy_steps=orchestrator.max_off_policy_steps,
        oversampling_factor=orchestrator.oversampling_factor,
        run_seed=config.seed,
        num_batches=config.max_steps,
        online_difficulty_filtering=(
            orchestrator.buffer.online_difficulty_filtering and orchestrator.training_mode == "rl"
        ),
        needs_rewards=config.needs_rewards,
    )


def _warn_of_useful_flat_groups(config: RunConfig) -> None:
    """Without a baseline, or with a teacher, a group of equal rewards has a gradient, and filtering it out loses it."""
    orchestrator = config.orchestrator
    if not orchestrator.buffer.online_difficulty_filtering or orchestrator.training_mode != "rl":
        return
    if config.follows_a_teacher:
        logger.warning(
            "online difficulty filtering drops groups of equal rewards, which trainer.loss.teacher_tau learns from; "
            "set orchestrator.buffer.online_difficulty_filtering = false"
        )
    for env in orchestrator.train.env:
        advantage = env.advantage or orchestrator.advantage
        if advantage.type == "chunk_returns" and advantage.knobs.get("baseline", "none") == "none":
            logger.warning(
                "environment %r: online difficulty filtering drops groups of equal rewards, which the advantage "
                '"chunk_returns" without a baseline learns from; set baseline = "group", or '
                "online_difficulty_filtering = false", env.label,
            )  # fmt: skip


def check_environments(config: RunConfig, environments: Environments) -> None:
    """Refuse, before a run folder is made, what would only fail after minutes of preparation.

    Raises:
        ConfigError: a data file that is not there.
        ComponentError: an environment without examples, with two of one id, or without demonstrations where the
            configuration needs some.
    """
    for split, made in (("train", environments.train), ("eval", environments.eval)):
        for label, (_, environment) in made.items():
            examples_of(environment, label, split)
    warm_start = config.warm_start
    if warm_start is not None and warm_start.data is not None and not warm_start.data.is_file():
        raise ConfigError(f"warm_start.data: there is no file {warm_start.data}")
    if config.model.build is not None or (warm_start is not None and warm_start.data is None):
        demonstrations(environments, 1, config.seed)


def check_tools(
    config: RunConfig, environments: Environments, renderer: Renderer, data: Sequence[Conversation] = ()
) -> None:
    """Refuse, before a run folder is made, a chat format that leaves out the tools of an environment or of `data`.

    An environment's tools are known when an episode starts; before that, only its demonstrations tell of them. Where
    there are no demonstrations, a format without tools is told in a warning, and the first episode is refused.

    Raises:
        ComponentError: names the environment, what is left out and what to do.
    """
    using = next(((messages, tools) for _, messages, tools in data
                  if tools or any(message.get("tool_calls") for message in messages)), None)  # fmt: skip
    if using is not None:
        _check_shown(renderer, "warm_start.data", *using)
    for label, environment in environments.by_label.items():
        if isinstance(environment, Demonstrates):
            seed = derive_seed(config.seed, "demonstrations", label) % 2**32
            for shown in demonstrations_of(environment, label, 1, seed)[:1]:
                _check_shown(renderer, f"environment {label!r}", shown.messages, shown.tools)
        else:
            lacks = getattr(getattr(renderer, "tool_support", None), "lacks", ())
            if lacks:
                logger.warning(
                    "the model's chat template %s; if environment %r has tools, its first episode is refused: %s",
                    " and ".join(lacks), label, USE_HERMES,
                )  # fmt: skip


def _check_shown(
    renderer: Renderer, where: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> None:
    try:
        renderer.render_ids(messages, tools or None, add_generation_prompt=False)
    except (ModelError, EnvironmentFault, TemplateFault) as error:
        raise ComponentError(f"{where}: {error}") from error


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


def make_loss(config: RunConfig) -> Any:
    """The loss of the training mode, or the custom one that replaces it, with its knobs; a custom function sees each
    trajectory whole and is divided by the trained tokens."""
    from verbatim.losses import Loss

    component = config.trainer.loss
    if config.orchestrator.training_mode != "rl" and component.type != "custom":
        component = _of_mode(config.orchestrator.training_mode, component)
    loss = resolve(component, component_tables().losses, what="loss", where="trainer.loss")
    return loss if isinstance(loss, Loss) else Loss(loss, level="sequence")


def _of_mode(mode: str, default: ComponentConfig) -> ComponentConfig:
    """The loss of mode "opd", which shares the clamp and the KL term with the default one, or "sft"."""
    read = ("kl_tau", "delta") if mode == "opd" else ()
    shared = {name: value for name, value in default.knobs.items() if name in read}
    ignored = sorted(set(default.knobs) - set(shared))
    if ignored:
        logger.warning('training_mode = "%s" does not read trainer.loss.{%s}', mode, ", ".join(ignored))
    return ComponentConfig(type=mode, **shared)
