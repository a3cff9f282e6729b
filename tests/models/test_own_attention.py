"""A model whose own mask says more than a plan carries is refused by name, or keeps its own attention."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, MistralConfig, Phi3Config, Qwen3Config

from models.architectures import FLAGS, Architecture, tiny_model
from verbatim.core.errors import ModelError
from verbatim.models.attention import ATTENTION, WholeSequencePlan
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model
from verbatim.models.own_attention import largest_difference, mask_settings, probe_ids, tiny_pair
from verbatim.models.tiny import VOCAB, tiny_config, tiny_copy
from verbatim.trainer.recompute import checkpoint_layers


def architecture(name):
    """One of `FLAGS`, or a class at its defaults."""
    return next((a for a in FLAGS if str(a) == name), Architecture(name))


@pytest.fixture
def folder(tmp_path):
    """A folder with a tiny random model of an architecture."""

    def write(name):
        tiny_model(architecture(name)).save_pretrained(tmp_path)
        return tmp_path

    return write


MASKS = [
    (
        "qwen2_moe use_sliding_window",
        "Qwen2MoeForCausalLM mixes tokens through a mask of its own .*use_sliding_window = T",
    ),
    ("phimoe sliding_window", "PhimoeForCausalLM mixes tokens through a mask of its own .*sliding_window = 16"),
]


@pytest.mark.parametrize(("name", "what"), MASKS)
def test_a_mask_that_layers_do_not_pass_on_is_refused_by_name(name, what, folder):
    with pytest.raises(ModelError, match=what):
        load_model(folder(name))


@pytest.mark.parametrize("name", [name for name, _ in MASKS])
def test_such_a_model_is_trained_with_its_own_attention(name, folder):
    path = folder(name)
    lm = CausalLM(load_model(path, only_attention=False))
    assert lm.rows_alone
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, 40))
    found = lm.logits(lm.hidden(ids, torch.arange(40), WholeSequencePlan()))
    expected = AutoModelForCausalLM.from_pretrained(path)(input_ids=ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("bert-generation", "is_decoder = False"),
        ("gemma3_text use_bidirectional_attention", "use_bidirectional_attention = True"),
        ("doge", "keep_window_size = 16"),
    ],
)
@pytest.mark.parametrize("only_attention", [True, False])
def test_a_model_that_looks_ahead_is_refused_everywhere(name, setting, only_attention, folder):
    """The last one chooses its keys among all of them."""
    with pytest.raises(ModelError, match=f"{setting}.*change with later tokens.*is_decoder = true"):
        load_model(folder(name), only_attention=only_attention)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "mistral sliding_window",
        "qwen3 use_sliding_window",
        "qwen3 mixed layer_types",
        "gemma3_text",
        "deepseek_v3",
        "olmo3",
        "bert-generation is_decoder",
    ],
)
def test_windows_that_layers_pass_on_are_plans(name, folder):
    if name.endswith("is_decoder"):
        path = folder("bert-generation")
        settings = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(settings | {"is_decoder": True}))
    else:
        path = folder(name)
    assert load_model(path).config._attn_implementation == ATTENTION


def test_the_gradient_of_a_parameter_that_only_one_side_has_is_a_difference():
    a, b = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])
    assert largest_difference({"w": a}, {"w": a}) == 0
    assert largest_difference({"w": b}, {"w": a}) == pytest.approx(0.1)
    assert largest_difference({"w": a}, {"w": a, "v": b}) == 1
    assert largest_difference({"w": a, "v": b}, {"w": a}) == pytest.approx(float(b.norm()) / 0.05)
    assert largest_difference({"w": a * float("nan")}, {"w": a}) == float("inf")


def test_a_tiny_copy_keeps_flags_and_kinds_of_layers_and_cuts_sizes():
    config = DeepseekV3Config(first_k_dense_replace=3)
    with torch.device("meta"):
        tiny = tiny_copy(AutoModelForCausalLM.from_config(config))
    assert [type(layer.mlp).__name__ for layer in tiny.model.layers] == ["DeepseekV3MLP"] + 3 * ["DeepseekV3MoE"]
    cut = tiny.config
    assert (cut.qk_nope_head_dim, cut.qk_rope_head_dim, cut.v_head_dim) == (8, 8, 8)
    assert cut.norm_topk_prob == config.norm_topk_prob and cut.routed_scaling_factor == config.routed_scaling_factor
    assert sum(p.numel() for p in tiny.parameters()) < 500_000
    assert all(p.device.type == "cpu" for p in tiny.parameters())


def test_a_tiny_copy_can_be_made_of_a_model_whose_layers_are_recomputed():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(num_hidden_layers=2))
    checkpoint_layers(model)
    tiny = tiny_copy(model)
    assert len(tiny.model.layers) == 2 and not any(layer.gradient_checkpointing for layer in tiny.model.layers)


def test_a_tiny_copy_is_as_deep_as_its_kinds_of_layers_need():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = Qwen3Config(layer_types=kinds * 4, num_hidden_layers=24, sliding_window=512, use_sliding_window=True)
    with torch.device("meta"):
        tiny = tiny_copy(AutoModelForCausalLM.from_config(config))
    assert tiny.config.layer_types == kinds
    assert [layer.self_attn.sliding_window for layer in tiny.model.layers] == [16] * 5 + [None]


@pytest.mark.parametrize(("heads", "kv_heads", "expected"), [(32, 32, 4), (32, 8, 2), (32, 1, 1)])
def test_key_value_heads_stay_all_some_or_one(heads, kv_heads, expected):
    config = MistralConfig(num_attention_heads=heads, num_key_value_heads=kv_heads, sliding_window=4096)
    cut = tiny_config(config, 2)
    assert (cut.num_attention_heads, cut.num_key_value_heads, cut.sliding_window) == (4, expected, 16)
    assert cut.num_hidden_layers == 2


def test_factors_of_single_angles_are_cut_with_the_heads():
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    cut = tiny_config(Phi3Config(rope_parameters=rope, original_max_position_embeddings=4096), 2)
    assert len(cut.rope_parameters["short_factor"]) == len(cut.rope_parameters["long_factor"]) == 8
    assert cut.rope_parameters["original_max_position_embeddings"] == 4096


def test_making_a_copy_draws_no_random_number_and_is_done_once():
    model = tiny_model(architecture("qwen3"))
    before = torch.random.get_rng_state()
    pair = tiny_pair(model, planned=True)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert tiny_pair(tiny_copy(model, seed=1), planned=True) is pair
    assert len(probe_ids(pair)) > 2 * 16


def test_what_a_configuration_says_of_masks_is_named():
    assert mask_settings(Qwen3Config(use_sliding_window=False)) == ""
    said = mask_settings(MistralConfig(sliding_window=4096))
    assert said == " (sliding_window = 4096)"
