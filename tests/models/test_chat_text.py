"""The texts that a tokenizer is trained on are those that `transformers` renders."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from transformers.utils import chat_template_utils

from pinned import is_pinned
from verbatim.environments.guess_number import GuessNumber
from verbatim.models.trained_tokenizer import chat_template, chat_text

OLD = not hasattr(chat_template_utils, "_alias_reasoning_fields")
"""Whether this release of `transformers` writes neither numpy's scalars nor the other names of reasoning."""
ARGUMENTS: dict[str, Any] = {"a": np.int64(3), "b": [np.float32(0.5), np.bool_(True), None], "\u00e9": np.str_("q")}
if OLD:
    ARGUMENTS = {"a": 3, "b": [0.5, True, None], "\u00e9": "q"}
REASONING, THINKING = ("reasoning_content", "reasoning_content") if OLD else ("reasoning", "thinking")
CALLS = [
    {"function": {"name": "f", "arguments": ARGUMENTS}},
    {"function": {"name": "g", "arguments": '{"x": 1}'}},
]
MESSAGES: list[Any] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u\n\n"},
    {"role": "assistant", "content": "\nx", REASONING: "why\n", "tool_calls": CALLS},
    {"role": "tool", "content": "1"},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": None, THINKING: "t"},
    {"role": "user", "content": "<b> 'and' \u00fc"},
    {"role": "assistant", "content": "end", "reasoning_content": "at last"},
]
TOOL = {"name": "f", "description": "a <b> '\u00fc'", "parameters": {"type": "object", "sizes": (1, 2.5)}}


def theirs(messages: Any, tools: Any) -> str:
    rendered, _ = chat_template_utils.render_jinja_template(
        [[dict(message) for message in messages]], tools=list(tools) or None, chat_template=chat_template()
    )
    text: str = rendered[0]
    return text


@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": TOOL}]])
@pytest.mark.parametrize("length", range(1, len(MESSAGES) + 1))
def test_a_conversation_is_written_as_transformers_writes_it(length: int, tools: list[Any]):
    assert chat_text(MESSAGES[:length], tools) == theirs(MESSAGES[:length], tools)


def test_demonstrations_are_written_as_transformers_writes_them():
    for shown in GuessNumber().demonstrations(30, seed=7):
        assert chat_text(shown.messages, shown.tools) == theirs(shown.messages, shown.tools)


def test_the_pinned_transformers_writes_all_of_it():
    assert not (OLD and is_pinned("transformers"))
