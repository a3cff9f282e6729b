"""Products in bfloat16 on a CPU: within the bounds of their rounding, and everything between them in float32."""

import weakref

import peft
import pytest
import torch
from torch import nn
from trainer_helpers import largest_difference, make_batch, shared_prefixes, write_experts
from transformers import GPT2Config, GPT2LMHeadModel

from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import LoraConfig, OptimConfig, TrainerConfig
from verbatim.models import native
from verbatim.models.attention import WholeSequencePlan
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model
from verbatim.trainer.bfloat16 import MergedLinear, Products, RoundedLinear, can_round, in_float32, round_products
from verbatim.trainer.fused import SOURCE
from verbatim.trainer.rounded_parts import RoundedFeedForward, RoundedHead
from verbatim.trainer.trainer import Trainer

U = 2.0**-8
"""Half the distance of two neighbouring bfloat16 numbers near 1, 8 bits apart from the sign."""
ROUNDED = 1.01 * 3 * U
"""Relative to a sum of absolute products: two factors that are rounded, the sum that is rounded, terms of u^2."""


def rounded(module):
    module.forward = RoundedLinear(module, module.forward, Products())
    return module


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(48, 80), (160, 64)])
def test_results_and_gradients_are_within_the_bounds_of_rounding(sizes, bias):
    torch.manual_seed(0)
    module = nn.Linear(*sizes, bias=bias)
    x, outside = torch.randn(1, 100, sizes[0], requires_grad=True), torch.randn(1, 100, sizes[1])
    weight, x_RI, outside_RO = module.weight.detach().double(), x.detach()[0].double(), outside[0].double()
    out = rounded(module)(x)
    found = torch.autograd.grad(out, [x, *module.parameters()], outside)
    bias_O = module.bias.detach().double() if bias else 0.0
    for got, exact, absolute in (
        (out[0], x_RI @ weight.T + bias_O, x_RI.abs() @ weight.abs().T),
        (found[0][0], outside_RO @ weight, outside_RO.abs() @ weight.abs()),
        (found[1], outside_RO.T @ x_RI, outside_RO.abs().T @ x_RI.abs()),
    ):
        assert got.dtype == torch.float32
        off = (got.double() - exact).abs()
        assert (off <= ROUNDED * absolute + 1e-6).all()
        assert off.max() > 1e-4, "it is rounded at all"
    if bias:
        torch.testing.assert_close(found[2], outside[0].sum(0))


def test_sums_are_in_float32():
    """4,096 ones, and a first product of 2^13: a sum in bfloat16 would stall there, whose next number is 2^13 + 64."""
    module = nn.Linear(4097, 8, bias=False)
    nn.init.ones_(module.weight)
    x = torch.ones(64, 4097)
    x[:, 0] = 2.0**13
    assert (rounded(module)(x).detach() == 2.0**13 + 4096).all()


def test_layers_that_read_one_tensor_share_what_it_is_rounded_to_while_it_lives():
    products = Products()
    x = torch.randn(4, 8)
    first = products.rounded(x)
    assert products.rounded(x) is first
    x.add_(1)
    assert torch.equal(products.rounded(x), x.bfloat16()), "it was changed in place"
    y = torch.randn(4, 8)
    assert torch.equal(products.rounded(y), y.bfloat16())
    kept = weakref.ref(products.rounded(y))
    assert kept() is not None
    del y
    assert kept() is None


def test_float32_is_there_again_inside_of_a_context_and_contexts_may_nest(qwen):
    lm = CausalLM(load_model(qwen, dtype="float32", device="cpu"))
    tokens = torch.arange(12)
    exact = lm.hidden(tokens, tokens, WholeSequencePlan())
    round_products(lm.model)
    with in_float32(lm.model):
        with in_float32(lm.model):
            assert torch.equal(lm.hidden(tokens, tokens, WholeSequencePlan()), exact)
        assert torch.equal(lm.hidden(tokens, tokens, WholeSequencePlan()), exact)
    assert not torch.equal(lm.hidden(tokens, tokens, WholeSequencePlan()), exact)


def test_models_whose_matrices_are_not_all_of_linear_layers_are_left_to_autocast(qwen, tmp_path):
    assert can_round(load_model(qwen, dtype="float32", device="cpu"))
    assert not can_round(load_model(qwen, dtype="float64", device="cpu"))
    assert not can_round(load_model(write_experts(tmp_path), dtype="float32", device="cpu"))
    assert not can_round(GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=40)))


