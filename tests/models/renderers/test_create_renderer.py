"""The right renderer is recognised by what it renders, and a wrong name is answered with the right ones."""

import copy
import logging
import subprocess
import sys

import pytest
from families import FAMILIES, MORE, family_tokenizer

from verbatim.core.errors import ModelError, UsageError
from verbatim.models.renderers import ALIASES, AUTO_FAMILIES, RENDERERS, create_renderer
from verbatim.models.renderers.detect_family import PROBES


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
    refuses = with_template(
        tokenizer,
        "{%- elif message.role == 'tool' -%}",
        "{%- elif message.role == 'tool' -%}{{ raise_exception('no') }}",
    )
    assert create_renderer("auto", refuses).name == "template"


def named(name, family):
    renamed = copy.copy(family_tokenizer(family))
    renamed.name_or_path = name
    return renamed


RECOGNISED = [
    "qwen3",
    "qwen3-vl",
    "qwen3.5",
    "qwen3.6",
    "qwen3.8",
    "nemotron-3",
    "nemotron-3-ultra",
    "gpt-oss",
    "llama-3",
]


@pytest.mark.parametrize("family", RECOGNISED)
def test_auto_recognises_a_fine_tune_of_a_family_by_its_ids(family, caplog):
    assert create_renderer("auto", named("my/fine-tune", family)).name == family
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("family", "about"), [("glm-4.5", "two tool calls"), ("deepseek-v3", "two tool calls")])
def test_a_family_that_differs_from_the_template_in_one_probe_is_not_recognised(family, about, caplog):
    assert create_renderer("auto", named("my/fine-tune", family)).name == "template"
    (record,) = caplog.records
    assert f'"{about} after thinking" is rendered differently by {family}' in record.message


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("Qwen/Qwen3-8B", "qwen3"),
        ("zai-org/GLM-5", "glm-5"),
        ("zai-org/GLM-4.5-Air", "glm-4.5"),
        ("moonshotai/Kimi-K2-Instruct", "kimi-k2"),
        ("moonshotai/Kimi-K2.5", "kimi-k2.5"),
        ("MiniMaxAI/MiniMax-M2", "minimax-m2"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("openai/gpt-oss-20b", "gpt-oss"),
        ("Qwen/Qwen3-VL-4B-Instruct", "qwen3-vl"),
        ("Qwen/Qwen3.5-4B", "qwen3.5"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron-3"),
    ],
)
def test_auto_recognises_a_published_model_by_its_name(name, family):
    assert create_renderer("auto", named(name, family)).name == family


def test_a_published_model_whose_template_differs_is_said_to(caplog):
    assert create_renderer("auto", named("zai-org/GLM-4.5-Air", "glm-4.5")).name == "glm-4.5"
    (record,) = caplog.records
    assert 'other ids (two tool calls after thinking); for those, use renderer = "template"' in record.message


def test_without_a_template_and_a_known_name_there_is_nothing_to_go_by():
    with pytest.raises(ModelError, match=r"no chat template"):
        create_renderer("auto", named("my/fine-tune", "glm-5"))


@pytest.mark.parametrize("alias", ALIASES)
def test_the_names_of_the_documents_work_too(alias):
    families = {"glm4.5": "glm-4.5", "DefaultRenderer": "qwen3", "default": "qwen3"}
    tokenizer = family_tokenizer(families.get(alias, "glm-5"))
    assert create_renderer(alias, tokenizer).name == ALIASES[alias]
    assert ALIASES[alias] in RENDERERS


def test_an_unknown_name_is_answered_with_the_nearest(tokenizer):
    with pytest.raises(UsageError, match=r"no renderer 'qwen-3'; did you mean \"qwen3\"\?.*template"):
        create_renderer("qwen-3", tokenizer)
    with pytest.raises(UsageError, match=r"did you mean \"glm5\"\?.* glm-5 \(or glm5\), glm-5\.1 "):
        create_renderer("glm_5", tokenizer)


def test_auto_tries_every_family():
    assert {*FAMILIES, *MORE} <= set(AUTO_FAMILIES) == set(RENDERERS) - {"template"}


def test_the_table_holds_every_family_of_the_package():
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    _populate_registry()
    assert {*RENDERER_REGISTRY, "template"} - {"default"} == set(RENDERERS)


def test_probes_cover_what_templates_do_differently():
    shapes = {about for about, _, _ in PROBES}
    assert len(shapes) == len(PROBES) >= 12
    assert any(m.get("reasoning_content") for _, messages, _ in PROBES for m in messages)
    assert any(sum(m["role"] == "user" for m in messages) > 1 for _, messages, _ in PROBES)


@pytest.mark.realtime
def test_importing_renderers_loads_no_heavy_library():
    heavy = {"torch", "transformers", "renderers"}
    code = f"import sys, verbatim.models.renderers; print(sorted({heavy} & set(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.realtime
def test_a_renderer_is_made_without_openai():
    code = (
        "import sys\n"
        "from verbatim.models.renderers import create_renderer\n"
        "from verbatim.models.trained_tokenizer import build_tokenizer\n"
        "tokenizer = build_tokenizer(['a text'], vocab_size=300, context_length=64)\n"
        "print(create_renderer('auto', tokenizer).name, {'openai', 'torch'} & set(sys.modules))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "qwen3 set()"
