"""Tiny models and batches for the trainer's tests."""

from dataclasses import replace
from functools import cache
from unittest import mock

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from verbatim.algorithms.losses import LOSSES
from verbatim.core.types import KeptSets, RoutedExperts, TrainingSample
from verbatim.models.float64 import keep_float64
from verbatim.models.head import CausalLM
from verbatim.models.loading import load_model
from verbatim.trainer.logprobs import TargetLogprobs
from verbatim.trainer.metrics import MetricSums
from verbatim.trainer.packing import PACKERS
from verbatim.trainer.recompute import checkpoint_layers
from verbatim.trainer.step import GradientPass

VOCAB = 61


def write_model(folder, *, sliding_window=None, tied=True, num_layers=2):
    """A random Qwen3 of two layers, with weights large enough that a token's context matters."""
    torch.manual_seed(0)
    layers = ["sliding_attention" if sliding_window else "full_attention", "full_attention"][:num_layers]
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        layer_types=layers,
        sliding_window=sliding_window,
        use_sliding_window=sliding_window is not None,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
    )
    return _save(Qwen3ForCausalLM(config), folder)


def write_llama(folder, *, tied=False):
    """A random Llama of two layers, whose four query heads share one key/value head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
    )
    return _save(LlamaForCausalLM(config), folder)


def write_experts(folder):
    """A random Mixtral of two layers; its folder has a tensor for each expert, the model one for all of a layer."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
    )
    return _save(MixtralForCausalLM(config), folder)


