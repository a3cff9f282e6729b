"""Creates a run's environments once, reads the conversations to imitate, and checks both before anything is started."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbatim.config.schema import EnvConfig, RunConfig
from verbatim.core.errors import (
    ComponentError,
    ConfigError,
    EnvironmentFault,
    ModelError,
    NoDemonstrations,
    TemplateFault,
    UsageError,
)
from verbatim.core.trajectories import BuiltSamples, build
from verbatim.core.types import Trajectory
from verbatim.core.user_values import why_refused
from verbatim.environments import ENVIRONMENTS
from verbatim.environments.environment import Demonstrates, Demonstration, Environment
from verbatim.environments.resolve import create_environment, demonstrations_of, examples_of, wrong_conversation
from verbatim.environments.sources import read_json_lines
from verbatim.models.renderers.renderer import Renderer
from verbatim.models.renderers.tool_support import USE_HERMES
from verbatim.rollouts import derive_seed, trajectory_from_messages

logger = logging.getLogger(__name__)

CORPUS = 2000
"""Number of demonstrations on which the tokenizer of a [model.build] is trained."""
_TRIED = 50
"""Number of warm-start conversations that are rendered as a check, evenly spread over all of them. Every command that
checks a run renders them, and rendering 3,000 conversations would take 6 s."""


@dataclass(frozen=True, kw_only=True)
class ImitatedConversation(Demonstration):
    """A conversation to imitate."""

    env: str = ""
    """The label of the conversation's environment; empty if it is from a file."""
    where: str
    """The conversation's name in messages: file and line, or environment and number."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Environments:
    """The environments of a run, each created once."""

    train: Mapping[str, tuple[EnvConfig, Environment]]
    """The training environments with their tables, by label."""
    eval: Mapping[str, tuple[EnvConfig, Environment]]
    """The evaluated environments, by label; empty without an [orchestrator.eval] table."""

    @property
    def by_label(self) -> dict[str, Environment]:
        """The training environments by label."""
        return {label: environment for label, (_, environment) in self.train.items()}


def make_environments(config: RunConfig, table: Mapping[str, Any] = ENVIRONMENTS) -> Environments:
    """Import and create every environment that the configuration names. `table` has the environments by id.

    Raises:
        ComponentError: an environment cannot be imported or created.
        ConfigError: two environments have the same name.
    """
    orchestrator = config.orchestrator
    train = _make(orchestrator.train.env, "orchestrator.train.env", table)
    if orchestrator.eval is None:
        return Environments(train=train, eval={})
    return Environments(train=train, eval=_make(orchestrator.eval.env, "orchestrator.eval.env", table) or train)


def _make(envs: Sequence[EnvConfig], where: str, table: Mapping[str, Any]) -> dict[str, tuple[EnvConfig, Environment]]:
    made: dict[str, tuple[EnvConfig, Environment]] = {}
    for env in envs:
        if env.label in made:
            raise ConfigError(f'{where}: two environments are called {env.label!r}; give one of them a name = "..."')
        made[env.label] = (env, create_environment(env.id or str(env.import_path), env.args, table))
    return made


def demonstrations(environments: Environments, count: int, seed: int) -> list[ImitatedConversation]:
    """Scripted conversations from the training environments that provide them, at least `count` in total.

    Raises:
        ComponentError: no environment provides demonstrations.
        NoDemonstrations: the environments that support demonstrations provide none with their current settings.
    """
    everyone = environments.by_label
    seeds = {label: derive_seed(seed, "demonstrations", label) % 2**32 for label in everyone}
    # If no environment provides demonstrations, all are asked anyway: the error then comes from an environment and
    # names it.
    offering = (
        {label: env for label, env in everyone.items() if _first_demonstration(env, label, seeds[label]) is not None}
        or {label: env for label, env in everyone.items() if isinstance(env, Demonstrates)}
        or everyone
    )
    share = -(-count // len(offering))
    return [
        conversation
        for label, env in offering.items()
        for conversation in as_conversations(
            demonstrations_of(env, label, share, seeds[label]), label, f"demonstrations({share}, {seeds[label]})"
        )
    ]


def as_conversations(shown: Sequence[Demonstration], env: str, call: str) -> list[ImitatedConversation]:
    """An environment's demonstrations with their numbers. `call` is the call that returned them, for messages."""
    return [
        ImitatedConversation(
            messages=each.messages, tools=each.tools, env=env, where=f"environment {env!r}: number {n} of {call}"
        )
        for n, each in enumerate(shown)
    ]


