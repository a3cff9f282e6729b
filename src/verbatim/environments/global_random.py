"""Runs code that draws from the process's global random numbers with numbers of its own."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator

import numpy as np

_ONE_AT_A_TIME = threading.RLock()


class OwnRandom:
    """The state of Python's and numpy's global random numbers, for one user of them.

    Two episodes with equal seeds draw the same numbers, however their turns are interleaved with those of others.
    Code outside, on other threads, sees the numbers of whoever is inside: keep the blocks short.

    Example: with `own = OwnRandom(0)`, `with own.lent(): random.random()` gives one number after the other of one
    sequence, and leaves `random` as it was.
    """

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state()

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """For as long as the block lasts the global random numbers are these."""
        with _ONE_AT_A_TIME:
            before = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(before[0])
                np.random.set_state(before[1])