def write_qwen_moe(folder, *, layers=3, dense=(1,), experts=5, each=2, vocab=VOCAB, scale=0.15, **settings):
    """A random Qwen3-MoE, whose tokens go to two of five experts in each layer but the second, which is dense."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        num_experts=experts,
        num_experts_per_tok=each,
        mlp_only_layers=list(dense),
        initializer_range=scale,
        bos_token_id=None,
        eos_token_id=None,
        **settings,
    )
    return _save(Qwen3MoeForCausalLM(config), folder)


def _save(model, folder):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms at exactly 1 would hide a gradient that forgot them
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def make_sample(length, trajectory_id, *, seed, trained=0.5, chunk=0):
    """Random ids; about `trained` of the tokens under the mask, the last one always."""
    rng = np.random.default_rng(seed)
    mask = rng.random(length) < trained
    mask[-1], mask[0] = True, False
    return TrainingSample(
        token_ids=rng.integers(0, VOCAB, length).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -4.1 + 0.3 * rng.standard_normal(length), np.nan).astype(np.float32),
        advantages=np.where(mask, rng.choice([-1.5, 1.0]), 0).astype(np.float32),
        chunk_ids=np.where(mask, chunk, -1).astype(np.int32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.where(mask, rng.choice([0.7, 1.0]), 1.0).astype(np.float32),
        trajectory_id=trajectory_id,
    )


def make_batch(seed=0):
    """Seven samples of four trajectories, lengths 2 to 33."""
    shape = [(9, "a"), (17, "a"), (2, "b"), (33, "c"), (9, "c"), (12, "c"), (21, "d")]
    return [make_sample(n, t, seed=seed + i, chunk=i) for i, (n, t) in enumerate(shape)]


def shared_prefixes(seed=0):
    """Trajectories whose samples share prefixes, with each other and among themselves."""
    rng = np.random.default_rng(seed)
    system, samples = rng.integers(0, VOCAB, 6), []
    for name in "abcd":
        history = np.concatenate([system, rng.integers(0, VOCAB, 3)]) if name != "d" else system
        for turn in range(3):
            text = np.concatenate([history, rng.integers(0, VOCAB, 2 + turn)]).astype(np.int32)
            made = make_sample(len(text), name, seed=len(samples), chunk=turn)
            samples.append(replace(made, token_ids=text))
            history = text[: len(text) - 1 - turn // 2]
    return samples


def random_experts(length, rng, known=1.0, layers=3):
    """Two of five experts for each token but the last."""
    chosen = np.stack([np.stack([rng.permutation(5)[:2] for _ in range(layers)]) for _ in range(length)])
    is_known = rng.random(length) < known
    is_known[-1] = False
    return RoutedExperts(experts=(chosen * is_known[:, None, None]).astype(np.uint8), known=is_known)


def routed_samples(known=1.0, layers=3):
    """Samples that share prefixes, with experts at random that no router would choose. Those of shared tokens are the
    same, but for one trajectory, of which all are others."""
    rng = np.random.default_rng(3)
    by_prefix, samples = {}, []
    for sample in shared_prefixes():
        own = random_experts(len(sample), rng, known, layers)
        for at in range(len(sample) - 1):
            key = (sample.trajectory_id == "b", sample.token_ids[: at + 1].tobytes())
            experts, is_known = by_prefix.setdefault(key, (own.experts[at].copy(), bool(own.known[at])))
            own.experts[at], own.known[at] = experts, is_known
        samples.append(replace(sample, routed_experts=own))
    return samples


def cut_samples(seed=0):
    """Samples that share prefixes, with kept sets of 1 to 30 of the ids, and some tokens of which nothing was cut."""
    rng, samples = np.random.default_rng([seed, 1]), []
    for sample in shared_prefixes(seed):
        sets = [
            []
            if not trained or rng.random() < 0.2
            else sorted({token, *rng.integers(0, VOCAB, rng.integers(30)).tolist()})
            for token, trained in zip(sample.token_ids.tolist(), sample.loss_mask.tolist(), strict=True)
        ]
        samples.append(replace(sample, kept_sets=KeptSets.of(sets)))
    return samples


def gradients(
    folder,
    samples,
    *,
    loss=LOSSES["default"],
    micro_batch_tokens=10_000,
    chunk=1000,
    dtype="float64",
    singly=False,
    denominator=None,
    packing="rows",
    checkpointing=False,
):
    """The gradient of one optimizer step by parameter name, its loss sum, and its metrics.

    `singly` runs every sample in a forward pass of its own.
    """
    pack = PACKERS[packing]
    model = loaded(folder, dtype, checkpointing)
    metrics = MetricSums()
    step = GradientPass(
        lm=TargetLogprobs(model, chunk), loss=loss, denominator=denominator or num_trained(samples), metrics=metrics
    )
    keep_whole = loss.level != "token"
    batches = [[s] for s in samples] if singly else [samples]
    packed = [m for b in batches for m in pack(b, micro_batch_tokens=micro_batch_tokens, keep_whole=keep_whole)]
    step.run(packed)
    total = step.loss_sum()
    assert step.num_trained == num_trained(samples)
    found = {name: p.grad for name, p in model.model.named_parameters()}
    model.model.zero_grad(set_to_none=True)
    return found, total, metrics.result()


@cache
def loaded(folder, dtype, checkpointing=False):
    model = load_model(folder, dtype=dtype, only_attention=False)
    if checkpointing:
        checkpoint_layers(model)
    return CausalLM(model)


def reference_gradients(folder, samples, dtype="float32"):
    """The default loss from its formula, one sample at a time, by transformers' own layers and full logits.

    In float64 its norms and its softmax, which it computes in float32 otherwise, are kept in float64.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=getattr(torch, dtype))
    softmax = nn.functional.softmax
    if dtype == "float64":
        keep_float64(model)
        softmax = _softmax
    total = 0.0
    with mock.patch.object(nn.functional, "softmax", softmax):
        for sample in samples:
            hidden = model.base_model(input_ids=torch.tensor(sample.token_ids)[None].long(), use_cache=False)
            logits = model.get_output_embeddings()(hidden.last_hidden_state[0, :-1])  # some round logits to float32
            ids = torch.tensor(sample.token_ids[1:]).long()
            t, m, a = (torch.tensor(x[1:]) for x in (sample.temperatures, sample.logprobs, sample.advantages))
            mask = torch.tensor(sample.loss_mask[1:])
            pi = (logits / t[:, None]).log_softmax(-1).gather(1, ids[:, None])[:, 0][mask]
            m, a = m[mask], a[mask]
            d = pi.exp() - m.exp()
            drop = ((a > 0) & (d > 0.2)) | ((a <= 0) & (d < -0.2))
            w = (pi - m).exp()
            total = total + torch.where(drop, 0.0, -a * torch.minimum(w, torch.tensor(8.0))).sum()
            total = total + 1e-3 * ((pi - m) ** 2).sum()
        (total / num_trained(samples)).backward()
    return {name: p.grad for name, p in model.named_parameters()}, total.item()


def _softmax(x, dim, dtype=None):
    return x.softmax(dim)


def num_trained(samples):
    return sum(sample.num_trained_tokens for sample in samples)


def largest_difference(found, expected):
    """Norm of the difference over the norm, the largest over parameters; zeros must be zeros in both."""
    assert found.keys() == expected.keys()
    worst = 0.0
    for name, want in expected.items():
        norm = want.norm()
        if norm == 0:
            assert found[name].norm() == 0, name
        else:
            worst = max(worst, ((found[name] - want).norm() / norm).item())
    return worst
