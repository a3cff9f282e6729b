"""Reads a run's evaluated episodes, one Parquet file per evaluation, without building their trajectories."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from verbatim.core.errors import UsageError
from verbatim.core.imports import refuse_without
from verbatim.logs.monitors.trajectory_log import EVALUATIONS
from verbatim.run.evaluation.evaluated_episode import EvaluatedEpisode, evaluated_episode_from_json


def read_evaluated_episodes(run: Path, steps: Collection[int] | None = None) -> Iterator[tuple[int, EvaluatedEpisode]]:
    """Yield the step and the result of each evaluated episode in a run folder.

    Args:
        run: The run folder.
        steps: Only evaluations after these steps; None for all evaluations.

    Raises:
        UsageError: a file does not contain evaluated episodes (the message names the file), or is a link; or pyarrow is
            missing.
    """
    for step, path in evaluation_files(run).items():
        if steps is None or step in steps:
            from verbatim.logs.outcomes.files import read_records

            for record in read_records(path):
                try:
                    outcome = evaluated_episode_from_json(record)
                except (AttributeError, KeyError, TypeError, ValueError) as error:
                    raise UsageError(
                        f"{path}: not an evaluated episode of Verbatim ({type(error).__name__}: {error})"
                    ) from None
                yield step, outcome


def evaluation_files(run: Path) -> Mapping[int, Path]:
    """The files of a run's evaluations by step, ascending.

    Raises:
        UsageError: there are Parquet files but pyarrow is missing, or a file is a link.
    """
    folder = run / EVALUATIONS
    if not folder.is_dir():
        return {}
    refuse_without("pyarrow", extra="train", what=f"reading {folder}")
    from verbatim.logs.outcomes.files import own_files_in

    return own_files_in(folder)
