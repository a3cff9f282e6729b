"""Intervals of success rates, against the figures of their papers."""

import pytest

from verbatim.run.intervals import gain_interval, wilson
from verbatim.run.summary import summary_of


def test_wilsons_interval_has_published_figures():
    """Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_the_interval_of_a_gain_has_published_figures():
    """Newcombe 1998, "Interval estimation for the difference between independent proportions", table II, method 10."""
    assert gain_interval((48 / 80, 80), (56 / 70, 70)) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert gain_interval((3 / 10, 10), (9 / 10, 10)) == pytest.approx((0.1705, 0.8090), abs=5e-5)
    assert gain_interval((0.0, 10), (1.0, 10)) == pytest.approx((0.6075, 1.0), abs=5e-5)


def test_a_summary_says_what_was_gained(tmp_path):
    def line(step: int, env: str, success: float, episodes: int) -> str:
        return (f'{{"step": {step}, "kind": "eval", "time": 0.0, "env": "{env}", '
                f'"metrics": {{"success": {success}, "episodes": {episodes}}}}}\n')  # fmt: skip

    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(line(0, "a", 0.6, 80) + line(5, "a", 0.1, 80) + line(9, "a", 0.8, 70))
    found = summary_of(metrics, {})
    assert (found["gain"], found["gain_interval_95"]) == (0.2, [0.0524, 0.3339])
    metrics.write_text(line(0, "a", 0.6, 80))
    assert "gain" not in summary_of(metrics, {}), "one evaluation is no gain"
    metrics.write_text("".join(line(0, env, 0.6, 80) + line(9, env, 0.8, 70) for env in "ab"))
    found = summary_of(metrics, {})
    assert "gain" not in found
    assert found["environments"]["b"]["gain_interval_95"] == [0.0524, 0.3339]
