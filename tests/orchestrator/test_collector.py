"""While a run is under way, cyclic garbage is looked for seldom; afterwards as before."""

from __future__ import annotations

import gc
import weakref

import pytest

from verbatim.orchestrator.collector import SLACK, THRESHOLDS, seldom_collected, step_is_over


class Cycle:
    def __init__(self):
        self.own = self


@pytest.fixture(autouse=True)
def as_before():
    thresholds = gc.get_threshold()
    yield
    gc.enable()
    gc.set_threshold(*thresholds)


def test_what_was_there_is_left_out_meanwhile():
    gc.set_threshold(700, 10, 10)
    with seldom_collected():
        assert gc.get_threshold() == THRESHOLDS
        assert gc.get_freeze_count() > 1000
    assert gc.get_threshold() == (700, 10, 10)
    assert gc.get_freeze_count() == 0


def test_a_cycle_is_still_freed():
    with seldom_collected():
        cycle = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() >= 1


def test_larger_thresholds_are_kept():
    gc.set_threshold(1_000_000, 20, 5)
    with seldom_collected():
        assert gc.get_threshold() == (1_000_000, 20, 50)


def test_a_collector_that_is_switched_off_stays_off():
    gc.set_threshold(0)
    with seldom_collected():
        assert gc.get_threshold()[0] == 0


def test_what_outlived_a_step_is_left_out_until_it_has_grown():
    """A cycle that was alive at the end of a step stays, as does every other one, until there are `SLACK` and a quarter
    more objects than at the start."""
    with seldom_collected():
        cycle = Cycle()
        gone = weakref.ref(cycle)
        step_is_over()
        del cycle
        gc.collect()
        step_is_over()
        assert gone() is not None
        many = [[] for _ in range(SLACK + gc.get_freeze_count() // 3)]
        step_is_over()
        assert gone() is None
        del many
    assert gc.get_freeze_count() == 0


def test_outside_of_a_run_nothing_is_left_out():
    step_is_over()
    assert gc.get_freeze_count() == 0
