"""Processes that are started get variables by name, so that no key stands in a configuration."""

import pytest

from verbatim.core import redaction
from verbatim.core.errors import UsageError
from verbatim.core.redaction import without_secrets
from verbatim.environments.tools.variables import further_variables


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redaction, "_hidden", set())
    monkeypatch.setenv("SEARCH", "open sesame")


def test_variables_are_taken_over_by_name_and_under_another_one_and_redacted():
    assert further_variables({"A": "1"}, ["SEARCH"], "x") == {"A": "1", "SEARCH": "open sesame"}
    assert further_variables(None, {"THEIRS": "SEARCH"}, "x") == {"THEIRS": "open sesame"}
    assert without_secrets("open sesame") == "[redacted]"


def test_keys_among_those_that_are_given_are_redacted():
    further_variables({"MY_PASS": "hunter2"}, (), "x")
    assert without_secrets("say hunter2") == "say [redacted]"


@pytest.mark.parametrize(
    ("env", "env_from", "said"),
    [
        ({}, ["NOT_THERE"], "program: env_from names the environment variable NOT_THERE, which is not set"),
        ({"SEARCH": "a"}, ["SEARCH"], "SEARCH is in both env and env_from"),
        ({}, "SEARCH", 'expected a list of names: env_from = ["SEARCH"]'),
    ],
)
def test_mistakes_are_refused(env, env_from, said):
    with pytest.raises(UsageError) as caught:
        further_variables(env, env_from, "program")
    assert said in str(caught.value)
