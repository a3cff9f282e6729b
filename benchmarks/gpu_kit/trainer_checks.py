"""Correctness of the trainer's other paths: the optimizer, adapters, recomputing, offload, compiling, experts, sets."""

from __future__ import annotations

import gc
import shutil
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verbatim.config.schema import LoraConfig, OptimConfig
from verbatim.core.types import RoutedExperts, TrainingSample
from verbatim.trainer.offload import ActivationOffload
from verbatim.trainer.trainer import Trainer

from .ours import gradient_of, trainer_of
from .record import Check, Findings, NotRun
from .reference import (
    IN_BFLOAT16,
    bound_of,
    default_loss,
    largest_error,
    plain_gradient,
    plain_logits,
    plain_model,
    whole_error,
)
from .setting import Setting, sample_of, shared_prefixes, with_kept_sets

OPTIM = OptimConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.5, eps=1e-3)
"""With a large epsilon: where a gradient is almost 0, AdamW would turn its rounding into a step of full size."""
LORA = LoraConfig(r=4, alpha=8)
MANY, SETTLED = 200, 50
"""Steps whose memory is watched, and those after which nothing may be added."""


def optimizer_step(setting: Setting, out: Findings) -> None:
    """Two steps with clipping and weight decay, in float64."""
    folder, samples = setting.model("dense"), shared_prefixes(setting)
    trainer = trainer_of(folder, setting.device, master="float64", optim=OPTIM, packing="rows")
    plain = plain_model(folder, torch.float64)
    first = {name: p.detach().clone() for name, p in plain.named_parameters()}
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": OPTIM.weight_decay},
        {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=OPTIM.lr, betas=(OPTIM.beta1, OPTIM.beta2), eps=OPTIM.eps, foreach=False)
    count = sum(sample.num_trained_tokens for sample in samples)
    for _ in range(2):
        trainer.train_batch(samples)
        losses = [default_loss(plain_logits(plain, torch.tensor(each.token_ids)), each) for each in samples]
        (torch.stack(losses).sum() / count).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), OPTIM.max_grad_norm)
        adamw.step()
        adamw.zero_grad()
    ours = dict(trainer.model.named_parameters())
    moved = {name: ours[name].detach().cpu() - first[name] for name in first}
    expected = {name: p.detach() - first[name] for name, p in plain.named_parameters()}
    # A step's relative error is at most that of the gradient, over the gradient's share of the denominator.
    room = OPTIM.max_grad_norm / OPTIM.eps
    out.at_most("change of weights float64", whole_error(moved, expected), room * bound_of(setting, torch.float64))


def _both_ways(setting: Setting, out: Findings, kind: str, samples: list[TrainingSample], **settings: Any) -> None:
    """Rows and trees in float32 by these settings, against plain `transformers` in float64."""
    folder = setting.model(kind)
    exact = plain_gradient(plain_model(folder, torch.float64), samples)
    for packing in ("rows", "tree"):
        found = gradient_of(folder, setting.device, samples, packing=packing, **settings)
        out.at_most(f"{packing} float32", largest_error(found, exact), bound_of(setting, torch.float32))


def cut_micro_batches(setting: Setting, out: Findings) -> None:
    """Small micro-batches and chunks of logprobs, so that trajectories and trees are cut."""
    unit = setting.sizes["unit"]
    _both_ways(setting, out, "dense", shared_prefixes(setting), micro_batch_tokens=8 * unit, logprob_chunk=7)


def recompute(setting: Setting, out: Findings) -> None:
    """Gradient checkpointing."""
    _both_ways(setting, out, "window", shared_prefixes(setting), gradient_checkpointing=True)


def offload(setting: Setting, out: Findings) -> None:
    """Activations that wait in host memory come back bit for bit; on a card also in the trainer."""
    device = torch.device(setting.device)
    generator = torch.Generator().manual_seed(0)
    size = 64 if setting.tiny else 2048
    weights = [torch.randn(size, size, generator=generator).to(device) * size**-0.5 for _ in range(6)]
    start = torch.randn(size, size, generator=generator).to(device)

    def gradient(hooks: Any) -> Tensor:
        leaf = start.clone().requires_grad_()
        x = leaf
        for weight in weights:
            with hooks() if hooks is not None else _nothing():
                x = (x @ weight).tanh()
        x.square().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    kept = ActivationOffload(device)
    out.holds("bit for bit", torch.equal(gradient(kept.hooks), gradient(None)))
    samples = shared_prefixes(setting)
    _both_ways(setting, out, "dense", samples, gradient_checkpointing=True, activation_offload=True)


