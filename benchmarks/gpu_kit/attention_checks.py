"""Correctness of attention: gradients of whole models by kind of attention, and FlexAttention by its definition."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from verbatim.models.attention import AttentionCall
from verbatim.trainer.attention.flex import BLOCK, FlexPlan

from .ours import dtype_of, gradient_of
from .record import Check, Findings
from .reference import (
    IN_BFLOAT16,
    bound_of,
    largest_error,
    plain_gradient,
    plain_model,
    rounding_bound,
    whole_error,
)
from .setting import Setting, shared_prefixes

IN_FLOAT64 = ("dense", "window")
"""Kinds that the trainer takes in float64; the norms of the others have no version of it there."""


def gradients(kind: str, setting: Setting, out: Findings) -> None:
    """Rows and trees, in each number format, against plain `transformers`."""
    folder, samples = setting.model(kind), shared_prefixes(setting)
    exact = plain_gradient(plain_model(folder, torch.float64), samples)
    masters = ("float32", "float64") if kind in IN_FLOAT64 else ("float32",)
    for packing in ("rows", "tree"):
        for master in masters:
            found = gradient_of(folder, setting.device, samples, packing=packing, master=master)
            bound = bound_of(setting, dtype_of(master))
            out.at_most(f"{packing} {master}", largest_error(found, exact), bound)
    plain = plain_gradient(plain_model(folder, torch.float32, setting.device), samples, autocast=True)
    allowed = IN_BFLOAT16 * whole_error(plain, exact)
    for packing in ("rows", "tree"):
        found = gradient_of(folder, setting.device, samples, packing=packing, dtype="bfloat16")
        out.at_most(f"{packing} bfloat16", whole_error(found, exact), allowed)


# ---- FlexAttention by itself

CASES = {
    "plain": {},
    "window": {"sliding_window": 40},
    "soft cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all of them": {"sliding_window": 40, "softcap": 2.0, "sinks": True},
}


def flex_attention(setting: Setting, out: Findings) -> None:
    """One kernel for trees of several numbers of tokens, against scores written out in float64. It has a backward pass
    on CUDA only."""
    on_cuda = setting.device == "cuda"
    for name, case in CASES.items():
        for blocks in (2,) if setting.tiny else (3, 7):
            for dtype in (torch.float32, torch.bfloat16):
                error, bound = _against_definition(setting, blocks * BLOCK, dtype, backward=on_cuda, **case)
                out.at_most(f"{name} {blocks * BLOCK} {str(dtype).removeprefix('torch.')}", error, bound)
    out.figures["backward"] = on_cuda


def _against_definition(
    setting: Setting,
    tokens: int,
    dtype: torch.dtype,
    *,
    backward: bool,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> tuple[float, float]:
    """The error of output and gradients, and its bound."""
    heads, keys, size = 4, 2, setting.sizes["head"]
    depths, ends = forest(tokens)
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((1, heads, tokens, size), (1, keys, tokens, size), (1, keys, tokens, size))
    exact = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).double() for shape in shapes]
    weights = torch.randn(1, tokens, heads, size, generator=generator, dtype=torch.float64).to(dtype).double()
    if sinks:
        exact.append(torch.randn(heads, generator=generator, dtype=torch.float64).to(dtype).double())

    def call(inputs: list[Tensor]) -> AttentionCall:
        own = inputs[3] if sinks else None
        return AttentionCall(scale=size**-0.5, sliding_window=sliding_window, softcap=softcap, sinks_H=own)

    seen = sees(depths, ends, sliding_window)
    plan = FlexPlan(depths, ends, setting.device)

    def definition(inputs: list[Tensor]) -> Tensor:
        query, key, value = inputs[:3]
        return by_definition(query, key, value, seen.to(query.device), call(inputs))

    def of_ours(inputs: list[Tensor]) -> Tensor:
        query, key, value = inputs[:3]
        return plan.attend(0, query, key, value, call(inputs))

    want = _with_gradients(definition, exact, weights, backward=backward)
    given = [each.to(setting.device, dtype) for each in exact]
    ours = _with_gradients(of_ours, given, weights, backward=backward)
    if dtype == torch.float32:
        return _distance(ours, want), rounding_bound(dtype, 1, tokens)
    plain = _with_gradients(definition, given, weights, backward=backward)
    return _distance(ours, want), IN_BFLOAT16 * _distance(plain, want)


def forest(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Depths and ends of trees that end inside of blocks: a trunk with three branches of two leaves each, again and
    again, and a row to the end."""
    depths, ends = np.zeros((2, tokens), np.int32)
    start, trunk, branch, leaf = 0, 37, 23, 11
    whole = trunk + 3 * (branch + 2 * leaf)
    while start + whole <= tokens:
        depths[start : start + trunk], ends[start : start + trunk] = np.arange(trunk), start + whole
        at = start + trunk
        for _ in range(3):
            depths[at : at + branch], ends[at : at + branch] = trunk + np.arange(branch), at + branch + 2 * leaf
            for tip in (at + branch, at + branch + leaf):
                depths[tip : tip + leaf], ends[tip : tip + leaf] = trunk + branch + np.arange(leaf), tip + leaf
            at += branch + 2 * leaf
        start += whole
    depths[start:], ends[start:] = np.arange(tokens - start), tokens
    return depths, ends


def sees(depths: np.ndarray, ends: np.ndarray, window: int | None) -> Tensor:
    """Whether a query sees a key: bool [U, U]."""
    at = np.arange(len(ends))
    seen = (at[None] <= at[:, None]) & (at[:, None] < ends[None])
    if window is not None:
        seen &= depths[:, None] - depths[None] < window
    return torch.from_numpy(seen)


def by_definition(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, call: AttentionCall) -> Tensor:
    """Attention with all scores, [1, U, H, E]; a sink is a column of scores without a value."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ keys.transpose(2, 3) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if call.sinks_H is not None:
        column = call.sinks_H[:, None, None].expand(-1, scores.shape[2], 1)[None]
        scores = torch.cat([scores, column.to(scores.dtype)], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[2]]
    return (weights @ values).transpose(1, 2)


def _with_gradients(compute, inputs: list[Tensor], weights: Tensor, *, backward: bool) -> list[Tensor]:
    """The output, and the gradients of its sum with these weights."""
    leaves = [each.detach().clone().requires_grad_(backward) for each in inputs]
    out = compute(leaves)
    if not backward:
        return [out.double().cpu()]
    out.backward(weights.to(out.device, out.dtype))
    return [out.detach().double().cpu(), *(each.grad.double().cpu() for each in leaves)]


def _distance(found: list[Tensor], want: list[Tensor]) -> float:
    """The largest relative error of output and gradients."""
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(found, want, strict=True)]
    return float("nan") if any(map(math.isnan, errors)) else max(errors)


CHECKS = (
    *(
        Check(
            name=f"gradients: {kind}",
            about="rows and trees have the gradient of plain transformers",
            run=partial(gradients, kind),
            seconds=75,
        )
        for kind in ("dense", "window", "soft caps", "sinks", "two windows")
    ),
    Check(
        name="flex attention",
        about="one kernel for trees has the output and gradients of scores written out in float64",
        run=flex_attention,
        seconds=75,
    ),
)
