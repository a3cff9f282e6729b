"""What our gradients are compared with: plain `transformers`, one sample at a time, and the bounds of rounding.

**float64 and float32.** A product of vectors of length K is computed to within K u of its terms (Higham, Accuracy and
Stability of Numerical Algorithms, 3.1; u is half the distance from 1 to the next number), and errors of consecutive
operations add up. A layer has at most `ROUNDINGS` operations on the way forward and back, so a gradient is within
`ROUNDINGS * layers * K * u` of the exact one, K the longest sum.

**bfloat16.** Its products are summed in float32, but where each side rounds differs, and how errors grow depends on the
model. So plain `transformers` computes the same in bfloat16 on the same device, and our distance from the float64
gradient may be at most twice that of plain `transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verbatim.core.types import TrainingSample
from verbatim.models.float64 import NoFloat32

from .setting import Setting

ROUNDINGS = 24
"""Operations that round, in a layer, forward and backward: norms, projections, rotations, scores, weights, sums."""
IN_BFLOAT16 = 2.0
"""How many times as far from the exact gradient as plain `transformers` ours may be, both in bfloat16."""
NEGLIGIBLE = 1e-3
"""A parameter's error is divided by the norm of its gradient, or by this share of the whole gradient's norm."""

Gradient = Mapping[str, Tensor]
Around = Callable[[Any, TrainingSample], Any]
"""`around(model, sample)`: a context of the sample's forward pass."""


def rounding_bound(dtype: torch.dtype, num_layers: int, longest_sum: int) -> float:
    """The relative error that rounding explains in float64 or float32.

    Example: float32, 2 layers, sums of 96 terms: 24 * 2 * 96 * 2^-24 = 2.7e-4.
    """
    return ROUNDINGS * num_layers * longest_sum * torch.finfo(dtype).eps / 2


def bound_of(setting: Setting, dtype: torch.dtype) -> float:
    """The bound for gradients of the small models on their batches."""
    sizes = setting.sizes
    longest = max(sizes["inner"], sizes["vocab"], 8 * sizes["unit"])
    return rounding_bound(dtype, sizes["layers"], longest)


def plain_model(folder: Path, dtype: torch.dtype, device: str = "cpu") -> Any:
    """The model by `transformers` alone, with its attention written out. In float64 also where it would convert to
    float32, if it is called inside `exactly`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype)
    if dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the fused one lacks float64
    return model.eval().to(device)


def exactly(dtype: torch.dtype) -> Any:
    """A context in which float64 stays float64."""
    return NoFloat32() if dtype == torch.float64 else nullcontext()


def plain_logits(model: Any, ids: Tensor) -> Tensor:
    """The logits of all but the last token: [L - 1, V]."""
    with exactly(next(model.parameters()).dtype):
        return model(input_ids=ids.long()[None].to(model.device), use_cache=False).logits[0, :-1]


def plain_gradient(
    model: Any, samples: Sequence[TrainingSample], *, autocast: bool = False, around: Around = lambda *_: nullcontext()
) -> Gradient:
    """The gradient of the default loss by its formula, from full logits: on the CPU in float64, by parameter name."""
    total = torch.zeros((), device=model.device, dtype=torch.float64)
    count = sum(sample.num_trained_tokens for sample in samples)
    for sample in samples:
        rounds = torch.autocast(model.device.type, dtype=torch.bfloat16) if autocast else nullcontext()
        with around(model, sample), rounds:
            logits = plain_logits(model, torch.tensor(sample.token_ids))
        total = total + default_loss(logits, sample)
    (total / count).backward()
    found = {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def default_loss(logits: Tensor, sample: TrainingSample) -> Tensor:
    """The sum of the default loss over a sample's trained tokens, with logits [L - 1, V], normalised over kept sets."""
    device = logits.device
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ids = torch.tensor(sample.token_ids[1:], device=device).long()
    t, m, a = (torch.tensor(x[1:], device=device) for x in (sample.temperatures, sample.logprobs, sample.advantages))
    mask = torch.tensor(sample.loss_mask[1:], device=device)
    scores = logits / t[:, None]
    if sample.kept_sets is not None:
        scores = scores.masked_fill(outside(sample, logits.shape[1]).to(device), -torch.inf)
    pi = scores.log_softmax(-1).gather(1, ids[:, None])[:, 0][mask]
    m, a = m[mask], a[mask]
    difference = pi.exp() - m.exp()
    is_masked = ((a > 0) & (difference > 0.2)) | ((a <= 0) & (difference < -0.2))
    weight = (pi - m).exp()
    policy = torch.where(is_masked, 0.0, -a * weight.clamp(max=8.0))
    return (policy + 1e-3 * (pi - m) ** 2).double().sum()


def outside(sample: TrainingSample, vocab: int) -> Tensor:
    """The ids that each token after the first was not drawn from: bool [L - 1, V]."""
    kept = sample.kept_sets
    assert kept is not None
    found = torch.zeros(len(sample) - 1, vocab, dtype=torch.bool)
    for place in range(1, len(sample)):
        if len(kept[place]):
            found[place - 1] = True
            found[place - 1, torch.tensor(kept[place]).long()] = False
    return found


def largest_error(found: Gradient, expected: Gradient) -> float:
    """The largest relative error over parameters; infinite where one is missing."""
    whole = norm_of(expected)
    worst = 0.0
    for name, want in expected.items():
        if name not in found:
            return float("inf")
        scale = max(float(want.norm()), NEGLIGIBLE * whole)
        error = float((found[name].double().cpu() - want).norm()) / scale
        if not error <= worst:
            worst = error
        if math.isnan(error):  # no later error may hide it
            break
    return worst


def whole_error(found: Gradient, expected: Gradient) -> float:
    """The norm of the difference of all parameters together, over the norm of what is expected."""
    if found.keys() != expected.keys():
        return float("inf")
    differences = {name: found[name].double().cpu() - want for name, want in expected.items()}
    return norm_of(differences) / norm_of(expected)


def norm_of(gradient: Gradient) -> float:
    """The norm of all parameters together."""
    return float(torch.stack([each.double().norm() for each in gradient.values()]).norm())
