"""The sampler's kernel and its fast form are taken for all models that they compute, however deep, and for no other."""

import copy
import dataclasses
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from campaigns import sized
from verbatim.inference.embedded import fast_forward
from verbatim.inference.embedded.compiled.forward import CompiledForward
from verbatim.inference.embedded.compiled.library import load_kernel
from verbatim.inference.embedded.fast_forward import known_backbone, probe
from verbatim.models.attention import follow_plans
from verbatim.models.head import CausalLM

pytestmark = [pytest.mark.slow, pytest.mark.campaign]
CONTEXT = 64
SMALL = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.1}
SMOLLM2 = LlamaConfig(
    vocab_size=1024,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=CONTEXT,
    initializer_range=0.042,
    rope_theta=100000,
)
"""SmolLM2-135M with fewer ids."""
DEEP = [
    LlamaConfig(**SMALL, num_hidden_layers=24),
    LlamaConfig(**{**SMALL, "num_key_value_heads": 4}, num_hidden_layers=32),
    LlamaConfig(
        **{**SMALL, "hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3}, num_hidden_layers=30
    ),
    Qwen2Config(**SMALL, num_hidden_layers=24),
    Qwen2Config(**{**SMALL, "num_key_value_heads": 1}, num_hidden_layers=28),
    Qwen3Config(**SMALL, num_hidden_layers=28),
    Qwen3Config(**{**SMALL, "head_dim": 32}, num_hidden_layers=32),
    Qwen3Config(**SMALL, num_hidden_layers=26, use_sliding_window=True, sliding_window=24, max_window_layers=1),
    MistralConfig(**SMALL, num_hidden_layers=32, sliding_window=24),
    MistralConfig(**{**SMALL, "hidden_size": 128}, num_hidden_layers=24, sliding_window=None),
]
DTYPES = [torch.float32, torch.bfloat16]


def model_of(config, dtype=torch.float32, seed=0):
    """A random model, whose norms are not 1 everywhere."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
    follow_plans(model)
    return CausalLM(model)


@torch.inference_mode()
def refusals(model, plant=lambda layers: None):
    """What is said against the kernel, and in float32 against the fast form, after a fault was planted in the layers
    that both compute."""
    shape, calls = probe(model)
    fast = known_backbone(model, calls, CONTEXT)
    plant(fast.layers)
    found = []
    if (kernel := load_kernel()) is not None:
        form = CompiledForward(model, fast, calls, shape, num_slots=1, context_length=CONTEXT, kernel=kernel)
        found.append(form.disagreement(model, CONTEXT))
    if model.output.weight.dtype == torch.float32:
        found.append(fast_forward.disagreement(fast, model, CONTEXT))
    return found


def test_rounding_refuses_no_deep_model_after_small_updates(campaign):
    row = campaign("small updates of a model with 30 layers: kernel and fast form taken")
    model = model_of(sized(DEEP[2], SMOLLM2))
    weights = list(model.model.parameters())
    for _ in range(sized(3, 200)):
        with torch.inference_mode():
            for weight in weights:
                weight.add_(torch.randn_like(weight), alpha=1e-4)
        row.add(wrong=any(refusals(model)))
    assert row.wrong == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_family_with_24_to_32_layers_is_taken(dtype, campaign):
    row = campaign("shapes with 24 to 32 layers: kernel and fast form taken")
    for config in sized(DEEP[::3], DEEP):
        for seed in range(sized(1, 20)):
            row.add(wrong=any(refusals(model_of(config, dtype, seed))))
    assert row.wrong == 0


def norm_from_one(layers, at, rng):
    name = rng.choice(["before_attention", "before_mlp"])
    norm = copy.deepcopy(getattr(layers[at], name))
    norm.weight.add_(1)
    layers[at] = dataclasses.replace(layers[at], **{name: norm})


def swapped_projections(layers, at, rng):
    first, second = rng.choice([("gate_proj", "up_proj"), ("k_proj", "v_proj")])
    name = "mlp" if first == "gate_proj" else "attention"
    part = copy.deepcopy(getattr(layers[at], name))
    swapped = {first: getattr(part, second), second: getattr(part, first)}
    for projection, module in swapped.items():
        setattr(part, projection, module)
    layers[at] = dataclasses.replace(layers[at], **{name: part})


def one_wrong_head(layers, at, rng):
    """A query head's projection is that of another head."""
    attention = copy.deepcopy(layers[at].attention)
    heads = attention.q_proj.weight.view(-1, attention.head_dim, attention.q_proj.weight.shape[1])
    one, other = rng.sample(range(len(heads)), 2)
    heads[one] = heads[other]
    layers[at] = dataclasses.replace(layers[at], attention=attention)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", [norm_from_one, swapped_projections, one_wrong_head])
def test_a_fault_in_one_layer_is_refused_and_named(fault, dtype, campaign):
    row, rng = campaign(f"a planted fault in one layer: {fault.__name__.replace('_', ' ')}"), random.Random(0)
    for number in range(sized(2, 200)):
        config = rng.choice(DEEP)
        at = rng.randrange(config.num_hidden_layers)
        found = refusals(model_of(config, dtype, number), lambda layers, at=at: fault(layers, at, rng))
        row.add(wrong=not all(said.startswith(f"layer {at} (of 0 to") for said in found))
    assert row.wrong == 0
