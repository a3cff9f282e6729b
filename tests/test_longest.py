"""The order in which tests are given to workers."""

from types import SimpleNamespace

import pytest

import longest
from longest import SECONDS, TESTS, longest_first


@pytest.fixture
def seconds(monkeypatch):
    monkeypatch.setattr(longest, "SECONDS", {"a.py": 30, "b.py": 20, "c.py": 15})


def items(counts):
    return [SimpleNamespace(path=TESTS / name, number=i) for name, count in counts.items() for i in range(count)]


def names(ordered):
    return "".join(item.path.stem for item in ordered)


def test_each_worker_begins_with_long_modules_and_all_have_as_many_tests(seconds):
    given = items({"x.py": 3, "c.py": 1, "y.py": 2, "a.py": 2, "b.py": 1, "z.py": 3})
    ordered = longest_first(given, 2)  # a = 30 s | b, c = 20 + 15 s
    assert names(ordered) == "aaxxxy" + "bcyzzz"
    assert sorted(map(id, ordered)) == sorted(map(id, given))


def test_a_long_module_alone_may_be_more_than_a_part(seconds):
    given = items({"a.py": 5, "b.py": 1, "x.py": 1})
    assert names(longest_first(given, 3)) == "aaaaabx"


def test_the_modules_exist():
    assert [name for name in SECONDS if not (TESTS / name).is_file()] == []
