"""Dotted overrides set one key of the document."""

from __future__ import annotations

from typing import Any

import pytest

from verbatim.config.overrides import apply_override, parse_overrides, parse_value
from verbatim.core.errors import ConfigError


def applied(document: dict[str, Any], *arguments: str) -> dict[str, Any]:
    for override in parse_overrides(arguments):
        apply_override(document, override, True if override.text is None else parse_value(override.text))
    return document


def test_kebab_and_snake_case_are_the_same_key():
    assert applied({}, "--a-b.c-d", "1") == applied({}, "--a_b.c_d=1") == {"a_b": {"c_d": 1}}


def test_a_key_that_is_spelt_with_a_dash_in_the_file_keeps_its_dash():
    assert applied({"args": {"my-key": 1}}, "--args.my-key", "2") == {"args": {"my-key": 2}}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64", 64),
        ("-0.5", -0.5),
        ("true", True),
        ("inf", float("inf")),
        ("[1, 2]", [1, 2]),
        ("a/text", "a/text"),
        ('"64"', "64"),
        ("{a = 1}", {"a": 1}),
        ('{"a": {"b": [true]}}', {"a": {"b": [True]}}),
        ("", ""),
        ("2026-01-31", "2026-01-31"),
        ('{"a": 1, "b": null}', {"a": 1}),
        ("1\nb = 2", "1\nb = 2"),
    ],
)
def test_values_are_toml_then_json_then_text(text: str, value: Any):
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


def test_list_elements_are_named_by_index_and_the_next_one_is_appended():
    document = {"env": [{"id": "a", "max_turns": 3}]}
    assert applied(document, "--env.0.max-turns", "4", "--env.1.id=b") == {
        "env": [{"id": "a", "max_turns": 4}, {"id": "b"}]
    }


def test_a_missing_list_is_made_for_index_0():
    assert applied({}, "--filters.0.type", "gibberish") == {"filters": [{"type": "gibberish"}]}


def test_an_index_past_the_end_is_refused():
    with pytest.raises(ConfigError, match=r"env is a list of 1; expected an index from 0 to 1, found '2'"):
        applied({"env": [{}]}, "--env.2.id", "x")


def test_null_removes_a_key_and_makes_nothing_on_its_way():
    assert applied({"a": {"b": 1, "c": 2}}, "--a.b", "null") == {"a": {"c": 2}}
    assert applied({}, "--a.b", "null") == {}
    assert applied({"env": [1, 2]}, "--env.0", "null") == {"env": [2]}


def test_the_last_override_of_a_key_wins():
    assert applied({}, "--a", "1", "--a", "2") == {"a": 2}


def test_a_negative_number_is_a_value_and_no_option():
    assert applied({}, "--a", "-1") == {"a": -1}


def test_an_option_without_a_value_is_true():
    assert applied({}, "--a", "--b", "1") == {"a": True, "b": 1}


@pytest.mark.parametrize("argument", ["value", "-a", "--", "--a..b", "--.a"])
def test_what_is_no_override_is_refused(argument: str):
    with pytest.raises(ConfigError, match=r"expected an override such as --orchestrator\.batch-size 64"):
        parse_overrides([argument])


def test_a_way_through_a_plain_value_is_refused():
    with pytest.raises(ConfigError, match="a is 1, which has no keys"):
        applied({"a": 1}, "--a.b", "2")