def read_conversations(path: Path) -> list[ImitatedConversation]:
    """Read a file with rows of `{"messages": [...], "tools": [...]}`.

    Raises:
        UsageError: there is no such file, or a line is not a conversation; the message names the line.
    """
    conversations: list[ImitatedConversation] = []
    for number, row in read_json_lines(path, "conversation").items():
        messages, tools = row.get("messages"), row.get("tools") or []
        if (why := why_refused(row) or wrong_conversation(messages, tools)) is not None:
            raise UsageError(f'{path}:{number}: expected {{"messages": [{{"role": ..., "content": ...}}, ...]}}; {why}')
        conversations.append(ImitatedConversation(messages=row["messages"], tools=tools, where=f"{path}:{number}"))
    return conversations


def to_imitate(config: RunConfig, environments: Environments) -> list[ImitatedConversation]:
    """The conversations of the warm start; empty if there is no warm start."""
    settings = config.warm_start
    if settings is None:
        return []
    if settings.data is not None:
        return read_conversations(settings.data)
    return demonstrations(environments, settings.conversations, config.seed)


def imitated(renderer: Renderer, conversation: ImitatedConversation, name: str = "") -> Trajectory:
    """The conversation as a trajectory to imitate.

    Raises:
        ComponentError: the conversation cannot be rendered, or the result could not have been sampled; the message
            names the conversation.
    """
    try:
        return trajectory_from_messages(
            renderer, conversation.messages, conversation.tools or None, trajectory_id=name, env=conversation.env
        )
    except (UsageError, EnvironmentFault, TemplateFault) as error:
        raise ComponentError(f"{conversation.where}: {error}") from error


def imitated_samples(
    config: RunConfig, conversations: Sequence[ImitatedConversation], renderer: Renderer
) -> Iterator[BuiltSamples]:
    """The training samples of each conversation, cut to `seq_len`.

    Raises:
        ComponentError: as for `imitated`.
        UsageError: raised after the last conversation if no conversation fits.
    """
    fits = False
    for number, conversation in enumerate(conversations):
        trajectory = imitated(renderer, conversation, f"demonstration-{number}")
        built = build(trajectory, max_length=config.orchestrator.seq_len, needs_logprobs=False)
        fits |= bool(built.samples)
        yield built
    if conversations and not fits:
        raise UsageError(f"warm_start: no conversation fits seq_len = {config.orchestrator.seq_len}; raise it")


def check_imitation(config: RunConfig, conversations: Sequence[ImitatedConversation], renderer: Renderer) -> None:
    """Try `_TRIED` of the conversations. Refuse the warm start if one of these would fail, or if none of these fits.
    The warm start itself reports faults in the other conversations, with the same message.

    Raises:
        ComponentError, UsageError: as for `imitated_samples`.
    """
    for _ in imitated_samples(config, conversations[:: -(-len(conversations) // _TRIED) or 1], renderer):
        pass


def check_environments(config: RunConfig, environments: Environments) -> None:
    """Refuse, before a run folder is created, what would otherwise fail after minutes of preparation.

    Raises:
        ConfigError: a data file does not exist.
        ComponentError: an environment has no examples, or two examples with the same id.
    """
    for split, made in (("train", environments.train), ("eval", environments.eval)):
        for label, (_, environment) in made.items():
            examples_of(environment, label, split)
    warm_start = config.warm_start
    if warm_start is not None and warm_start.data is not None and not warm_start.data.is_file():
        raise ConfigError(f"warm_start.data: there is no file {warm_start.data}")


def check_tools(config: RunConfig, environments: Environments, renderer: Renderer) -> None:
    """Refuse, before a run folder is created, a chat template that leaves out an environment's tools.

    Tools are known only when an episode starts; before that, only demonstrations contain them. Without demonstrations,
    a template without tools leads to a warning here, and the first episode is refused.

    Raises:
        ComponentError: the template leaves tools out; the message names the environment, what is left out, and what to
            do.
    """
    for label, environment in environments.by_label.items():
        shown = _first_demonstration(environment, label, derive_seed(config.seed, "demonstrations", label) % 2**32)
        if shown is not None:
            try:
                renderer.render_ids(shown.messages, shown.tools or None, add_generation_prompt=False)
            except (ModelError, EnvironmentFault, TemplateFault) as error:
                raise ComponentError(f"environment {label!r}: {error}") from error
        else:
            lacks = getattr(getattr(renderer, "tool_support", None), "lacks", ())
            if lacks:
                logger.warning(
                    "the model's chat template %s; if environment %r has tools, its first episode is refused: %s",
                    " and ".join(lacks),
                    label,
                    USE_HERMES,
                )


def _first_demonstration(environment: Environment, label: str, seed: int) -> Demonstration | None:
    """The environment's first demonstration; None if it provides no demonstrations at all, or no demonstrations with
    its current settings."""
    if not isinstance(environment, Demonstrates):
        return None
    try:
        return next(iter(demonstrations_of(environment, label, 1, seed)), None)
    except NoDemonstrations:
        return None
