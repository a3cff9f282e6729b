"""A model made on the spot: reproducible, loadable, with a tokenizer that loses nothing and wastes little."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from drawn import drawn
from verbatim.config.schema import BuildConfig
from verbatim.core.errors import ModelError
from verbatim.environments.guess_number import GuessNumber
from verbatim.environments.resolve import corpus
from verbatim.models.build import build_model
from verbatim.models.loading import load_model
from verbatim.models.trained_tokenizer import chat_text

SMALL = BuildConfig(
    hidden_size=16, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=24, vocab_size=600, context_length=256
)
TEXT = st.text(max_size=30).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text))


@pytest.fixture(scope="module")
def texts():
    return corpus(GuessNumber().demonstrations(60, seed=0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("built") / "model"
    build_model(folder, SMALL, texts, seed=1)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def test_transformers_loads_the_folder(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.vocab_size == len(tokenizer) == model.get_output_embeddings().weight.shape[0]
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert model.config.max_position_embeddings == 256
    stops = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert (tokenizer.eos_token, model.generation_config.eos_token_id) == ("<|im_end|>", stops)


def test_our_own_loader_takes_it(folder):
    assert load_model(folder).config.num_hidden_layers == 2


def test_no_bar_is_drawn_where_a_model_is_saved_or_loaded(tmp_path, texts, capfd):
    for work in (lambda: build_model(tmp_path / "model", SMALL, texts, seed=0), lambda: load_model(tmp_path / "model")):
        transformers_logging.enable_progress_bar()
        work()
        assert capfd.readouterr() == ("", "")


def test_the_same_seed_gives_the_same_model_and_another_seed_another(folder, tmp_path, texts):
    build_model(tmp_path / "same", SMALL, texts, seed=1)
    build_model(tmp_path / "other", SMALL, texts, seed=2)
    for file in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "same" / file).read_bytes() == (folder / file).read_bytes()
    assert (tmp_path / "other" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    ours, others = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "other"))
    assert not ours["model.embed_tokens.weight"].equal(others["model.embed_tokens.weight"])


@given(text=TEXT)
@drawn("ids of the built tokenizer", 50, 10000)
def test_any_text_comes_back_from_its_ids(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(before=TEXT, after=TEXT)
@drawn("cuts of the built tokenizer", 50, 10000)
def test_a_cut_at_a_lines_end_changes_no_id(tokenizer, before, after):
    whole = tokenizer.encode(f"{before}\n{after}")
    assert whole == tokenizer.encode(before) + tokenizer.encode("\n") + tokenizer.encode(after)


def test_a_guess_is_one_token(tokenizer):
    for number in range(1, 16):
        assert len(tokenizer.encode(f'": {number}}}}}')) == 3


def test_control_tokens_are_one_token_each_and_only_chatmls_are_special(tokenizer):
    markup = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
    for token in ["<|im_start|>", "<|im_end|>", "<|endoftext|>", *markup]:
        assert tokenizer.encode(token) == [tokenizer.convert_tokens_to_ids(token)]
    ids = tokenizer.encode("<|im_start|><think>a</think><|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>"


def test_a_game_costs_few_tokens(tokenizer):
    shown = next(d for d in GuessNumber().demonstrations(50, seed=5) if len(d.messages) >= 6)

    def length(messages, generation=True):
        return len(
            tokenizer.apply_chat_template(
                messages, tools=list(shown.tools), add_generation_prompt=generation, return_dict=False
            )
        )

    prompt = length(shown.messages[:2])
    assert prompt == 48
    answered = length(shown.messages[:4])
    called = length(shown.messages[:3] + shown.messages[3:4], generation=False) - prompt
    assert answered - prompt == 22
    assert called < 22


def test_the_template_writes_chatml():
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "gone", "reasoning_content": "forgotten"},
        {"role": "user", "content": "V"},
        {
            "role": "assistant",
            "content": "C",
            "reasoning_content": "R",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}},
                {"type": "function", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat_text(messages, tools) == (
        "<|im_start|>system\nS\n\n# Tools\n\n"
        "You may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        '<tools>\n{"type": "function", "function": {"name": "f"}}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n"
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\nU<|im_end|>\n"
        "<|im_start|>assistant\ngone<|im_end|>\n"
        "<|im_start|>user\nV<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nR\n</think>\n\nC\n"
        '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
    )


def test_what_cannot_be_built_is_refused(folder, tmp_path, texts):
    with pytest.raises(ModelError, match="already holds a model"):
        build_model(folder, SMALL, texts, seed=1)
    with pytest.raises(ModelError, match="training a tokenizer needs text, and there is none"):
        build_model(tmp_path / "x", SMALL, [], seed=1)
    for sizes in ({"num_heads": 3}, {"hidden_size": 18, "num_heads": 2}, {"num_heads": 4, "num_kv_heads": 3}):
        with pytest.raises(ModelError, match="do not fit"):
            build_model(tmp_path / "x", SMALL.model_copy(update=sizes), texts, seed=1)
    assert not (tmp_path / "x").exists()
