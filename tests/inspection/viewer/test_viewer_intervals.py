"""Intervals of evaluations on the page: those that the run logged."""

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
