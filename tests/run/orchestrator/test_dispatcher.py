"""Which groups make a batch, how many are in flight, and what becomes of those that are left over."""

import asyncio
import random
from itertools import pairwise

import pytest
from virtual_runs import Play, on_virtual_time

from verbatim.rollouts import GroupRun
from verbatim.rollouts.group import MOST_IN_LINE
from verbatim.run.orchestrator import dispatcher
from verbatim.run.orchestrator.dispatcher import MOST_AT_ONCE

G = 16
"""Groups per batch."""


def uneven(seed):
    """Lengths of 1 to 4, for each group its own."""
    return lambda index: 1 + 3 * random.Random(seed * 10_000 + index).random()


def test_a_straggler_does_not_hold_a_batch():
    """Group 5 takes as long as fifty others. Without it the first batch comes with the 16th of the others, and the next
    ones come as often as ever; when it is done it is the first of the batch that comes next."""
    play = Play(seconds=lambda index: 50.005 if index == 5 else 1 + index % 16 / 100, batches=70, bound=100)
    taken = on_virtual_time(play.run())
    ends = sorted(end for index, end in play.finished.items() if index != 5)
    assert taken[0][0] == ends[G - 1] < 2.5
    pauses = [after[0] - before[0] for before, after in pairwise(taken)]
    assert max(pauses) < 2.5
    (where,) = [number for number, (_, indices, _) in enumerate(taken) if 5 in indices]
    time, indices, ages = taken[where]
    assert taken[where - 1][0] < 50 <= time < 53
    assert indices[0] == 5
    assert ages[0] == where > 25
    assert max(max(ages) for number, (_, _, ages) in enumerate(taken) if number != where) <= 2


@pytest.mark.parametrize("bound", [8, 3])
def test_a_straggler_that_is_lost_to_the_bound_does_not_hold_a_batch_either(bound):
    """At most half a batch more is let finish for it."""
    play = Play(seconds=lambda index: 50.0 if index == 5 else 1 + index % 16 / 100, batches=60, level=3, bound=bound)
    taken = on_virtual_time(play.run())
    others = sorted(end for index, end in play.finished.items() if index != 5)
    pauses = [after[0] - before[0] for before, after in pairwise(taken)]
    assert max(pauses) < 3.0
    for number, (time, _, _) in enumerate(taken):
        assert sum(end < time for end in others) < (number + 1.5) * G
    assert 5 not in [i for _, indices, _ in taken for i in indices]
    assert [group.group_id for group in play.stale] == ["train-5"]


@pytest.mark.parametrize("train_seconds", [0.1, 3.0, 30.0])
@pytest.mark.parametrize("level", [1, 3])
def test_a_batch_is_the_finished_groups_that_were_launched_first(level, train_seconds):
    play = Play(seconds=uneven(1), level=level, batches=40, bound=100)
    before = set()
    for time, indices, _ in on_virtual_time(play.run(train_seconds)):
        finished = {index for index, end in play.finished.items() if end <= time} - before
        assert indices == sorted(finished)[:G]
        before |= set(indices)
        launched = {index for index, (begin, _) in play.launched.items() if begin < time}
        assert len(launched - before) < (level + 1) * G


def test_where_more_is_finished_than_a_batch_needs_it_takes_what_was_launched_first():
    """Later groups take less time, so all that finished first were launched last."""

    async def asked_late():
        play = Play(seconds=lambda index: 5.0 - index / 10, factor=2.0)
        play.dispatcher.start(version=0, batch=0)
        await asyncio.sleep(10.0)
        groups = await play.dispatcher.next_batch()
        await play.dispatcher.stop()
        return play, [group.index for group in groups]

    play, taken = on_virtual_time(asked_late())
    assert sorted(play.finished, key=play.finished.__getitem__)[:G] == list(range(2 * G - 1, G - 1, -1))
    assert taken == list(range(G))


def test_a_batch_comes_with_the_last_group_that_it_needs():
    """A sampler that is slower: nothing that is finished waits for what is not."""
    play = Play(seconds=uneven(2), batches=40, bound=100)
    taken = on_virtual_time(play.run())
    ends = sorted(play.finished.values())
    assert [time for time, _, _ in taken] == [ends[(number + 1) * G - 1] for number in range(40)]


def test_with_a_trainer_that_is_slower_every_batch_is_what_was_launched_first_and_one_step_old():
    """Only the first batch, for which the trainer has nothing else to do, goes without its slowest groups."""
    play = Play(seconds=uneven(2), batches=20, bound=1)
    taken = on_virtual_time(play.run(train_seconds=10.0))
    indices = [batch for _, batch, _ in taken]
    assert indices[0] != list(range(G))
    left = sorted(set(range(20 * G)) - set(indices[0]))
    assert indices[1:] == [left[n * G : (n + 1) * G] for n in range(19)]
    assert [set(ages) for _, _, ages in taken] == [{0}] + [{1}] * 19


