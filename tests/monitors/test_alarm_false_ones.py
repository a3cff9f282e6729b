"""Healthy runs raise no alarm: made-up ones, of noise and of learning, and recorded ones."""

from __future__ import annotations

import pytest

from monitors.healthy_runs import CONFIG, HealthyRun, alarms_of
from verbatim.monitors.alarms import ALARMS, AlarmWatch


def false_alarms(seed: int, *, learns: bool, num_steps: int = 120) -> list[str]:
    watch = AlarmWatch({name: rule() for name, rule in ALARMS.items()}, config=CONFIG)
    return alarms_of(HealthyRun(seed, learns=learns, num_steps=num_steps), watch)


@pytest.mark.parametrize("learns", [True, False], ids=["learns", "stands still"])
def test_a_healthy_run_is_quiet(learns: bool):
    assert {seed: found for seed in range(4) if (found := false_alarms(seed, learns=learns))} == {}


@pytest.mark.slow
@pytest.mark.parametrize("learns", [True, False], ids=["learns", "stands still"])
def test_at_most_one_run_in_fifty_raises_an_alarm(learns: bool):
    """Of all alarms together, over 120 steps and 12 evaluations of two environments."""
    found = {seed: found for seed in range(100, 200) if (found := false_alarms(seed, learns=learns))}
    assert len(found) <= 2, found
