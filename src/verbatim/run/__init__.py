"""A training run: what it is assembled of, its loop (`orchestrator`), its evaluations (`evaluation`).

In: a configuration. Out: a trained model, a `RunResult`, the run's folder. Read first: `execute.py`, which assembles,
then `orchestrator/loop.py`, which loops. Imports all but `inspection`, `cli`.

The package has the name of its function: `verbatim.run("run.toml")` and `verbatim.run({"model": ..., ...})` run what
`verbatim rl` runs, and return a `RunResult`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verbatim.logs.monitors.base import Monitor
    from verbatim.run.entry import Config
    from verbatim.run.result import RunResult


class _RunPackage(ModuleType):
    def __call__(
        self,
        config: Config,
        *,
        resume: bool | str | Path = False,
        environments: Mapping[str, Any] | None = None,
        monitors: Sequence[Monitor] = (),
        quiet: bool = False,
        **settings: Any,
    ) -> RunResult:
        """`verbatim.run.entry.run`."""
        from verbatim.run.entry import run

        return run(config, resume=resume, environments=environments, monitors=monitors, quiet=quiet, **settings)


sys.modules[__name__].__class__ = _RunPackage