@pytest.mark.parametrize("train_seconds", [0.5, 2.0, 4.0])
def test_with_a_bound_of_one_nothing_older_is_in_a_batch_and_few_are_dropped_for_it(train_seconds):
    """Lengths from 1 to 4, and one group in fifty takes 8."""
    lengths = uneven(3)
    play = Play(seconds=lambda index: 8.0 if index % 50 == 7 else lengths(index), bound=1, batches=100)
    taken = on_virtual_time(play.run(train_seconds))
    assert max(max(ages) for _, _, ages in taken) == 1
    assert all(len(indices) == G for _, indices, _ in taken)  # others took the place of what was dropped
    assert 2 * len(play.stale) == play.ledger.dropped["stale"]  # a rollout has two tokens
    assert 0 < len(play.stale) <= 0.05 * 100 * G
    assert sum(play.ledger.dropped.values()) + play.ledger.trained == play.ledger.sampled


def test_the_bound_drops_exactly_what_is_older():
    """The straggler is done in time for batch 4: a bound of 4 trains it, one of 3 drops it."""
    for bound in (4, 3):
        play = Play(seconds=lambda index: 11.0 if index == 3 else 1.9, bound=bound, batches=12)
        taken = on_virtual_time(play.run())
        where = [(number, ages[0]) for number, (_, indices, ages) in enumerate(taken) if 3 in indices]
        assert (where, len(play.stale)) == (([(4, 4)], 0) if bound == 4 else ([], 1))


def test_a_bound_below_the_level_bounds_what_may_start():
    """At level 3 and bound 1 nothing is launched that would be too old for its batch."""
    play = Play(seconds=uneven(4), level=3, bound=1, batches=30)
    taken = on_virtual_time(play.run(train_seconds=10.0))
    assert [set(ages) for _, _, ages in taken] == [{0}] + [{1}] * 29
    assert play.stale == []


# ---- oversampling


@pytest.mark.parametrize(
    ("level", "factor", "filtering", "in_flight"),
    [
        (0, 3.0, False, 1.0),  # nothing gives its place to another: the rule alone decides
        (1, 3.0, False, 2.0),
        (3, 3.0, False, 3.0),
        (1, 1.5, False, 1.5),
        (0, 1.0, True, 1.0),
        (0, 3.0, True, 3.0),
        (1, 3.0, True, 3.0),
        (0, 2.5, True, 2.5),
    ],
)
def test_the_factor_counts_groups_in_flight_wherever_groups_are_replaced(level, factor, filtering, in_flight):
    async def at_the_start():
        play = Play(seconds=lambda index: 1.0, level=level, factor=factor, filtering=filtering)
        play.dispatcher.start(version=0, batch=0)
        count = play.dispatcher.num_running
        await play.dispatcher.stop()
        return count

    assert on_virtual_time(at_the_start()) == in_flight * G


def test_at_every_step_of_a_synchronous_run_the_factor_is_in_flight_where_two_of_three_groups_are_dropped():
    lengths = uneven(5)
    play = Play(seconds=lengths, flat=lambda index: index % 3 > 0, level=0, factor=3.0, filtering=True, batches=10)
    taken = on_virtual_time(play.run())
    slow = Play(seconds=lengths, flat=lambda index: index % 3 > 0, level=0, factor=1.0, filtering=True, batches=10)
    one_by_one = on_virtual_time(slow.run())
    assert min(play.in_flight[:-1]) > 2.5 * G
    assert taken[-1][0] < 0.6 * one_by_one[-1][0]
    # Whatever is in flight: the same groups, in the same order.
    assert [i for _, indices, _ in taken for i in indices] == [i for _, indices, _ in one_by_one for i in indices]
    assert max(max(ages) for _, _, ages in one_by_one) == 0


@pytest.mark.parametrize("level", [0, 1])
def test_no_surplus_group_is_lost_for_being_long(level):
    """Half of the groups are flat, three times as many as needed are in flight: all others are trained, long or short,
    in about the order in which they were launched."""
    play = Play(
        seconds=lambda index: 10.0 if index % 4 == 0 else 1.0,
        flat=lambda index: index % 8 < 4,
        level=level,
        factor=3.0,
        filtering=True,
        batches=40,
        bound=100,
    )
    taken = on_virtual_time(play.run())
    indices = [i for _, batch, _ in taken for i in batch]
    assert len(set(indices)) == len(indices) == 40 * G
    long = sum(index % 4 == 0 for index in indices)
    assert long == pytest.approx(len(indices) / 4, abs=3 * G / 4)
    if level == 0:
        assert indices == [i for i in range(indices[-1] + 1) if i % 8 >= 4]


