"""Runs forward passes over all sequences in flight, with prompt tokens and decode tokens in the same pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verbatim.errors import ModelError
from verbatim.inference.base import SampleRequest
from verbatim.inference.embedded.expert_record import ExpertRecord
from verbatim.inference.embedded.fast_forward import fast_backbone, probe
from verbatim.inference.embedded.kv_cache import BLOCK, CachePlan, KeptPrefix, KeyValueCache, up_to
from verbatim.inference.embedded.pass_layout import PassLayout, Rows, as_tensor, fixed_groups, group, ragged_groups
from verbatim.inference.embedded.sampling import Truncation, draw, uniforms
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.embedded.slots import Placement, Slots, SlotTable
from verbatim.machine_faults import is_out_of_memory
from verbatim.models.head import CausalLM
from verbatim.types import Experts

_ROW_QUANTUM = 32
"""Deterministic passes have a multiple of this many rows: matrix kernels then have no remainder rows, and
element-wise kernels no remainder elements, which other instructions would compute."""

_PARKING_BUDGET = 1 << 30
"""Bytes of keys and values, at full context length, of sequences that wait for their next turn."""


@dataclass(kw_only=True)
class Counts:
    """Counts of a decoder since it started."""

    forward_passes: int = 0
    """Forward passes of the model."""
    sampled_tokens: int = 0
    """Tokens drawn."""
    prefill_tokens: int = 0
    """Prompt tokens computed the first time."""
    prefix_hit_tokens: int = 0
    """Prompt tokens taken from a cache."""
    recomputed_tokens: int = 0
    """Tokens of sequences in flight computed again because the weights changed."""


class Decoder:
    """The model, its cache and its slots; no threads and no clocks.

    `add` a request, `step` until its slot is among those that ended, read the slot's row of `table`, `release` it.

    Args:
        model: Its weights may be replaced between two steps, before `set_version`.
        settings: Most sequences in flight, most prompt tokens of one pass, and whether every pass has the same shape.
        context_length: Most tokens of one sequence.
        version: The version of the weights.
        keep_cache: Whether caches survive new weights (`on_weight_update = "keep"`).
        record_experts: Whether the experts that compute each token are recorded.
    """

    def __init__(
        self, model: CausalLM, settings: TorchSettings, *, context_length: int, version: int, keep_cache: bool = False,
        record_experts: bool = False,
    ) -> None:  # fmt: skip
        self.model = model
        self.version = version
        self._num_loads = 0
        self._prefill_chunk = settings.prefill_chunk
        self._deterministic = settings.deterministic
        self._keep_cache = keep_cache
        num_slots = settings.max_batch_size
        self.counts = Counts()
        dtype = model.output.weight.dtype
        shape, calls = probe(model)
        with torch.inference_mode():
            self._backbone = fast_backbone(model, calls, context_length) or model
        self._bytes_per_key = shape.bytes_per_token(dtype) // shape.num_layers
        # In deterministic mode row i of a decode pass is slot i, so there are as many slots as rows.
        self.num_rows = up_to(num_slots, _ROW_QUANTUM) if settings.deterministic else 0
        self.cache = KeyValueCache(shape, max(num_slots, self.num_rows), dtype=dtype, device=model.device)
        num_parked = min(4 * num_slots, _PARKING_BUDGET // (shape.bytes_per_token(dtype) * context_length))
        self._parked: dict[int, KeptPrefix] = {}
        self.table = SlotTable(num_slots, num_parked, context_length)
        self._record = None
        if record_experts:
            with torch.inference_mode():
                self._record = ExpertRecord(model, len(self.table.session), context_length)
        # Equal ids have other keys and values where some were cached before an update; and in another slot, where two
        # experts are almost tied: then the records name other experts, and each sequence has to read its own.
        self._reads_prefixes_once = not keep_cache and self._record is None
        if settings.deterministic:
            self._refuse_row_dependent_kernels()

    # ---- sequences come and go

    @torch.inference_mode()
    def add(self, request: SampleRequest) -> int | None:
        """Give a request a slot, with the longest cached prefix; None if it has to wait.

        If it raises, the request has no slot, and every other sequence is as it was.
        """
        self.cache.reserve(len(request.prompt_ids))
        table = self.table
        place = table.place(request.prompt_ids, request.session, self._num_loads, keep=self._keep_cache)
        if place is None:
            return None
        try:
            self._start(request, place)
        except BaseException:
            self.drop(place.slot)  # its cache may hold half of another sequence's keys and values
            raise
        return place.slot

    def _start(self, request: SampleRequest, place: Placement) -> None:
        table = self.table
        slot, source, reused = place.slot, place.source, place.reused
        loaded = int(table.loaded[source]) if reused else self._num_loads
        stays = reused if source == slot else 0
        if table.session[slot] != request.session and table.computed[slot] > stays:
            self._park(slot, keep_out=source)
        if source >= table.num_batch:
            self.cache.restore(self._parked[source], slot, reused)
            if table.session[source] == request.session:
                del self._parked[source]
                table.forget(source)
        elif source != slot:
            self.cache.copy_prefix(source, slot, reused)
        if self._record is not None:
            self._record.copy(source, slot, reused)
        table.start(slot, request, reused, loaded)
        self.counts.prefix_hit_tokens += reused

    @property
    def has_idle_slot(self) -> bool:
        """Whether a request could start now."""
        return not self.table.active[: self.table.num_batch].all()

    def release(self, slot: int) -> None:
        """Free the slot of a sequence that ended or was cancelled; its cached prefix stays usable."""
        self.table.release(slot)

    @torch.inference_mode()
    def discard(self, slot: int) -> None:
        """Free a slot whose keys or values are not finite numbers, and clear its cache."""
        self.drop(slot)
        self.cache.clear(slot)

    def drop(self, slot: int) -> None:
        """Free a slot; no other sequence may reuse its prefix."""
        self.table.release(slot)
        self.table.forget(slot)

    @property
    def largest(self) -> int | None:
        """The slot of the longest sequence in flight (of equal ones the newest); None without sequences."""
        table = self.table
        active = np.flatnonzero(table.active[: table.num_batch])
        if not len(active):
            return None
        return int(active[np.lexsort((table.arrival[active], table.length[active]))[-1]])

    @torch.inference_mode()
    def give_back_memory(self) -> None:
        """Free the memory that sequences in flight do not need: parked prefixes, and room for longer sequences."""
        table = self.table
        for place in self._parked:
            table.forget(place)
        self._parked.clear()
        try:
            self.cache.shrink(int(table.length[table.active].max(initial=0)))
        except (MemoryError, RuntimeError) as error:  # no room even for the smaller copy
            if not is_out_of_memory(error):
                raise
            table.rebuild_all(self.version)
            self.cache.drop()
        np.minimum(table.computed, self.cache.capacity, out=table.computed)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def set_version(self, version: int) -> None:
        """Set the version of the weights; tokens drawn from now on carry it."""
        self.version = version
        self._num_loads += 1
        if not self._keep_cache:
            self.table.rebuild_all(self._num_loads)
            self.cache.clear()
            self._parked.clear()

    def _park(self, slot: int, *, keep_out: int) -> None:
        """Save an idle slot's cache, if a session may come back to it, before another sequence takes the slot."""
        table = self.table
        place = table.parking_place()
        if place is None or place == keep_out or not table.session[slot]:
            return
        kept = self.cache.keep(slot, int(table.computed[slot]))
        table.forget(place)
        self._parked[place] = kept
        if self._record is not None:
            self._record.copy(slot, place, int(table.computed[slot]))
        table.move(slot, place)

    def routed_experts(self, slot: int, start: int) -> Experts | None:
        """The experts of a sequence that has sampled tokens, from a token on and without the last: [N, D, K]; None
        where they are not recorded."""
        if self._record is None:
            return None
        return self._record.read(slot, start, int(self.table.length[slot]) - 1)

    # ---- one pass

    @torch.inference_mode()
    def step(self) -> tuple[Slots, Slots]:
        """One forward pass: every decoding sequence gets a token, prompts are processed as far as the pass allows.

        If it raises, every sequence is as long as it was, and the next pass draws the tokens of this one.

        Returns:
            The slots whose sequences ended, and those whose logits are not finite numbers.
        """
        before, counts = self.table.snapshot(), replace(self.counts)
        try:
            return self._pass()
        except BaseException:
            self.table.restore(before)
            self.counts = counts
            raise

    def _pass(self) -> tuple[Slots, Slots]:
        table = self.table
        active = np.flatnonzero(table.active[: table.num_batch])
        if not len(active):
            return active, active
        ahead = table.length[active] - table.computed[active]
        self.cache.reserve(int(table.length[active].max()))
        slots, counts = (active, ahead) if ahead.max() == 1 else self._share_out(active, ahead)
        one = counts == 1
        if not one.all():  # slots with one new token first, then those with several; each in the order of slots
            order = np.argsort(~one, kind="stable")
            slots, counts = slots[order], counts[order]
        layout = self._layout(slots, counts, int(one.sum()))
        hidden = self._forward(layout, slots, counts)
        last = layout.rows[np.cumsum(counts) - 1]
        before = table.computed[slots]
        self._account(slots, before, counts)
        done = table.computed[slots] == table.length[slots]
        return self._sample(hidden, last[done], slots[done])

    def _share_out(self, active: Slots, ahead: Rows) -> tuple[Slots, Rows]:
        """Which slots take part, with how many tokens: prompts share the remaining room, first come first served."""
        decode, prefill = active[ahead == 1], active[ahead > 1]
        needed = ahead[ahead > 1]
        room = self._prefill_chunk
        if self._deterministic:
            room = min(room, self.num_rows - len(decode))
        order = np.argsort(self.table.arrival[prefill])
        prefill, needed = prefill[order], needed[order]
        taken = np.clip(room - (np.cumsum(needed) - needed), 0, needed)
        slots, counts = np.concatenate([decode, prefill]), np.concatenate([np.ones_like(decode), taken])
        slots, counts = slots[counts > 0], counts[counts > 0]
        order = np.argsort(slots)
        return slots[order], counts[order]

    def _layout(self, slots: Slots, counts: Rows, num_single: int) -> PassLayout:
        """Where each token goes: one row after the other, or in deterministic mode slot i's only token in row i."""
        row_slots = np.repeat(slots, counts)
        starts = np.cumsum(counts) - counts
        positions = np.arange(len(row_slots)) - np.repeat(starts - self.table.computed[slots], counts)
        if not self._deterministic:
            rows = np.arange(len(row_slots))
            return PassLayout(rows=rows, slots=row_slots, positions=positions, num_rows=len(rows))
        single = slots[:num_single]
        free = np.setdiff1d(np.arange(self.num_rows), single, assume_unique=True)
        rows = np.concatenate([single, free[: len(row_slots) - num_single]])
        return PassLayout(rows=rows, slots=row_slots, positions=positions, num_rows=self.num_rows)

    def _forward(self, layout: PassLayout, slots: Slots, counts: Rows) -> Tensor:
        table, device = self.table, self.model.device
        ids, positions = table.ids[layout.slots, layout.positions].astype(np.int64), layout.positions
        write_rows = None
        if self._deterministic:
            write_rows = as_tensor(layout.rows, device)
            ids, positions = layout.spread(ids), layout.spread(positions)
            groups = fixed_groups(layout, int((counts == 1).sum()), device)
        else:
            groups = ragged_groups(
                layout, slots, counts, table.computed[slots], bytes_per_key=self._bytes_per_key, device=device,
                ids=table.ids if self._reads_prefixes_once else None,
            )  # fmt: skip
        plan = CachePlan(
            cache=self.cache, write_rows=write_rows, write_slots=as_tensor(layout.slots, device),
            write_positions=as_tensor(layout.positions, device), groups=groups, in_blocks=self._deterministic,
        )  # fmt: skip
        ids_T, positions_T = as_tensor(ids, device), as_tensor(positions, device)
        if self._record is None:
            return self._backbone.hidden(ids_T, positions_T, plan)
        hidden = self.model.hidden(ids_T, positions_T, plan, self._record.during_pass(layout.num_rows))
        self._record.keep(layout, table.rebuild_until[layout.slots])
        return hidden

    def _account(self, slots: Slots, before: Rows, counts: Rows) -> None:
        table, done = self.table, self.counts
        after = before + counts
        rebuilt = np.clip(np.minimum(after, table.rebuild_until[slots]) - before, 0, None).sum()
        first = np.maximum(before, table.rebuild_until[slots])
        prompt = np.clip(np.minimum(after, table.prompt_length[slots]) - first, 0, None).sum()
        table.computed[slots] = after
        done.recomputed_tokens += int(rebuilt)
        done.prefill_tokens += int(prompt)
        done.forward_passes += 1

    def _sample(self, hidden: Tensor, rows: Rows, slots: Slots) -> tuple[Slots, Slots]:
        """Draw the next token of each slot from its row of hidden states.

        A deterministic pass computes and draws in every row, because shapes decide bits.
        """
        table, device = self.table, hidden.device
        if not len(slots):
            return slots, slots
        spread = self._deterministic
        if not spread:
            if len(rows) != len(hidden):
                hidden = hidden[as_tensor(rows, device)]
            rows = np.arange(len(slots))

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
        drawn = draw(self.model.logits(hidden), temperatures, randomness, truncation)
        tokens, logprobs = drawn[0].cpu().numpy()[rows], drawn[1].cpu().numpy()[rows]
        finite = np.isfinite(logprobs)
        self.counts.sampled_tokens += int(finite.sum())
        ended = table.append(slots[finite], tokens[finite], logprobs[finite], self.version)
        return ended, slots[~finite]

    # ---- refusals

    @torch.inference_mode()
    def _refuse_row_dependent_kernels(self) -> None:
        """The same token in every row, in every slot, in place or copied, must give the same bits in every row."""
        self.cache.reserve(1)
        device, slots = self.model.device, np.arange(self.num_rows)
        positions = np.zeros_like(slots)
        in_place = group(slice(0, self.num_rows), None, slice(0, self.num_rows), positions, BLOCK, device)
        few = slots[1:4]
        copied = group(few, None, few, positions[few], BLOCK, device)
        plan = CachePlan(
            cache=self.cache, write_rows=None, write_slots=as_tensor(slots, device),
            write_positions=as_tensor(positions, device), groups=(in_place, copied), in_blocks=True,
        )  # fmt: skip
        zeros = as_tensor(positions, device)
        logits = self.model.logits(self._backbone.hidden(zeros + 1, zeros, plan))
        if not bool((logits == logits[0]).all()):
            raise ModelError(
                f"deterministic sampling: on this machine a pass of {self.num_rows} rows gives other bits in other "
                "rows; in [inference.torch] use another max_batch_size, num_threads = 1, or deterministic = false"
            )