def trainer(folder, **settings):
    config = TrainerConfig(optim=OptimConfig(lr=1e-2), device="cpu", **{"packing": "rows", **settings})
    return Trainer(folder, config, loss=LOSSES["default"], total_optimizer_steps=8)


def gradients(made, samples):
    """Those of one optimizer step, by name."""
    kept = {}
    step = made.optimizer.step
    made.optimizer.step = lambda: kept.update({n: p.grad.clone() for n, p in made.model.named_parameters()}) or step()
    made.train_batch(samples)
    return kept


def test_a_trainer_in_bfloat16_rounds_products_and_nothing_else(qwen):
    made = trainer(qwen, dtype="bfloat16")
    seen = {}
    for name, module in made.model.named_modules():
        module.register_forward_hook(lambda _m, _i, out, name=name: seen.setdefault(name, out))
    found = gradients(made, make_batch())
    assert {out.dtype for out in seen.values() if isinstance(out, torch.Tensor)} == {torch.float32}
    assert {grad.dtype for grad in found.values()} == {torch.float32}
    assert {p.dtype for p in made.model.parameters()} == {torch.float32}
    exact = gradients(trainer(qwen), make_batch())
    off = {name: float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact}
    # Some roundings of 2^-8 at most on the way through two layers and back; their signs are random.
    assert 1e-4 < max(off.values()) < 10 * U


def test_recomputed_activations_are_rounded_as_they_were(qwen):
    plain, recomputed = (
        gradients(trainer(qwen, dtype="bfloat16", gradient_checkpointing=on), make_batch()) for on in (False, True)
    )
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def test_trees_are_held_against_float32_where_activations_are_recomputed(qwen, monkeypatch):
    monkeypatch.setattr("verbatim.trainer.packer.StepPacker._rounding", lambda self: 0.0)
    made = trainer(qwen, dtype="bfloat16", packing="tree", gradient_checkpointing=True)
    assert made.train_batch(shared_prefixes())["packing/tree"] == 1


def adapted(inputs, outputs, rank, bias):
    """A layer with an adapter of scale 2, whose B is not 0; its base is frozen, as `Adapters` leaves it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(inputs, outputs, bias=bias))
    peft.inject_adapter_in_model(peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["0"]), model)
    (layer,) = model
    nn.init.normal_(layer.lora_B["default"].weight, std=rank**-0.5)
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", [(48, 80), (160, 64)])
def test_a_layer_with_an_adapter_multiplies_by_its_merged_weight(sizes, bias):
    layer = adapted(*sizes, 4, bias)
    weight, a, b = (
        x.detach().double()
        for x in (layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    )
    x, outside = torch.randn(1, 100, sizes[0], requires_grad=True), torch.randn(1, 100, sizes[1])
    x_RI, g_RO, bias_O = x.detach()[0].double(), outside[0].double(), 0.0
    if bias:
        bias_O = layer.base_layer.bias.detach().double()
    merged = weight + 2 * b @ a
    layer.forward = MergedLinear(layer, layer.forward, Products())
    out = layer(x)
    found = torch.autograd.grad(out, [x, layer.lora_A["default"].weight, layer.lora_B["default"].weight], outside)
    # A and B have the rounding of two products one after the other, each of which rounds its factors and its result.
    for got, exact, absolute, roundings in (
        (out[0], x_RI @ merged.T + bias_O, x_RI.abs() @ merged.abs().T, 3),
        (found[0][0], g_RO @ merged, g_RO.abs() @ merged.abs(), 3),
        (found[1], 2 * (g_RO @ b).T @ x_RI, 2 * (g_RO.abs() @ b.abs()).T @ x_RI.abs(), 5),
        (found[2], 2 * g_RO.T @ (x_RI @ a.T), 2 * g_RO.abs().T @ (x_RI.abs() @ a.abs().T), 5),
    ):
        assert got.dtype == torch.float32 and got.shape == exact.shape
        off = (got.double() - exact).abs()
        assert (off <= 1.01 * roundings * U * absolute + 1e-6).all()
        assert off.max() > 1e-4, "it is rounded at all"
    assert layer.base_layer.weight.grad is None


def test_a_layer_without_its_adapter_and_in_float32_is_as_peft_has_it():
    layer = adapted(48, 80, 4, True)
    x, own = torch.randn(1, 10, 48), layer.forward
    exact = own(x)
    layer.base_layer.forward = RoundedLinear(layer.base_layer, layer.base_layer.forward, products := Products())
    layer.forward = MergedLinear(layer, own, products)
    with in_float32(layer):
        assert torch.equal(layer(x), exact)
    assert not torch.equal(layer(x), exact)
    layer.enable_adapters(False)
    assert torch.equal(layer(x), layer.base_layer(x))


def test_a_step_of_adapters_is_near_that_of_float32(qwen):
    """B is 0 at first, so that only B has a gradient; the second step's gradient has both."""
    found, exact = (trainer(qwen, lora=LoraConfig(r=4), dtype=dtype) for dtype in ("bfloat16", "float32"))
    for seed in range(2):
        a, b = (
            {name: grad for name, grad in adapter_gradients(made, shared_prefixes(seed)).items()}
            for made in (found, exact)
        )
        off = {name: float((a[name] - b[name]).norm()) for name in b}
        most = max(float(grad.norm()) for grad in b.values())
        assert 1e-5 * most < max(off.values()) < 0.1 * most


