"""The line of a chat template that is behind a break is found by running it."""

from __future__ import annotations

import pytest

from inspection.doctor.corpus import QWEN3
from verbatim.core.errors import ModelError
from verbatim.inspection.doctor import BreakClass
from verbatim.inspection.doctor.template_lines import template_lines
from verbatim.models.trained_tokenizer import chat_template

CUT_ALWAYS = """\
{%- for message in messages %}
    {%- set content = message['content'] %}
    {%- if '</think>' in content %}
        {%- set content = content.split('</think>')[-1] | trim %}
    {%- endif %}
    {{- '<' + message['role'] + '>' + content }}
{%- endfor %}
"""
KEPT_ALWAYS = "{% for message in messages %}{{ message['content'] }}</think>{% endfor %}"
REFUSES = "{{ raise_exception('no') }}</think>"


@pytest.mark.parametrize(
    ("template", "kind", "line"),
    [
        (QWEN3.read_text(), BreakClass.THINKING_STRIPPED, "{%- if loop.index0 > ns.last_query_index %}"),
        (QWEN3.read_text(), BreakClass.TOOL_ARGUMENTS, "{{- tool_call.arguments | tojson }}"),
        (QWEN3.read_text(), BreakClass.TOOLS_CHANGED, "{%- for tool in tools %}"),
        (QWEN3.read_text(), BreakClass.RETOKENISED, None),
        (
            chat_template(),
            BreakClass.THINKING_STRIPPED,
            "{%- if loop.index0 > query.index and (thinking or loop.last) -%}",
        ),
        (CUT_ALWAYS, BreakClass.THINKING_STRIPPED, "{%- if '</think>' in content %}"),
        (CUT_ALWAYS, BreakClass.WHITESPACE, None),
        (CUT_ALWAYS, BreakClass.TOOLS_CHANGED, None),
        (
            CUT_ALWAYS.replace(" | trim", "").replace("+ content", "+ content.strip()"),
            BreakClass.WHITESPACE,
            "{{- '<' + message['role'] + '>' + content.strip() }}",
        ),
        (KEPT_ALWAYS, BreakClass.THINKING_STRIPPED, None),
        (REFUSES, BreakClass.THINKING_STRIPPED, None),
    ],
)
def test_the_line_that_does_it_is_named(template: str, kind: BreakClass, line: str | None):
    found = template_lines(template)(kind)
    if line is None:
        assert found is None
    else:
        assert found.text == line
        assert template.split("\n")[found.number - 1].strip() == line


def test_a_template_that_is_no_jinja_is_refused_with_its_line():
    with pytest.raises(ModelError, match=r"chat template is not valid Jinja \(line 2: .*\)"):
        template_lines("a\n{% if %}")


def test_a_debugger_keeps_its_trace():
    import sys

    def trace(frame, event, arg):
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        template_lines(chat_template())(BreakClass.THINKING_STRIPPED)
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
