"""Gives code that uses the global random generators (`random`, `numpy.random`) a private state of these generators."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator

import numpy as np

_ONE_AT_A_TIME = threading.RLock()
"""Lock that lets only one block at a time replace the generators' states, because the generators belong to the
process."""


class OwnRandom:
    """A private state of Python's and NumPy's global random generators, for example for one episode.

    Two episodes with equal seeds draw the same numbers, no matter how their turns interleave with the turns of other
    episodes. During a block, code on other threads draws from the private state too, so blocks must be short.

    Example: with `own = OwnRandom(0)`, each `with own.lent(): random.random()` draws the next number of one private
    sequence and leaves `random` as it was.
    """

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed % 2**32).get_state()  # accepts only 32-bit seeds

    @contextlib.contextmanager
    def lent(self) -> Iterator[None]:
        """Context manager in which the global generators use this state. Afterwards they have their own state again."""
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
