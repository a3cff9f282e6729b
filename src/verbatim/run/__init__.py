"""A training run: what it is assembled of, its loop (`orchestrator`), its evaluations (`evaluation`).

In: a configuration. Out: a trained model, a `RunResult`, the run's folder. Read first: `execute.py`, which assembles,
then `orchestrator/loop.py`, which loops. Imports all but `inspection`, `cli`.

Importing the package imports nothing of it: `verbatim.run` is the function below, whatever of the package is imported
later, and the modules are imported by their whole names, `from verbatim.run.execute import execute`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verbatim.logs.monitors.monitor import Monitor
    from verbatim.run.entry import Config
    from verbatim.run.result import RunResult


def run(
    config: Config,
    *,
    resume: bool | str | Path = False,
    fork: str | Path | None = None,
    fresh: Sequence[str] = (),
    environments: Mapping[str, Any] | None = None,
    monitors: Sequence[Monitor] = (),
    quiet: bool = False,
    **settings: Any,
) -> RunResult:
    """Run what `verbatim rl` runs, to its end: `verbatim.run("run.toml")`, `verbatim.run({"model": ..., ...})`.

    This is `verbatim.run.entry.run`, which says what the arguments are; it is imported when it is called.
    """
    from verbatim.run import entry

    return entry.run(
        config,
        resume=resume,
        fork=fork,
        fresh=fresh,
        environments=environments,
        monitors=monitors,
        quiet=quiet,
        **settings,
    )
