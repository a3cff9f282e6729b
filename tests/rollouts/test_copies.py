"""Messages are copied whole, and a conversation is known again only where a template would write it alike."""

from __future__ import annotations

import copy
from collections import OrderedDict
from enum import StrEnum
from types import MappingProxyType

import numpy as np
import pytest

from verbatim.core.errors import EnvironmentFault
from verbatim.rollouts.copies import begins_with, copied, others_in, same_messages, schema_and_text


def called(arguments):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "look", "arguments": arguments}},
        ],
    }


def known_again(now, before):
    kept = tuple(copied(message) for message in before)
    return begins_with(now, kept, others_in(kept))


def test_a_copy_shares_nothing_that_can_change():
    message = called({"at": ["Bonn"], "deep": True, "far": 2.5, "none": None})
    made = copied(message)
    assert made == message
    message["tool_calls"][0]["function"]["arguments"]["at"].append("Ulm")
    assert made["tool_calls"][0]["function"]["arguments"] == {"at": ["Bonn"], "deep": True, "far": 2.5, "none": None}


class Role(StrEnum):
    USER = "user"


class Text(str):
    """Raises when it is asked."""

    def refuse(self, *_):
        raise OSError("no text")

    __repr__ = __str__ = __getitem__ = __iter__ = __len__ = __eq__ = __add__ = refuse
    __hash__ = str.__hash__


class Number(int):
    __repr__ = __str__ = __int__ = __index__ = __eq__ = __add__ = bit_length = Text.refuse
    __hash__ = int.__hash__


class Fraction(float):
    __repr__ = __str__ = __float__ = __eq__ = __pos__ = Text.refuse
    __hash__ = float.__hash__


class Silent(dict):
    __repr__ = __str__ = __eq__ = __deepcopy__ = copy = Text.refuse


