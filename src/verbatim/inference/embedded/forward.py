"""Chooses what computes a model's passes: the compiled kernel if it supports the model and the machine, else
PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import torch

from verbatim.core.errors import ModelError
from verbatim.inference.embedded.compiled.forward import CompiledForward
from verbatim.inference.embedded.compiled.library import kernel_build, load_kernel
from verbatim.inference.embedded.compiled.structures import why_not
from verbatim.inference.embedded.fast_forward import FastBackbone, disagreement, known_backbone, probe
from verbatim.inference.embedded.kv_cache import KeyValueShape
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.embedded.torch_forward import TorchForward
from verbatim.models.attention import AttentionCall
from verbatim.models.head import CausalLM
from verbatim.models.native import find_compiler

logger = logging.getLogger(__name__)

_QUIETLY = 'inference.torch.kernel = "torch" uses PyTorch without this warning'
_PLEASE = "Please report this, with the output of `verbatim doctor --machine MODEL`"
_REPORT = f"{_PLEASE}; {_QUIETLY}"
_INSTALL = (
    "Install a C compiler (Debian and Ubuntu: apt install gcc), and test it with `verbatim doctor --machine`; "
    f"{_QUIETLY}"
)


Forward: TypeAlias = TorchForward | CompiledForward
"""Computes forward passes over the rows of many sequences, keeps their KV cache, and samples their next tokens."""


def open_forward(
    model: CausalLM,
    settings: TorchSettings,
    *,
    context_length: int,
    keep_cache: bool,
    record_experts: bool,
    warns: bool = True,
) -> Forward:
    """Create the object that computes a model's passes: with the compiled kernel if possible, otherwise in PyTorch.

    If the kernel or the fast form of the layers exists for the model's class but cannot be used, a warning says why,
    once per process (only with `warns`).

    Raises:
        ModelError: `kernel = "compiled"`, but the kernel cannot be built or does not compute this model.
    """
    shape, calls = probe(model)
    known = known_backbone(model, calls, context_length, fixed_rows=settings.deterministic)
    if settings.kernel != "torch":
        compiled = _open_kernel(model, known, calls, shape, settings, context_length)
        if isinstance(compiled, CompiledForward):
            return compiled
        if settings.kernel == "compiled":
            raise ModelError(
                'inference.torch.kernel = "compiled", but the compiled kernel cannot be used: '
                f'{compiled.reason}; use "auto"'
            )
        if compiled.advice and warns:
            _warn_once(
                "the embedded sampler computes with PyTorch, 2 to 3 times slower than with its compiled "
                f"kernel: {compiled.reason}. {compiled.advice}"
            )
        else:
            logger.info("the embedded sampler computes with PyTorch, without its compiled kernel: %s", compiled.reason)
    if model.output.weight.dtype != torch.float32:
        known = None  # in bfloat16 the model's own order of roundings has to be kept
    differs = disagreement(known, model, context_length) if known is not None else ""
    if differs and warns:
        _warn_once(
            f"the embedded sampler computes with transformers' {type(model.model).__name__}, slower than with its own "
            f"form of the layers, whose results differ: {differs}. {_PLEASE}"
        )
    backbone = model if known is None or differs else known
    reads_prefixes_once = not keep_cache and not record_experts  # see `TorchForward`
    return TorchForward(model, backbone, shape, settings, reads_prefixes_once=reads_prefixes_once)


def why_no_kernel(model: CausalLM, settings: TorchSettings, *, context_length: int) -> str:
    """Why the compiled kernel would not be used for a model; "" if it would."""
    shape, calls = probe(model)
    opened = _open_kernel(model, known_backbone(model, calls, context_length), calls, shape, settings, context_length)
    return "" if isinstance(opened, CompiledForward) else opened.reason


class _Missing(NamedTuple):
    """Why the kernel is not used, and what to do about it ("" if PyTorch is the expected choice)."""

    reason: str
    advice: str


def _open_kernel(
    model: CausalLM,
    known: FastBackbone | None,
    calls: Sequence[AttentionCall],
    shape: KeyValueShape,
    settings: TorchSettings,
    context_length: int,
) -> CompiledForward | _Missing:
    reason = why_not(model, known, calls)
    if reason is not None:
        return _Missing(reason, "")
    assert known is not None, "why_not refuses models without one"
    kernel = load_kernel()
    if kernel is None:
        made = kernel_build()
        return _Missing(made.reason, "" if made.is_off else _INSTALL if find_compiler() is None else _REPORT)
    compiled = CompiledForward(
        model,
        known,
        calls,
        shape,
        num_slots=settings.max_batch_size,
        context_length=context_length,
        kernel=kernel,
    )
    differs = compiled.disagreement(model, context_length)
    return (
        _Missing(f"its results differ from those of {type(model.model).__name__}: {differs}", _REPORT)
        if differs
        else compiled
    )


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