def adapter_gradients(made, samples):
    kept = {}
    step = made.optimizer.step
    named = [(name, p) for name, p in made.model.named_parameters() if p.requires_grad]
    made.optimizer.step = lambda: kept.update({name: p.grad.clone() for name, p in named}) or step()
    made.train_batch(samples)
    made.optimizer.step = step
    return kept


@pytest.mark.parametrize("lora", [None, LoraConfig(r=4)])
def test_feed_forward_layers_have_the_bits_of_one_product_after_the_other(qwen, monkeypatch, lora):
    """Two steps: B is 0 in the first one."""
    found = []
    for parts in (True, False):
        if not parts:
            monkeypatch.setattr("verbatim.trainer.compile.round_parts", lambda model: None)
        made = trainer(qwen, dtype="bfloat16", lora=lora)
        rounded = [m for m in made.model.modules() if isinstance(vars(m).get("forward"), RoundedFeedForward)]
        assert len(rounded) == (2 if parts and native.library(SOURCE) is not None else 0)
        if parts:
            made.model.lm_head.forward = made.model.lm_head.forward.own  # its gradients are rounded
        found.append([adapter_gradients(made, make_batch(seed=seed)) for seed in (0, 1)])
    for a, b in zip(*found, strict=True):
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("bias", [True, False])
def test_the_head_is_float32_forward_and_rounded_backward(bias):
    torch.manual_seed(0)
    head = nn.Linear(48, 300, bias=bias)
    x, outside = torch.randn(20, 48, requires_grad=True), torch.randn(20, 300)
    exact = head(x).detach()
    head.forward = RoundedHead(head, head.forward, Products())
    out = head(x)
    assert torch.equal(out.detach(), exact)
    found = torch.autograd.grad(out, [x, *head.parameters()], outside)
    w, g, x_MD = head.weight.detach().double(), outside.double(), x.detach().double()
    for got, wanted, absolute in ((found[0], g @ w, g.abs() @ w.abs()), (found[1], g.T @ x_MD, g.abs().T @ x_MD.abs())):
        off = (got.double() - wanted).abs()
        assert got.dtype == torch.float32
        assert (off <= ROUNDED * absolute + 1e-6).all() and off.max() > 1e-4
    if bias:
        torch.testing.assert_close(found[2], outside.sum(0))


def test_adapters_stay_in_float32_and_their_base_is_rounded(qwen):
    made = trainer(qwen, dtype="bfloat16", lora=LoraConfig(r=4))
    kinds = {
        name.rpartition(".")[2] if "lora_" not in name else "adapter": isinstance(
            vars(module).get("forward"), RoundedLinear
        )
        for name, module in made.model.named_modules()
        if type(module) is nn.Linear
    }
    assert kinds["adapter"] is False and kinds["base_layer"] is True and kinds["lm_head"] is False
    exact = trainer(qwen, lora=LoraConfig(r=4))
    assert made.train_batch(make_batch())["loss"] == pytest.approx(exact.train_batch(make_batch())["loss"], rel=0.05)


def test_a_step_is_the_same_each_time(qwen):
    a, b = (gradients(trainer(qwen, dtype="bfloat16"), make_batch()) for _ in range(2))
    assert largest_difference(a, b) == 0
