"""Messages are copied whole, and a conversation is known again only where a template would write it alike."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest

from verbatim.errors import EnvironmentFault
from verbatim.rollouts.copies import begins_with, copied, others_in, same_messages, schema_text


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


def test_what_is_no_plain_json_is_copied_by_python():
    message = OrderedDict(role="user", content=("a", ["b"]))
    made = copied(message)
    assert isinstance(made, OrderedDict) and made == message and made["content"][1] is not message["content"][1]


def test_a_message_that_holds_itself_is_copied_as_one():
    message = {"role": "user", "content": "x"}
    message["again"] = message
    made = copied(message)
    assert made["again"] is made


def test_lists_inside_one_another_many_times_over_are_copied_once():
    value = ["x"]
    for _ in range(100):  # 2**100 lists, were each copied by itself
        value = [value, value]
    made = copied({"role": "user", "content": value})
    assert made["content"][0] is made["content"][1]


class Stubborn:
    def __deepcopy__(self, memo):
        raise OSError("no copies")


def test_what_cannot_be_copied_is_the_environments_fault():
    with pytest.raises(EnvironmentFault, match="the messages cannot be copied: OSError: no copies"):
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
    for schema in ({"type": "function", "deep": [1, 1.5, True, None, {"é": "\n'"}]}, OrderedDict(type="function")):
        assert schema_text(schema) == str(schema)
    assert schema_text({"number": 1}) != schema_text({"number": True})
