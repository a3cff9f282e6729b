"""An architecture or a file that cannot be used is refused by its name, whatever its code raises."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from models.other_models import write_other
from verbatim.core.errors import ModelError
from verbatim.models import tiny
from verbatim.models.attention import WholeSequencePlan
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model, load_tokenizer
from verbatim.models.refusal import refusing

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
ENCODER = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"} | {"is_decoder": True}
OTHERS = {
    "electra": ENCODER | {"embedding_size": 16},
    "llama4_text": SMALL | {"head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2},
    "nemotron": SMALL | {"head_dim": 8},
    "rembert": ENCODER | {"input_embedding_size": 16, "output_embedding_size": 24},
    "xmod": ENCODER,
}
"""Type: what its configuration says."""


@pytest.mark.parametrize("only_attention", [True, False])
@pytest.mark.parametrize("kind", list(OTHERS))
def test_an_architecture_is_used_or_refused_by_its_name(kind, only_attention, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **OTHERS[kind]))
    model.save_pretrained(tmp_path)
    if kind == "nemotron":  # its code reads a head_dim that its published configurations leave out
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"head_dim": None}))
    if kind == "nemotron" and not only_attention:  # its own attention does not read it
        lm, ids = CausalLM(load_model(tmp_path, only_attention=False)), torch.arange(9)
        own = AutoModelForCausalLM.from_pretrained(tmp_path)(input_ids=ids[None], use_cache=False).logits[0]
        torch.testing.assert_close(lm.logits(lm.hidden(ids, ids, WholeSequencePlan())), own)
        return
    with pytest.raises(ModelError, match=type(model).__name__):
        CausalLM(load_model(tmp_path, only_attention=only_attention))


@pytest.mark.parametrize("left", [0, 7, 200])
def test_weights_that_are_cut_off_are_refused(left, tmp_path):
    write_other("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:left])
    with pytest.raises(ModelError, match=r"\(LlamaForCausalLM\) cannot be loaded as a causal language model: "):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        "{",
        "[]",
        '{"model_type": 3}',
        '{"model_type": "llama", "num_attention_heads": 0}',
    ],
)
def test_a_configuration_that_cannot_be_one_is_refused(config, tmp_path):
    write_other("llama", tmp_path)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model: "):
        load_model(tmp_path)


@pytest.mark.parametrize("text", ["{", "{}", '{"model": {"type": "BPE", "vocab": 3}}'])
def test_a_tokenizer_file_that_is_damaged_is_refused(text, tmp_path):
    write_other("llama", tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match="has no tokenizer that can be loaded: "):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("full"),
        KeyboardInterrupt(),
        ModelError("no"),
    ],
)
def test_what_is_not_the_models_fault_stays_what_it_is(error):
    with pytest.raises(type(error)) as raised, refusing("X"):
        raise error
    assert raised.value is error


NO_MEMORY = RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("where", ["_fitting", "_randomize", "tiny_config"])
def test_a_small_copy_that_there_is_no_memory_for_is_not_the_models_fault(where, monkeypatch, tmp_path):
    write_other("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)

    def fail(*args):
        raise NO_MEMORY

    monkeypatch.setattr(tiny, where, fail)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):
        tiny.tiny_copy(model)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ZeroDivisionError("division by zero"), "X: ZeroDivisionError: division by zero"),
        (OSError("no file"), "X: no file"),
        (AssertionError(), "X: AssertionError: no message"),
    ],
)
def test_a_refusal_says_what_was_raised(error, message):
    with pytest.raises(ModelError) as raised, refusing("X"):
        raise error
    assert str(raised.value) == message
    assert raised.value.__cause__ is error


def test_a_tiny_copy_has_no_special_token_outside_its_vocabulary():
    config = Qwen3Config(vocab_size=1000, eos_token_id=[541, 3], bos_token_id=540, pad_token_id=999)
    small = tiny.tiny_config(config, 1)
    assert (small.vocab_size, small.eos_token_id, small.bos_token_id, small.pad_token_id) == (96, [95, 3], 95, 95)
