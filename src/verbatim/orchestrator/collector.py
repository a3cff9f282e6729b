"""Has Python's cyclic garbage collector look at a run's records seldom: they hold no cycles, and there are millions."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

THRESHOLDS = (50_000, 10, 50)
"""New objects before the youngest are looked at, and how often that happens before older ones are. A pass over the
youngest takes about 1 ms, one over the next half a million about 15 ms."""


@contextlib.contextmanager
def seldom_collected() -> Iterator[None]:
    """Leave what exists already (modules, models, tokenizers) out of all collections meanwhile, and collect what is new
    less often. References still free everything at once; only cycles wait longer."""
    before = gc.get_threshold()
    if not before[0] or not gc.isenabled():  # somebody has switched it off
        yield
        return
    gc.collect()
    gc.freeze()
    gc.set_threshold(*(max(one, other) for one, other in zip(before, THRESHOLDS, strict=True)))
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
