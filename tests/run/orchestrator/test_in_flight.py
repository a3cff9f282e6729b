"""Which groups are in flight, by the weights that they were launched with."""

import doctest
import random

from verbatim.run.orchestrator import in_flight
from verbatim.run.orchestrator.in_flight import InFlight


def test_the_example_of_its_docstring():
    assert doctest.testmod(in_flight) == (0, 4)


def test_its_counts_are_those_of_a_list_that_is_searched():
    """Groups are launched in the order of their numbers with newer and newer weights, and end in any order."""
    for seed in range(20):
        rng, groups, known = random.Random(seed), InFlight(), []
        version = 0
        for index in range(200):
            version += rng.random() < 0.05
            groups.add(index, version)
            known.append((index, version))
            while known and rng.random() < 0.45:
                ended = known.pop(rng.randrange(len(known)))
                groups.remove(*ended)
            oldest, last = rng.randint(0, version + 1), rng.randrange(index + 2)
            useful = [i for i, v in known if v >= oldest]
            assert len(groups) == len(known)
            assert groups.num_since(oldest) == len(useful)
            assert groups.first_since(oldest) == min(useful, default=None)
            assert groups.first(oldest) == min((i for i, v in known if v == oldest), default=None)
            assert groups.num_later(last) == sum(i > last for i, _ in known)
        groups.clear()
        assert len(groups) == 0
