"""Each alarm stands once, in the table: its condition, its thresholds, its texts, its row in the documentation."""

from __future__ import annotations

import doctest
import inspect
import re
import string
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from verbatim.config.backends import schema_with_backends
from verbatim.config.fields import keys
from verbatim.config.parameters import check_parameters
from verbatim.logs.monitors.alarms import ALARMS, AlarmRow, StepFigures, Window, break_reasons, conditions, engine
from verbatim.logs.monitors.alarms import reward_conditions as of_rewards
from verbatim.logs.monitors.alarms.engine import Why
from verbatim.logs.monitors.alarms.rule import Sight
from verbatim.run.tables import component_tables

PAGE = Path(__file__).parents[3] / "docs" / "alarms.md"


def causes_of(row: AlarmRow) -> dict[str, Why]:
    return {"": row.why} if isinstance(row.why, Why) else dict(row.why)


def texts_of(row: AlarmRow) -> Iterator[str]:
    yield row.message
    for why in causes_of(row).values():
        yield from (why.cause, why.advice, why.seen)


def test_each_condition_is_of_one_alarm():
    """An alarm that stood twice under one name would leave the condition of the first one without an alarm."""
    written = [
        function
        for module in (conditions, of_rewards)
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    ]
    assert Counter(row.function for row in ALARMS.values()) == Counter(written)
    assert {name: row.function.__name__ for name, row in ALARMS.items()} == {name: name for name in ALARMS}


def test_the_page_has_each_alarm_once():
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [name.strip("` ") for row in rows for name in row.split(",")] == list(ALARMS)


@pytest.mark.parametrize("name", ALARMS)
def test_a_row_gives_each_parameter_a_value_of_its_type(name: str):
    row = ALARMS[name]
    values, wrong = check_parameters(row.function, row.parameters, num_inputs=1, label="alarm")
    assert (values, wrong) == (row.parameters, {})
    assert set(row.limits) <= set(row.parameters)
    assert all(low <= row.parameters[parameter] <= high for parameter, (low, high) in row.limits.items())


def test_every_text_names_keys_that_exist():
    schema, _ = schema_with_backends({}, component_tables())
    known = {name for name, _ in keys(schema)}
    fields = [
        field for row in ALARMS.values() for text in texts_of(row) for _, field, _, _ in string.Formatter().parse(text)
    ]
    named = {field for field in fields if field and "." in field}
    assert len(named) > 25 and named <= known
    assert set(break_reasons.KEYS.values()) <= known


def test_an_alarm_without_a_cause_for_what_is_seen_takes_the_last_one():
    row = AlarmRow(
        name="x",
        function=lambda window, bound: [Sight(level=2.0, why=window.setting("seen"), values={"share": 0.25})],
        parameters={"bound": 3},
        message="{share:.0%} is above {bound}{seen}",
        why={"known": Why(cause="a", advice="b {a.b}", seen=", and known"), "": Why(cause="c", advice="d")},
        evidence=("loss", "absent"),
    )

    def found(seen: str) -> tuple[str, str, str]:
        steps = [StepFigures(step=1, metrics={"loss": 0.5})]
        (finding,) = row(Window(steps=steps, config={"seen": seen, "a": {"b": True}}))
        assert finding.evidence == {"loss": 0.5}
        return finding.message, finding.cause, finding.advice

    assert found("known") == ("25% is above 3, and known", "a", "b a.b (now true)")
    assert found("other") == ("25% is above 3", "c", "d")


def test_the_example_of_the_docstring_holds():
    assert doctest.testmod(engine) == (0, 2)
