"""Intervals of evaluations on the page: those that the run logged, or of older runs those of independent episodes."""

import pytest

from verbatim.inspection.viewer.metrics import intervals


def test_logged_intervals_are_shown_as_they_are():
    logged = {
        "success": 0.5,
        "episodes": 40,
        "success/low": 0.25,
        "success/high": 0.75,
        "reward/low": "NaN",
        "reward/high": "NaN",
        "reward/mean": 1.0,
        "reward/std": 0.0,
    }
    assert intervals(logged) == {"success": [0.25, 0.75]}
    assert intervals({**logged, "reward/low": -1.0, "reward/high": 3.0})["reward/mean"] == [-1.0, 3.0]


def test_an_older_run_has_those_of_independent_episodes():
    found = intervals({"success": 0.2, "episodes": 200, "failed": 0, "reward/mean": 1.0, "reward/std": 2.0})
    assert found["success"] == pytest.approx([0.1505, 0.2609], abs=1e-4)
    assert found["reward/mean"] == pytest.approx([1 - 1.96 * 2 / 200**0.5, 1 + 1.96 * 2 / 200**0.5], abs=1e-4)
    assert intervals({"success": "NaN", "episodes": 0}) == {}
