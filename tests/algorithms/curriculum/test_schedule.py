"""The schedule: every example once per pass, environments by ratio, the same draws after a resume."""

import json
from collections import Counter

import pytest

from verbatim import Example
from verbatim.algorithms.curriculum import ExampleSchedule
from verbatim.core.errors import RunStopped


def rows(n, prefix="e"):
    return [Example(id=f"{prefix}{i}") for i in range(n)]


def test_every_example_is_drawn_once_before_any_is_drawn_again():
    schedule = ExampleSchedule({"a": rows(7)}, {"a": 1.0}, seed=0)
    for _ in range(3):
        assert {schedule.draw().example.id for _ in range(7)} == {f"e{i}" for i in range(7)}


def test_draws_are_numbered_from_zero():
    schedule = ExampleSchedule({"a": rows(2)}, {"a": 1.0}, seed=0)
    assert [schedule.draw().index for _ in range(5)] == [0, 1, 2, 3, 4]


def test_environments_are_mixed_by_ratio():
    schedule = ExampleSchedule({"a": rows(3), "b": rows(3)}, {"a": 3.0, "b": 1.0}, seed=1)
    counts = Counter(schedule.draw().env for _ in range(4000))
    assert 0.72 < counts["a"] / 4000 < 0.78  # 0.75 +- 4 standard deviations


def test_the_seed_decides_the_order():
    orders = [
        [ExampleSchedule({"a": rows(20)}, {"a": 1.0}, seed=s).draw().example.id for _ in range(1)] for s in range(8)
    ]
    assert len({tuple(o) for o in orders}) > 1


def test_saved_and_loaded_it_draws_the_same():
    make = lambda: ExampleSchedule({"a": rows(5), "b": rows(4)}, {"a": 1.0, "b": 2.0}, seed=3)  # noqa: E731
    schedule = make()
    for _ in range(7):
        schedule.draw()
    state = json.loads(json.dumps(schedule.state_dict()))
    expected = [schedule.draw() for _ in range(30)]
    again = make()
    again.load_state_dict(state)
    assert [again.draw() for _ in range(30)] == expected


def test_an_environment_without_examples_ends_the_run_by_name():
    with pytest.raises(RunStopped, match="'empty'"):
        ExampleSchedule({"empty": []}, {"empty": 1.0}, seed=0)


def test_an_example_that_is_gone_is_named():
    schedule = ExampleSchedule({"a": rows(2)}, {"a": 1.0}, seed=0)
    with pytest.raises(RunStopped, match="'e9'"):
        schedule.lookup("a", "e9", 4)
