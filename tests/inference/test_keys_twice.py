"""A key that stands twice in an object of a body is found, however the body is written; no other body is refused."""

import doctest
import json
import random

import pytest

from verbatim.core.errors import UsageError
from verbatim.inference.http import keys_twice
from verbatim.inference.http.keys_twice import check_keys

KEYS = ("a", "b", "", ":", '"', "\\", '\\"', '":', " :", "ä", "a\\")
TEXTS = (*KEYS, ":-)", '{"a": 1, "a": 2}', '{"a" : "\\\\":1}', '"\\":', "\\\\", "x")
SPACES = ("", "", "", " ", "\n", "\t", "\r\n  ")


class Writer:
    """Writes random JSON, piece by piece, and notes whether a key stands twice."""

    def __init__(self, seed, twice):
        self._random = random.Random(seed)
        self._twice = twice
        self.has_twice = False
        self._spaced = self._random.random() < 0.3

    def value(self, depth=0):
        kind = self._random.choice(("text", "number", *(("object", "list") if depth < 4 else ())))
        if depth == 0 or kind == "object":
            return self._object(depth)
        if kind == "list":
            items = (self._space() + self.value(depth + 1) + self._space() for _ in range(self._random.randint(0, 3)))
            return "[" + ",".join(items) + "]"
        return self._text(TEXTS) if kind == "text" else self._random.choice(("1", "-2.5", "true", "null"))

    def _object(self, depth):
        keys = self._random.sample(KEYS, self._random.randint(0, 4))
        if keys and self._twice and self._random.random() < 0.3:
            keys.insert(self._random.randrange(len(keys) + 1), self._random.choice(keys))
            self.has_twice = True
        pairs = [
            self._space() + self._text([key]) + self._space() + ":" + self._space() + self.value(depth + 1)
            for key in keys
        ]
        return "{" + ",".join(pairs) + self._space() + "}"

    def _text(self, texts):
        text = self._random.choice(texts)
        escaped = "".join(f"\\u{ord(character):04x}" for character in text)
        return f'"{escaped}"' if self._random.random() < 0.1 else json.dumps(text, ensure_ascii=False)

    def _space(self):
        return self._random.choice(SPACES) if self._spaced else ""


@pytest.mark.parametrize("twice", [False, True])
def test_a_key_twice_is_found_and_nothing_else(twice):
    wrong, num_found = [], 0
    for seed in range(3000):
        writer = Writer(seed, twice)
        body = writer.value()
        try:
            check_keys(body.encode(), json.loads(body))
            found = False
        except UsageError:
            found = True
        num_found += found
        if found != writer.has_twice:
            wrong.append(body)
    assert wrong == []
    assert (num_found > 500) == twice


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ('{"a": 1, "a": 1}', "the body has the key 'a' twice"),
        ('{"a":{"b":1,"b":1}}', "a has the key 'b' twice"),
        ('{"a": [0, {"b": [[{"c": {"": 1, "\\u0062": 2, "": 3}}]]}]}', "a[1].b[0][0].c has the key '' twice"),
        ('{"a" : 1, "b": 2, "b"\n: 3}', "the body has the key 'b' twice"),
        ('{"a": {"b": 1, "b": 2}, "a": 5}', "the body has the key 'a' twice"),
        ('{"%s": {"b": 1, "b": 2}}' % ("k" * 900), "k" * 200 + " has the key 'b' twice"),
    ],
)
def test_the_key_is_named_with_its_place(body, told):
    for data in (body.encode(), bytearray(body.encode()), body.encode("utf-16"), body.encode("utf-32-le")):
        with pytest.raises(UsageError) as refusal:
            check_keys(data, json.loads(data))
        assert str(refusal.value) == f"{told}, and one of the values would be lost; send each key once"


@pytest.mark.parametrize(
    "body", ["[]", "{}", "5", '""', '"a"', "null", '[[], {}, [1, "b"], ["b", 1]]', '[1, {"a": "b"}]']
)
def test_a_body_of_any_shape_is_looked_at(body):
    check_keys(body.encode(), json.loads(body))


def test_what_the_module_says_of_itself():
    assert doctest.testmod(keys_twice).failed == 0
