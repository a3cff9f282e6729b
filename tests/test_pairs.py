"""Rows of options hold every pair of values, and there are far fewer of them than combinations."""

import doctest
import itertools

import pairs


def test_the_example_is_true():
    assert doctest.testmod(pairs) == (0, 1)


def test_every_pair_occurs_and_most_combinations_do_not():
    options = [range(4), range(3), range(2), range(3)]
    rows = pairs.pairs(*options)
    for one, other in itertools.combinations(range(4), 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(options[one], options[other]))
    assert len(rows) <= 16 < len(pairs.all_rows(*options)) == 72
