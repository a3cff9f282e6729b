"""Reads logs of any known format, one trajectory at a time. Unreadable lines are skipped and reported."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from verbatim.core.errors import RecordError, UsageError
from verbatim.core.types import Trajectory

_KEPT = 50
"""Maximum number of unreadable lines to keep in a list; further unreadable lines are only counted."""

DAMAGED = (KeyError, TypeError, ValueError, AssertionError, AttributeError, IndexError)
"""The exceptions that converting a record of an unexpected shape can raise."""


@dataclass(frozen=True, kw_only=True)
class LoggedTrajectory:
    """A trajectory and its position in the file."""

    trajectory: Trajectory
    line: int
    """The number of the trajectory's first line, counted from 1."""
    tools: tuple[str, ...] = ()
    """For each turn, the tools of its request as text; empty if the log has no tools."""


@dataclass(frozen=True)
class Line:
    """One JSON object of a file, with its line number (counted from 1) and its offset in bytes."""

    number: int
    offset: int
    record: Mapping[str, Any]


class Unreadable(NamedTuple):
    """A skipped line. Line numbers start at 1."""

    line: int
    why: str


@dataclass
class Problems:
    """The skipped lines."""

    kept: list[Unreadable] = field(default_factory=list)
    """The first skipped lines, in order."""
    count: int = 0

    def add(self, line: int, why: str) -> None:
        self.count += 1
        if len(self.kept) < _KEPT:
            self.kept.append(Unreadable(line, why))


class Format(Protocol):
    """One kind of log."""

    name: str
    """The name of the format in reports."""
    expected: str
    """An example line, for error messages."""

    @property
    def about(self) -> str:
        """A note for the report on how the file was read."""

    def matches(self, record: Mapping[str, Any], /) -> bool:
        """True if the keys of a line's JSON object show that the line has this format."""

    def read(self, file: LogFile) -> Iterator[LoggedTrajectory]:
        """Yield the trajectories, and add damaged lines to `file.problems`."""


class LogFile:
    """The lines of a file. `detect_format` reads the lines too, but adds nothing to `problems`, so that no problem
    counts twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems = Problems()

    def lines(self, problems: Problems) -> Iterator[Line]:
        """Yield the line of each JSON object, and add unreadable lines to `problems`.

        Raises:
            UsageError: the file does not exist.
        """
        if not self.path.is_file():
            raise UsageError(_no_log(self.path))
        # The file is read as bytes, because `at` seeks to offsets in bytes.
        with self.path.open("rb") as file:
            offset = 0
            for number, raw in enumerate(file, start=1):
                record = _parse(raw, number, problems) if raw.strip() else None
                if record is not None:
                    yield Line(number, offset, record)
                offset += len(raw)

    def lines_of(self, known: Format) -> Iterator[Line]:
        """Yield the lines of this format, and record all other lines as problems."""
        for line in self.lines(self.problems):
            if known.matches(line.record):
                yield line
            else:
                self.problems.add(
                    line.number, f"not the same format as the lines before; its keys are {_keys(line, 8)}"
                )

    def at(self, places: Iterable[tuple[int, int]]) -> Iterator[Line]:
        """Yield the lines at the given pairs (line number, offset in bytes), which come from `lines`."""
        with self.path.open("rb") as file:
            for number, offset in places:
                file.seek(offset)
                yield Line(number, offset, json.loads(file.readline()))

    def damaged(self, line: int, error: Exception) -> None:
        """Record a line that a format could not read."""
        reason = str(error) if isinstance(error, RecordError) else f"{type(error).__name__}: {error}"
        self.problems.add(line, reason)


def _no_log(path: Path) -> str:
    """The error message for a path that is not a file."""
    expected = "expected a run folder, such as runs/NAME/latest, or a file of JSON lines"
    if not path.is_dir():
        return f"there is no log {path}; {expected}"
    try:
        names = sorted(each.name for each in path.iterdir())
    except OSError as error:
        return f"the folder {path} cannot be read: {error.strerror or error}; {expected}"
    found = f"{', '.join(names[:5])}{', ...' * (len(names) > 5)}" if names else "nothing"
    return f"there is no log in the folder {path}: found {found}; {expected}"


def _parse(raw: bytes, number: int, problems: Problems) -> Mapping[str, Any] | None:
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        torn = "" if raw.endswith(b"\n") else "; the file's last line is torn: a writer is at work, or was killed"
        problems.add(number, f"not JSON ({error}){torn}")
        return None
    if not isinstance(record, dict):
        problems.add(number, f"expected a JSON object, found a {type(record).__name__}")
        return None
    return record


def _keys(line: Line, most: int) -> str:
    return ", ".join(map(repr, list(line.record)[:most])) or "none"


def detect_format(file: LogFile, formats: Sequence[Format]) -> Format:
    """The format of the first line whose format is known.

    Raises:
        UsageError: no line has a known format; the message says what was found and what is expected.
    """
    first: Line | None = None
    problems = Problems()
    for line in file.lines(problems):
        found = next((known for known in formats if known.matches(line.record)), None)
        if found is not None:
            return found
        first = first or line
    expected = "\n".join(f"  {known.name}: {known.expected}" for known in formats)
    if first is not None:
        was = f"line {first.number} is an object whose keys are {_keys(first, 12)}"
    elif problems.kept:
        was = "line {}: {}".format(*problems.kept[0])
    else:
        was = "it is empty"
    raise UsageError(
        f"{file.path} is not a log of trajectories: {was}. Expected JSON lines with token ids, one of\n{expected}"
    )
