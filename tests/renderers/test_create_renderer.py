"""The right renderer is recognised by what it renders, and a wrong name is answered with the right ones."""

import copy
import logging
import subprocess
import sys

import pytest

from verbatim.errors import UsageError
from verbatim.renderers import RENDERERS, create_renderer
from verbatim.renderers.recognise import PROBES


def with_template(tokenizer, old, new):
    changed = copy.deepcopy(tokenizer)
    assert old in changed.chat_template
    changed.chat_template = changed.chat_template.replace(old, new)
    return changed


def test_auto_recognises_the_family_by_its_ids(tokenizer, caplog):
    with caplog.at_level(logging.INFO):
        assert create_renderer("auto", tokenizer).name == "qwen3"
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize(
    ("old", "new", "about"),
    [
        ("'<|im_end|>\\n' -}}\n{%- elif", "'<|im_end|>' -}}\n{%- elif", "tools"),
        ("(thinking or loop.last)", "thinking", "an answer"),
        ("loop.index0 > query.index and", "", "the thinking of an earlier turn"),
        ("You may call one", "You can call one", "tools"),
        ("'\\n<tool_response>\\n'", "'<tool_response>\\n'", "a tool's answer"),
    ],
)
def test_auto_takes_the_template_itself_when_any_probe_differs(tokenizer, caplog, old, new, about):
    renderer = create_renderer("auto", with_template(tokenizer, old, new))
    assert renderer.name == "template"
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert about in record.message


def test_a_family_given_by_name_is_used_but_said_to_differ(tokenizer, caplog):
    renderer = create_renderer("qwen3", with_template(tokenizer, "# Tools", "# Instruments"))
    assert renderer.name == "qwen3"
    assert "a question with tools" in caplog.records[0].message


def test_a_template_that_refuses_a_probe_is_not_a_familys(tokenizer):
    refuses = with_template(tokenizer, "{%- elif message.role == 'tool' -%}",
                            "{%- elif message.role == 'tool' -%}{{ raise_exception('no') }}")  # fmt: skip
    assert create_renderer("auto", refuses).name == "template"


def test_an_unknown_name_is_answered_with_the_nearest(tokenizer):
    with pytest.raises(UsageError, match=r"no renderer 'qwen-3'; did you mean \"qwen3\"\?.*template"):
        create_renderer("qwen-3", tokenizer)


def test_the_table_holds_every_family_of_the_package():
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    _populate_registry()
    assert {*RENDERER_REGISTRY, "template"} - {"default"} == set(RENDERERS)


def test_probes_cover_what_templates_do_differently():
    shapes = {about for about, _, _ in PROBES}
    assert len(shapes) == len(PROBES) >= 12
    assert any(m.get("reasoning_content") for _, messages, _ in PROBES for m in messages)
    assert any(sum(m["role"] == "user" for m in messages) > 1 for _, messages, _ in PROBES)


def test_importing_renderers_loads_no_heavy_library():
    code = "import sys, verbatim.renderers; print(sorted({'torch', 'transformers', 'renderers'} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
