"""Runs forward passes with the compiled kernel, without padding, over rows of any sequences, and samples their tokens.

The bits of a row depend only on its own sequence, so deterministic mode needs no special passes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verbatim.core.types import Int32, KeptSets
from verbatim.inference.embedded.compiled.library import bfloat16_path
from verbatim.inference.embedded.compiled.paged_cache import PagedCache
from verbatim.inference.embedded.compiled.structures import UNIT, DrawFields, KernelModel, PassFields
from verbatim.inference.embedded.expert_record import ExpertRecord
from verbatim.inference.embedded.fast_forward import FastBackbone
from verbatim.inference.embedded.kv_cache import KeyValueShape, up_to
from verbatim.inference.embedded.pass_layout import PassLayout, Rows
from verbatim.inference.embedded.sampling import uniforms
from verbatim.inference.embedded.slots import Drawn, Slots, SlotTable
from verbatim.models import agreement
from verbatim.models.attention import AttentionCall
from verbatim.models.head import CausalLM

_SCORED_AT_ONCE = 512
"""Number of tokens per pass when a given sequence is scored."""
_HEADS_AT_ONCE = 64
"""Number of tokens whose logits exist at the same time when a sequence is scored, to bound memory."""
_WORTH_A_TEAM = 2e7
"""Number of multiplications above which several threads are faster than one, despite the cost of synchronising them."""


class CompiledForward:
    """Passes of one model on the CPU: matrices in float32 or bfloat16, everything else in float32, except
    that AMX reads keys and values in bfloat16.

    Args:
        model: A model that `why_not` accepts.
        fast: The model's layers and position encoding.
        calls: Attention arguments of each layer.
        shape: Shape of one token's keys and values.
        num_slots: Maximum number of sequences in flight.
        context_length: Maximum tokens of one sequence.
        kernel: The kernel's functions.
    """

    num_rows = 0
    """Fixed number of rows of each pass; 0 means one row for each token."""

    def __init__(
        self,
        model: CausalLM,
        fast: FastBackbone,
        calls: Sequence[AttentionCall],
        shape: KeyValueShape,
        *,
        num_slots: int,
        context_length: int,
        kernel: ctypes.CDLL,
    ) -> None:
        self._kernel = kernel
        self._model = KernelModel(kernel, model, fast, calls)
        self.uses_tiles = self._model.is_rounded and bfloat16_path(kernel) == "amx"
        """True if products and attention are computed by AMX, in bfloat16 with sums in float32."""
        dtype = torch.bfloat16 if self.uses_tiles else torch.float32
        self.bytes_per_token = shape.bytes_per_token(dtype)
        """Bytes of one token's keys and values in all layers."""
        self.cache = PagedCache(shape, num_slots + 1, context_length, dtype)
        self._scored = num_slots  # an extra slot for scoring sequences, in which nothing is sampled
        self._memory = torch.empty(0)
        self._logits = torch.empty(0)
        self._kept: Int32 = np.empty(0, dtype=np.int32)

    def refresh(self) -> None:
        """Pack the model's weights again after they were replaced in place."""
        self._model.refresh()

    def give_back_memory(self) -> None:
        """Free the working memory of passes and sampling. Later passes allocate what they need."""
        self._memory, self._logits = torch.empty(0), torch.empty(0)
        self._kept = np.empty(0, dtype=np.int32)

    def hidden(
        self, layout: PassLayout, slots: Slots, counts: Rows, table: SlotTable, record: ExpertRecord | None
    ) -> Tensor:
        """The last hidden state of each slot of the pass, after the final norm: float32 [len(slots), W]."""
        assert record is None, "the kernel's models have no experts"
        self.cache.extend(slots, table.computed[slots] + counts)
        ids = table.ids[layout.slots, layout.positions].astype(np.int64)
        return self._run(ids, layout.positions, layout.slots, np.cumsum(counts) - 1)

    def _run(
        self, ids: Rows, positions: Rows, slots: Rows, outs: Rows, alone: tuple[int, Tensor] | None = None
    ) -> Tensor:
        """The hidden states of the rows `outs`, after the final norm. With `alone` = (layer, hidden states before that
        layer), only that layer is computed, and the hidden states after it are returned."""
        fields = self._model.fields if alone is None else self._model.layer_alone(alone[0])
        given_states = None if alone is None else alone[1].contiguous()
        out = torch.empty(len(outs), fields.width)
        # These are kept until the call returns, because the kernel gets only their addresses.
        kept = [np.ascontiguousarray(rows, dtype=np.int64) for rows in (ids, positions, slots, outs)]
        at_ids, at_positions, at_slots, at_outs = (rows.ctypes.data for rows in kept)
        given = PassFields(
            rows=len(ids),
            ids=at_ids,
            positions=at_positions,
            slots=at_slots,
            outs=len(outs),
            out_rows=at_outs,
            out=out.data_ptr(),
            threads=_threads(len(ids) * self._model.num_weights),
            given=None if given_states is None else given_states.data_ptr(),
        )
        self.cache.fill(given)
        address = ctypes.addressof(fields)
        floats = self._kernel.verbatim_workspace(address, len(ids), given.threads)
        if len(self._memory) < floats:
            self._memory = torch.empty(floats)
        self._kernel.verbatim_forward(address, ctypes.addressof(given), self._memory.data_ptr())
        return out

    def draw(
        self, hidden: Tensor, layout: PassLayout, counts: Rows, done: NDArray[np.bool_], table: SlotTable, slots: Slots
    ) -> Drawn:
        """Sample the next token of each slot in `slots`. These slots have all known ids computed (`done`)."""
        if not done.all():
            hidden = hidden[torch.from_numpy(np.flatnonzero(done))]
        num = len(slots)
        tokens, logprobs = np.empty(num, dtype=np.int64), np.empty(num, dtype=np.float32)
        temperatures, randomness = table.temperature[slots], uniforms(table.keys[slots], table.length[slots])
        given = self._head(hidden)
        given.temperatures, given.uniforms = temperatures.ctypes.data, randomness.ctypes.data
        given.tokens, given.logprobs = tokens.ctypes.data, logprobs.ctypes.data
        if not table.truncates[slots].any():
            self._kernel.verbatim_draw(ctypes.addressof(given))
            return tokens, logprobs, None
        cuts = [np.ascontiguousarray(column[slots]) for column in (table.top_k, table.top_p, table.min_p)]
        given.top_k, given.top_p, given.min_p = (column.ctypes.data for column in cuts)
        scratch = torch.empty(given.threads * given.stride)
        given.scratch = scratch.data_ptr()
        needs = table.needs_kept_sets[slots]
        if not needs.any():
            self._kernel.verbatim_draw(ctypes.addressof(given))
            return tokens, logprobs, None
        if len(self._kept) < num * given.stride:
            self._kept = np.empty(num * given.stride, dtype=np.int32)
        num_kept = np.empty(num, dtype=np.int64)
        given.kept, given.num_kept = self._kept.ctypes.data, num_kept.ctypes.data
        self._kernel.verbatim_draw(ctypes.addressof(given))
        num_kept[~needs] = 0
        starts = given.stride * np.arange(num)
        ids = [self._kept[start : start + count] for start, count in zip(starts, num_kept, strict=True)]
        return tokens, logprobs, KeptSets.of_counts(np.concatenate(ids), num_kept)

    def _head(self, hidden: Tensor) -> DrawFields:
        """Write the logits of hidden states [rows, W] to `_logits`; row r begins at r * stride."""
        num, stride = len(hidden), up_to(self._model.fields.vocab, UNIT)
        if self._logits.numel() < num * stride:
            self._logits = torch.empty(num * stride)
        given = DrawFields(
            model=self._model.address,
            rows=num,
            hidden=hidden.data_ptr(),
            stride=stride,
            logits=self._logits.data_ptr(),
            threads=_threads(num * stride * self._model.fields.width),
        )
        if self.uses_tiles:
            rounded = torch.empty(2 * hidden.numel(), dtype=torch.bfloat16)
            given.rounded = rounded.data_ptr()
        self._kernel.verbatim_logits(ctypes.addressof(given))
        return given

    def prompt_logprobs(self, ids: Rows, temperature: float) -> NDArray[np.float32]:
        """Logprob of each token given those before it, by the functions that sample: float32 [L]. The first is NaN.

        Args:
            ids: int64 [L].
            temperature: Divides the logits; above 0.
        """
        found = np.full(len(ids), np.nan, dtype=np.float32)
        last, vocab = len(ids) - 1, self._model.fields.vocab
        try:
            self.cache.extend(np.array([self._scored]), np.array([last]))
            for start in range(0, last, _SCORED_AT_ONCE):
                positions = np.arange(start, min(start + _SCORED_AT_ONCE, last))
                hidden = self._run(ids[positions], positions, np.full_like(positions, self._scored), positions - start)
                for at in range(0, len(positions), _HEADS_AT_ONCE):
                    some = hidden[at : at + _HEADS_AT_ONCE]
                    stride = self._head(some).stride
                    logits = self._logits[: len(some) * stride].view(len(some), stride)[:, :vocab]
                    following = positions[at : at + _HEADS_AT_ONCE] + 1
                    targets = torch.from_numpy(ids[following])[:, None]
                    found[following] = (logits / temperature).log_softmax(-1).gather(-1, targets)[:, 0].numpy()
        finally:  # free the pages
            self.cache.truncate(self._scored, 0)
        return found

    def disagreement(self, model: CausalLM, context_length: int) -> str:
        """How the kernel's results differ from the model's; "" if they differ only by rounding.

        On some CPUs the kernel rounds the inputs of a bfloat16 model's matrix products. The cache is empty afterwards.
        """
        length = min(agreement.TOKENS, context_length)
        positions, slot = np.arange(length), np.zeros(length, dtype=np.int64)
        self.cache.extend(slot[:1], np.array([length]))
        try:
            differs = agreement.disagreement(
                model,
                lambda index, given: self._run(slot, positions, slot, positions, (index, given)),
                lambda ids: self._run(ids.numpy(), positions, slot, positions),
                length=length,
                rounds=self._model.is_rounded and bool(self._kernel.verbatim_rounds()),
            )
            return differs or self._dependence_on_rows(length)
        finally:
            self.cache.drop()

    def _dependence_on_rows(self, length: int) -> str:
        """Which passes of few rows, computed by other code, give other bits than one of many; "" if none."""
        positions, slot = np.arange(length), np.zeros(length, dtype=np.int64)
        ids = positions * 7919 % self._model.fields.vocab
        together = self._run(ids, positions, slot, positions)
        for count in (1, 2, 5, 16):
            last = slice(length - min(count, length), length)
            few = self._run(ids[last], positions[last], slot[last], np.arange(len(positions[last])))
            if not torch.equal(few, together[last]):
                return f"each layer agrees, but a pass of {count} tokens gives other bits than one of {length}"
        return ""


def _threads(work: int) -> int:
    """Number of threads to use: torch's setting for the calling thread, or 1 if there is little work."""
    return torch.get_num_threads() if work >= _WORTH_A_TEAM else 1
