"""Reads logs of any known format, one trajectory at a time; unreadable lines are skipped and reported."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from verbatim.errors import RecordError, UsageError
from verbatim.types import Trajectory

_KEPT = 50
"""Most unreadable lines kept; the rest is counted."""

DAMAGED = (KeyError, TypeError, ValueError, AssertionError, AttributeError, IndexError)
"""Exceptions from reading a record of another shape."""


@dataclass(frozen=True, kw_only=True)
class LoggedTrajectory:
    """A trajectory and its line in the file."""

    trajectory: Trajectory
    """Its turns, as exact ids."""
    line: int
    """Its first line, from 1."""
    tools: tuple[str, ...] = ()
    """Tools of each turn's request as text; empty if the log has none."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One JSON object of a file."""

    number: int
    """Line number, from 1."""
    record: Mapping[str, Any]
    """The JSON object."""


@dataclass(frozen=True, kw_only=True)
class Unreadable:
    """A skipped line."""

    line: int
    """Line number, from 1."""
    why: str
    """Why it was skipped."""


@dataclass
class Problems:
    """The skipped lines."""

    kept: list[Unreadable] = field(default_factory=list)
    """The first of them, in order."""
    count: int = 0
    """Number of all of them."""

    def add(self, line: int, why: str) -> None:
        """Add one."""
        self.count += 1
        if len(self.kept) < _KEPT:
            self.kept.append(Unreadable(line=line, why=why))


class Format(Protocol):
    """One kind of log."""

    name: str
    """Its name in reports."""
    expected: str
    """An example of its lines, for error messages."""

    def recognises(self, record: Mapping[str, Any]) -> bool:
        """Whether a line has this format, by its keys."""

    def read(self, file: LogFile) -> Iterator[LoggedTrajectory]:
        """The trajectories; damaged lines are added to `file.problems`."""

    def note(self) -> str:
        """A note for the report on how the file was read."""


class LogFile:
    """The lines of a file, which a format may read several times; problems are recorded the first time only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems = Problems()

    def lines(self, problems: Problems | None = None) -> Iterator[tuple[Line, int]]:
        """Each JSON object with its offset in bytes.

        Raises:
            UsageError: no such file.
        """
        if not self.path.is_file():
            inside = self.path / "trajectories.jsonl"
            hint = f"; it is a folder: type {inside}" if inside.is_file() else ""
            raise UsageError(f"there is no log {self.path}{hint}")
        problems = self.problems if problems is None else problems
        with self.path.open("rb") as file:
            place = 0
            for number, raw in enumerate(file, start=1):
                record = _parse(raw, number, problems) if raw.strip() else None
                if record is not None:
                    yield Line(number=number, record=record), place
                place += len(raw)

    def at(self, places: Iterable[tuple[int, int]]) -> Iterator[Line]:
        """The lines at (number, offset in bytes), as given by `lines`."""
        with self.path.open("rb") as file:
            for number, place in places:
                file.seek(place)
                yield Line(number=number, record=json.loads(file.readline()))

    def damaged(self, line: int, error: Exception) -> None:
        """Record a line that a format could not read."""
        reason = str(error) if isinstance(error, RecordError) else f"{type(error).__name__}: {error}"
        self.problems.add(line, reason)


def _parse(raw: bytes, number: int, problems: Problems) -> Mapping[str, Any] | None:
    try:
        record = json.loads(raw)
    except (ValueError, RecursionError) as error:
        torn = "" if raw.endswith(b"\n") else "; the file's last line is torn: its writer is at work, or was killed"
        problems.add(number, f"no JSON ({error}){torn}")
        return None
    if not isinstance(record, dict):
        problems.add(number, f"expected a JSON object, found a {type(record).__name__}")
        return None
    return record


def other_format(record: Mapping[str, Any]) -> str:
    """The report on a line whose keys do not belong to the file's format."""
    return f"not like the lines before it; its keys are {', '.join(map(repr, list(record)[:8])) or 'none'}"


def recognise(file: LogFile, formats: Sequence[Format]) -> Format:
    """The format of the first line that has a known one.

    Raises:
        UsageError: no line has; says what was found and what is expected.
    """
    first: Line | None = None
    problems = Problems()
    for line, _ in file.lines(problems):
        found = next((known for known in formats if known.recognises(line.record)), None)
        if found is not None:
            return found
        first = first or line
    expected = "\n".join(f"  {known.name}: {known.expected}" for known in formats)
    if first is not None:
        keys = ", ".join(map(repr, list(first.record)[:12])) or "none"
        was = f"line {first.number} is an object whose keys are {keys}"
    elif problems.kept:
        was = f"line {problems.kept[0].line}: {problems.kept[0].why}"
    else:
        was = "it is empty"
    raise UsageError(f"{file.path} is no log of trajectories: {was}. Expected JSON lines with token ids, one of\n"
                     f"{expected}")  # fmt: skip
