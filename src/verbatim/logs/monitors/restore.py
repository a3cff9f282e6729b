"""Restores a log to its state at a checkpoint. Damaged or missing parts are reported, and a damaged log is renamed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from verbatim.core.disk import keep_aside, rename, sync_descriptor
from verbatim.core.texts import ranges
from verbatim.logs.monitors.jsonl import LogMark, measure

_SHOWN = 5
"""Maximum number of line numbers in a message."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The state of a log to which a resumed run can append."""

    mark: LogMark
    """The end of the log."""
    fault: str | None = None
    """A sentence that describes the fault of the log; None if there was none."""
    earlier: Mapping[int, LogMark] = field(default_factory=dict)
    """The corrected marks of the checkpoints, by step, if the log became shorter because of a fault."""


@dataclass(kw_only=True)
class _ReadableLog:
    """The readable part of a log up to a step."""

    mark: LogMark = field(default_factory=LogMark)
    """The end of the copied lines."""
    steps: set[int] = field(default_factory=set)
    """The steps that have a line."""
    last_line: int = 0
    """Line number of the last line that was kept."""
    unreadable: list[int] = field(default_factory=list)
    """Line numbers of the lines that are not records."""
    earlier: dict[int, LogMark] = field(default_factory=dict)
    """See `Restored.earlier`."""
    is_prefix: bool = True
    """True if the kept lines are the beginning of the log, so that the log can be truncated in place."""


def restore(
    path: Path,
    *,
    step: int,
    mark: LogMark | None,
    is_record: Callable[[Any], bool],
    checkpoints: Iterable[int] = (),
    every_step: bool = False,
) -> Restored:
    """Truncate a log to its length at a checkpoint, because the steps after the checkpoint will be done again.

    If the log no longer has its content at the checkpoint, the readable lines are copied to a new file, and the damaged
    file is renamed to `{name}.damaged-{number}`.

    Args:
        path: The log.
        step: The step of the checkpoint; 0 to empty the log.
        mark: The log's mark at the checkpoint; None if the checkpoint has no mark, because the log was not written at
            the time.
        is_record: Returns True if a JSON value is a record of this log. Records have an integer `step`.
        checkpoints: The steps of all checkpoints, whose marks are corrected after a fault.
        every_step: True if the log must have a line for each step, so that a missing step is a fault even without a
            mark.

    Raises:
        OSError: the log can be neither truncated nor renamed.
    """
    if step == 0:
        mark = LogMark()
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise PermissionError(errno.EPERM, "it is a pipe, a socket or a device")  # opening it may block forever
        if mark is not None and measure(path, mark.size) == mark:
            if path.exists() and path.stat().st_size > mark.size:
                os.truncate(path, mark.size)
            return Restored(mark=mark)
        temporary = path.with_name(f".{path.name}.tmp")
        with temporary.open("wb") as new:
            kept = _copy(path, new, step, is_record, sorted(n for n in checkpoints if n <= step))
            new.flush()
            sync_descriptor(new.fileno())
        why = _what_is_wrong(path, kept, step, mark, every_step=every_step)
    except (IsADirectoryError, PermissionError) as error:
        temporary = None
        kept = _ReadableLog(earlier=dict.fromkeys((n for n in checkpoints if n <= step), LogMark()))
        why = f"{path} cannot be read ({error.strerror}); a new log is started"
    if why is None:
        assert temporary is not None
        if kept.is_prefix and path.exists():
            os.truncate(path, kept.mark.size)
            temporary.unlink()
        else:
            rename(temporary, path)
        return Restored(mark=kept.mark)
    if path.exists():
        why += f". What was found is kept as {keep_aside(path)}"
    if temporary is not None:
        rename(temporary, path)
    return Restored(mark=kept.mark, fault=why, earlier=kept.earlier)


def _copy(
    path: Path, new: BinaryIO, step: int, is_record: Callable[[Any], bool], checkpoints: Sequence[int]
) -> _ReadableLog:
    kept, ahead = _ReadableLog(), list(checkpoints)
    if path.exists():
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                record = _parse(line)
                if record is None or not is_record(record):
                    if line.endswith(b"\n"):  # an incomplete last line is not damage, because its writer was killed
                        kept.unreadable.append(number)
                elif record["step"] <= step:
                    kept.is_prefix &= kept.last_line == number - 1
                    while ahead and ahead[0] < record["step"]:
                        kept.earlier[ahead.pop(0)] = kept.mark
                    new.write(line)
                    kept.mark = kept.mark.after(line)
                    kept.steps.add(record["step"])
                    kept.last_line = number
    kept.earlier |= dict.fromkeys(ahead, kept.mark)
    return kept


def _parse(line: bytes) -> Any:
    if not line.endswith(b"\n"):
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _what_is_wrong(path: Path, kept: _ReadableLog, step: int, mark: LogMark | None, *, every_step: bool) -> str | None:
    left = kept.mark.records
    absent = [number for number in range(1, step + 1) if number not in kept.steps] if every_step else []
    is_short = bool(absent) if mark is None else left < mark.records
    # An unreadable line after the last kept line may belong to a later step, so it matters only if records are missing.
    unreadable = [number for number in kept.unreadable if is_short or number < kept.last_line]
    if mark is None and not absent and not unreadable:
        return None
    if not path.exists():
        why = f"{path} is missing"
    elif unreadable:
        why = f"{path} is damaged: {_lines(unreadable)}"
    elif mark is not None and path.stat().st_size < mark.size:
        why = f"{path} is damaged: it has {path.stat().st_size} bytes, and had {mark.size} at the checkpoint"
    else:
        why = f"{path} is damaged: its content is not what was written"
    of = f" of {mark.records}" if mark is not None else ""
    why += f"; {left}{of} records up to step {step} are left"
    return why + (f", none of {'step' if len(absent) == 1 else 'steps'} {ranges(absent)}" if absent else "")


def _lines(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    if len(numbers) == 1:
        return f"line {shown} is not a record"
    return f"lines {shown}{', ...' if len(numbers) > _SHOWN else ''} are not records ({len(numbers)} lines)"
