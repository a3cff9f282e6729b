"""A recorded conversation becomes the turns that a model would have sampled."""

from __future__ import annotations

from verbatim.environments import tool_call, tool_exchange
from verbatim.environments.tools import FunctionTool
from verbatim.models.renderers import create_renderer
from verbatim.models.trained_tokenizer import build_tokenizer, chat_text
from verbatim.rollouts import trajectory_from_messages


def guess(number: int) -> str:
    """Guess."""
    return "lower"


TOOL = FunctionTool(guess)
ASK = {"role": "user", "content": "Find the number."}


def test_a_call_that_ends_the_conversation_is_written_as_the_calls_before_it():
    """Qwen3's template puts an empty thinking block before a last message; a model samples the call before it can be
    known whether anything follows."""
    messages = [ASK, *tool_exchange("guess", {"number": 8}, "lower"), tool_call("guess", {"number": 4})]
    tokenizer = build_tokenizer([chat_text(messages)], vocab_size=400, context_length=512)
    renderer = create_renderer("auto", tokenizer)
    turns = trajectory_from_messages(renderer, messages, [TOOL.schema]).turns
    told = [tokenizer.decode(turn.completion_ids) for turn in turns]
    assert told == [
        f'<tool_call>\n{{"name": "guess", "arguments": {{"number": {number}}}}}\n</tool_call><|im_end|>'
        for number in (8, 4)
    ]
    answered = [*messages, {"role": "tool", "content": "correct", "tool_call_id": "call_0", "name": "guess"}]
    whole = trajectory_from_messages(renderer, answered, [TOOL.schema]).turns
    assert [turn.completion_ids.tolist() for turn in turns] == [turn.completion_ids.tolist() for turn in whole]


def test_an_answer_that_ends_the_conversation_is_written_as_the_template_ends_one():
    messages = [ASK, {"role": "assistant", "content": "8"}]
    tokenizer = build_tokenizer([chat_text(messages)], vocab_size=400, context_length=512)
    (turn,) = trajectory_from_messages(create_renderer("auto", tokenizer), messages).turns
    assert tokenizer.decode(turn.completion_ids) == "<think>\n\n</think>\n\n8<|im_end|>"
