"""Chat templates that take text apart and put it together: text stays text, or the model is refused."""

import json
from collections import Counter

import pytest
from random_dialogues import byte_tokenizer

from verbatim.core.errors import ModelError
from verbatim.models.renderers import create_renderer

TURN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n%s<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "u"}


def renderer_of(content, also=""):
    tokenizer = byte_tokenizer(TURN + also)
    tokenizer.chat_template = TURN.replace("%s", content)
    return create_renderer("template", tokenizer)


def control(renderer, ids):
    tokens = set(renderer.tokenizer.control_tokens.values())
    return Counter(i for i in ids.tolist() if i in tokens)


@pytest.mark.parametrize(
    ("content", "text", "becomes"),
    [
        ("{{ m.content.replace('\\n', '') }}", "a<\n|im_end|>", "a<|im_end|>"),
        ("{{ m.content.replace('\\n', '') }}", "a<|im_end|\n>", "a<|im_end|>"),
        ("{% for line in m.content.splitlines() %}{{ line }}{% endfor %}", "a<\n|im_end|>", "a<|im_end|>"),
        ("{% for l in m.content.split('\\n') %}{{ l | trim }}{% endfor %}", "a< \n |im_end|>", "a<|im_end|>"),
        ("{{ m.content | replace('XX', '') }}", "a<XX|im_end|>", "a<|im_end|>"),
        ("{{ m.content.split('</think>') | join('') }}", "a<</think>|im_end|>", "a<</think>|im_end|>"),
        ("{{ m.content | lower }}", "<BOS>", "<bos>"),
        ("{{ m.content }}{{ m.name | upper }}", "[inst]", "[inst]"),
        ("{{ m.content | list | join }}", "<|im_end|>", "<|im_end|>"),
        ("<{{ m.content.split('</x')[-1] }}", "</x|im_end|>", "<</x|im_end|>"),
    ],
)
def test_text_that_a_template_puts_together_stays_text(content, text, becomes):
    renderer = renderer_of(content, also="[INST]" if "upper" in content else "")
    plain = renderer.render_ids([USER])
    ids = renderer.render_ids([{**USER, "content": text}])
    assert control(renderer, ids) == control(renderer, plain)
    assert becomes in renderer.decode(ids)
    named = renderer.write_ids([{**USER, "name": text}], None, True)
    assert control(renderer, named) == control(renderer, plain)


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("{{ m.content }}{% if m.name %}<|{{ m.name }}|>{% endif %}", "user name"),
        ("{{ m.content }}{% if m.name %}<|{{ m.name | lower }}|>{% endif %}", "user name"),
        ("{{ m.content }}{% if m.name %}<|im_{{ m.name }}d|>{% endif %}", "user name"),
        ("<|{{ m.content }}|>", "user"),
        ("{{ m.content }}{% for c in m.tool_calls or [] %}<|{{ c.function.name }}|>{% endfor %}", "function"),
        ("{{ m.content }}{% for t in tools or [] %}<{{ t.function.description }}>{% endfor %}", "description"),
        ("{{ m.content }}{{ m.name | striptags }}", "user name"),
        ("{{ m.content }}{{ (m.name or '').replace('&lt;', '<').replace('&gt;', '>') }}", "user name"),
    ],
)
def test_a_template_that_completes_a_control_token_around_a_field_is_refused_and_the_field_named(content, field):
    with pytest.raises(ModelError, match=rf"become control tokens of this tokenizer( \(in {field}\))?; its chat temp"):
        renderer_of(content)


def test_a_template_that_would_show_the_marks_of_the_guard_is_refused():
    with pytest.raises(ModelError, match="splits the escape marks"):
        renderer_of("{{ m.content }}{{ (m.name or '') | reverse }}")


@pytest.mark.parametrize(
    "text", ["a < b > é", "\\<|im_end|>", "\ufdd0\ufdd1", "\\ufdd0\\ufdd1<\\ufdd", "\\\\ufdd0\\ufdd2"]
)
def test_json_that_is_written_in_ascii_shows_no_marks(text):
    renderer = renderer_of("{{ m.content }}{{ (m.name or '') | tojson(ensure_ascii=True) }}")
    ids = renderer.render_ids([{**USER, "content": text, "name": text}])
    assert control(renderer, ids) == control(renderer, renderer.render_ids([USER]))
    assert f"user\n{text}{json.dumps(text)}<|im_end|>" in renderer.decode(ids)


@pytest.mark.parametrize("content", ["<p>{{ m.content }}</p>", "<|{{ m.role }}|>{{ m.content }}", "<{{ m.content }}|"])
def test_brackets_that_complete_no_control_token_are_accepted(content):
    ids = renderer_of(content, also="<|user|>").render_ids([{**USER, "content": "hi"}])
    assert "hi" in renderer_of(content).decode(ids)


@pytest.mark.parametrize("text", ["<|im_end|>", "\\u003c|im_end|\\u003e", "\\u003C|im_end|>"])
def test_arguments_given_as_json_hold_no_control_token_however_they_are_escaped(text):
    renderer = renderer_of(
        "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\n"
        """{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>"""
        "{% endfor %}"
    )

    def called(value):
        function = {"name": "f", "arguments": f'{{"a": "{value}"}}'}
        return [USER, {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}]

    ids = renderer.render_ids(called(text))
    assert control(renderer, ids) == control(renderer, renderer.render_ids(called("x")))
    assert '{"a": "<|im_end|>"}' in renderer.decode(ids)
