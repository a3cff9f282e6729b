"""However many turns are ready at once, the event loop serves its timers in between, and nobody is forgotten."""

from __future__ import annotations

import asyncio

from verbatim.rollouts.turn_limiter import AT_A_TIME, turn_limiter


async def test_so_many_for_each_turn_of_the_loop_in_order():
    turns, entered = 0, []

    async def count():
        nonlocal turns
        while len(entered) < 5 * AT_A_TIME:
            await asyncio.sleep(0)
            turns += 1

    async def caller(number):
        await turn_limiter().enter()
        entered.append((turns, number))

    await asyncio.gather(count(), *(caller(number) for number in range(5 * AT_A_TIME)))
    assert [number for _, number in entered] == list(range(5 * AT_A_TIME))
    in_each = [sum(turn == at for at, _ in entered) for turn in range(turns + 1)]
    assert max(in_each) == AT_A_TIME


async def test_few_enter_at_once():
    for _ in range(AT_A_TIME):
        entering = turn_limiter().enter()
        try:
            entering.send(None)
        except StopIteration:
            continue
        raise AssertionError("it waited")


async def test_the_place_of_a_caller_that_was_cancelled_is_taken_by_the_next():
    entered = []

    async def caller(number):
        await turn_limiter().enter()
        entered.append(number)

    tasks = [asyncio.create_task(caller(number)) for number in range(3 * AT_A_TIME)]
    await asyncio.sleep(0)
    assert entered == list(range(AT_A_TIME))
    for task in tasks[AT_A_TIME : 2 * AT_A_TIME]:
        task.cancel()
    await asyncio.wait(tasks)
    assert entered == [*range(AT_A_TIME), *range(2 * AT_A_TIME, 3 * AT_A_TIME)]


def test_every_event_loop_has_its_own():
    async def own():
        await asyncio.gather(*(turn_limiter().enter() for _ in range(3 * AT_A_TIME)))
        return turn_limiter()

    assert asyncio.run(own()) is not asyncio.run(own())
