"""What was read of a completion is known again for the same prompt, ids and schemas only."""

from __future__ import annotations

import threading

import numpy as np

from verbatim.renderers.base import ParsedResponse
from verbatim.renderers.remembered import Readings, Remembered
from verbatim.types import ToolCall

TOOLS = [{"type": "function", "function": {"name": "look", "strict": True}}]


def prompt(*values, writeable=False):
    ids = np.array(values, dtype=np.int32)
    ids.flags.writeable = writeable
    return ids


def said(**arguments):
    return ParsedResponse(content="", tool_calls=(ToolCall(name="look", arguments=arguments),))


def test_the_same_prompt_completion_and_schemas():
    readings, sent, answered, parsed = Readings(4), prompt(1, 2), prompt(3), said(at="Bonn")
    readings.add(sent, answered, TOOLS, parsed)
    assert readings.of(sent, answered.copy(), [dict(TOOLS[0])]) is parsed
    assert readings.of(sent, prompt(4), TOOLS) is None
    assert readings.of(sent.copy(), answered, TOOLS) is None
    assert readings.of(sent, answered, None) is None
    assert readings.of(sent, answered, [{"type": "function", "function": {"name": "look", "strict": 1}}]) is None


def test_what_somebody_could_change_is_not_remembered():
    readings, answered = Readings(4), prompt(3)
    for sent, parsed in ((prompt(1, writeable=True), said(at="Bonn")), (prompt(1), said(at=["Bonn"]))):
        readings.add(sent, answered, TOOLS, parsed)
        sent.flags.writeable = False
        assert readings.of(sent, answered, TOOLS) is None
    sent = prompt(1)
    readings.add(sent, answered, TOOLS, said(at="Bonn"))
    sent.flags.writeable = True
    assert readings.of(sent, answered, TOOLS) is None


def test_the_oldest_is_forgotten():
    known = Remembered(2)
    for number in range(3):
        known.add(number, str(number))
    assert known == {1: "1", 2: "2"}


def test_long_readings_are_forgotten_sooner():
    """Each has 400 bytes of ids, 600 of text and the 1 byte of no schemas: three of them have more than 3000 bytes."""
    readings, sent = Readings(100, most_bytes=3000), [prompt(number) for number in range(3)]
    answered = prompt(*range(100))
    for ids in sent:
        readings.add(ids, answered, None, ParsedResponse(content="x" * 600))
    assert [readings.of(ids, answered, None) is not None for ids in sent] == [False, True, True]
    readings.add(sent[2], answered, None, ParsedResponse(content="y" * 600))  # in the place of the one before
    assert [readings.of(ids, answered, None) is not None for ids in sent] == [False, True, True]


def test_several_threads_at_once():
    known = Remembered(8)

    def fill(start):
        for number in range(start, start + 5000):
            known.add(number, number)

    threads = [threading.Thread(target=fill, args=(start,)) for start in (0, 10_000, 20_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(known) == 8
