"""Makes the environment variables of a process that is started for a tool or an agent."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from verbatim.core.errors import UsageError
from verbatim.core.redaction import hide, hide_in

EnvFrom = Sequence[str] | Mapping[str, str]
"""Variables of this process that another one gets: their names, or `{name there: name here}`."""


def further_variables(env: Mapping[str, str] | None, env_from: EnvFrom, where: str) -> dict[str, str]:
    """The variables that a process gets beside the usual ones. Keys among them are redacted from now on.

    Args:
        env: Names and values.
        env_from: Names alone; the values are those of this process's variables.
        where: What is started, for errors.

    Raises:
        UsageError: one that is named in both, or that this process does not have.
    """
    if isinstance(env_from, str):
        raise UsageError(f'{where}: env_from = "{env_from}"; expected a list of names: env_from = ["{env_from}"]')
    given = dict(env or {})
    names = dict(env_from) if isinstance(env_from, Mapping) else {name: name for name in env_from}
    for name, own in names.items():
        if name in given:
            raise UsageError(f"{where}: {name} stands in env and in env_from; leave one of them out")
        if own not in os.environ:
            raise UsageError(
                f"{where}: env_from names the environment variable {own}, which is not set; type  export "
                f"{own}=...  in the shell that starts this, also for a run that goes on"
            )
        hide(os.environ[own])
        given[name] = os.environ[own]
    for name, value in given.items():
        hide_in(name, value)
    return given
