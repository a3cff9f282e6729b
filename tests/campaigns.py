"""Campaigns: tests that try many random cases, or all that there are.

With all other tests a campaign runs small, on fixed seeds; `pytest --whole` (`make campaigns`) runs it whole. It
carries `@pytest.mark.campaign`, asks `sized(small, whole)` how many cases to try, and counts them in a row of the table
that ends the run:

    @pytest.mark.campaign
    def test_random_trees_are_packed_once(campaign):
        row = campaign("random trees")
        for seed in range(sized(20, 5000)):
            row.add(wrong=not packed_once(seed))
        assert row.wrong == 0
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import pytest

T = TypeVar("T")
_WHOLE = False


def set_whole(whole: bool) -> None:
    """Called once, before the tests are collected."""
    global _WHOLE
    _WHOLE = whole


def sized(small: T, whole: T) -> T:
    """`whole` where `--whole` was given, else `small`; also in decorators and parameters."""
    return whole if _WHOLE else small


@dataclasses.dataclass
class Campaign:
    """One row of the table at the end."""

    name: str
    cases: int = 0
    wrong: int = 0
    note: str = ""

    def add(self, wrong: bool = False) -> None:
        """One more case; `wrong` where it did not end as promised."""
        self.cases += 1
        self.wrong += wrong


class CampaignTable:
    """Adds up the rows of all tests and prints them. Rows travel in the tests' reports: the workers of pytest-xdist are
    other processes."""

    def __init__(self) -> None:
        self._rows: dict[str, Campaign] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the rows of a test that has ended."""
        if report.when == "teardown":
            for more in (Campaign(**value) for key, value in report.user_properties if key == "campaign"):
                row = self._rows.setdefault(more.name, Campaign(more.name))
                row.cases, row.wrong, row.note = row.cases + more.cases, row.wrong + more.wrong, more.note or row.note

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        if self._rows:
            terminalreporter.section("campaigns")
            for _, row in sorted(self._rows.items()):
                terminalreporter.line(f"{row.name:<60} {row.cases:>7} cases {row.wrong:>4} wrong  {row.note}")
