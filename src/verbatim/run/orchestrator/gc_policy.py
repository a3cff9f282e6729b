"""Has Python's cyclic garbage collector look at few of a run's records: they hold no cycles, and there are millions."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import PAGESIZE

THRESHOLDS = (50_000, 10, 50)
"""New objects before the youngest are looked at, and how often that happens before older ones are. With 10,000 episodes
in flight a pass over the youngest takes 27 ms and one over the next half a million 340 ms: none of what they touch is
in the processor's caches. See `spot_checks`."""
CHECK_EVERY = 0.05
"""Seconds between two looks of `spot_checks`. The collector counts new objects less freed ones: where as
many end as begin it makes no pass, and the one that comes at last looks at all that began meanwhile. With 100,000
episodes in flight that took 9 s."""
ONE_IN, FEW = 16, 50
"""While a look finds fewer cyclic objects than `FEW`, only each `ONE_IN`th is made."""
GROWTH, SLACK = 1.25, 100_000
"""Everything is looked through when there are this many times as many objects for each held episode, and so many
objects more, as the last time. With 10,000 episodes in flight that takes 2 s and with 100,000 more than a minute, in
which the event loop stands still."""
MEMORY_GROWTH, MEMORY_SLACK = 1.5, 1 << 30
"""The same of the bytes of resident memory: a few cyclic objects may hold large arrays, which are no objects of the
collector."""


@dataclass
class _Known:
    """What is no sign of garbage."""

    at_start: int
    """Objects before the first episode."""
    memory: int
    """Bytes of resident memory then; later, at the end of the first step, or after everything was looked through."""
    per_episode: float | None = None
    """Objects for each held episode: at the end of the first step, or after everything was looked through; None before
    that."""


_known: list[_Known] = []
"""One within `seldom_collected`, else empty."""


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Leave what exists already (modules, models, tokenizers) out of all collections meanwhile, and look at what is new
    less often. References still free everything at once; only cycles wait longer, at most until `step_is_over` or
    `group_is_over` notices the growth."""
    before = gc.get_threshold()
    if not before[0] or not gc.isenabled():  # the collector is switched off
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
    """Within `seldom_collected`: look at the youngest objects from time to time, and leave them out of all collections
    in between, so that no pass finds many. Where a look finds cycles, the next one follows at once. Without end."""
    num_left_out = ONE_IN
    while _known:
        await asyncio.sleep(CHECK_EVERY)
        if num_left_out < ONE_IN - 1:
            gc.freeze()
            num_left_out += 1
        elif gc.collect(0) < FEW:
            num_left_out = 0


def step_is_over(num_held: int) -> None:
    """Within `seldom_collected`: leave out what is alive, the episodes in flight above all. References free it as ever;
    of cycles among it, the growth is noticed.

    Args:
        num_held: Episodes in flight, and those that ended and are not settled: what there is beyond their share is
            garbage. Their share is what there is at the end of the first step, so that a run with many episodes does
            not stand still there.
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
        known.per_episode = max(0, _num_objects() - known.at_start) / max(1, num_held)


def group_is_over() -> None:
    """Within `seldom_collected`, where there are no steps: look through everything where memory has grown."""
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
    """Bytes of this process in memory; 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * PAGESIZE
    except OSError:
        return 0


def _num_objects() -> int:
    """Objects alive, as Python's allocator counts them: to count what is left out one by one takes 0.1 s a million."""
    return sys.getallocatedblocks() or gc.get_freeze_count()
