"""Stores the episodes of `verbatim eval` as JSON lines, so that running the command again continues where it stopped.

A line is `{"format": 1, "step": 120, "trajectory": {...}, "evaluation": {"model": ..., "fingerprint": ...,
"digest": ..., "success": ..., "settings": {...}}}`. Programs that read the trajectories of a run can read these lines.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from verbatim.core.errors import UsageError
from verbatim.core.texts import error_text
from verbatim.core.trajectory_json import NOT_WRITTEN, plain, trajectory_to_json
from verbatim.core.types import Trajectory
from verbatim.run.eval_models import EvalModel
from verbatim.run.evaluation.evaluated_episode import EvaluatedEpisode, evaluated_episode_from_json
from verbatim.run.kept_lines import KeptLines

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Everything that the episodes of one model on one environment depend on."""

    model: EvalModel
    env: str
    settings: Mapping[str, Any]
    """The settings by configuration key. In a file, all episodes of a model on an environment share them."""
    digests: Mapping[str, str]
    """A digest of each example's content, by example id."""


class EpisodeLog:
    """The episodes played so far; new episodes are appended. One process at a time may open a file.

    Opening the file removes the episodes that failed, so that they are played again.

    Args:
        path: The file, created if missing; None to store nothing.
        models: The models being evaluated. Episodes of other models stay in the file untouched.

    Raises:
        UsageError: another process is writing the file, or the file contains something other than episodes.
    """

    def __init__(self, path: Path | None, models: Collection[EvalModel]) -> None:
        self.path = path
        self._lines: KeptLines | None = None
        self._played: dict[tuple[str, str], dict[tuple[str, int], tuple[str, Mapping[str, Any], EvaluatedEpisode]]] = {}
        self.num_failed_before = 0
        """Number of failed episodes that were removed from the file."""
        if path is None:
            return
        self._models = {model.fingerprint for model in models}
        self._lines = KeptLines(path, what="an episode of verbatim eval", take_in=self._take_in)
        self.num_failed_before = self._lines.num_failed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lines is not None:
            self._lines.close(keeps_empty=False)  # if nothing was played, no file is left behind

    def played(self, conditions: Conditions) -> dict[tuple[str, int], EvaluatedEpisode]:
        """The stored episodes, by example id and sample index; these need not be played again.

        Raises:
            UsageError: the episodes were played under different conditions; the message lists the differences.
        """
        found = {}
        kept = self._played.get((conditions.model.fingerprint, conditions.env), {})
        for (example_id, number), (digest, settings, outcome) in kept.items():
            if settings != plain(conditions.settings):
                raise UsageError(
                    f"{self.path} holds episodes of {conditions.model.label} on {conditions.env} under "
                    f"other conditions ({_changes(settings, plain(conditions.settings))}); use the "
                    "earlier conditions, or name another --out file"
                )
            if conditions.digests.get(example_id, digest) != digest:
                raise UsageError(
                    f"{self.path} holds episodes of another example with the id {example_id!r} of "
                    f"{conditions.env}; name another --out file"
                )
            found[example_id, number] = outcome
        return found

    def write(self, conditions: Conditions, trajectory: Trajectory, success: bool) -> EvaluatedEpisode:
        """Append an episode, and return its result.

        Raises:
            OSError: the file system refused the write.
        """
        record = self._record(trajectory)
        outcome = evaluated_episode_from_json(record, success)
        if self._lines is not None:
            self._lines.write(
                {
                    "step": conditions.model.step,
                    "trajectory": record,
                    "evaluation": {
                        "model": conditions.model.label,
                        "fingerprint": conditions.model.fingerprint,
                        "digest": conditions.digests[trajectory.example_id],
                        "success": outcome.success,
                        "settings": conditions.settings,
                    },
                }
            )
        return outcome

    def _record(self, trajectory: Trajectory) -> dict[str, Any]:
        """The trajectory as JSON; without messages and info if these cannot be written as JSON."""
        record: dict[str, Any] = plain(trajectory_to_json(trajectory))
        try:
            json.dumps(record, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            reason = f"messages and info were not written: {error_text(error)}"
            logger.error("episode %s of %r: %s", trajectory.trajectory_id, trajectory.env, reason)
            record = plain(trajectory_to_json(trajectory.replace(messages=(), tools=(), info={NOT_WRITTEN: reason})))
        return record

    def _take_in(self, record: Mapping[str, Any]) -> bool:
        """Read one stored episode; True if the episode failed and is to be played again."""
        about = record["evaluation"]
        of, digest, settings = about["fingerprint"], about["digest"], about["settings"]
        outcome = evaluated_episode_from_json(record["trajectory"], about["success"])
        if of not in self._models:
            return False
        if outcome.error is None:
            kept = self._played.setdefault((of, outcome.env), {})
            kept[outcome.example_id, outcome.sample_index] = (digest, settings, outcome)
        return outcome.error is not None


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """
    >>> _changes({"seed": 1, "max_turns": 4}, {"seed": 2, "max_turns": 4, "renderer": "auto"})
    'seed: 1 there, 2 now; renderer: not set there, auto now'
    """
    return "; ".join(
        f"{key}: {before.get(key, 'not set')} there, {now.get(key, 'not set')} now"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key)
    )
