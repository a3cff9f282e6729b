"""Writes one file for each finished trajectory, atomically, under a unique name.

A trace is one line of JSON, as in a run's log, so that `verbatim doctor TRACE` reads it:

    {"format": 1, "success": true, "callback_errors": [], "trajectory": {"messages": [...], "turns": [...], ...}}
"""

from __future__ import annotations

import json
import logging
import re
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from verbatim.core.ctrl_c import is_ctrl_c
from verbatim.core.disk import replacing
from verbatim.core.formats import LINES, stamped
from verbatim.core.texts import error_text
from verbatim.core.trajectory_json import plain, trajectory_to_json
from verbatim.core.types import StopReason, Trajectory

logger = logging.getLogger(__name__)


class TraceFolder:
    """Stores trajectories as they end. Thread-safe. Callbacks are called one at a time, so that they need no locks."""

    def __init__(
        self,
        folder: Path,
        *,
        trace_callback: Callable[[Trajectory], Any] | None = None,
        success_callback: Callable[[Trajectory], Any] | None = None,
    ) -> None:
        self.folder = folder
        self._wanted = trace_callback or (lambda trajectory: True)
        self._succeeded = success_callback or _ended_well
        self._one_at_a_time = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def store(self, trajectory: Trajectory) -> Path | None:
        """Write a trajectory's trace if `trace_callback` wants it. Return the path, or None if it was not written. A
        failure to write is logged and not raised, because losing a trace is better than losing the episode. If a
        callback raises, the trace is kept; if `success_callback` raises, the file's name begins with `fail-`."""
        errors: list[str] = []
        with self._one_at_a_time:
            if not self._ask("trace_callback", self._wanted, trajectory, errors, otherwise=True):
                return None
            success = self._ask("success_callback", self._succeeded, trajectory, errors, otherwise=False)
        name = _file_name(trajectory, success)
        told = {"success": success, "callback_errors": errors, "trajectory": trajectory_to_json(trajectory)}
        try:
            with replacing(self.folder / name, lasting=False) as new:
                new.write_text(json.dumps(plain(stamped(LINES, told)), default=str) + "\n", encoding="utf-8")
        except (OSError, ValueError, RecursionError) as error:
            logger.error(
                "the trace of trajectory %s was not written: %s: %s",
                trajectory.trajectory_id,
                type(error).__name__,
                error,
            )
            return None
        return self.folder / name

    def _ask(
        self,
        which: str,
        callback: Callable[[Trajectory], Any],
        trajectory: Trajectory,
        errors: list[str],
        *,
        otherwise: bool,
    ) -> bool:
        try:
            return bool(callback(trajectory))
        except BaseException as error:  # user code may raise anything; the error is stored in the trace
            if is_ctrl_c(error):
                raise
            name = trajectory.trajectory_id or trajectory.example_id
            logger.warning("%s raised on trajectory %s; its trace is kept", which, name, exc_info=True)
            errors.append(f"{which} raised {error_text(error)}")
            return otherwise


def _ended_well(trajectory: Trajectory) -> bool:
    return trajectory.error is None and trajectory.stop_reason is StopReason.STOP


def _file_name(trajectory: Trajectory, success: bool) -> str:
    """Return a file name that is readable, safe on any file system, and unique, even if several runs write into the
    same folder."""
    label = re.sub(r"[^A-Za-z0-9_.-]+", "_", trajectory.trajectory_id or trajectory.example_id)[:80]
    return f"{'ok' if success else 'fail'}-{label}-{uuid.uuid4().hex[:16]}.json"
