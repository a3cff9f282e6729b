"""`pytest --where-time-goes` ends with tables: seconds by what the tests ask the system for, by folder and by file; and
the tests that lack the marker slow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

ASKS = "asks for"
"""The name of the property of a test that says what it asked the system for: realtime.py writes it."""
NUM_FILES = 40
MOST_SECONDS, MOST_OF_ALL_CASES = 0.5, 3.0
"""What a test without the marker slow takes at most, on average, and all cases of one together."""


class DurationsTable:
    """Adds up the seconds of all phases of all tests, in all workers."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._kinds: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test; fixtures of a wider scope count for the test that needs them first."""
        self._seconds[report.nodeid] += report.duration
        if report.when == "teardown":
            asked = [value for name, value in report.user_properties if name == ASKS]
            pace = "slow" if "slow" in report.keywords else "quick"
            self._kinds[report.nodeid] = f"{pace}, {asked[0] if asked else 'neither processes nor sockets'}"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        tests = [(name.partition("::")[0], s, self._kinds.get(name, "")) for name, s in self._seconds.items()]
        terminalreporter.section("where the time goes")
        for title, rows in (
            ("kind", ((kind, seconds) for _, seconds, kind in tests)),
            ("folder", ((file.rpartition("/")[0], seconds) for file, seconds, _ in tests)),
            ("file", ((file, seconds) for file, seconds, _ in tests)),
        ):
            terminalreporter.line(f"{title:<70} {'tests':>6} {'seconds':>8}")
            for name, count, seconds in added(rows)[:NUM_FILES]:
                terminalreporter.line(f"{name:<70} {count:>6} {seconds:>8.1f}")
        quick = [name for name, kind in self._kinds.items() if kind.startswith("quick")]
        terminalreporter.line("not marked slow:")
        for name, count, seconds in added((name.partition("[")[0], self._seconds[name]) for name in quick):
            if seconds / count >= MOST_SECONDS or seconds >= MOST_OF_ALL_CASES:
                terminalreporter.line(f"{name:<100} {count:>6} {seconds:>8.1f}")


def added(rows: Iterable[tuple[str, float]]) -> list[tuple[str, int, float]]:
    """Name, count and sum of each name's seconds; the largest sum first."""
    sums: dict[str, list[float]] = defaultdict(list)
    for name, seconds in rows:
        sums[name].append(seconds)
    return sorted(((name, len(each), sum(each)) for name, each in sums.items()), key=lambda row: -row[2])
