"""Chooses what computes a model's passes: PyTorch, or the compiled kernel where it fits the model and the machine."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verbatim.core.errors import ModelError
from verbatim.inference.embedded.compiled.forward import CompiledForward
from verbatim.inference.embedded.compiled.library import kernel_build, load_kernel
from verbatim.inference.embedded.compiled.structures import why_not
from verbatim.inference.embedded.expert_record import ExpertRecord
from verbatim.inference.embedded.fast_forward import compared_backbone, known_backbone, probe
from verbatim.inference.embedded.pass_layout import PassLayout, Rows
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.embedded.slots import Drawn, Slots, SlotTable
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


class Cache(Protocol):
    """Keys and values of every slot."""

    @property
    def capacity(self) -> int:
        """Tokens that each slot can hold now."""

    def reserve(self, num_tokens: int) -> None:
        """Take the memory that a sequence of this many tokens needs."""

    def shrink(self, num_tokens: int) -> None:
        """Give back memory that sequences of this many tokens do not need."""

    def drop(self) -> None:
        """Give back all memory."""

    def clear(self, slots: int | slice = slice(None)) -> None:
        """Empty slots."""

    def truncate(self, slot: int, num_tokens: int) -> None:
        """Keep a slot's first tokens only; another sequence goes on from there."""

    def copy_prefix(self, source: int, slot: int, num_tokens: int) -> None:
        """A slot begins with the first tokens of another."""

    def keep(self, slot: int, num_tokens: int) -> Any:
        """Hold a slot's first tokens until `release`, whatever becomes of the slot."""

    def restore(self, kept: Any, slot: int, num_tokens: int) -> None:
        """A slot begins with the first tokens of a kept sequence."""

    def release(self, kept: Any) -> None:
        """Give up what was kept."""


class Forward(Protocol):
    """Forward passes over the rows of many sequences, their cache, and the draw of their next tokens."""

    num_rows: int
    """Rows of every pass, where all have the same shape; 0 = as many as there are tokens."""

    @property
    def cache(self) -> Cache:
        """Keys and values of every slot."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""

    def refresh(self) -> None:
        """The model's weights were replaced in place."""

    def give_back_memory(self) -> None:
        """Free what it keeps from pass to pass, beside the cache."""

    def prompt_logprobs(self, ids: Rows, temperature: float) -> NDArray[np.float32]:
        """Logprob of each token of a sequence (int64 [L]) given those before it, past the cache: float32 [L]; the first
        is NaN."""

    def hidden(
        self, layout: PassLayout, slots: Slots, counts: Rows, table: SlotTable, record: ExpertRecord | None
    ) -> Tensor:
        """Compute a pass and cache its keys and values; returns hidden states, for `draw`."""

    def draw(
        self, hidden: Tensor, layout: PassLayout, counts: Rows, done: NDArray[np.bool_], table: SlotTable, slots: Slots
    ) -> Drawn:
        """The next token of each of `slots`, which are those of the pass that are `done`."""


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
