"""Tunes the cyclic garbage collector: a run holds millions of records without cycles, which need not be traversed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import PAGESIZE

THRESHOLDS = (50_000, 10, 50)
"""The thresholds of `gc.set_threshold`: the number of new objects before a collection of the youngest generation, and
the number of collections of one generation before a collection of the next. With 10,000 episodes in flight, a
collection of the youngest generation takes 27 ms. A collection of the next generation, which has half a million
objects, takes 340 ms, because the objects are not in the processor's caches. See `spot_checks`."""
CHECK_EVERY = 0.05
"""Seconds between two rounds of `spot_checks`. The collector counts new objects minus freed objects: while as many
objects are freed as created, it does not run, and when it finally runs, it traverses everything created meanwhile. With
100,000 episodes in flight, that took 9 s."""
ONE_IN, FEW = 16, 50
"""While collections find fewer than `FEW` cyclic objects, only every `ONE_IN`th round collects."""
GROWTH, SLACK = 1.25, 100_000
"""A full collection runs once the number of objects per held episode has grown by the factor `GROWTH`, plus `SLACK`
objects in total, since the last full collection. A full collection blocks the event loop: for 2 s with 10,000 episodes
in flight, for more than a minute with 100,000."""
MEMORY_GROWTH, MEMORY_SLACK = 1.5, 1 << 30
"""The same factor and addition for resident memory, in bytes: a few cyclic objects may hold large arrays, whose size
the collector does not count."""


@dataclass
class _Known:
    """Baselines: only growth beyond these is a sign of garbage."""

    at_start: int
    """Number of objects before the first episode; after a full collection while no episode was held, those it left."""
    memory: int
    """Resident memory in bytes: at the start, then after the first step, then after each full collection."""
    per_episode: float | None = None
    """Number of objects per held episode, after the first step or the last full collection; None if neither has
    happened yet."""


_known: list[_Known] = []
"""Has one entry inside `seldom_collected`, and is otherwise empty."""


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """While the block runs, exclude existing objects (modules, models, tokenizers) from collections, and check new
    objects less often. Reference counting still frees objects immediately; only cycles live longer, until
    `step_is_over` or `group_is_over` notices the growth."""
    before = gc.get_threshold()
    if not before[0] or not gc.isenabled():  # the user has switched the collector off
        yield
        return
    gc.collect()
    gc.freeze()
    gc.set_threshold(*(max(one, other) for one, other in zip(before, THRESHOLDS, strict=True)))
    _known[:] = [_Known(_num_objects(), resident())]
    try:
        yield
    finally:
        _known.clear()
        gc.set_threshold(*before)
        gc.unfreeze()


async def spot_checks() -> None:
    """Inside `seldom_collected`: collect the youngest objects now and then, and exclude them from later collections, so
    that no collection has many objects to traverse. After a round that found cycles, the next round collects too. Never
    returns while the block runs."""
    num_left_out = ONE_IN
    while _known:
        await asyncio.sleep(CHECK_EVERY)
        if num_left_out < ONE_IN - 1:
            gc.freeze()
            num_left_out += 1
        elif gc.collect(0) < FEW:
            num_left_out = 0


def step_is_over(num_held: int) -> None:
    """Inside `seldom_collected`: exclude all live objects, above all the episodes in flight, from collections. They are
    still freed by reference counting; garbage cycles among them show up as growth.

    Args:
        num_held: Number of episodes in flight or ended but not settled. Objects beyond the usual number per episode are
            treated as garbage. The usual number is measured at the end of the first step, without a full collection,
            which would block a run with many episodes.
    """
    if not _known:
        return
    gc.freeze()
    known = _known[0]
    grown = _num_objects() - known.at_start
    if known.per_episode is None and num_held:
        known.per_episode, known.memory = grown / num_held, resident()
    elif grown > GROWTH * (known.per_episode or 0.0) * num_held + SLACK or _has_grown_in_memory(known):
        _look_through_everything(known)
        if num_held:
            known.per_episode = max(0, _num_objects() - known.at_start) / num_held
        else:  # what is left belongs to no episode: without this, every later step of such a run would look again
            known.at_start = _num_objects()


def group_is_over() -> None:
    """Inside `seldom_collected` in a program without steps: run a full collection if memory has grown."""
    if _known and _has_grown_in_memory(_known[0]):
        _look_through_everything(_known[0])


def _look_through_everything(known: _Known) -> None:
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    known.memory = resident()


def _has_grown_in_memory(known: _Known) -> bool:
    return resident() > MEMORY_GROWTH * known.memory + MEMORY_SLACK


def resident() -> int:
    """Resident memory of this process in bytes; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * PAGESIZE
    except OSError:
        return 0


def _num_objects() -> int:
    """Number of live objects, from the allocator's counter: counting the excluded objects one by one takes 0.1 s per
    million."""
    return sys.getallocatedblocks() or gc.get_freeze_count()