def exactly(value):
    """The value with the types of all that is in it."""
    if isinstance(value, dict):
        return dict, [(exactly(key), exactly(item)) for key, item in value.items()]
    return type(value), [exactly(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "given, plain",
    [
        (OrderedDict(a=("b", ["c"])), {"a": ["b", ["c"]]}),
        (MappingProxyType({"a": 1}), {"a": 1}),
        (Role.USER, "user"),
        ({Role.USER: True}, {"user": True}),
        (Text("told"), "told"),
        (Number(7), 7),
        (Fraction(0.5), 0.5),
        (Silent(a=1), {"a": 1}),
        ([np.int64(7), np.float64(0.5), np.float32(0.5), np.bool_(True), np.str_("x")], [7, 0.5, 0.5, True, "x"]),
        ({1: "a", 1.5: "b", None: "c"}, {1: "a", 1.5: "b", None: "c"}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_plain_json_is_copied_as_pythons_own_types(given, plain):
    made = copied({"role": "user", "content": given})
    assert exactly(made) == exactly({"role": "user", "content": plain})
    assert same_messages({"role": "user", "content": given}, made)
    assert known_again([{"role": "user", "content": given}], [{"role": "user", "content": given}])


@pytest.mark.parametrize(
    "value, why",
    [
        (
            np.zeros(3),
            r"['content'] is a ndarray; expected texts, numbers, booleans, None, lists and mappings; "
            ".tolist() makes an array a list",
        ),
        (10**5000, "['content'] is a number of more than 4,300 digits"),
        ([10**5000], "['content'][0] is a number of more than 4,300 digits"),
        ({("a", 1): 2}, "a key at ['content'] is a tuple; expected texts"),
        ({10**5000: 2}, "a key at ['content'] is a number of more than 4,300 digits"),
        (np.complex64(1), "['content'] is a complex64; expected texts"),
        (np.longdouble(1), "['content'] is a longdouble; expected texts"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_written_is_refused_in_a_message_and_a_schema(value, why):
    for refuse, what in ((copied, "a message"), (schema_and_text, "a tool's schema")):
        with pytest.raises(EnvironmentFault) as refused:
            refuse({"role": "user", "content": value})
        assert str(refused.value).startswith(f"{what}: {why}")


def test_the_longest_numbers_that_can_be_written_are_taken():
    assert copied([10**4299, -(10**4299)]) == [10**4299, -(10**4299)]


def test_info_may_hold_arrays_and_keys_of_any_type():
    places = np.arange(3)
    made = copied({"places": places, ("a", 1): Text("told")}, "info", of_info=True)
    assert made["places"].tolist() == [0, 1, 2] and made["places"] is not places
    assert exactly(made["('a', 1)"]) == (str, "told")


class Torn(dict):
    """Can be read once."""

    def items(self):
        raise OSError("torn")


def test_messages_that_cannot_be_compared_are_the_environments_fault():
    with pytest.raises(EnvironmentFault, match="the messages cannot be compared: OSError: torn"):
        known_again([Torn(role="user", content="x")], [{"role": "user", "content": "y"}])


def test_a_message_that_holds_itself_is_refused():
    message = {"role": "user", "content": "x"}
    message["again"] = message
    with pytest.raises(EnvironmentFault, match=r"a message: it contains itself, at \['again'\]"):
        copied(message)


def test_lists_inside_one_another_are_copied_once_and_refused_where_they_are_too_many_when_written():
    value = ["x"]
    for _ in range(15):  # 2**16 values, were each written by itself
        value = [value, value]
    made = copied({"role": "user", "content": value})
    assert made["content"][0] is made["content"][1]
    for _ in range(80):
        value = [value, value]
    with pytest.raises(EnvironmentFault, match="it has more than 1,000,000 values"):
        copied({"role": "user", "content": value})


class Stubborn:
    def __deepcopy__(self, memo):
        raise OSError("no copies")


def test_what_cannot_be_copied_is_the_environments_fault():
    with pytest.raises(EnvironmentFault, match=r"a message: \['content'\] is a Stubborn; expected texts"):
        copied({"role": "user", "content": Stubborn()})


@pytest.mark.parametrize(
    "before, now, same",
    [
        ({"number": 1}, {"number": 1}, True),
        ({"number": 1}, {"number": 1.0}, False),
        ({"number": 1}, {"number": True}, False),
        ({"number": 0.0}, {"number": 0}, False),
        ({"at": ["Bonn"]}, {"at": ("Bonn",)}, True),
        ({"at": "Bonn", "deep": True}, {"deep": True, "at": "Bonn"}, True),
        ({"at": "x" * 1000, "deep": True}, {"at": "x" * 1000, "deep": 1}, False),
        ({"at": "x" * 1000, "deep": True}, {"at": "x" * 1000, "deep": True}, True),
    ],
)
def test_a_conversation_is_known_again_where_a_template_would_write_it_alike(before, now, same):
    asked = {"role": "user", "content": "where?"}
    assert known_again([asked, called(now), asked], [asked, called(before)]) is same
    assert same_messages([called(now)], [called(before)]) is same


def test_another_text_a_missing_message_and_another_kind_of_mapping():
    asked, answered = {"role": "user", "content": "where?"}, {"role": "assistant", "content": "there"}
    assert known_again([asked, answered], [asked, answered])
    assert not known_again([asked, {**answered, "content": "here"}], [asked, answered])
    assert not known_again([asked], [asked, answered])
    assert known_again([OrderedDict(asked), answered], [asked, answered])
    assert known_again((copy.deepcopy(asked), answered), [asked])


def test_what_was_not_noted_is_compared_piece_by_piece():
    kept = (copied(called({"number": 1})),)
    assert begins_with([called({"number": 1})], kept, None)
    assert not begins_with([called({"number": True})], kept, None)


def test_the_text_of_a_schema_is_pythons_own():
    schema = {"type": "function", "deep": [1, 1.5, True, None, {"é": "\n'"}]}
    assert schema_and_text(schema) == (schema, str(schema))
    assert schema_and_text(OrderedDict(type=("function",))) == ({"type": ["function"]}, "{'type': ['function']}")
    assert schema_and_text({"number": 1})[1] != schema_and_text({"number": True})[1]
