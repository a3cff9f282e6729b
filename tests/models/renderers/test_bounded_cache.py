"""The newest entries are remembered, within a number and a size."""

from __future__ import annotations

import threading

from verbatim.models.renderers.bounded_cache import BoundedCache


def test_the_oldest_is_forgotten():
    known = BoundedCache(2)
    for number in range(3):
        known.add(number, str(number))
    assert known == {1: "1", 2: "2"}


def test_big_entries_are_forgotten_sooner():
    """Each has 1000 bytes: three of them have more than 2500."""
    known = BoundedCache(100, most_bytes=2500)
    for number in range(3):
        known.add(number, number, 1000)
    assert list(known) == [1, 2]
    known.add(2, 2, 1000)  # in the place of the one before
    assert list(known) == [1, 2]


def test_several_threads_at_once():
    known = BoundedCache(8)

    def fill(start):
        for number in range(start, start + 5000):
            known.add(number, number)

    threads = [threading.Thread(target=fill, args=(start,)) for start in (0, 10_000, 20_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(known) == 8
