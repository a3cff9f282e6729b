"""What `save_model` writes `load_weights` reads, in the published layout of each architecture and bit for bit."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GPTNeoXConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from verbatim.core.errors import ModelError
from verbatim.models.conversion import to_model_tensors
from verbatim.models.loading import load_model, load_weights, save_model
from verbatim.models.round_trip import check_round_trip

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SHARED = SMALL | {"num_key_value_heads": 2, "num_experts_per_tok": 2}
LATENT = SHARED | {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
EXPERTS = "model.layers.1.block_sparse_moe.experts"


def config(name):
    match name:
        case "deepseek_v2":
            return DeepseekV2Config(**LATENT)
        case "deepseek_v3":
            return DeepseekV3Config(**LATENT)
        case "glm4_moe":
            return Glm4MoeConfig(
                **SHARED,
                head_dim=8,
                n_routed_experts=4,
                moe_intermediate_size=16,
                n_group=1,
                topk_group=1,
                first_k_dense_replace=1,
            )
        case "gpt_neox":
            return GPTNeoXConfig(**SMALL)
        case "granitemoe":
            return GraniteMoeConfig(**SHARED, num_local_experts=4)
        case "llama":
            return LlamaConfig(**SMALL, num_key_value_heads=2)
        case "llama_tied":
            return LlamaConfig(**SMALL, num_key_value_heads=2, tie_word_embeddings=True)
        case "minimax_m2":
            return MiniMaxM2Config(**SHARED, head_dim=8, num_local_experts=4)
        case "mixtral":
            return MixtralConfig(**SHARED, num_local_experts=4)
        case "mixtral_of_12":  # 10 comes after 9, not after 1
            return MixtralConfig(**SHARED, num_local_experts=12)
        case "olmoe":
            return OlmoeConfig(**SHARED, num_experts=4)
        case "qwen2_moe":
            return Qwen2MoeConfig(**SHARED, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16)
        case "qwen3_moe":
            return Qwen3MoeConfig(**SHARED, num_experts=4, head_dim=8, moe_intermediate_size=16)
    raise ValueError(name)


def made(name, seed=0):
    """A model in which no two numbers are the same by intent."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(name)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand_like(parameter))
    return model


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v2",
        "deepseek_v3",
        "glm4_moe",
        "gpt_neox",
        "granitemoe",
        "llama",
        "llama_tied",
        "minimax_m2",
        "mixtral",
        "mixtral_of_12",
        "olmoe",
        "qwen2_moe",
        "qwen3_moe",
    ],
)
def test_a_saved_folder_loads_into_another_model_bit_for_bit(name, tmp_path):
    trained, sampled = made(name, seed=0), made(name, seed=1)
    save_model(trained, None, tmp_path / "step_1")
    load_weights(sampled, tmp_path / "step_1")
    assert_same(values(sampled), values(trained))
    assert_same(values(AutoModelForCausalLM.from_pretrained(tmp_path / "step_1")), values(trained))
    # A trainer's model was itself read from a folder, which decides the layout that it is saved in.
    save_model(load_model(tmp_path / "step_1", only_attention=False), None, tmp_path / "step_2")
    load_weights(sampled := made(name, seed=1), tmp_path / "step_2")
    assert_same(values(sampled), values(trained))
    check_round_trip(trained)


