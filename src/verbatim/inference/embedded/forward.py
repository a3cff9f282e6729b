"""Chooses what computes a model's passes: PyTorch, or the compiled kernel where it fits the model and the machine."""

from __future__ import annotations

import logging
from functools import cache
from typing import TypeAlias

import torch

from verbatim.core.errors import ModelError
from verbatim.inference.embedded.compiled.forward import CompiledForward
from verbatim.inference.embedded.compiled.library import kernel_build, load_kernel
from verbatim.inference.embedded.compiled.structures import why_not
from verbatim.inference.embedded.fast_forward import compared_backbone, known_backbone, probe
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.embedded.torch_forward import TorchForward
from verbatim.models.head import CausalLM
from verbatim.models.native import find_compiler

logger = logging.getLogger(__name__)

_QUIETLY = 'inference.torch.kernel = "torch" takes PyTorch without this warning'
_DISAGREES = "it gives other hidden states than the model"
_REPORT = f"Please report that, with what `verbatim doctor --machine` prints; {_QUIETLY}"
_INSTALL = (
    f"Install a C compiler (Debian and Ubuntu: apt install gcc), which `verbatim doctor --machine` tries; {_QUIETLY}"
)


Forward: TypeAlias = TorchForward | CompiledForward
"""Forward passes over the rows of many sequences, their cache, and the draw of their next tokens."""


def open_forward(
    model: CausalLM,
    settings: TorchSettings,
    *,
    context_length: int,
    keep_cache: bool,
    record_experts: bool,
    warns: bool = True,
) -> Forward:
    """What computes the passes of a model.

    Where the kernel knows the model and still cannot be used, a warning says why, once in a process (`warns`).

    Raises:
        ModelError: `kernel = "compiled"` where the kernel cannot be built, or does not compute this model.
    """
    shape, calls = probe(model)
    fast, differs = compared_backbone(model, calls, context_length, fixed_rows=settings.deterministic)
    if settings.kernel != "torch":
        known = fast if model.output.weight.dtype == torch.float32 else known_backbone(model, calls, context_length)
        reason, advice = why_not(model, known, calls), ""
        if differs and model.output.weight.device.type == "cpu":
            reason, advice = differs, _REPORT
        if reason is None:
            assert known is not None, "why_not refuses models without one"
            kernel = load_kernel()
            if kernel is not None:
                compiled = CompiledForward(
                    model,
                    known,
                    calls,
                    shape,
                    num_slots=settings.max_batch_size,
                    context_length=context_length,
                    kernel=kernel,
                )
                if compiled.agrees(model, context_length):
                    return compiled
            reason, advice = (_DISAGREES, _REPORT) if kernel is not None else _why_missing()
        if settings.kernel == "compiled":
            raise ModelError(
                f'inference.torch.kernel = "compiled", but the compiled kernel cannot be used: {reason}; use "auto"'
            )
        if advice and warns:
            _warn_once(
                f"the embedded sampler computes with PyTorch, several times slower than with its compiled "
                f"kernel: {reason}. {advice}"
            )
        else:
            logger.info("the embedded sampler computes with PyTorch, without its compiled kernel: %s", reason)
    reads_prefixes_once = not keep_cache and not record_experts
    return TorchForward(model, fast or model, shape, settings, reads_prefixes_once=reads_prefixes_once)


def _why_missing() -> tuple[str, str]:
    """Why there is no kernel, and what to do; nothing, where it is switched off."""
    made = kernel_build()
    if made.is_off:
        return made.reason, ""
    return made.reason, _INSTALL if find_compiler() is None else _REPORT


@cache
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
