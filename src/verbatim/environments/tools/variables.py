"""Builds the environment variables of a process that is started for a tool or an agent."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from verbatim.core.errors import UsageError
from verbatim.core.redaction import hide, hide_in

EnvFrom = Sequence[str] | Mapping[str, str]
"""Variables to copy from this process to another process: a list of names, or a mapping from the names in the other
process to the names in this process."""


def further_variables(env: Mapping[str, str] | None, env_from: EnvFrom, where: str) -> dict[str, str]:
    """Return the variables that a process gets in addition to the usual variables. Secrets among them are redacted from
    now on.

    Args:
        env: Variables with their values.
        env_from: Names of variables to copy from this process, so that a secret need not be in the configuration.
        where: Name of the process to be started, for errors.

    Raises:
        UsageError: a variable is in both `env` and `env_from`, or is not set in this process.
    """
    if isinstance(env_from, str):
        raise UsageError(f'{where}: env_from = "{env_from}"; expected a list of names: env_from = ["{env_from}"]')
    given = dict(env or {})
    names = dict(env_from) if isinstance(env_from, Mapping) else {name: name for name in env_from}
    for name, own in names.items():
        if name in given:
            raise UsageError(f"{where}: {name} is in both env and env_from; leave one of them out")
        if own not in os.environ:
            raise UsageError(
                f"{where}: env_from names the environment variable {own}, which is not set; type  export "
                f"{own}=...  in the shell that starts this program, and again before a run is resumed"
            )
        hide(os.environ[own])
        given[name] = os.environ[own]
    for name, value in given.items():
        hide_in(name, value)
    return given
