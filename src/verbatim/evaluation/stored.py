"""Reads the outcomes of evaluated episodes from a log of them, without building their trajectories."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from verbatim.errors import UsageError
from verbatim.evaluation.outcomes import Outcome, outcome_from_json

_STEP = re.compile(rb'\{"step": (\d+), ')
"""How a line of a log of trajectories begins: a line of another step need not be parsed."""


def read_outcomes(path: Path, steps: Collection[int] | None = None) -> Iterator[tuple[int, Outcome]]:
    """Step and outcome of each episode of an `eval_trajectories.jsonl`; a torn last line is left out.

    Args:
        path: The log.
        steps: Only evaluations after these steps; None = all.

    Raises:
        UsageError: no such file, or a line that is no evaluated episode; names the line.
    """
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                return
            begins = _STEP.match(line)
            if steps is not None and begins is not None and int(begins[1]) not in steps:
                continue
            try:
                record = json.loads(line)
                step, outcome = int(record["step"]), outcome_from_json(record["trajectory"])
            except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
                raise UsageError(f"{path}:{number}: no evaluated episode of ours "
                                 f"({type(error).__name__}: {error})") from None  # fmt: skip
            if steps is None or step in steps:
                yield step, outcome


def evaluated_steps(path: Path) -> list[int]:
    """After which steps a log has evaluations, ascending; empty where there is no such file."""
    if not path.is_file():
        return []
    with path.open("rb") as lines:
        return sorted({int(found[1]) for line in lines if (found := _STEP.match(line)) and line.endswith(b"\n")})
