"""What is settled of a growing completion is how every longer completion begins."""

from __future__ import annotations

import doctest

import numpy as np
import pytest
from families import FAMILIES, MORE, family_renderer, family_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from drawn import drawn, is_found
from verbatim.models.renderers import create_renderer, stable_text
from verbatim.models.renderers.renderer import ReadsGrowingText

TEXTS = ["so ", "I", " look", "\n", "\n\n", "ö", "🙂", "<", "< 3", "<think", ">", "{", '{"name": "look", ', "[",
         "look(", '"arguments": {"at": "Bonn"}}', "<think>", "</think>", "<tool_call>", "</tool_call>",
         "\n<tool_call>\n", "<function=look>", "```json\n", "<tool", "_call>"]  # fmt: skip
TEMPLATES = ["qwen3", "llama-3", "deepseek-v3", "glm-4.5"]


def test_examples_are_true():
    assert doctest.testmod(stable_text).failed == 0


@st.composite
def completions(draw: st.DrawFn, name: str) -> list[int]:
    """Ids of pieces of text, some of them cut inside a character, and of the family's own tokens."""
    tokenizer = family_tokenizer(name)
    control = sorted(tokenizer.get_added_vocab().values())
    ids: list[int] = []
    for piece in draw(st.lists(st.sampled_from(TEXTS) | st.sampled_from(control), max_size=9)):
        new = [piece] if isinstance(piece, int) else tokenizer.encode(piece, add_special_tokens=False)
        ids += new[: draw(st.integers(1, len(new)))] if draw(st.integers(0, 9)) == 0 else new
    return ids


def check(renderer, ids: list[int], opens_thinking: bool) -> int:
    """Compare what is settled at every length with the whole; returns how much of it is settled at the end."""
    prompt = np.array(renderer.render_ids([{"role": "user", "content": "hi"}]), dtype=np.int32)
    if opens_thinking:
        opening = renderer.tokenizer.encode("<think>\n")
        prompt = np.concatenate([prompt, np.array(opening, dtype=np.int32)])
    whole = renderer.parse_response(np.array(ids, dtype=np.int32), prompt)
    said = (whole.reasoning_content or "", whole.content)
    before, found = ("", ""), ("", "")
    for size in range(len(ids) + 1):
        found = renderer.stable_text(np.array(ids[:size], dtype=np.int32), prompt)
        assert said[0].startswith(found[0]) and said[1].startswith(found[1]), (size, found, said)
        assert not found[1] or found[0] == said[0], "thinking is over where content has begun"
        assert len(found[0]) >= len(before[0])
        before = found
    return len(found[0]) + len(found[1])


@pytest.mark.parametrize(("name", "settled"), [("glm-5", ("so", "so")), ("glm-4.5", ("", "so"))])
def test_only_the_first_mark_that_closes_an_open_thought_ends_it(name, settled):
    """GLM-5's prompt opens a thought, GLM-4.5's does not: there the mark is text, and may become more of it."""
    renderer = family_renderer(name)
    encode = family_tokenizer(name).encode
    ids = [*encode("so "), *encode("</think>"), *encode("so ")]
    assert check(renderer, ids, opens_thinking=False) == sum(map(len, settled))
    prompt = renderer.render_ids([{"role": "user", "content": "hi"}])
    assert renderer.stable_text(np.array(ids, dtype=np.int32), prompt) == settled


RENDERERS = {
    **{name: family_renderer for name in sorted({*FAMILIES, *MORE} - {"gpt-oss"})},
    **{f"template {name}": lambda name: create_renderer("template", family_tokenizer(name)) for name in TEMPLATES},
}


@pytest.mark.slow
@pytest.mark.parametrize("which", RENDERERS)
@given(data=st.data())
@drawn("settled text", 10, 1000)
def test_what_is_settled_of_a_completion_stays(which, data):
    name = which.rpartition(" ")[2]
    renderer = RENDERERS[which](name)
    assert isinstance(renderer, ReadsGrowingText)
    check(renderer, data.draw(completions(name)), data.draw(st.booleans()))


def test_text_that_is_settled_too_early_is_found(monkeypatch):
    """The campaign can fail: the last word may be the beginning of a call."""
    renderer = create_renderer("template", family_tokenizer("qwen3"))
    monkeypatch.setattr(renderer, "stable_text", lambda ids, prompt: ("", renderer.decode(ids)))
    assert is_found(lambda ids: check(renderer, ids, False), completions("qwen3"))


@pytest.mark.parametrize("renderer", ["template", "qwen3"])
def test_plain_text_and_thinking_are_settled_up_to_the_last_word(renderer):
    tokenizer = family_tokenizer("qwen3")
    one = create_renderer(renderer, tokenizer)
    for text, expected in [
        ("so I look", ("", "so I look")),
        ("so I look ", ("", "so I look")),
        ("<think>hm", ("hm", "")),
        ("<think>\nhm\n</think>\n\nso", ("hm", "so")),
        ("<think>hm </thi", ("hm", "")),
        ("so <tool_call>\n{", ("", "so")),
        ("so <to", ("", "so")),
    ]:
        ids = np.array(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)
        assert one.stable_text(ids) == expected, text


def test_a_format_that_takes_text_back_settles_none():
    tokenizer = family_tokenizer("llama-3")
    ids = np.array(tokenizer.encode("so I look", add_special_tokens=False), dtype=np.int32)
    assert family_renderer("llama-3").stable_text(ids) == ("", "")
    assert create_renderer("template", tokenizer).stable_text(ids) == ("", "so I look")
    assert not isinstance(family_renderer("gpt-oss"), ReadsGrowingText)
