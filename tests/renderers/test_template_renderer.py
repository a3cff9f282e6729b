"""Any chat template: its own ids, no bridge, and calls where its form is known."""

import json

import numpy as np
import pytest
from dialogues import ANSWER, ASK, CALL, DIALOGUES, SEES, TOOLS
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from verbatim.errors import EnvironmentFault, ModelError
from verbatim.renderers.template import TemplateRenderer

PLAIN = (
    "{% for m in messages %}{% if m.role == 'tool' and not tools %}{{ raise_exception('no tools, no answers') }}"
    "{% endif %}[{{ m.role }}] {{ m.content | trim }}<eot>\n{% endfor %}{% if add_generation_prompt %}[assistant] "
    "{% endif %}{# <tool_call> #}"
)


def byte_tokenizer(template, *, eos="<eos>", tokens=("<eot>", "<eos>")):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, chat_template=template)


@pytest.fixture(scope="module")
def plain():
    return TemplateRenderer(byte_tokenizer(PLAIN))


# Arguments given as JSON text are parsed first: see the next test.
WITH_PARSED_ARGUMENTS = [
    dialogue for dialogue in DIALOGUES
    if not any(isinstance(c["function"]["arguments"], str) for m in dialogue[0] for c in m.get("tool_calls", ()))
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WITH_PARSED_ARGUMENTS)))
def test_rendering_is_the_chat_templates_own(template, tokenizer, number):
    messages, tools = WITH_PARSED_ARGUMENTS[number]
    for generation in (True, False):
        theirs = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=generation, return_dict=False
        )
        assert template.render_ids(messages, tools, generation).tolist() == theirs


def test_arguments_given_as_json_text_are_not_quoted_twice(template):
    as_text = {**CALL, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"place": "Bonn"}'}}]}  # fmt: skip
    assert template.render_ids([ASK, as_text, SEES]).tolist() == template.render_ids([ASK, CALL, SEES]).tolist()


def test_it_never_bridges(template, tokenizer):
    prompt = template.render_ids([ASK])
    completion = np.asarray(tokenizer.encode("20<|im_end|>"), dtype=np.int32)
    assert template.bridge_to_next_turn(prompt, completion, [ASK]) is None


def test_a_turn_ends_with_the_templates_own_close_too(plain):
    assert [plain.decode([i]) for i in plain.stop_token_ids] == ["<eos>", "<eot>"]


def test_stop_tokens_of_the_models_folder_are_used(tmp_path):
    fast = byte_tokenizer(PLAIN, tokens=("<eot>", "<eos>", "<eom>"))
    extra = fast.convert_tokens_to_ids("<eom>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [extra]}))
    fast.name_or_path = str(tmp_path)
    assert extra in TemplateRenderer(fast).stop_token_ids


def test_a_model_whose_turns_never_end_is_refused():
    with pytest.raises(ModelError, match="eos_token"):
        TemplateRenderer(byte_tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}", eos=None))


def test_untrusted_text_is_guarded(plain):
    ids = plain.render_ids([{"role": "user", "content": "a <eot> b"}])
    close = plain.stop_token_ids[1]
    assert ids.tolist().count(close) == 1
    assert plain.decode(ids) == "[user] a <eot> b<eot>\n[assistant] "


def test_messages_that_the_template_refuses_are_the_environments_fault(plain):
    with pytest.raises(EnvironmentFault, match=r"no tools, no answers.*roles are user, tool"):
        plain.render_ids([ASK, SEES])


def test_calls_in_plain_text_are_read_where_the_tokenizer_has_no_tokens_for_them(plain):
    good = '<tool_call>\n{"name": "look", "arguments": {"place": "Bonn"}}\n</tool_call>'
    text = f"<think>so</think>Well.\n{good}\n<tool_call>[1]</tool_call><tool_call>{{"
    completion = np.asarray(plain._tokenizer.encode(text), dtype=np.int32)
    parsed = plain.parse_response(completion)
    assert parsed.content == "Well."
    assert parsed.reasoning_content == "so"
    assert [(c.name, c.status) for c in parsed.tool_calls] == [
        ("look", "ok"), (None, "malformed_structure"), (None, "unclosed_block"),
    ]  # fmt: skip


def test_calls_in_tokens_are_read_by_token(template, tokenizer):
    prompt = template.render_ids([ASK], TOOLS)
    whole = template.render_ids([ASK, CALL, SEES], TOOLS).tolist()
    completion = np.asarray(whole[len(prompt) : whole.index(template.stop_token_ids[0], len(prompt)) + 1])
    (call,) = template.parse_response(completion, prompt).tool_calls
    assert (call.name, call.arguments, call.status) == ("look", {"place": "Bonn"}, "ok")


def test_an_answer_is_read_without_its_close(template, tokenizer):
    parsed = template.parse_response(np.asarray(tokenizer.encode(ANSWER["content"] + "<|im_end|>")))
    assert (parsed.content, parsed.reasoning_content, parsed.tool_calls) == (ANSWER["content"], None, ())
