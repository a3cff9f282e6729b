"""The fast forward pass: the same numbers as `transformers`, or not used at all."""

import pytest
import torch
from test_agreement import MODELS
from torch import nn
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig, Qwen2Config

from verbatim.inference.embedded import fast_forward
from verbatim.inference.embedded.fast_forward import FastBackbone, disagreement, known_backbone, probe
from verbatim.models.attention import WholeSequencePlan
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model, load_weights

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
}


def save(config, folder):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def fast(model):
    with torch.inference_mode():
        return known_backbone(model, probe(model)[1], 128)


def difference(ours, model):
    ids, positions = torch.arange(90) % 97, torch.arange(90)
    with torch.inference_mode():
        got, expected = (m.hidden(ids, positions, WholeSequencePlan()) for m in (ours, model))
    return float((got - expected).abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_known_models_are_computed_alike(models, name):
    model = CausalLM(load_model(models[name]))
    ours = fast(model)
    assert isinstance(ours, FastBackbone)
    assert difference(ours, model) <= 2e-5
    with torch.inference_mode():
        assert disagreement(ours, model, 128) == ""


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
        Qwen2Config(**SMALL),
        LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
    ],
    ids=["biases", "qwen2", "linear_rope"],
)
def test_biases_and_other_position_encodings_are_the_models_own(config, tmp_path):
    model = CausalLM(load_model(save(config, tmp_path)))
    assert difference(fast(model), model) <= 2e-5


@pytest.mark.parametrize("by_onednn", [False, True])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("num_wanted", [2, 18])
def test_any_number_of_rows_and_some_of_them_alone(models, by_onednn, length, num_wanted, monkeypatch):
    """With oneDNN for each product, passes of 16 rows and more are padded to a multiple of 16."""
    monkeypatch.setattr(fast_forward, "onednn_is_faster", lambda: by_onednn)
    monkeypatch.setattr(fast_forward, "_WORTH_A_CALL", 0)
    model = CausalLM(load_model(models["tied"]))
    ours = fast(model)
    ids, positions = torch.arange(length) * 7 % 97, torch.arange(length)
    wanted = (length - 1 - torch.arange(num_wanted) * 3) % length
    with torch.inference_mode():
        expected = model.hidden(ids, positions, WholeSequencePlan())
        whole = ours.hidden(ids, positions, WholeSequencePlan())
        some = ours.hidden(ids, positions, WholeSequencePlan(), wanted)
    assert whole.shape == expected.shape
    torch.testing.assert_close(whole, expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(some, expected[wanted], rtol=0, atol=2e-5)


def test_it_follows_new_weights(models):
    model = CausalLM(load_model(models["tied"]))
    ours = fast(model)
    load_weights(model.model, models["tied_later"])
    assert difference(ours, model) <= 2e-5


def test_other_architectures_and_altered_models_run_as_they_are(models, tmp_path):
    assert fast(CausalLM(load_model(save(GemmaConfig(**SMALL, head_dim=16), tmp_path)))) is None
    hooked = CausalLM(load_model(models["tied"]))
    hooked.backbone.layers[0].register_forward_hook(lambda module, args, output: output)
    assert fast(hooked) is None
    adapted = CausalLM(load_model(models["tied"]))
    adapted.backbone.layers[0].self_attn.q_proj.__class__ = type("Adapted", (nn.Linear,), {})
    assert fast(adapted) is None
