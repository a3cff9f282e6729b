"""Checks the arguments of a turn other than its messages and tools: agent name, state key, and `trained`."""

from __future__ import annotations

from typing import Any

import numpy as np

from verbatim.core.errors import EnvironmentFault
from verbatim.core.texts import shown
from verbatim.core.user_values import as_atom

LONGEST_STATE_KEY = 10_000
"""Maximum length of a state key in characters. There is a limit because every turn stores a state key."""
LONGEST_NAME = 200
"""Maximum length of an agent's name in characters. There is a limit because the name is part of the session id that is
sent to a server."""


def checked_name(agent: Any) -> str:
    """Return an agent's name as a plain `str`. `AgentScores` and the trajectory identify agents by their names.

    Raises:
        EnvironmentFault: the name is not a string, is empty, or is longer than `LONGEST_NAME`.
    """
    name = as_atom(agent)
    if type(name) is not str or not 0 < len(name) <= LONGEST_NAME:
        raise EnvironmentFault(
            f"agent = {shown(agent, 80)}; expected the agent's name, a string of 1 to {LONGEST_NAME} characters"
        )
    return name


def checked_state_key(key: Any, said: str) -> str | None:
    """Return the key of the state in which a turn begins, as a plain `str`.

    Args:
        key: The environment's value, which is not yet checked.
        said: Start of the error message, such as "state_key returned".

    Raises:
        EnvironmentFault: the key is not a string, or is longer than `LONGEST_STATE_KEY`.
    """
    if key is None:
        return None
    text = as_atom(key)
    if type(text) is not str:
        raise EnvironmentFault(f"{said} {shown(key)}; expected a string or None")
    if len(text) > LONGEST_STATE_KEY:
        raise EnvironmentFault(
            f"{said} a string of {len(text):,} characters; expected at most {LONGEST_STATE_KEY:,}, "
            "for example a hash of it"
        )
    return text


def checked_trained(trained: Any) -> bool:
    """Return `trained` as a plain `bool`.

    Raises:
        EnvironmentFault: the value is not a bool. Truthiness is not used, because the string "no" is truthy.
    """
    if not isinstance(trained, bool | np.bool_):
        raise EnvironmentFault(f"trained = {shown(trained, 80)}; expected True or False")
    return bool(trained)
