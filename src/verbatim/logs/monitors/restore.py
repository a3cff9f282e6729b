"""Restores a log to its state at a checkpoint. Damaged or missing parts are reported; a damaged log is kept aside."""

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
"""Line numbers that a message names."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A log that a run can go on with."""

    mark: LogMark
    """Where it goes on."""
    fault: str | None = None
    """What was wrong with it, as one sentence for people; None if nothing was."""
    earlier: Mapping[int, LogMark] = field(default_factory=dict)
    """After a fault: where the log, which is shorter now, was at the checkpoints, by their steps."""


@dataclass(kw_only=True)
class _ReadableLog:
    """What could be read of a log."""

    mark: LogMark = field(default_factory=LogMark)
    steps: set[int] = field(default_factory=set)
    last_line: int = 0
    """Number of the last line that was kept."""
    unreadable: list[int] = field(default_factory=list)
    """Numbers of the lines that are no records."""
    earlier: dict[int, LogMark] = field(default_factory=dict)
    is_prefix: bool = True
    """Whether everything kept stands before everything dropped."""


def restore(
    path: Path,
    *,
    step: int,
    mark: LogMark | None,
    is_record: Callable[[Any], bool],
    checkpoints: Iterable[int] = (),
    every_step: bool = False,
) -> Restored:
    """Cut a log back to a checkpoint: what stands after it is of steps that are done again.

    If the log is not what it was there, the lines that can be read are copied into a new file, and the one that was
    found is renamed to `{name}.damaged-{number}`.

    Args:
        path: The log.
        step: The checkpoint's; 0 empties the log.
        mark: How far the log was at the checkpoint; None: the checkpoint does not say, because the log was not
            written then.
        is_record: Whether a JSON value is a line of this log; such a value has an int `step`.
        checkpoints: Steps of all checkpoints, whose marks are corrected after a fault.
        every_step: Whether each step has a line: those that have none are missing, also where there is no mark.

    Raises:
        OSError: the log can be neither cut nor renamed.
    """
    if step == 0:
        mark = LogMark()
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise PermissionError(errno.EPERM, "it is a pipe, a socket or a device")  # opening it may wait for ever
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
        why = f"{path} cannot be read ({error.strerror}); the log begins anew"
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
                    if line.endswith(b"\n"):
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
        return f"line {shown} is no record"
    return f"lines {shown}{', ...' if len(numbers) > _SHOWN else ''} are no records ({len(numbers)} lines)"