@contextmanager
def _nothing():
    yield


def compiled(setting: Setting, out: Findings) -> None:
    """A layer by `torch.compile`, which takes long."""
    if shutil.which("g++" if setting.device == "cpu" else "gcc") is None:
        raise NotRun("no C compiler, which torch.compile needs")
    folder, samples = setting.model("one layer"), shared_prefixes(setting)
    exact = plain_gradient(plain_model(folder, torch.float64), samples)
    for packing in ("rows",) if setting.tiny else ("rows", "tree"):
        found = gradient_of(folder, setting.device, samples, packing=packing, compile=True)
        out.at_most(f"{packing} float32", largest_error(found, exact), bound_of(setting, torch.float32))


def adapters(setting: Setting, out: Findings) -> None:
    """With W' = W + s B A: dL/dB = s dL/dW' A^T and dL/dA = s B^T dL/dW', dL/dW' by plain `transformers`."""
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise NotRun("peft is not installed") from error
    folder, samples = setting.model("dense"), shared_prefixes(setting)
    scale = LORA.alpha / LORA.r
    pairs: dict[str, tuple[Tensor, Tensor]] = {}

    def scatter(trainer: Trainer) -> None:
        """Give B values: it is 0 at the start, where A has no gradient."""
        own = dict(trainer.model.named_parameters())
        generator = torch.Generator().manual_seed(0)
        for name, b in own.items():
            if ".lora_B." in name:
                with torch.no_grad():
                    b.copy_(0.1 * torch.randn(b.shape, generator=generator))
                a = own[name.replace("lora_B", "lora_A")]
                layer = name.removesuffix(".lora_B.default.weight")
                pairs[layer] = (a.detach().double().cpu(), b.detach().double().cpu())

    for packing in ("rows", "tree"):
        found = gradient_of(folder, setting.device, samples, packing=packing, lora=LORA, prepare=scatter)
        dense = plain_model(folder, torch.float64)
        with torch.no_grad():
            for layer, (a, b) in pairs.items():
                dense.get_submodule(layer).weight += scale * b @ a
        whole = plain_gradient(dense, samples)
        expected = {}
        for layer, (a, b) in pairs.items():
            expected[f"{layer}.lora_A.default.weight"] = scale * b.T @ whole[f"{layer}.weight"]
            expected[f"{layer}.lora_B.default.weight"] = scale * whole[f"{layer}.weight"] @ a.T
        out.at_most(f"{packing} float32", largest_error(found, expected), bound_of(setting, torch.float32))
        out.holds(f"{packing}: nothing else has a gradient", found.keys() == expected.keys())


def kept_sets(setting: Setting, out: Findings) -> None:
    """Logprobs over the ids that each token was drawn from."""
    samples = with_kept_sets(shared_prefixes(setting), setting.sizes["vocab"])
    _both_ways(setting, out, "dense", samples, logprob_chunk=7)


# ---- a mixture of experts


def recorded(samples: list[TrainingSample], num_layers: int) -> list[TrainingSample]:
    """The samples with two of eight experts at random for each token but the last, which a router would not choose;
    tokens with the same prefix have the same."""
    found, by_prefix, rng = [], {}, np.random.default_rng(0)
    for sample in samples:
        chosen = np.zeros((len(sample), num_layers, 2), np.uint8)
        for at in range(len(sample) - 1):
            prefix = sample.token_ids[: at + 1].tobytes()
            if prefix not in by_prefix:
                by_prefix[prefix] = np.stack([rng.permutation(8)[:2] for _ in range(num_layers)])
            chosen[at] = by_prefix[prefix]
        known = np.arange(len(sample)) < len(sample) - 1
        found.append(replace(sample, routed_experts=RoutedExperts(experts=chosen, known=known)))
    return found


