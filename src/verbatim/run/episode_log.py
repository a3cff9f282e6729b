"""Keeps the episodes of `verbatim eval` as JSON lines, so that the command typed again goes on where it stopped.

A line is `{"format": 1, "step": 120, "trajectory": {...}, "evaluation": {"model": ..., "fingerprint": ...,
"digest": ..., "success": ..., "settings": {...}}}`: whatever reads the trajectories of a run reads these.
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
    """What the episodes of a model on an environment depend on."""

    model: EvalModel
    env: str
    settings: Mapping[str, Any]
    """By the configuration's keys: a file holds episodes of one kind for each model and environment."""
    digests: Mapping[str, str]
    """Of the content of each example, by its id."""


class EpisodeLog:
    """Knows which episodes are played, and appends what gets played. For one process at a time.

    Episodes that failed are taken out when the file is opened: they are played again.

    Args:
        path: The file, made if it is not there; None keeps nothing.
        models: Those that are evaluated; what the file holds of others stays as it is.

    Raises:
        UsageError: another process writes it, or it holds something else.
    """

    def __init__(self, path: Path | None, models: Collection[EvalModel]) -> None:
        self.path = path
        self._lines: KeptLines | None = None
        self._played: dict[tuple[str, str], dict[tuple[str, int], tuple[str, Mapping[str, Any], EvaluatedEpisode]]] = {}
        self.num_failed_before = 0
        """Failed episodes that were taken out."""
        if path is None:
            return
        self._models = {model.fingerprint for model in models}
        self._lines = KeptLines(path, what="episode that verbatim eval can go on from", take_in=self._take_in)
        self.num_failed_before = self._lines.num_failed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lines is not None:
            self._lines.close(keeps_empty=False)  # where nothing was played, the command leaves nothing

    def played(self, conditions: Conditions) -> dict[tuple[str, int], EvaluatedEpisode]:
        """The episodes that need not be played, by example and number.

        Raises:
            UsageError: they were played under other conditions; says which.
        """
        found = {}
        kept = self._played.get((conditions.model.fingerprint, conditions.env), {})
        for (example_id, number), (digest, settings, outcome) in kept.items():
            if settings != plain(conditions.settings):
                raise UsageError(
                    f"{self.path} holds episodes of {conditions.model.label} on {conditions.env} under "
                    f"other conditions ({_changes(settings, plain(conditions.settings))}); type them "
                    "again, or name another --out file"
                )
            if conditions.digests.get(example_id, digest) != digest:
                raise UsageError(
                    f"{self.path} holds episodes of another example with the id {example_id!r} of "
                    f"{conditions.env}; name another --out file"
                )
            found[example_id, number] = outcome
        return found

    def write(self, conditions: Conditions, trajectory: Trajectory, success: bool) -> EvaluatedEpisode:
        """Append one; what it came to.

        Raises:
            OSError: the system refused to write.
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
        """Its JSON; where its messages or its info are none, the rest of it."""
        record: dict[str, Any] = plain(trajectory_to_json(trajectory))
        try:
            json.dumps(record, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            reason = f"messages and info were not written: {error_text(error)}"
            logger.error("episode %s of %r: %s", trajectory.trajectory_id, trajectory.env, reason)
            record = plain(trajectory_to_json(trajectory.replace(messages=(), tools=(), info={NOT_WRITTEN: reason})))
        return record

    def _take_in(self, record: Mapping[str, Any]) -> bool:
        """Take in what is there; whether it is a failure that is played again."""
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
