"""Chooses the breaks to show in full: one of each class first."""

from __future__ import annotations

from collections.abc import Iterator

from verbatim.doctor.classes import BreakClass
from verbatim.doctor.diagnosis import Diagnosis


class Choice:
    """Keeps the first `limit` breaks of each class, and chooses `limit` of them.

    Example: from the classes a a a b a c it chooses a b c for a limit of three, and a a b c for four.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: dict[BreakClass, list[tuple[int, Diagnosis]]] = {}
        self._count = 0

    def add(self, diagnosis: Diagnosis) -> None:
        same = self._kept.setdefault(diagnosis.kind, [])
        if len(same) < self._limit:
            same.append((self._count, diagnosis))
        self._count += 1

    def breaks(self) -> Iterator[Diagnosis]:
        """The chosen breaks in the order of the file; breaks by design have lower priority."""
        firsts = [same[0] for same in self._kept.values() if same]
        firsts.sort(key=lambda found: (found[1].kind.by_design, found[0]))
        rest = sorted((found for same in self._kept.values() for found in same[1:]), key=lambda found: found[0])
        chosen = [*firsts, *rest][: self._limit]
        yield from (diagnosis for _, diagnosis in sorted(chosen, key=lambda found: found[0]))
