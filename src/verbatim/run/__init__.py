"""A training run: how it is assembled, its training loop (`orchestrator`), its evaluations (`evaluation`).

Input: a configuration. Output: a trained model, a `RunResult` and the run folder. Read first: `execute.py`, which
assembles a run, then `orchestrator/loop.py`, the training loop. Imports all but `inspection` and `cli`.

`verbatim/__init__.py` binds the name `verbatim.run` to the function below instead of this package. Python binds that
name to the package only when the package is first loaded, so later imports of the package's modules do not change it.
Importing the package imports none of its modules; import them by their full names: `from verbatim.run.execute import
execute`.
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
    """Run a configuration to its end, as `verbatim rl` does: `verbatim.run("run.toml")`,
    `verbatim.run({"model": ..., ...})`.

    The arguments are documented at `verbatim.run.entry.run`.
    """
    # Imported here so that `import verbatim` stays fast: the entry imports everything that a run needs.
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
