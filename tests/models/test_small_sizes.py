"""Small models of every valid size have a working small copy, and what fails in a copy is not said of the model."""

import itertools
import resource
from typing import Literal

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3Config,
)

from verbatim.config.schema import BuildConfig
from verbatim.core.errors import ModelError
from verbatim.models import tiny
from verbatim.models.build import build_config
from verbatim.models.own_attention import tiny_pair
from verbatim.models.tiny import NoTinyCopy, tiny_copy
from verbatim.trainer.recompute import checkpoint_layers

HEADS = [(heads, keys) for heads in (1, 2, 3, 4, 5, 6, 8) for keys in range(1, heads + 1) if heads % keys == 0]


def made(config):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def works(model):
    pair = tiny_pair(model, planned=True)
    ids = torch.arange(20)
    assert pair.own_logprobs(ids).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "keys"), HEADS)
def test_every_small_model_that_can_be_built_has_a_copy(heads, keys):
    """[model.build]: all numbers of heads, key/value heads that divide them, and even head widths."""
    for width in (2, 6, 8, 22, 32):
        build = BuildConfig(
            hidden_size=heads * width,
            num_heads=heads,
            num_kv_heads=keys,
            num_layers=1,
            intermediate_size=40,
            vocab_size=300,
            context_length=64,
        )
        works(made(build_config(build, 300)))


def small(kind, heads, keys, width, **settings):
    config = {
        "vocab_size": 99,
        "hidden_size": heads * width,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "intermediate_size": 50,
        "max_position_embeddings": 64,
    }
    return kind(**{**config, **({"num_key_value_heads": keys} if keys is not None else {}), **settings})


def gpt2(heads, width, **settings):
    return GPT2Config(vocab_size=99, n_embd=heads * width, n_layer=2, n_head=heads, n_positions=64, **settings)


OTHERS = [
    small(kind, heads, keys, width, **settings)
    for kind, settings in ((LlamaConfig, {}), (Qwen2Config, {}), (MistralConfig, {"sliding_window": 8}))
    for (heads, keys), width in itertools.product([(2, 2), (3, 3), (3, 1), (6, 2), (8, 4)], (10, 34))
] + [
    small(MixtralConfig, heads, keys, width, num_local_experts=3, intermediate_size=48)
    for (heads, keys), width in itertools.product([(2, 2), (3, 3), (3, 1)], (12, 36))
] + [small(GemmaConfig, 3, 3, 20, head_dim=28), small(Qwen3Config, 2, 2, 40, head_dim=14),
     *(small(GPTNeoXConfig, heads, None, 20) for heads in (1, 2, 3, 5)),
     *(GPTJConfig(vocab_size=99, n_embd=heads * 12, n_layer=2, n_head=heads, n_positions=64, rotary_dim=4)
       for heads in (1, 2, 3)),
     *(gpt2(heads, width) for heads, width in itertools.product((1, 2, 3, 5, 7), (5, 24))),
     *(OPTConfig(vocab_size=99, hidden_size=heads * 14, num_hidden_layers=2, num_attention_heads=heads, ffn_dim=30,
                 word_embed_proj_dim=heads * 14, max_position_embeddings=64) for heads in (1, 3, 5))]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("config", OTHERS, ids=lambda c: f"{c.model_type}-{c.hidden_size}-{c.num_attention_heads}")
def test_other_small_models_have_one_too(config):
    works(made(config))


def test_a_copy_that_does_not_fit_together_gives_way_to_one_of_true_sizes(monkeypatch):
    """Three heads of a width of 34: 64 is no multiple of 3."""
    model = made(small(LlamaConfig, 3, 3, 34))
    assert tiny_copy(model).config.hidden_size == 48
    monkeypatch.setattr(tiny, "SIZES", {**tiny.SIZES, "hidden_size": 7})
    copy = tiny_copy(model)
    assert (copy.config.hidden_size, copy.config.num_attention_heads, copy.config.vocab_size) == (102, 3, 96)


def test_a_copy_of_true_sizes_takes_no_memory_before_it_is_known_to_be_small(monkeypatch):
    model = made(small(LlamaConfig, 2, 2, 8))
    model.config.update({"hidden_size": 8192, "intermediate_size": 28672, "head_dim": 4096})
    monkeypatch.setattr(tiny, "Sizes", Literal["true"])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(NoTinyCopy, match=r"no small copy of it can be made \(.*it has [\d,]{11,} parameters"):
        tiny_copy(model)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # KiB; it would be 8 GB


def test_a_copy_that_cannot_be_made_is_no_fault_of_the_model(monkeypatch):
    model = made(small(LlamaConfig, 2, 2, 8))
    monkeypatch.setattr(tiny, "tiny_config", lambda *_: (_ for _ in ()).throw(ValueError("7 is no width")))
    with pytest.raises(NoTinyCopy, match=r"no small copy of it can be made \(.*7 is no width"):
        tiny_copy(model)


@pytest.mark.parametrize("keys", [{}, {"summary_first_dropout": 0.1}, {"classifier_dropout": 0.3}])
def test_a_dropout_that_is_in_no_layer_is_let_pass(keys):
    model = made(gpt2(2, 8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **keys))
    assert model.config.summary_first_dropout == 0.1
    checkpoint_layers(model)


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"resid_pdrop": 0.1, "attn_pdrop": 0.0}, "mlp.dropout"),
        ({"resid_pdrop": 0, "attn_pdrop": 0.2}, "attn_dropout"),
    ],
)
def test_a_dropout_of_a_layer_is_named(keys, named):
    model = made(gpt2(2, 8, embd_pdrop=0.0, **keys))
    with pytest.raises(ModelError, match=rf"GPT2LMHeadModel has \{{.*{named}.*\}} in its layers"):
        checkpoint_layers(model)


def test_a_dropout_by_another_name_is_found():
    config = OPTConfig(
        vocab_size=99,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=20,
        word_embed_proj_dim=16,
        max_position_embeddings=64,
        dropout=0.25,
        layerdrop=0.5,
    )
    model = made(config)
    with pytest.raises(ModelError, match=r"'dropout': 0.25"):
        checkpoint_layers(model)
