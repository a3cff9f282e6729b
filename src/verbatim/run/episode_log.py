"""Keeps the episodes of `verbatim eval` as JSON lines, so that the command typed again goes on where it stopped.

A line is `{"step": 120, "trajectory": {...}, "evaluation": {"model": ..., "fingerprint": ..., "digest": ..., "success":
..., "settings": {...}}}`: whatever reads the trajectories of a run reads these.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from verbatim.core.disk import rename, sync_descriptor, temporary_beside
from verbatim.core.errors import UsageError
from verbatim.core.texts import error_text
from verbatim.core.trajectory_json import NOT_WRITTEN, plain, trajectory_to_json
from verbatim.core.types import Trajectory
from verbatim.logs.checkpoints.lock import FolderLock
from verbatim.logs.monitors.jsonl import JsonlWriter
from verbatim.run.eval_models import EvalModel
from verbatim.run.evaluation.outcomes import Outcome, outcome_from_json

logger = logging.getLogger(__name__)

_BEGINNING = '{"step": '
"""How a line begins. A torn last line is cut off only if it begins so: a file of something else is left alone."""


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
        self._writer: JsonlWriter | None = None
        self._lock: FolderLock | None = None
        self._played: dict[tuple[str, str], dict[tuple[str, int], tuple[str, Mapping[str, Any], Outcome]]] = {}
        self.num_failed_before = 0
        """Failed episodes that were taken out."""
        if path is None:
            return
        self._models = {model.fingerprint for model in models}
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = FolderLock(path.parent, f".{path.name}.lock")
        except UsageError:
            raise UsageError(
                f"{path} is being written by another process; wait for it to end, or name another --out file"
            ) from None
        try:
            if path.exists():
                self._take_over(path)
            self._writer = JsonlWriter(path)
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None and self._lock is not None:
            self._writer.close()
            if self._writer.mark.size == 0:  # nothing was played: the command leaves nothing
                self._writer.path.unlink(missing_ok=True)
            self._lock.release()

    def played(self, conditions: Conditions) -> dict[tuple[str, int], Outcome]:
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

    def write(self, conditions: Conditions, trajectory: Trajectory, success: bool) -> Outcome:
        """Append one; what it came to.

        Raises:
            OSError: the system refused to write.
        """
        record = self._record(trajectory)
        outcome = outcome_from_json(record, success)
        if self._writer is not None:
            self._writer.write(
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

    def _take_over(self, path: Path) -> None:
        """Read what is there; where something failed, write the file anew without it."""
        rewritten = temporary_beside(path)
        try:
            with path.open(encoding="utf-8") as old, rewritten.open("w", encoding="utf-8") as new:
                for number, line in enumerate(old, start=1):
                    if not line.endswith("\n"):
                        if not line.startswith(_BEGINNING[: len(line)]):
                            raise self._none_of_ours(number)
                    elif self._read(line, number):
                        self.num_failed_before += 1
                    else:
                        new.write(line)
                new.flush()
                sync_descriptor(new.fileno())
            if self.num_failed_before:
                rename(rewritten, path)
        finally:
            rewritten.unlink(missing_ok=True)

    def _read(self, line: str, number: int) -> bool:
        """Take in one line; whether it is a failure that is played again."""
        try:
            record = json.loads(line)
            about = record["evaluation"]
            of, digest, settings = about["fingerprint"], about["digest"], about["settings"]
            outcome = outcome_from_json(record["trajectory"], about["success"])
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            raise self._none_of_ours(number) from None
        if of not in self._models:
            return False
        if outcome.error is None:
            kept = self._played.setdefault((of, outcome.env), {})
            kept[outcome.example_id, outcome.sample_index] = (digest, settings, outcome)
        return outcome.error is not None

    def _none_of_ours(self, number: int) -> UsageError:
        return UsageError(
            f"{self.path}:{number}: no episode that verbatim eval can go on from; name another --out file"
        )


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
