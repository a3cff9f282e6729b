"""Reads the outcomes of a run's evaluated episodes, without building their trajectories.

They are in `evaluations/`, a Parquet file for each evaluation; an earlier version of Verbatim wrote them to
`eval_trajectories.jsonl`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from verbatim.core.disk import refuse_link
from verbatim.core.errors import UsageError
from verbatim.core.imports import refuse_without
from verbatim.logs.monitors.trajectory_log import EVALUATED_LINES, EVALUATIONS
from verbatim.run.evaluation.outcomes import Outcome, outcome_from_json

_STEP = re.compile(rb'\{"step": (\d+), ')
"""How a line of a log of trajectories begins: a line of another step need not be parsed."""


def read_outcomes(run: Path, steps: Collection[int] | None = None) -> Iterator[tuple[int, Outcome]]:
    """Step and outcome of each evaluated episode of a run folder; a torn last line of JSON is left out.

    Args:
        run: The folder.
        steps: Only evaluations after these steps; None = all.

    Raises:
        UsageError: a line or a file that holds no evaluated episodes, and says which; a link; a Parquet file without
            pyarrow.
    """
    refuse_link(run / EVALUATED_LINES)
    if (run / EVALUATED_LINES).is_file():
        yield from _read_lines(run / EVALUATED_LINES, steps)
    for step, path in _files_of(run).items():
        if steps is None or step in steps:
            yield from _read_file(step, path)


def _files_of(run: Path) -> Mapping[int, Path]:
    """The files of a run's evaluations by step."""
    folder = run / EVALUATIONS
    if not folder.is_dir():
        return {}
    refuse_without("pyarrow", extra="train", what=f"reading {folder}")
    from verbatim.logs.fates.files import own_files_in

    return own_files_in(folder)


def _read_file(step: int, path: Path) -> Iterator[tuple[int, Outcome]]:
    from verbatim.logs.fates.files import read_records

    for record in read_records(path):
        try:
            outcome = outcome_from_json(record)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise _no_episode(path, error) from None
        yield step, outcome


def _read_lines(path: Path, steps: Collection[int] | None) -> Iterator[tuple[int, Outcome]]:
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
                raise _no_episode(f"{path}:{number}", error) from None
            if steps is None or step in steps:
                yield step, outcome


def _no_episode(where: object, error: Exception) -> UsageError:
    return UsageError(f"{where}: no evaluated episode of ours ({type(error).__name__}: {error})")


def evaluated_steps(run: Path) -> list[int]:
    """After which steps a run folder has evaluated episodes, ascending.

    Raises:
        UsageError: it has Parquet files, and pyarrow is not there.
    """
    found = set(_files_of(run))
    if (run / EVALUATED_LINES).is_file():
        with (run / EVALUATED_LINES).open("rb") as lines:
            found |= {int(step[1]) for line in lines if (step := _STEP.match(line)) and line.endswith(b"\n")}
    return sorted(found)
