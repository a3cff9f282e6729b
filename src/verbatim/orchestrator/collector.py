"""Has Python's cyclic garbage collector look at a run's records seldom: they hold no cycles, and there are millions."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

THRESHOLDS = (50_000, 10, 50)
"""New objects before the youngest are looked at, and how often that happens before older ones are. A pass over the
youngest takes about 1 ms, one over the next half a million about 15 ms."""
GROWTH, SLACK = 1.25, 100_000
"""What is left out is looked through when there is this many times as much of it, and so many objects more, as the last
time. With 10,000 episodes in flight that takes 2 s, in which the event loop stands still."""

_left_out: list[int] = []
"""How many objects were left out after they had been looked through last; empty outside of `seldom_collected`."""


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Leave what exists already (modules, models, tokenizers) out of all collections meanwhile, and collect what is new
    less often. References still free everything at once; only cycles wait longer."""
    before = gc.get_threshold()
    if not before[0] or not gc.isenabled():  # the collector is switched off
        yield
        return
    gc.collect()
    gc.freeze()
    gc.set_threshold(*(max(one, other) for one, other in zip(before, THRESHOLDS, strict=True)))
    _left_out[:] = [gc.get_freeze_count()]
    try:
        yield
    finally:
        _left_out.clear()
        gc.set_threshold(*before)
        gc.unfreeze()


def step_is_over() -> None:
    """Within `seldom_collected`: leave out what is alive, the episodes in flight above all. References free it as ever;
    of cycles among it, the growth is noticed."""
    if not _left_out:
        return
    gc.freeze()
    if gc.get_freeze_count() > GROWTH * _left_out[0] + SLACK:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        _left_out[:] = [gc.get_freeze_count()]
