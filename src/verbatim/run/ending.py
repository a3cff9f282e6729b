"""Summarises a run for the monitors when its process ends, from the metrics log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from verbatim.core.errors import UsageError
from verbatim.core.records.failed import MAX_FAILED
from verbatim.logs.checkpoints import RunFolder
from verbatim.logs.monitors.metrics_log import read_history
from verbatim.run.summary import summary_of

logger = logging.getLogger(__name__)

RunState = Literal["finished", "stopped", "failed"]
"""How a run ended. "finished": all steps were taken; "stopped": it ended early on request; "failed": an error ended
it."""

_LEDGER = "ledger/"
"""The prefix of the ledger's metrics."""


def ending(
    folder: RunFolder,
    best_constant: Mapping[str, float],
    *,
    state: RunState,
    seconds: float,
    max_failed: float = MAX_FAILED,
    forked_at: int = -1,
) -> dict[str, Any]:
    """The argument of `Monitor.on_end`, as plain values.

    Args:
        folder: The run folder. If its metrics log cannot be read, this is logged, and the values from it are left out.
        best_constant: Same as for `summary_of`.
        state: How the process ended.
        seconds: Wall-clock time of the run, over all its processes.
        max_failed: Same as for `summary_of`.
        forked_at: Same as for `summary_of`.

    Returns:
        `folder`, the absolute path; `state`; `steps`, the number of steps done; `seconds`; `metrics` of the last step;
        `evals`, the metrics of this run's last evaluation by environment; `ledger`, the sampled tokens by outcome;
        `results`, the contents of `summary.json`.
    """
    metrics: Mapping[str, Any] = {}
    evals: dict[str, Mapping[str, Any]] = {}
    results: Mapping[str, Any] = {}
    steps = 0
    try:
        history, evaluated = read_history(folder.metrics)
        steps, metrics = history[-1] if history else (0, {})
        # A fork's log begins with the rows of the forked run: evaluations up to the fork do not belong to this run.
        evals = {env: rows[-1][1] for env, rows in evaluated.items() if rows[-1][0] > forked_at}
        results = summary_of(folder.metrics, best_constant, max_failed=max_failed, forked_at=forked_at)
    except (UsageError, OSError) as error:
        logger.error("the summary for the monitors is incomplete: %s", error)
    ledger = {name.removeprefix(_LEDGER): value for name, value in metrics.items() if name.startswith(_LEDGER)}
    return {
        "folder": str(folder.path.resolve()),
        "state": state,
        "steps": steps,
        "seconds": round(seconds, 1),
        "metrics": metrics,
        "evals": evals,
        "ledger": ledger,
        "results": results,
    }
