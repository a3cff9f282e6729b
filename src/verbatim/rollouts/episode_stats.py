"""Counts how the episodes of a run ended, and logs the first failure of each kind immediately."""

from __future__ import annotations

import logging
import re
import threading
import traceback
from collections import Counter
from collections.abc import Mapping

from verbatim.core.redaction import without_secrets
from verbatim.core.texts import MOST_READ
from verbatim.core.types import Trajectory

logger = logging.getLogger(__name__)

TRACEBACK = "traceback"
"""Key of `Trajectory.info` whose value is the last lines of a traceback."""
TOOL_FAULTS = "tool_faults"
"""Key of `Trajectory.info` for tools that raised or timed out: a count and the first message for each failure kind."""
NO_TURNS = "no_turns"
"""Failure kind of an episode in which the policy sampled nothing. It is logged once per example and not only once per
run, because the example's prompt is usually the cause."""
MOST_SAID = 50
"""Maximum number of failures that are logged individually, so that failures with different messages cannot fill the
log."""
_TAIL_LINES, _TAIL_CHARACTERS = 12, 2000


class EpisodeStats:
    """Counts episodes and their failures. A failure is logged when it happens, and not only counted in the metrics. If
    a run trains nothing, these counts explain why."""

    def __init__(self, purpose: str = "train") -> None:
        self.purpose = purpose
        """Purpose of the episodes, for the log: "train" or "eval"."""
        self.num_episodes = 0
        """Number of episodes that have ended, including failed episodes."""
        self.failures: Counter[str] = Counter()
        """Number of failed episodes by kind (see `failure_kind`)."""
        self.tool_faults: Counter[str] = Counter()
        """Number of tool calls that raised or timed out, by kind."""
        self.unmeasured: Counter[str] = Counter()
        """Number of evaluations that were skipped because the environment failed to provide their examples, by kind."""
        self._said: set[tuple[str, str]] = set()
        """The failures that are already logged, each as (kind, ""). A failure of the kind `NO_TURNS` is (kind, example
        id)."""
        self._lock = threading.Lock()

    @property
    def num_failed(self) -> int:
        """Number of failed episodes."""
        return sum(self.failures.values())

    def ended(self, trajectory: Trajectory) -> None:
        """Count an episode that has ended, and its failures."""
        with self._lock:
            self.num_episodes += 1
        faults = trajectory.info.get(TOOL_FAULTS)
        if isinstance(faults, Mapping):
            for kind, fault in faults.items():
                self._count(
                    self.tool_faults,
                    kind,
                    fault["count"],
                    trajectory,
                    f"{fault['first']} (the model is told; counted in tool_errors)",
                )
        if trajectory.error is not None:
            self.failed(trajectory)

    def failed(self, trajectory: Trajectory) -> None:
        """Count an episode as failed. Also called for episodes that fail only after their end: in the group's score, or
        because their reward or advantage is invalid."""
        assert trajectory.error is not None
        column = f"errors/{trajectory.error.partition(':')[0]}"
        said = f"{trajectory.error} (its tokens are not trained; counted in {column})"
        tail = trajectory.info.get(TRACEBACK)
        self._count(self.failures, failure_kind(trajectory.error), 1, trajectory, f"{said}\n{tail}" if tail else said)

    def not_evaluated(self, why: str) -> None:
        """Count an evaluation that is skipped because the environment failed to provide its examples."""
        with self._lock:
            self.unmeasured[failure_kind(why)] += 1
        logger.warning("an evaluation was skipped: %s", why)

    def _count(self, counts: Counter[str], kind: str, count: int, trajectory: Trajectory, said: str) -> None:
        told = (kind, trajectory.example_id if kind.startswith(NO_TURNS) else "")
        with self._lock:
            is_new = told not in self._said and len(self._said) < MOST_SAID
            self._said |= {told} if is_new else set()
            counts[kind] += count
        if is_new:
            logger.warning(
                "%s episode %s of environment %r, example %r: %s",
                self.purpose,
                trajectory.trajectory_id,
                trajectory.env,
                trajectory.example_id,
                said,
            )

    def summary(self) -> list[str]:
        """Return one line each about failed episodes, failed tools and skipped evaluations, if there are any. Example:
        `["3 of 8 train episodes failed: 3 x environment: score raised KeyError"]`."""
        lines = []
        if self.failures:
            lines.append(
                f"{self.num_failed} of {self.num_episodes} {self.purpose} episodes failed: "
                f"{_most_common(self.failures)}"
            )
        if self.tool_faults:
            lines.append(f"tools failed in {self.purpose} episodes: {_most_common(self.tool_faults)}")
        if self.unmeasured:
            lines.append(f"evaluations were skipped: {_most_common(self.unmeasured)}")
        return lines

    def log_summary(self) -> None:
        """Log the lines of `summary` as warnings."""
        for line in self.summary():
            logger.warning("%s", line)


def failure_kind(error: str) -> str:
    """Return the kind of a failure: the first two parts of its message, with numbers and quoted values masked.

    >>> failure_kind("environment: score raised KeyError: 'question 17'")
    'environment: score raised KeyError'
    >>> failure_kind("timeout: the episode took more than 600 s")
    'timeout: the episode took more than # s'
    """
    head = ": ".join(error.partition("\n")[0].split(": ")[:2])[:200]
    return re.sub(r"\d+(\.\d+)?", "#", re.sub(r"'[^']*'", "'...'", head))


def traceback_tail(error: BaseException | None) -> str:
    """Return the last lines of an exception's traceback; "" if there is no exception."""
    if error is None:
        return ""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return without_secrets("\n".join(lines[-_TAIL_LINES:])[-MOST_READ:])[-_TAIL_CHARACTERS:]


def _most_common(counts: Counter[str], most: int = 5) -> str:
    shown = "; ".join(f"{count} x {kind}" for kind, count in counts.most_common(most))
    return f"{shown}; and {len(counts) - most} other kinds" if len(counts) > most else shown