@contextmanager
def forced(model: Any, sample: TrainingSample):
    """While the block runs, the routers of a plain Qwen3-MoE choose the sample's experts, by the router's formula: the
    softmax over all experts, of which those of the chosen are divided by their sum."""
    routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    assert len(routers) == model.config.num_hidden_layers, (
        "the routers of this release of transformers have another name"
    )
    experts = torch.tensor(sample.routed_experts.experts.astype(np.int64), device=model.device)
    known = torch.tensor(sample.routed_experts.known, device=model.device)[:, None]

    def route(layer: int, router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = hidden.reshape(-1, hidden.shape[-1])
        logits = torch.nn.functional.linear(hidden, router.weight)
        shares = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        chosen = torch.where(known, experts[:, layer], shares.topk(2).indices)
        weights = shares.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(logits.dtype), chosen

    for layer, router in enumerate(routers):
        router.forward = partial(route, layer, router)
    try:
        yield
    finally:
        for router in routers:
            del router.forward


def experts(setting: Setting, out: Findings) -> None:
    """Recorded experts, against plain `transformers` whose routers are made to choose them."""
    folder = setting.model("experts")
    samples = recorded(shared_prefixes(setting), setting.sizes["layers"])
    exact = plain_gradient(plain_model(folder, torch.float64), samples, around=forced)
    free = plain_gradient(plain_model(folder, torch.float64), samples)
    for packing in ("rows", "tree"):
        for checkpointing in (False, True):
            found = gradient_of(folder, setting.device, samples, packing=packing, gradient_checkpointing=checkpointing)
            name = f"{packing} float32{' recomputed' * checkpointing}"
            out.at_most(name, largest_error(found, exact), bound_of(setting, torch.float32))
    plain = plain_gradient(plain_model(folder, torch.float32, setting.device), samples, autocast=True, around=forced)
    allowed = IN_BFLOAT16 * whole_error(plain, exact)
    for packing in ("rows", "tree"):
        found = gradient_of(folder, setting.device, samples, packing=packing, dtype="bfloat16")
        out.at_most(f"{packing} bfloat16", whole_error(found, exact), allowed)
    out.holds("the recorded experts matter", whole_error(free, exact) > 0.1)


# ---- memory


def flat_memory(setting: Setting, out: Findings) -> None:
    """After so many steps on batches of many lengths no tensor more is held than after the first of them."""
    rng = np.random.default_rng(0)
    trainer = trainer_of(setting.model("dense"), setting.device, dtype="bfloat16")
    unit, vocab = setting.sizes["unit"], setting.sizes["vocab"]
    held, allocated = [], []
    for step in range(MANY):
        system, samples = rng.integers(0, vocab, rng.integers(1, 4 * unit)), []
        for name in "abcd":
            ids = np.concatenate([system, rng.integers(0, vocab, rng.integers(2, 6 * unit))])
            samples.append(sample_of(ids, rng.random(len(ids)) < 0.5, f"{step}{name}", rng))
        trainer.train_batch(samples)
        if step + 1 in (SETTLED, MANY):
            gc.collect()
            held.append(_bytes_of_tensors())
            if setting.device == "cuda":
                torch.cuda.synchronize()
                allocated.append(torch.cuda.memory_allocated())
    out.at_most("bytes of tensors added", held[1] - held[0], 0)
    if allocated:
        out.at_most("bytes allocated on the card added", allocated[1] - allocated[0], 0)


def _bytes_of_tensors() -> int:
    """Bytes of the distinct storages of all tensors that Python knows."""
    storages = {}
    for each in gc.get_objects():
        if type(each) in (Tensor, torch.nn.Parameter) and each.layout == torch.strided:
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


CHECKS = (
    Check(name="kept sets", about="logprobs over kept sets have the gradient of masked logits", run=kept_sets),
    Check(
        name="experts",
        about="recorded experts are replayed: the gradient is that of routers made to choose them",
        run=experts,
        seconds=90,
    ),
    Check(name="adapters", about="LoRA's gradient follows from the dense one by the chain rule", run=adapters),
    Check(
        name="cut micro-batches", about="small micro-batches have the gradient of whole samples", run=cut_micro_batches
    ),
    Check(name="recompute", about="gradient checkpointing does not change the gradient", run=recompute),
    Check(name="offload", about="activations come back from host memory bit for bit", run=offload),
    Check(
        name="optimizer step",
        about="clipping and fused AdamW change the weights as torch's AdamW does in float64",
        run=optimizer_step,
    ),
    Check(name="flat memory", about=f"{MANY} steps hold no tensor more than {SETTLED} did", run=flat_memory),
    Check(name="compiled layers", about="torch.compile does not change the gradient", run=compiled, seconds=120),
)
