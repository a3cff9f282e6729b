"""The load-balancing loss is that of the whole optimizer step, whatever its micro-batches are."""

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from parallel_jobs import noted_gradients
from torch import nn
from trainer_helpers import (
    largest_difference,
    make_batch,
    num_trained,
    reference_gradients,
    shared_prefixes,
    write_experts,
    write_llama,
    write_qwen_moe,
)
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from pinned import needs
from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import LoraConfig, OptimConfig, TrainerConfig
from verbatim.core.errors import ModelError
from verbatim.models.float64 import keep_float64
from verbatim.trainer.router_loss import RouterLoss, check_router_loss
from verbatim.trainer.split import split_batch
from verbatim.trainer.trainer import Trainer

COEFFICIENT = 0.7


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return write_qwen_moe(tmp_path_factory.mktemp("qwen_moe"))


def trained(folder, samples, *, coefficient=COEFFICIENT, loss="default", dtype="float64", **settings):
    """The gradient of one optimizer step, and its metrics."""
    config = TrainerConfig(
        **{
            "optim": OptimConfig(lr=1e-30),
            "device": "cpu",
            "packing": "rows",
            "router_aux_loss_coef": coefficient,
            **settings,
        }
    )
    trainer = Trainer(folder, config, loss=LOSSES[loss], total_optimizer_steps=9, dtype=dtype)
    steps = noted_gradients(trainer)
    metrics = trainer.train_batch(samples)
    assert not [name for name, p in trainer.model.named_parameters() if p.grad is not None]
    return steps, metrics


