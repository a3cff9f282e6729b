"""Compiled norms, feed-forward parts and rotations are those of `transformers`, and only its own are replaced."""

from __future__ import annotations

import inspect
import shutil

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama import modeling_llama

from verbatim.models import native
from verbatim.trainer import fused
from verbatim.trainer.fused import fuse_layers

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="this machine has no C compiler"
)
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
FAMILIES = [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config]


def pair(config):
    """Two models with the same weights, whose norms are not 1 everywhere; the second one is to be fused."""
    torch.manual_seed(0)
    plain, other = (AutoModelForCausalLM.from_config(config(**SIZES)) for _ in range(2))
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    other.load_state_dict(plain.state_dict())
    return plain, other


def gradients(model):
    ids = torch.arange(1, 72)[None] * 7919 % 97
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    (logits.log_softmax(-1)[0, :, 3] @ torch.linspace(-1, 1, 71, dtype=logits.dtype)).backward()
    return logits.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("config", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(config, compiled_calls):
    plain, other = pair(config)
    expected_logits, expected = gradients(plain.double())
    fuse_layers(other)
    compiled_calls.clear()
    logits, found = gradients(other)
    assert set(compiled_calls) == {"norm_forward", "norm_backward", "swiglu_forward", "swiglu_backward", "rotate"}
    torch.testing.assert_close(logits.double(), expected_logits, rtol=1e-5, atol=1e-5)
    for name, wanted in expected.items():
        floor = 1e-3 * max(float(x.norm()) for x in expected.values())
        assert float((found[name].double() - wanted).norm()) < 1e-5 * max(float(wanted.norm()), floor), name


def test_float64_and_bfloat16_run_as_transformers_has_them(compiled_calls):
    plain, other = pair(Qwen3Config)
    fuse_layers(other)
    compiled_calls.clear()
    for dtype in (torch.float64, torch.bfloat16):
        (a, one), (b, two) = gradients(plain.to(dtype)), gradients(other.to(dtype))
        assert torch.equal(a, b)
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert compiled_calls == []


def test_a_family_with_another_norm_is_left_alone():
    config = Gemma2Config(**SIZES)
    model = AutoModelForCausalLM.from_config(config)
    fuse_layers(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_nothing_is_replaced_where_nothing_is_compiled(monkeypatch):
    monkeypatch.setenv(native.SWITCH, "0")
    native.build.cache_clear()
    try:
        _, other = pair(Qwen3Config)
        fuse_layers(other)
        assert not any("forward" in vars(module) for module in other.modules())
    finally:
        monkeypatch.undo()
        native.build.cache_clear()


def test_threads_do_not_change_a_bit():
    _, other = pair(Qwen3Config)
    fuse_layers(other)
    x = torch.randn(1000, 64, requires_grad=True)
    norm, before, found = other.model.norm, torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            out = norm(x)
            found.append((out, *torch.autograd.grad(out, [x, norm.weight], torch.ones_like(out))))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_second_derivative_is_refused():
    """It would be wrong: a compiled function has none."""
    _, other = pair(Qwen3Config)
    fuse_layers(other)
    x = torch.randn(3, 64, requires_grad=True)
    (grad,) = torch.autograd.grad(other.model.norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.fixture
def llama(monkeypatch):
    """What is compared here, later tests do not see."""
    monkeypatch.setattr(fused, "_compared", {})
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", inspect.unwrap(modeling_llama.apply_rotary_pos_emb))
    return modeling_llama


def norm_from_one(self, x):
    return (1 + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def gate_and_up_in_turn(self, x):
    return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def turned_back(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(x * cos - modeling_llama.rotate_half(x) * sin for x in (q, k))


@pytest.mark.parametrize(
    ("owner", "other", "not_called"),
    [
        ("LlamaRMSNorm", norm_from_one, "norm_forward"),
        ("LlamaMLP", gate_and_up_in_turn, "swiglu_forward"),
        (None, turned_back, "rotate"),
    ],
)
def test_a_part_of_the_same_name_with_another_formula_runs_as_it_is(
    llama, monkeypatch, caplog, compiled_calls, owner, other, not_called
):
    changed = (llama, "apply_rotary_pos_emb") if owner is None else (getattr(llama, owner), "forward")
    monkeypatch.setattr(*changed, other)
    plain, fast = pair(LlamaConfig)
    expected, _ = gradients(plain)
    fuse_layers(fast)
    compiled_calls.clear()
    found, _ = gradients(fast)
    assert {"norm_forward", "swiglu_forward", "rotate"} - {*compiled_calls} == {not_called}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    (said,) = caplog.messages
    assert said.startswith(f"{owner or other.__qualname__} of this transformers: its compiled form is ")
    assert "away from its numbers in float64" in said and "the model's own form is " in said


def test_what_is_compared_draws_no_random_numbers_of_the_run(llama, compiled_calls, caplog):
    _, model = pair(LlamaConfig)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    fuse_layers(model)
    assert torch.equal(torch.rand(4), expected)
    assert {*compiled_calls} == {"norm_forward", "swiglu_forward", "rotate"} and not caplog.messages
