"""Tests that determine the class of a break. Each test is a pure function that takes a `Difference` and returns its
evidence in words, or None if the class does not apply.

The tests run in a fixed order, the more specific tests first. They explain only the first difference, because all
tokens from there on are computed again anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verbatim.inspection.doctor.classes import BreakClass
from verbatim.inspection.doctor.difference import Difference
from verbatim.inspection.doctor.evidence.endings import stop_token, truncated
from verbatim.inspection.doctor.evidence.history import (
    another_conversation,
    another_system_message,
    cannot_tell,
    history_compacted,
    history_rewritten,
    not_read_back,
    recorded_tools_changed,
    sampled_again,
    tools_changed,
)
from verbatim.inspection.doctor.evidence.rewording import retokenised, thinking_stripped, tool_arguments, whitespace

Test = Callable[[Difference], str | None]

TESTS: Sequence[tuple[BreakClass, Test, bool]] = (
    (BreakClass.SUB_AGENT, another_conversation, False),
    (BreakClass.HISTORY_REWRITTEN, sampled_again, False),
    (BreakClass.THINKING_STRIPPED, thinking_stripped, True),
    (BreakClass.RETOKENISED, retokenised, True),
    (BreakClass.TOOLS_CHANGED, recorded_tools_changed, False),
    (BreakClass.TOOLS_CHANGED, tools_changed, True),
    (BreakClass.TOOL_ARGUMENTS, tool_arguments, True),
    (BreakClass.WHITESPACE, whitespace, True),
    (BreakClass.TRUNCATED, truncated, False),
    (BreakClass.STOP_TOKEN, stop_token, False),
    (BreakClass.SUB_AGENT, another_system_message, True),
    (BreakClass.UNKNOWN, cannot_tell, False),
    (BreakClass.NOT_READ_BACK, not_read_back, True),
    (BreakClass.HISTORY_COMPACTED, history_compacted, True),
    (BreakClass.HISTORY_REWRITTEN, history_rewritten, False),
)
"""Each entry is (class, test, True if the test needs a tokenizer). Without a tokenizer, `cannot_tell` always applies,
so the tests after it are not run."""


def classify(difference: Difference) -> tuple[BreakClass, str]:
    """The class of a break, and the evidence for it in words."""
    for kind, test, needs_text in TESTS:
        if needs_text and difference.text is None:
            continue
        found = test(difference)
        if found is not None:
            return kind, found
    raise AssertionError("the last test always finds something")