def routed(folder, samples):
    """`transformers`' own model in float64, and for each router the logits of each token that predicts a target."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float64)
    keep_float64(model)
    logits = []
    with mock.patch.object(nn.functional, "softmax", lambda x, dim, dtype=None: x.softmax(dim)):
        for sample in samples:
            out = model(input_ids=torch.tensor(sample.token_ids)[None].long(), output_router_logits=True)
            sources = np.flatnonzero(sample.loss_mask) - 1
            logits.append(torch.stack([layer[sources] for layer in out.router_logits]))
    return model, torch.cat(logits, dim=1)


def balance(logits_LTE, share_LE=None):
    """E * sum over experts of f * P, the mean of layers; f may be given."""
    num_layers, num_tokens, num_experts = logits_LTE.shape
    total = 0.0
    for number, layer in enumerate(logits_LTE):
        counts = [0] * num_experts
        for row in layer.tolist():
            for expert in sorted(range(num_experts), key=row.__getitem__)[-2:]:
                counts[expert] += 1
        share = torch.tensor(counts, dtype=torch.float64) / num_tokens if share_LE is None else share_LE[number]
        total = total + num_experts * (share * layer.softmax(-1).mean(0)).sum()
    return total / num_layers


def with_balance(folder, samples, value=balance):
    """The gradient of the default loss and of the balance, from their formulas; the balance."""
    model, logits = routed(folder, samples)
    found = value(logits)
    (COEFFICIENT * found).backward()
    gradient, _ = reference_gradients(folder, samples, "float64")
    own = {name: p.grad for name, p in model.named_parameters()}
    return {name: g if own[name] is None else g + own[name] for name, g in gradient.items()}, found.item()


PACKINGS = [
    {"packing": "rows"},
    {"packing": "rows", "micro_batch_tokens": 16},
    {"packing": "tree"},
    {"packing": "tree", "micro_batch_tokens": 16},
    {"packing": "tree", "micro_batch_tokens": 20, "gradient_checkpointing": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", PACKINGS, ids=str)
def test_packing_leaves_it_that_of_the_whole_step(experts, settings):
    """Samples share prefixes: a token of a prefix counts once for each target that is predicted from it."""
    samples = shared_prefixes()
    expected, value = with_balance(experts, samples)
    (found,), metrics = trained(experts, samples, **settings)
    assert largest_difference(found, expected) < 1e-12
    assert metrics["router/aux_loss"] == pytest.approx(value, rel=1e-12)
    assert metrics["num_micro_batches"] > 1 or "micro_batch_tokens" not in settings


@pytest.mark.slow
def test_the_balance_of_single_micro_batches_would_be_another(experts):
    samples = shared_prefixes()
    expected, value = with_balance(experts, samples)
    sizes = [s.num_trained_tokens for s in samples]
    other, other_value = with_balance(
        experts,
        samples,
        lambda logits: sum(balance(part) * part.shape[1] for part in logits.split(sizes, dim=1)) / sum(sizes),
    )
    assert abs(other_value / value - 1) > 1e-2
    assert largest_difference(other, expected) > 1e-2


def test_its_gradient_is_not_rounded_where_the_model_computes_in_bfloat16():
    """The loads of two experts differ by less than bfloat16 can tell apart. Both have the probability 1/2, so the
    gradient of the first logit is 1/2 (s_0 - (s_0 + s_1) / 2), where s is the gradient of a probability."""
    loads = torch.tensor([1024, 1025])
    count = int(loads.sum())
    experts = torch.repeat_interleave(torch.arange(2), loads)[:, None]
    logits, weights = torch.zeros(count, 2, requires_grad=True), torch.ones(count, 1)

    class Batch:
        input_ids_T, source_positions_M, router_pass = torch.zeros(count), torch.arange(count), None

        def __len__(self):
            return count

    def hidden(batch):
        return batch.router_pass.observe(0, slice(None), logits, weights, experts)

    routers, calls = SimpleNamespace(layers=[None], num_experts=2), SimpleNamespace(release=lambda: None)
    model = SimpleNamespace(routers=routers, device=torch.device("cpu"), calls=calls)
    loss, batch = RouterLoss(SimpleNamespace(model=model, hidden=hidden), count**2 / 2**13), Batch()
    loss.measure([batch], None)  # s is 2 * coefficient * load / count^2: 1/4, and 1/4 + 2^-12
    with torch.autocast("cpu", dtype=torch.bfloat16):
        attached = hidden(batch)
    attached.sum().backward()
    assert logits.grad.unique(dim=0).tolist() == [[-(2.0**-14), 2.0**-14]]


def test_without_the_option_nothing_is_added(experts):
    samples = make_batch()
    expected, _ = reference_gradients(experts, samples, "float64")
    (found,), metrics = trained(experts, samples, coefficient=0.0)
    assert largest_difference(found, expected) < 1e-12
    assert not [name for name in metrics if name.startswith("router/")]


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["gspo", "ipa"])
def test_losses_of_whole_trajectories_have_it_too(experts, loss):
    """Cut trajectories are computed twice, the first time without a gradient."""
    samples = shared_prefixes()
    with_it, without = (
        trained(experts, samples, coefficient=c, loss=loss, micro_batch_tokens=20)[0][0] for c in (COEFFICIENT, 0.0)
    )
    by_token = [trained(experts, samples, coefficient=c)[0][0] for c in (COEFFICIENT, 0.0)]
    added, expected = (
        {name: a[name] - b[name] for name in a if "norm" not in name and "lm_head" not in name}
        for a, b in ((with_it, without), by_token)
    )
    assert largest_difference(added, expected) < 1e-10


def test_its_value_is_that_of_transformers_layer_by_layer(experts):
    samples = make_batch()
    _, logits = routed(experts, samples)
    own = [float(load_balancing_loss_func((layer,), 5, 2)) for layer in logits.detach()]
    _, metrics = trained(experts, samples)
    assert metrics["router/aux_loss"] == pytest.approx(np.mean(own), rel=1e-6)


def test_load_and_entropy(experts):
    samples = make_batch()
    _, logits = routed(experts, samples)
    chosen = logits.topk(2).indices.flatten(1)
    load = max(int(torch.bincount(layer, minlength=5).max()) / (layer.numel() / 5) for layer in chosen)
    entropy = torch.distributions.Categorical(logits=logits.detach()).entropy().mean()
    _, metrics = trained(experts, samples, optimizer_steps_per_batch=1)
    assert metrics["router/load_max"] == pytest.approx(load, rel=1e-12)
    assert metrics["router/entropy"] == pytest.approx(float(entropy), rel=1e-12)
    assert logits.shape == (2, num_trained(samples), 5)


def test_several_optimizer_steps_have_one_each(experts):
    samples = make_batch()
    steps, metrics = trained(experts, samples, optimizer_steps_per_batch=2)
    parts = split_batch(samples, 2)
    values = []
    for found, part in zip(steps, parts, strict=True):
        expected, value = with_balance(experts, part)
        assert largest_difference(found, expected) < 1e-12
        values.append(value)
    sizes = [num_trained(part) for part in parts]
    assert metrics["router/aux_loss"] == pytest.approx(np.average(values, weights=sizes), rel=1e-12)


@pytest.mark.slow
def test_it_balances_the_experts(tmp_path):
    """With a strong coefficient and no other loss (advantages of 0), the busiest expert loses tokens."""
    model = write_qwen_moe(tmp_path / "model", scale=0.4)
    config = TrainerConfig(optim=OptimConfig(lr=1e-2), device="cpu", router_aux_loss_coef=1.0)
    trainer = Trainer(model, config, loss=LOSSES["sft"], total_optimizer_steps=40)
    metrics = [trainer.train_batch(make_batch()) for _ in range(40)]
    assert metrics[-1]["router/aux_loss"] < metrics[0]["router/aux_loss"]
    assert metrics[-1]["router/load_max"] < metrics[0]["router/load_max"] - 0.2


def test_float32_has_the_same_value(experts):
    samples = make_batch()
    _, expected = trained(experts, samples)
    _, metrics = trained(experts, samples, dtype="float32")
    assert metrics["router/aux_loss"] == pytest.approx(expected["router/aux_loss"], rel=1e-5)


def test_what_has_no_such_loss_is_refused_by_name(tmp_path):
    dense = write_llama(tmp_path / "dense")
    with pytest.raises(
        ModelError,
        match=r"router_aux_loss_coef .* but the decoder layers of LlamaForCausalLM have no routed experts; leave",
    ):
        trained(dense, [])
    with pytest.raises(ModelError, match=r"LlamaForCausalLM have no routed experts"):
        check_router_loss(AutoConfig.from_pretrained(dense))
    check_router_loss(Qwen3MoeConfig(num_hidden_layers=2))


@needs("router_logits" in DeepseekV3ForCausalLM._can_record_outputs, "transformers", "routers declared by DeepSeek's")
def test_routers_without_a_loss_are_refused_by_name(tmp_path):
    torch.manual_seed(0)
    DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            kv_lora_rank=8,
            q_lora_rank=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            max_position_embeddings=128,
        )
    ).save_pretrained(tmp_path / "deepseek")
    with pytest.raises(ModelError, match=r"DeepseekV3ForCausalLM, but transformers has no such loss for this class"):
        trained(tmp_path / "deepseek", [], dtype="float32")


def test_adapters_leave_the_routers_as_they_are():
    with pytest.raises(ValueError, match=r"router_aux_loss_coef = 0.1 with \[trainer.lora\]: the routers"):
        TrainerConfig(router_aux_loss_coef=0.1, lora=LoraConfig())


@pytest.mark.slow
def test_mixtral_has_it_too(tmp_path):
    samples = shared_prefixes()
    folder = write_experts(tmp_path / "mixtral")
    found = [trained(folder, samples, **settings) for settings in PACKINGS[:4]]
    for (gradient,), metrics in found[1:]:
        assert largest_difference(gradient, found[0][0][0]) < 1e-12
        assert metrics["router/aux_loss"] == pytest.approx(found[0][1]["router/aux_loss"], rel=1e-12)