def test_surplus_that_would_be_too_old_is_dropped_and_counted():
    """Synchronous, nothing off policy, nothing flat: of three batches in flight one is trained."""
    play = Play(seconds=uneven(6), level=0, bound=0, factor=3.0, filtering=True, batches=6)
    taken = on_virtual_time(play.run())
    assert [set(ages) for _, _, ages in taken] == [{0}] * 6
    assert play.ledger.trained == 6 * G * 2 * 2
    assert play.ledger.dropped["stale"] == len(play.stale) * 2 * 2 > 0
    for (_, indices, _), (_, following, _) in pairwise(taken):
        assert indices == list(range(indices[0], indices[0] + G))  # launched first, not finished first
        assert following[0] > indices[-1]


def test_groups_that_find_no_place_are_drawn_and_made_as_places_become_free(monkeypatch):
    """Five batches of 200 groups may be in flight, and 20 episodes have places. No place is ever empty: 20 episodes of
    one second end in each second. The examples are drawn at once, in their order, and a resume holds them all."""
    made = []

    class CountedRun(GroupRun):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(kwargs["index"])

    monkeypatch.setattr(dispatcher, "GroupRun", CountedRun)

    def play():
        return Play(seconds=lambda index: 1.0, groups_per_batch=200, level=4, factor=5.0, places=20)

    async def run():
        first = play()
        dispatcher = first.dispatcher
        dispatcher.start(version=0, batch=0)
        await asyncio.sleep(0.5)
        for second in range(20):
            assert list(first.launched) == list(range(20 * (second + 1)))
            assert made == list(range(20 * (second + 1) + MOST_IN_LINE))
            await asyncio.sleep(1.0)
        state = dispatcher.state_dict()
        assert (dispatcher.num_running, dispatcher.num_ready, dispatcher.num_held) == (600, 400, 420 + MOST_IN_LINE)
        assert [row["index"] for row in state["held"]] == list(range(1000))
        assert dispatcher.num_pending_tokens == 400 * 2
        await dispatcher.stop()
        again = play().dispatcher
        again.load_state_dict(state)
        assert again.state_dict() == state

    on_virtual_time(run())


def test_a_resume_holds_what_was_in_flight_and_what_was_left_over():
    async def interrupted():
        play = Play(seconds=uneven(7), factor=2.0, batches=20)
        running = asyncio.create_task(play.run())
        await asyncio.sleep(12.0)
        running.cancel()
        await play.dispatcher.stop()
        return play

    play = on_virtual_time(interrupted())
    held = [row["index"] for row in play.dispatcher.state_dict()["held"]]
    settled = [index for index in play.launched if play.ledger.is_settled(index)]
    assert sorted(held + settled) == list(range(len(play.launched)))
    assert held == sorted(held)
    assert len(held) > G


def test_what_goes_wrong_as_a_group_is_collected_stops_the_run(monkeypatch):
    """The event loop would only log it, and the next batch would never come."""

    def no_memory(*args, **kwargs):
        raise MemoryError

    async def asked():
        play = Play(seconds=lambda index: 1.0)
        play.dispatcher.start(version=0, batch=0)
        monkeypatch.setattr(dispatcher, "insort", no_memory)
        try:
            await asyncio.wait_for(play.dispatcher.next_batch(), 100)
        finally:
            held.append(play.dispatcher.num_running)
            await play.dispatcher.stop()

    held = []
    with pytest.raises(MemoryError):
        on_virtual_time(asked())
    assert held[0] >= G  # they will be sampled again when the run goes on


def test_a_fault_while_launching_goes_on_in_a_later_turn_of_the_loop_stops_the_run():
    """The examples cannot be drawn from the 129th on: nothing has ended by then, and nothing will for an hour."""

    async def run():
        play = Play(seconds=lambda index: 3600.0, groups_per_batch=200)
        draw, drawn = play.dispatcher.schedule.draw, []

        def broken_draw():
            if len(drawn) == MOST_AT_ONCE:
                raise RuntimeError("no example 128")
            drawn.append(draw())
            return drawn[-1]

        play.dispatcher.schedule.draw = broken_draw
        play.dispatcher.start(version=0, batch=0)
        with pytest.raises(RuntimeError, match="no example 128"):
            await play.dispatcher.next_batch()
        assert asyncio.get_running_loop().time() < 1.0
        await play.dispatcher.stop()

    on_virtual_time(run())
