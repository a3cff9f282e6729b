"""While a run is under way, cyclic garbage is looked for seldom; afterwards as before."""

from __future__ import annotations

import asyncio
import gc
import mmap
import weakref

import pytest

from verbatim.run.orchestrator import gc_policy
from verbatim.run.orchestrator.gc_policy import (
    CHECK_EVERY,
    FEW,
    ONE_IN,
    SLACK,
    THRESHOLDS,
    group_is_over,
    seldom_collected,
    spot_checks,
    step_is_over,
)


class Cycle:
    def __init__(self):
        self.own = self


@pytest.fixture(autouse=True)
def as_before(real_freeze):
    thresholds = gc.get_threshold()
    gc.freeze()  # a test looks through its own objects
    yield
    gc.enable()
    gc.set_threshold(*thresholds)


@pytest.mark.slow
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


@pytest.mark.slow
def test_what_outlived_a_step_is_left_out_until_it_has_grown():
    """A cycle that was alive at the end of a step stays, as does every other one, until there are a quarter more
    objects for each held episode than at the end of the first step, and `SLACK` more: here 6 SLACK for 100 of them."""
    with seldom_collected():
        first = [[] for _ in range(4 * SLACK)]
        cycle = Cycle()
        gone = weakref.ref(cycle)
        step_is_over(100)
        del cycle
        gc.collect()
        step_is_over(100)
        assert gone() is not None
        more = [[] for _ in range(3 * SLACK)]
        step_is_over(100)
        assert gone() is None
        del first, more
    assert gc.get_freeze_count() == 0


@pytest.mark.slow
def test_more_objects_for_more_episodes_are_no_garbage():
    """As above; with 200 episodes held, up to 11 SLACK are no sign of it."""
    with seldom_collected():
        first = [[] for _ in range(4 * SLACK)]
        cycle = Cycle()
        gone = weakref.ref(cycle)
        step_is_over(100)
        del cycle
        more = [[] for _ in range(3 * SLACK)]
        step_is_over(200)
        assert gone() is not None
        step_is_over(100)
        assert gone() is None
        del first, more


@pytest.mark.slow
def test_garbage_of_a_run_that_holds_nothing_between_steps_is_found():
    with seldom_collected():
        cycle = Cycle()
        gone = weakref.ref(cycle)
        kept = [[] for _ in range(2 * SLACK)]
        del cycle
        step_is_over(0)
        assert gone() is None
        del kept


@pytest.mark.slow
def test_what_stays_in_a_run_that_holds_nothing_between_steps_is_looked_through_once():
    """As above; from then on only what is more than was left is a sign of garbage."""
    with seldom_collected():
        kept = [[] for _ in range(2 * SLACK)]
        step_is_over(0)
        cycle = Cycle()
        gone = weakref.ref(cycle)
        gc.freeze()  # as after a spot check
        del cycle
        step_is_over(0)
        assert gone() is not None
        more = [[] for _ in range(2 * SLACK)]
        step_is_over(0)
        assert gone() is None
        del kept, more


@pytest.mark.slow
@pytest.mark.parametrize("is_over", [group_is_over, lambda: step_is_over(0), lambda: step_is_over(100)])
def test_a_few_cycles_that_hold_much_memory_are_found(is_over, monkeypatch):
    """From 2 GiB on, once there are more than 1.5 times that and 1 GiB more; then from what is left."""
    gib = 1 << 30
    memory = [2 * gib]
    monkeypatch.setattr(gc_policy, "resident", lambda: memory[0])
    with seldom_collected():
        is_over()
        (kept,) = gone_cycles(1)
        gc.freeze()  # as after a spot check
        memory[0] = 4 * gib
        is_over()
        assert num_alive([kept]) == 1
        memory[0] = 4 * gib + 1
        is_over()
        assert num_alive([kept]) == 0
        (later,) = gone_cycles(1)
        memory[0] = 7 * gib
        is_over()
        assert num_alive([later]) == 1


def test_memory_that_is_not_counted_as_objects_is_that_of_the_process():
    before = gc_policy.resident()
    if not before:
        pytest.skip("this system does not say")
    with mmap.mmap(-1, 1 << 26) as array:  # pages of its own: the C library may hand out freed memory again
        array[:] = bytes(1 << 26)
        assert (1 << 25) < gc_policy.resident() - before < (1 << 28)


async def test_where_as_many_objects_end_as_begin_no_pass_has_to_look_at_all_that_began():
    """The collector's own count stays at 0 here, so that it makes no pass."""
    with seldom_collected():
        checks = asyncio.create_task(spot_checks())
        old = [[] for _ in range(40_000)]
        new = []
        while old:
            old.pop()
            new.append([])
        assert num_looked_at() >= 40_000
        await asyncio.sleep(2.5 * CHECK_EVERY)  # two looks: the second one leaves out
        assert num_looked_at() < 4_000
        checks.cancel()


def num_looked_at():
    return sum(len(gc.get_objects(generation)) for generation in range(3))


def gone_cycles(count):
    cycles = [Cycle() for _ in range(count)]
    return [weakref.ref(cycle) for cycle in cycles]


def num_alive(refs):
    return sum(ref() is not None for ref in refs)


def looks(monkeypatch):
    """Spot checks that look once each time they are sent something; the first one has looked."""
    monkeypatch.setattr(gc_policy, "CHECK_EVERY", 0)
    checks = spot_checks()
    checks.send(None)
    checks.send(None)
    return checks


def test_where_the_youngest_hold_no_cycles_the_next_looks_leave_them_out(monkeypatch):
    with seldom_collected():
        checks = looks(monkeypatch)
        unseen = []
        for _ in range(ONE_IN - 1):
            unseen += gone_cycles(1)
            checks.send(None)
        assert num_alive(unseen) == ONE_IN - 1
        seen = gone_cycles(1)
        checks.send(None)
        assert num_alive(seen) == 0, "the look after them looks again"
        assert num_alive(unseen) == ONE_IN - 1
        checks.close()


def test_where_the_youngest_hold_cycles_every_look_looks(monkeypatch):
    with seldom_collected():
        refs = gone_cycles(FEW)
        checks = looks(monkeypatch)
        for _ in range(ONE_IN + 2):
            assert num_alive(refs) == 0
            refs = gone_cycles(FEW)
            checks.send(None)
        checks.close()


def test_nothing_is_done_within_a_collection():
    with seldom_collected():
        assert not [callback for callback in gc.callbacks if "verbatim" in str(callback)]


@pytest.mark.slow
def test_after_a_run_the_collector_looks_at_everything_again():
    with seldom_collected():
        refs = gone_cycles(3)
        gc.freeze()
        gc.collect()
        assert num_alive(refs) == 3
    gc.collect()
    assert num_alive(refs) == 0


def test_outside_of_a_run_nothing_is_left_out():
    gc.unfreeze()
    step_is_over(1)
    assert gc.get_freeze_count() == 0
