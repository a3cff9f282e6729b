"""Computes passes with PyTorch. Sequences whose attention is computed together are padded to the longest sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verbatim.core.errors import ModelError
from verbatim.inference.embedded.expert_record import ExpertRecord
from verbatim.inference.embedded.fast_forward import FastBackbone
from verbatim.inference.embedded.kv_cache import BLOCK, CachePlan, KeyValueCache, KeyValueShape, up_to
from verbatim.inference.embedded.pass_layout import PassLayout, Rows, as_tensor, fixed_groups, group, ragged_groups
from verbatim.inference.embedded.sampling import Truncation, draw, kept_sets, uniforms
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.embedded.slots import Drawn, Slots, SlotTable
from verbatim.inference.embedded.whole_sequence import sequence_logprobs
from verbatim.models.head import CausalLM
from verbatim.models.native.freed_memory import keep_freed_memory

_ROW_QUANTUM = 32
"""The number of rows in a deterministic pass is a multiple of this. Then matrix kernels have no remainder rows, and
element-wise kernels no remainder elements; remainders are computed with other instructions and may be rounded
differently."""


class TorchForward:
    """Forward passes in PyTorch, for any model that lets an `AttentionPlan` compute its attention.

    Args:
        model: The model.
        backbone: Computes the hidden states: the fast form of the model's layers, or the model itself.
        shape: Shape of one token's keys and values.
        settings: Batch size, and whether sampling is deterministic.
        reads_prefixes_once: Assume that equal ids have equal keys and values, so that shared prefixes are read once.
            The assumption is wrong if some keys and values were cached before a weight update. Between slots, it is
            also wrong if experts are recorded: rounding may decide between two almost tied experts, so each sequence
            must read its own keys and values.

    Raises:
        ModelError: deterministic mode is on, but on this machine the bits of a row depend on its index.
    """

    def __init__(
        self,
        model: CausalLM,
        backbone: FastBackbone | CausalLM,
        shape: KeyValueShape,
        settings: TorchSettings,
        *,
        reads_prefixes_once: bool,
    ) -> None:
        if model.device.type == "cpu":
            keep_freed_memory()
        self._model = model
        self._backbone = backbone
        self._reads_prefixes_once = reads_prefixes_once
        dtype, num_slots = model.output.weight.dtype, settings.max_batch_size
        self.bytes_per_token = shape.bytes_per_token(dtype)
        """Bytes of one token's keys and values in all layers."""
        self._bytes_per_key = self.bytes_per_token // shape.num_layers
        # In deterministic mode, row i of a decode pass belongs to slot i, so there are as many slots as rows.
        self.num_rows = up_to(num_slots, _ROW_QUANTUM) if settings.deterministic else 0
        """Fixed number of rows of each pass in deterministic mode; 0 means one row for each token."""
        self.cache = KeyValueCache(shape, max(num_slots, self.num_rows), dtype=dtype, device=model.device)
        """Keys and values of every slot."""
        if settings.deterministic:
            self._refuse_row_dependent_kernels()

    def refresh(self) -> None:
        """Do nothing, because passes read the model's own weights."""

    def give_back_memory(self) -> None:
        """Do nothing, because the memory of a pass is freed when the pass ends."""

    def prompt_logprobs(self, ids: Rows, temperature: float) -> NDArray[np.float32]:
        """Logprob of each token given the tokens before it, without the cache: float32 [L]; the first is NaN."""
        logprobs = sequence_logprobs(self._model, as_tensor(ids, self._model.device), temperature)
        found: NDArray[np.float32] = logprobs.cpu().numpy()
        return found

    def hidden(
        self, layout: PassLayout, slots: Slots, counts: Rows, table: SlotTable, record: ExpertRecord | None
    ) -> Tensor:
        """The last hidden state of each slot of the pass, [slots, W]; in deterministic mode, of all rows, [rows, W]."""
        device = self._model.device
        self.cache.reserve(int((table.computed[slots] + counts).max()))
        ids, positions = table.ids[layout.slots, layout.positions].astype(np.int64), layout.positions
        write_rows = None
        if self.num_rows:
            write_rows = as_tensor(layout.rows, device)
            ids, positions = layout.spread(ids), layout.spread(positions)
            groups = fixed_groups(layout, int((counts == 1).sum()), device)
        else:
            groups = ragged_groups(
                layout,
                slots,
                counts,
                table.computed[slots],
                bytes_per_key=self._bytes_per_key,
                device=device,
                ids=table.ids if self._reads_prefixes_once else None,
            )
        plan = CachePlan(
            cache=self.cache,
            write_rows=write_rows,
            write_slots=as_tensor(layout.slots, device),
            write_positions=as_tensor(layout.positions, device),
            groups=groups,
            in_blocks=bool(self.num_rows),
        )
        ids_T, positions_T = as_tensor(ids, device), as_tensor(positions, device)
        last = None
        if not self.num_rows and len(slots) < len(ids):
            last = as_tensor(np.cumsum(counts) - 1, device)
        if isinstance(self._backbone, FastBackbone) and record is None:
            return self._backbone.hidden(ids_T, positions_T, plan, last)
        if record is None:
            hidden = self._model.hidden(ids_T, positions_T, plan)
        else:
            hidden = self._model.hidden(ids_T, positions_T, plan, record.during_pass(layout.num_rows))
            record.keep(layout, table.rebuild_until[layout.slots])
        return hidden if last is None else hidden[last]

    def draw(
        self, hidden: Tensor, layout: PassLayout, counts: Rows, done: NDArray[np.bool_], table: SlotTable, slots: Slots
    ) -> Drawn:
        """Sample the next token of each slot in `slots`. These slots have all known ids computed (`done`).

        A deterministic pass computes and samples in every row, because different shapes could give different bits.
        """
        device, spread = hidden.device, self.num_rows
        rows = layout.rows[np.cumsum(counts) - 1][done] if spread else np.arange(len(slots))
        if not spread and len(slots) < len(hidden):
            hidden = hidden[as_tensor(np.flatnonzero(done), device)]

        def per_row(values: NDArray[Any], elsewhere: float) -> Tensor:
            if spread:
                full = np.full(len(hidden), elsewhere, dtype=values.dtype)
                full[rows] = values
                values = full
            return as_tensor(values, device)

        truncation = None
        if table.truncates[slots].any():
            truncation = Truncation(
                top_k_N=per_row(table.top_k[slots], 0),
                top_p_N=per_row(table.top_p[slots], 1),
                min_p_N=per_row(table.min_p[slots], 0),
            )
        randomness = per_row(uniforms(table.keys[slots], table.length[slots]), 0.5)
        temperatures = per_row(table.temperature[slots], 1)
        tokens, logprobs, kept = draw(self._model.logits(hidden), temperatures, randomness, truncation)
        needs = np.flatnonzero(table.needs_kept_sets[slots])
        sets = None
        if kept is not None and len(needs):
            sets = kept_sets(kept[as_tensor(rows[needs], device)]).spread(needs, len(slots))
        return tokens.cpu().numpy()[rows], logprobs.cpu().numpy()[rows], sets

    @torch.inference_mode()
    def _refuse_row_dependent_kernels(self) -> None:
        """Check that the same token gives the same bits in every row and slot, whether keys are in place or copied."""
        self.cache.reserve(1)
        device, slots = self._model.device, np.arange(self.num_rows)
        positions = np.zeros_like(slots)
        in_place = group(slice(0, self.num_rows), None, slice(0, self.num_rows), positions, BLOCK, device)
        few = slots[1:4]
        copied = group(few, None, few, positions[few], BLOCK, device)
        plan = CachePlan(
            cache=self.cache,
            write_rows=None,
            write_slots=as_tensor(slots, device),
            write_positions=as_tensor(positions, device),
            groups=(in_place, copied),
            in_blocks=True,
        )
        zeros = as_tensor(positions, device)
        logits = self._model.logits(self._backbone.hidden(zeros + 1, zeros, plan))
        if not bool((logits == logits[0]).all()):
            raise ModelError(
                f"deterministic sampling: on this machine, a pass of {self.num_rows} rows does not give bit-identical "
                "results in every row; in [inference.torch] use another max_batch_size, num_threads = 1, or "
                "deterministic = false"
            )
