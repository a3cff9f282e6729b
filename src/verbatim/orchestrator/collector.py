"""Has Python's cyclic garbage collector look at few of a run's records: they hold no cycles, and there are millions."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Mapping
from typing import Any

THRESHOLDS = (50_000, 10, 50)
"""New objects before the youngest are looked at, and how often that happens before older ones are. With 10,000 episodes
in flight a pass over the youngest takes 27 ms and one over the next half a million 340 ms: none of what they touch is
in the processor's caches. See `SpotChecks`."""
ONE_IN, FEW = 16, 50
"""While a pass finds fewer cyclic objects than `FEW`, only each `ONE_IN`th is made."""
GROWTH, SLACK = 1.25, 100_000
"""What is left out is looked through when there are this many times as many objects, and so many more, as the last
time. With 10,000 episodes in flight that takes 2 s, in which the event loop stands still."""

_left_out: list[int] = []
"""How many objects there were after they had been looked through last; empty outside of `seldom_collected`."""


class SpotChecks:
    """A callback of the collector: after a pass that found few cycles it leaves the youngest objects of the next ones
    out of all collections, instead of looking at them. Where a pass finds more, the next one looks too."""

    def __init__(self) -> None:
        self._num_to_skip = 0
        self._is_skipping = False

    def __call__(self, phase: str, info: Mapping[str, Any]) -> None:
        if info["generation"] == 2:  # asked for
            return
        if phase == "start":
            self._is_skipping = self._num_to_skip > 0
            if self._is_skipping:
                self._num_to_skip -= 1
                gc.freeze()  # nothing is left to look at
        elif not self._is_skipping:
            self._num_to_skip = ONE_IN - 1 if info["collected"] < FEW else 0


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Leave what exists already (modules, models, tokenizers) out of all collections meanwhile, and look at what is new
    less often. References still free everything at once; only cycles wait longer, at most until `step_is_over` notices
    the growth."""
    before = gc.get_threshold()
    if not before[0] or not gc.isenabled():  # the collector is switched off
        yield
        return
    gc.collect()
    gc.freeze()
    gc.set_threshold(*(max(one, other) for one, other in zip(before, THRESHOLDS, strict=True)))
    _left_out[:] = [_num_objects()]
    checks = SpotChecks()
    gc.callbacks.append(checks)
    try:
        yield
    finally:
        gc.callbacks.remove(checks)
        _left_out.clear()
        gc.set_threshold(*before)
        gc.unfreeze()


def step_is_over() -> None:
    """Within `seldom_collected`: leave out what is alive, the episodes in flight above all. References free it as ever;
    of cycles among it, the growth is noticed."""
    if not _left_out:
        return
    gc.freeze()
    if _num_objects() > GROWTH * _left_out[0] + SLACK:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        _left_out[:] = [_num_objects()]


def _num_objects() -> int:
    """Objects alive, as Python's allocator counts them: to count what is left out one by one takes 0.1 s a million."""
    return sys.getallocatedblocks() or gc.get_freeze_count()
