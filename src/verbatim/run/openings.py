"""Checks the opening prompts of a run's examples before anything is trained."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from verbatim.config.schema import RunConfig
from verbatim.core.errors import ConfigError
from verbatim.environments.environment import Environment
from verbatim.environments.resolve import examples_of
from verbatim.models.renderers.renderer import Renderer
from verbatim.rollouts.main_loop import run_in_program
from verbatim.rollouts.openings import Openings, measure_openings
from verbatim.run.environments import Environments
from verbatim.run.rollouts import plays_elsewhere


def check_openings(config: RunConfig, environments: Environments, renderer: Renderer) -> None:
    """Refuse a run in which no episode could begin, or in which no opening prompt leaves room for a completion.

    Stops at the first example that leaves room. Environments whose episodes run in other processes are not checked.

    Raises:
        ConfigError: no episode can begin, or no prompt leaves room; the message names the environment and the split.
        ModelError: the model's chat template cannot render an episode's tools.
    """
    for _ in _measured(config, environments, renderer, is_quick=True):
        pass


def look_at_openings(config: RunConfig, environments: Environments, renderer: Renderer) -> Iterator[str]:
    """One sentence per environment split in which some opening prompts leave no room for a completion, or were not
    measured.

    Measures all examples.

    Raises:
        ConfigError, ModelError: as for `check_openings`.
    """
    for where, openings in _measured(config, environments, renderer, is_quick=False):
        if openings.found is not None:
            yield (
                f"{where}: {openings.found}; nothing is sampled for them, and their rollouts fail as no_turns: "
                "raise orchestrator.seq_len, shorten the prompts, or leave the examples out"
            )
        if openings.left_out is not None:
            yield f"{where}: {openings.left_out}"


def _measured(
    config: RunConfig, environments: Environments, renderer: Renderer, *, is_quick: bool
) -> Iterator[tuple[str, Openings]]:
    """The opening prompts of each environment and split. Refuses environments in which no episode can start, or no
    opening prompt fits."""
    for split, made in (("train", environments.train), ("eval", environments.eval)):
        for label, (env, environment) in made.items():
            if is_quick and plays_elsewhere(config.orchestrator, env):
                continue
            openings = run_in_program(
                measure_openings(
                    _another(environment),
                    examples_of(environment, label, split),
                    seq_len=config.orchestrator.seq_len,
                    renderer=renderer,
                    until_one_fits=is_quick,
                )
            )
            where = f'environment {label!r}, split "{split}"'
            if openings.cannot_begin:
                raise ConfigError(f"{where}: no episode can begin: {openings.first_fault}")
            if openings.none_fits:
                raise ConfigError(f"{where}: {openings.found}; raise orchestrator.seq_len, or shorten the prompts")
            yield where, openings


def _another(environment: Environment) -> Environment:
    """A shallow copy of an environment, because `start` may store objects of this event loop (a connection) on the
    environment, and the run has a different loop. If the environment cannot be copied, the environment itself."""
    try:
        return copy.copy(environment)
    except Exception:  # noqa: BLE001  user code may raise anything
        return environment
