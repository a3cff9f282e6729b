"""Runs a part's checks in a process that is watched: one that hangs, crashes or breaks the card costs that check alone.

The child appends a line of JSON where a check begins and one with its record. The parent ends the child where a check
takes longer than its limit, and starts another for the checks that are left.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .record import FAILED, NOT_RUN, Check, line_of, record_of, run_check
from .setting import Setting

BROKEN = 70
"""Exit status of a child whose card no longer responds."""
SECONDS = 230.0
"""Time limit of one part, in seconds."""
_PAUSE = 0.1


def watched(part: str, checks: Sequence[Check], setting: Setting, seconds: float) -> list[dict[str, Any]]:
    """The records of all checks, in order; no check begins after so many seconds. With more than a part has by default,
    the limit of each check is longer too."""
    setting = replace(setting, patience=patience_of(seconds))
    checks = [replace(check, seconds=check.seconds * setting.patience) for check in checks]
    until, records, left = time.monotonic() + seconds, [], list(checks)
    while left and time.monotonic() < until:
        found = _Child(part, left, setting, len(records)).records(until)
        assert found, "a child left no record"
        records += found
        left = left[len(found) :]
    for check in left:
        records.append(record_of(check, NOT_RUN, 0.0, reason=f"the part's {seconds:.0f} s were spent"))
        print(line_of(records[-1]), flush=True)
    return records


def patience_of(seconds: float) -> float:
    """How many times its limit each check of a part has that may take so long."""
    return max(1.0, seconds / SECONDS)


class _Child:
    """A process that runs checks, the first ones of those given."""

    def __init__(self, part: str, checks: Sequence[Check], setting: Setting, number: int) -> None:
        self._checks = checks
        self._lines = setting.folder / f"{part}-{number}.jsonl"
        self._lines.touch()
        command = [sys.executable, "-m", __package__, part, "--child", str(self._lines)]
        command += ["--cpu"] * (setting.device == "cpu") + ["--seconds", str(setting.patience * SECONDS)]
        command += ["--checks", *(check.name for check in checks)]
        place = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, [place, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, start_new_session=True)
        self._began = time.monotonic()

    def records(self, until: float) -> list[dict[str, Any]]:
        """The records of the checks that it ran, at least one."""
        try:
            while (told := self._told(until)) is None:
                time.sleep(_PAUSE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        return told

    def _told(self, until: float) -> list[dict[str, Any]] | None:
        """All records, once the child has ended or has to be ended; None: it goes on."""
        ended = self._process.poll()  # before reading: what it wrote until it ended is read
        lines = [json.loads(line) for line in self._lines.read_text(encoding="utf-8").splitlines()]
        done = [line["record"] for line in lines if "record" in line]
        if len(done) == len(self._checks):
            return done
        check = self._checks[len(done)]
        # Before its first check a child imports for a while, which counts as the check's.
        now, began = time.monotonic(), max([self._began, *(line["began"] for line in lines if "began" in line)])
        if ended is not None:
            if ended == BROKEN and done:
                return done
            said = f"its process ended with {ended}" if ended > 0 else f"its process was ended by signal {-ended}"
            return [*done, self._say(check, FAILED, now - began, error=said)]
        if now - began > check.seconds:
            return [*done, self._say(check, FAILED, now - began, error=f"not done after {check.seconds:.0f} s")]
        if now > until:
            said = f"the part's time was spent {now - began:.0f} s after it began"
            return [*done, self._say(check, NOT_RUN, now - began, reason=said)]
        return None

    def _say(self, check: Check, status: str, seconds: float, **told: Any) -> dict[str, Any]:
        record = record_of(check, status, seconds, **told)
        print(line_of(record), flush=True)
        return record


def run_child(checks: Sequence[Check], setting: Setting, lines: Path) -> int:
    """Run the checks in this process, and note each one. Returns the exit status."""
    import torch
    from transformers import logging

    logging.disable_progress_bar()
    if setting.tiny:
        torch.set_num_threads(1)  # several would wait for each other longer than they compute
    with lines.open("a", encoding="utf-8") as file:

        def note(**what: Any) -> None:
            file.write(json.dumps(what) + "\n")
            file.flush()

        for check in checks:
            note(begins=check.name, began=time.monotonic())
            record = run_check(check, setting)
            note(record=record)
            print(line_of(record), flush=True)
            if record["status"] == FAILED and setting.device == "cuda" and not _answers():
                return BROKEN
    return 0


def _answers() -> bool:
    """Whether the card computes; after some faults every later operation of a process fails."""
    import torch

    try:
        return float(torch.ones(2, device="cuda").sum()) == 2.0
    except RuntimeError:
        return False
