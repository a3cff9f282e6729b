"""Checks what an environment says of a turn beside its messages: who speaks, in which state, and if it is trained."""

from __future__ import annotations

from typing import Any

import numpy as np

from verbatim.core.errors import EnvironmentFault
from verbatim.core.texts import shown
from verbatim.core.user_values import as_atom

LONGEST_STATE_KEY = 10_000
"""Characters of a state's name: every turn keeps one."""
LONGEST_NAME = 200
"""Characters of an agent's name: it is a part of the session that a server is told."""


def checked_name(agent: Any) -> str:
    """An agent's name as Python's own text: `AgentScores` and the record know agents by it.

    Raises:
        EnvironmentFault: it is no text, empty, or longer than `LONGEST_NAME`.
    """
    name = as_atom(agent)
    if type(name) is not str or not 0 < len(name) <= LONGEST_NAME:
        raise EnvironmentFault(
            f"agent = {shown(agent, 80)}; expected the agent's name, a text of 1 to {LONGEST_NAME} characters"
        )
    return name


def checked_state_key(key: Any, said: str) -> str | None:
    """The key of the state that a turn begins in.

    Args:
        key: As the environment gave it.
        said: Begins the message: "state_key returned".

    Raises:
        EnvironmentFault: it is no text, or longer than `LONGEST_STATE_KEY`.
    """
    if key is None:
        return None
    text = as_atom(key)
    if type(text) is not str:
        raise EnvironmentFault(f"{said} {shown(key)}; expected a string or None")
    if len(text) > LONGEST_STATE_KEY:
        raise EnvironmentFault(
            f"{said} a text of {len(text):,} characters; expected at most {LONGEST_STATE_KEY:,}, "
            "for example a hash of it"
        )
    return text


def checked_trained(trained: Any) -> bool:
    """Whether a turn is trained.

    Raises:
        EnvironmentFault: it is neither True nor False: "no" would be true.
    """
    if not isinstance(trained, bool | np.bool_):
        raise EnvironmentFault(f"trained = {shown(trained, 80)}; expected True or False")
    return bool(trained)
