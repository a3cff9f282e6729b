"""Creates the environments of a run once, reads conversations to imitate, and checks both before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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
from verbatim.core.types import Message
from verbatim.core.user_values import why_refused
from verbatim.environments import ENVIRONMENTS
from verbatim.environments.base import Demonstrates, Demonstration, Environment
from verbatim.environments.resolve import create_environment, demonstrations_of, examples_of
from verbatim.environments.sources import read_json_lines
from verbatim.models.renderers.base import Renderer
from verbatim.models.renderers.tool_support import USE_HERMES
from verbatim.rollouts import derive_seed

logger = logging.getLogger(__name__)

Conversation = tuple[str, Sequence[Message], Sequence[Mapping[str, Any]]]
"""Environment, messages, tool schemas."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Environments:
    """The environments of a run, made once."""

    train: Mapping[str, tuple[EnvConfig, Environment]]
    """By label."""
    eval: Mapping[str, tuple[EnvConfig, Environment]]
    """By label; empty without an [orchestrator.eval] table."""

    @property
    def by_label(self) -> dict[str, Environment]:
        """The training environments by label."""
        return {label: environment for label, (_, environment) in self.train.items()}


def make_environments(config: RunConfig, table: Mapping[str, Any] = ENVIRONMENTS) -> Environments:
    """Import and construct every environment that the configuration names; `table` says what ids stand for.

    Raises:
        ComponentError: one that cannot be imported or made.
        ConfigError: two with the same name.
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


def read_conversations(path: Path) -> list[Conversation]:
    """Rows of `{"messages": [...], "tools": [...]}`.

    Raises:
        UsageError: no such file, or a line that is no conversation; names the line.
    """
    conversations: list[Conversation] = []
    for number, row in read_json_lines(path, "conversation").items():
        try:
            messages: list[Message] = row["messages"]
            if (why := why_refused(row)) is not None:
                raise ValueError(why)
            if not all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in messages):
                raise ValueError("role and content are texts")
            if not any(message["role"] == "assistant" for message in messages):
                raise ValueError("no assistant message to learn from")
            tools = row.get("tools") or []
            if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
                raise ValueError("tools is a list of tool schemas")
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f'{path}:{number}: expected {{"messages": [{{"role": ..., "content": ...}}, ...]}}; {error!r}'
            ) from error
        conversations.append(("", messages, tools))
    return conversations


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
    using = next(
        (
            (messages, tools)
            for _, messages, tools in data
            if tools or any(message.get("tool_calls") for message in messages)
        ),
        None,
    )
    if using is not None:
        _check_shown(renderer, "warm_start.data", *using)
    for label, environment in environments.by_label.items():
        shown = _first_demonstration(config, environment, label)
        if shown is not None:
            _check_shown(renderer, f"environment {label!r}", shown.messages, shown.tools)
        else:
            lacks = getattr(getattr(renderer, "tool_support", None), "lacks", ())
            if lacks:
                logger.warning(
                    "the model's chat template %s; if environment %r has tools, its first episode is refused: %s",
                    " and ".join(lacks),
                    label,
                    USE_HERMES,
                )


def _first_demonstration(config: RunConfig, environment: Environment, label: str) -> Demonstration | None:
    """None where it has none, or shows none with its settings."""
    if not isinstance(environment, Demonstrates):
        return None
    try:
        seed = derive_seed(config.seed, "demonstrations", label) % 2**32
        return next(iter(demonstrations_of(environment, label, 1, seed)), None)
    except NoDemonstrations:
        return None


def _check_shown(
    renderer: Renderer, where: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> None:
    try:
        renderer.render_ids(messages, tools or None, add_generation_prompt=False)
    except (ModelError, EnvironmentFault, TemplateFault) as error:
        raise ComponentError(f"{where}: {error}") from error