def test_experts_are_published_one_by_one_and_stacked_gate_over_up(tmp_path):
    """The layout that Mixtral was published in: w1 is the gate, w3 is up, w2 is down."""
    save_model(made("mixtral_of_12", seed=0), None, tmp_path)
    load_weights(model := made("mixtral_of_12", seed=1), tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    mlp = model.model.layers[1].mlp.experts
    for expert in range(12):
        w1, w2, w3 = (saved[f"{EXPERTS}.{expert}.w{i}.weight"] for i in (1, 2, 3))
        assert torch.equal(mlp.gate_up_proj[expert], torch.cat([w1, w3]))
        assert torch.equal(mlp.down_proj[expert], w2)


def test_tensors_that_need_no_conversion_are_passed_on_uncopied(tmp_path):
    model = made("llama")
    save_model(model, None, tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    converted, unknown = to_model_tensors(model, saved)
    assert unknown == [] and converted.keys() == saved.keys()
    assert all(converted[name] is saved[name] for name in saved)


def renumber(saved):
    """Expert 3 becomes expert 4 of four."""
    return {name.replace(f"{EXPERTS}.3.", f"{EXPERTS}.4."): value for name, value in saved.items()}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            lambda saved: {k: v for k, v in saved.items() if f"{EXPERTS}.3." not in k},
            r"other shape \['model.layers.1.mlp",
        ),
        (lambda saved: {k: v for k, v in saved.items() if f"{EXPERTS}.1.w1" not in k}, r"numbers them \[0, 2, 3\]"),
        (renumber, r"stacked from tensors 0 to 3; the folder numbers them \[0, 1, 2, 4\]"),
        (lambda saved: {k: v for k, v in saved.items() if ".w3." not in k}, "layers.0.mlp.experts.gate_up_proj do not"),
        (lambda saved: {k: v for k, v in saved.items() if EXPERTS not in k}, r"missing \['model.layers.1.mlp.experts"),
        (lambda saved: saved | {f"{EXPERTS}.0.w9.weight": torch.ones(1)}, rf"unknown \['{EXPERTS}.0.w9.weight'\]"),
        (lambda saved: saved | {f"{EXPERTS}.2.w2.weight": torch.ones(3)}, r"layers.1.mlp.experts.down_proj do not"),
        (lambda saved: saved | {f"{EXPERTS}.4.w2.weight": torch.ones(32, 48)}, r"other shape \['model.layers.1.mlp"),
        (
            lambda saved: saved | {"layers.0.input_layernorm.weight": torch.ones(32)},
            "both map to the model's model.layers.0",
        ),
    ],
)
def test_experts_that_do_not_fit_are_refused_and_the_model_is_unchanged(fault, message, tmp_path):
    save_model(made("mixtral", seed=0), None, tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(fault(load_file(file)), file)
    model = made("mixtral", seed=1)
    before = values(model)
    with pytest.raises(ModelError, match=message):
        load_weights(model, tmp_path)
    assert_same(values(model), before)


@pytest.mark.parametrize("second", [0.0, 1.0])
def test_a_tied_head_may_be_told_twice_but_not_with_two_values(second, tmp_path):
    save_model(made("llama_tied", seed=0), None, tmp_path)
    file = tmp_path / "model.safetensors"
    saved = load_file(file)
    assert "lm_head.weight" not in saved
    save_file(saved | {"lm_head.weight": saved["model.embed_tokens.weight"] + second}, file)
    model = made("llama_tied", seed=1)
    before = values(model)
    if second:
        with pytest.raises(ModelError, match="different values for"):
            load_weights(model, tmp_path)
        assert_same(values(model), before)
    else:
        load_weights(model, tmp_path)
        assert torch.equal(model.lm_head.weight, saved["model.embed_tokens.weight"])


def test_an_architecture_that_does_not_save_all_it_has_is_named():
    model = made("mixtral")
    model._keys_to_ignore_on_save = ["model.norm.weight"]
    before = values(model)
    with pytest.raises(ModelError, match=r"MixtralForCausalLM cannot take new weights: .*missing \['model.norm.weight"):
        check_round_trip(model)
    assert_same(values(model), before)


def test_an_architecture_whose_weights_come_back_changed_is_named(monkeypatch):
    monkeypatch.setattr("verbatim.models.round_trip.load_weights", lambda model, folder: None)
    with pytest.raises(ModelError, match="LlamaForCausalLM cannot take new weights: 21 of its tensors have other"):
        check_round_trip(made("llama"))
