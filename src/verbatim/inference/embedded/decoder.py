"""One forward pass after the other over all sequences in flight: prompt tokens and decode tokens side by side."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verbatim.errors import ModelError
from verbatim.inference.base import SampleRequest
from verbatim.inference.embedded.fast_forward import AttentionCall, fast_backbone
from verbatim.inference.embedded.kv_cache import (
    BLOCK,
    CachePlan,
    Group,
    KeptPrefix,
    KeyValueCache,
    KeyValueShape,
    up_to,
)
from verbatim.inference.embedded.sampling import Truncation, draw, uniforms
from verbatim.inference.embedded.slot_ranges import slot_ranges
from verbatim.inference.embedded.slots import Placement, Slots, SlotTable
from verbatim.machine_faults import is_out_of_memory
from verbatim.models.head import CausalLM

_ROW_QUANTUM = 32
"""Deterministic passes have a multiple of this many rows: matrix kernels then have no remainder rows, and
element-wise kernels no remainder elements, that are computed by other instructions than the rest."""

_QUANTUM = 16
"""Other passes attend to a multiple of this many keys."""

_PARKING_BUDGET = 1 << 30
"""Bytes of keys and values, at full context length, of sequences that wait for their next turn."""

Rows = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """How a decoder shares its passes."""

    num_slots: int
    """Sequences in flight at most."""
    context_length: int
    """Tokens of one sequence at most."""
    prefill_chunk: int
    """Prompt tokens of one pass at most."""
    deterministic: bool
    """Whether every pass has the same shape."""
    keep_cache: bool
    """Whether caches survive new weights (`on_weight_update = "keep"`)."""


@dataclass(kw_only=True)
class Counts:
    """What a decoder has done."""

    forward_passes: int = 0
    """Forward passes."""
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
    """

    def __init__(self, model: CausalLM, config: DecoderConfig, *, version: int) -> None:
        self.model = model
        self.config = config
        self.version = version
        self.counts = Counts()
        dtype = model.output.weight.dtype
        shape, calls = probe(model)
        with torch.inference_mode():
            self._backbone = fast_backbone(model, calls, config.context_length) or model
        self._bytes_per_key = shape.bytes_per_token(dtype) // shape.num_layers
        # In deterministic mode row i of a decode pass is slot i, so there are as many slots as rows.
        self.num_rows = -(-config.num_slots // _ROW_QUANTUM) * _ROW_QUANTUM if config.deterministic else 0
        self.cache = KeyValueCache(shape, max(config.num_slots, self.num_rows), dtype=dtype, device=model.device)
        per_slot = shape.bytes_per_token(dtype) * config.context_length
        num_parked = min(4 * config.num_slots, _PARKING_BUDGET // per_slot)
        self._parked: dict[int, KeptPrefix] = {}
        self.table = SlotTable(config.num_slots, num_parked, config.context_length)
        if config.deterministic:
            self._refuse_row_dependent_kernels()

    # ---- sequences come and go

    @torch.inference_mode()
    def add(self, request: SampleRequest) -> int | None:
        """Give a request a slot, with the longest cached prefix; None if it has to wait.

        If it raises, the request has no slot, and every other sequence is as it was.
        """
        self.cache.reserve(len(request.prompt_ids))
        table = self.table
        place = table.place(request.prompt_ids, request.session, self.version, keep=self.config.keep_cache)
        if place is None:
            return None
        try:
            self._start(request, place)
        except BaseException:
            table.release(place.slot)
            table.forget(place.slot)  # its keys and values may be half another sequence's
            raise
        return place.slot

    def _start(self, request: SampleRequest, place: Placement) -> None:
        table = self.table
        slot, source, reused = place.slot, place.source, place.reused
        cache_version = int(table.cache_version[source]) if reused else self.version
        stays = reused if source == slot else 0
        if table.session[slot] != request.session and table.computed[slot] > stays:
            self._park(slot, keep_out=source)
        if source != slot:
            self._copy_prefix(source, slot, reused)
            if source >= table.num_batch and table.session[source] == request.session:
                self._parked.pop(source, None)
                table.forget(source)
        table.start(slot, request, reused, cache_version)
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
        """Free a slot whose numbers are not finite, and leave nothing of them."""
        self.drop(slot)
        self.cache.clear(slot)

    def drop(self, slot: int) -> None:
        """Free a slot, and leave its prefix to no other sequence."""
        self.table.release(slot)
        self.table.forget(slot)

    @property
    def largest(self) -> int | None:
        """The slot of the longest sequence in flight, of several the one that came last; None without sequences."""
        table = self.table
        active = np.flatnonzero(table.active[: table.num_batch])
        if not len(active):
            return None
        return int(active[np.lexsort((table.arrival[active], table.length[active]))[-1]])

    @torch.inference_mode()
    def give_back_memory(self) -> None:
        """Let go of all that sequences in flight do not need: parked prefixes, and room for longer sequences."""
        table = self.table
        for place in self._parked:
            table.forget(place)
        self._parked.clear()
        try:
            self.cache.shrink(int(table.length[table.active].max(initial=0)))
        except (MemoryError, RuntimeError) as error:  # there is not even room for a smaller copy
            if not is_out_of_memory(error):
                raise
            table.rebuild_all(self.version)
            self.cache.drop()
        np.minimum(table.computed, self.cache.capacity, out=table.computed)
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def set_version(self, version: int) -> None:
        """The weights have changed: from now on tokens carry this version."""
        self.version = version
        if not self.config.keep_cache:
            self.table.rebuild_all(version)
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
        table.move(slot, place)

    def _copy_prefix(self, source: int, slot: int, num_tokens: int) -> None:
        if not num_tokens:
            return
        if source < self.table.num_batch:
            self.cache.copy_prefix(source, slot, num_tokens)
        else:
            self.cache.restore(self._parked[source], slot, num_tokens)

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
        if not one.all():  # tokens of their own first, then those that share a slot; each in the order of slots
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
        """Which slots take part, with how many tokens: prompts share what room there is, first come first served."""
        decode, prefill = active[ahead == 1], active[ahead > 1]
        needed = ahead[ahead > 1]
        room = self.config.prefill_chunk
        if self.config.deterministic:
            room = min(room, self.num_rows - len(decode))
        order = np.argsort(self.table.arrival[prefill])
        prefill, needed = prefill[order], needed[order]
        taken = np.clip(room - (np.cumsum(needed) - needed), 0, needed)
        slots, counts = np.concatenate([decode, prefill]), np.concatenate([np.ones_like(decode), taken])
        slots, counts = slots[counts > 0], counts[counts > 0]
        order = np.argsort(slots)
        return slots[order], counts[order]

    def _layout(self, slots: Slots, counts: Rows, num_single: int) -> _Layout:
        """Where each token goes: one row after the other, or in deterministic mode slot i's only token in row i."""
        row_slots = np.repeat(slots, counts)
        starts = np.cumsum(counts) - counts
        positions = np.arange(len(row_slots)) - np.repeat(starts - self.table.computed[slots], counts)
        if not self.config.deterministic:
            rows = np.arange(len(row_slots))
            return _Layout(rows=rows, slots=row_slots, positions=positions, num_rows=len(rows))
        single = slots[:num_single]
        free = np.setdiff1d(np.arange(self.num_rows), single, assume_unique=True)
        rows = np.concatenate([single, free[: len(row_slots) - num_single]])
        return _Layout(rows=rows, slots=row_slots, positions=positions, num_rows=self.num_rows)

    def _forward(self, layout: _Layout, slots: Slots, counts: Rows) -> Tensor:
        table, device = self.table, self.model.device
        ids, positions = table.ids[layout.slots, layout.positions].astype(np.int64), layout.positions
        write_rows = None
        if self.config.deterministic:
            write_rows = _tensor(layout.rows, device)
            ids, positions = layout.spread(ids), layout.spread(positions)
            groups = self._fixed_groups(layout, int((counts == 1).sum()))
        else:
            groups = self._ragged_groups(layout, slots, counts)
        plan = CachePlan(
            cache=self.cache, write_rows=write_rows, write_slots=_tensor(layout.slots, device),
            write_positions=_tensor(layout.positions, device), groups=groups, in_blocks=self.config.deterministic,
        )  # fmt: skip
        return self._backbone.hidden(_tensor(ids, device), _tensor(positions, device), plan)

    def _fixed_groups(self, layout: _Layout, num_single: int) -> list[Group]:
        """All slots in place, as they lie in the rows; then each prompt token with a copy of its slot's keys."""
        device, groups = self.model.device, []
        if num_single:
            positions = np.zeros(self.num_rows, dtype=np.int64)
            positions[layout.rows[:num_single]] = layout.positions[:num_single]
            groups.append(_group(slice(0, self.num_rows), None, slice(0, self.num_rows), positions, BLOCK, device))
        if num_single < len(layout.rows):
            rest = slice(num_single, None)
            groups.append(_group(layout.rows[rest], None, layout.slots[rest], layout.positions[rest], BLOCK, device))
        return groups

    def _ragged_groups(self, layout: _Layout, slots: Slots, counts: Rows) -> list[Group]:
        device, groups = self.model.device, []
        num_single = int((counts == 1).sum())
        single, lengths = slots[:num_single], layout.positions[:num_single] + 1
        for slot_range in slot_ranges(single, lengths, self._bytes_per_key):
            rows, positions = slice(slot_range.first, slot_range.last), lengths[slot_range.first : slot_range.last] - 1
            own = single[rows]
            if slot_range.in_place and len(own) == slot_range.num_slots:
                groups.append(_group(rows, None, slot_range.slots, positions, _QUANTUM, device))
            elif slot_range.in_place:
                cells, spread = own - slot_range.slots.start, np.zeros(slot_range.num_slots, dtype=np.int64)
                spread[cells] = positions
                groups.append(_group(rows, cells, slot_range.slots, spread, _QUANTUM, device))
            else:
                groups.append(_group(rows, None, own, positions, _QUANTUM, device))
        if num_single < len(slots):
            several, starts = counts[num_single:], (np.cumsum(counts) - counts)[num_single:]
            groups += [
                self._prompt_group(slots[num_single:][of], starts[of], several[of]) for of in _similar(several)
            ]
        return groups

    def _prompt_group(self, slots: Slots, starts: Rows, counts: Rows) -> Group:
        """Sequences with similar numbers of new tokens, padded to the longest."""
        device = self.model.device
        longest, total = int(counts.max()), int(counts.sum())
        within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        sequence = np.repeat(np.arange(len(slots)), counts)
        positions = np.zeros((len(slots), longest), dtype=np.int64)
        positions[sequence, within] = self.table.computed[slots][sequence] + within
        cells = sequence * longest + within
        return _group(starts[sequence] + within, cells, slots, positions, _QUANTUM, device)

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
        spread = self.config.deterministic
        if not spread:
            if len(rows) != len(hidden):
                hidden = hidden[_tensor(rows, device)]
            rows = np.arange(len(slots))

        def per_row(values: NDArray[Any], elsewhere: float) -> Tensor:
            if spread:
                full = np.full(len(hidden), elsewhere, dtype=values.dtype)
                full[rows] = values
                values = full
            return _tensor(values, device)

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
        in_place = _group(slice(0, self.num_rows), None, slice(0, self.num_rows), positions, BLOCK, device)
        few = slots[1:4]
        copied = _group(few, None, few, positions[few], BLOCK, device)
        plan = CachePlan(
            cache=self.cache, write_rows=None, write_slots=_tensor(slots, device),
            write_positions=_tensor(positions, device), groups=(in_place, copied), in_blocks=True,
        )  # fmt: skip
        zeros = _tensor(positions, device)
        logits = self.model.logits(self._backbone.hidden(zeros + 1, zeros, plan))
        if not bool((logits == logits[0]).all()):
            raise ModelError(
                f"deterministic sampling: on this machine a pass of {self.num_rows} rows gives other bits in other "
                "rows; in [inference.torch] use another max_batch_size, num_threads = 1, or deterministic = false"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Layout:
    """Where the tokens of a pass go. The tokens of one slot follow each other, in order."""

    rows: Rows
    """The row of each token: int64 [W]."""
    slots: Slots
    """Its slot: int64 [W]."""
    positions: Rows
    """Its position: int64 [W]."""
    num_rows: int
    """Rows of the pass, those without a token included."""

    def spread(self, values: Rows) -> Rows:
        """Values of the tokens, at their rows; 0 elsewhere."""
        out = np.zeros(self.num_rows, dtype=np.int64)
        out[self.rows] = values
        return out


def probe(model: CausalLM) -> tuple[KeyValueShape, list[AttentionCall]]:
    """Read the shape of keys and values, and how each layer attends, off one forward pass of the model itself.

    Raises:
        ModelError: layers whose shapes differ, which one cache cannot hold.
    """
    shapes: dict[int, tuple[int, int, int]] = {}
    calls: dict[int, AttentionCall] = {}

    class _Probe:
        def attend(
            self, layer_index: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, *, scale: float,
            sliding_window: int | None,
        ) -> Tensor:  # fmt: skip
            shapes[layer_index] = (key_BKTD.shape[1], key_BKTD.shape[-1], value_BKTD.shape[-1])
            calls[layer_index] = AttentionCall(scale=scale, sliding_window=sliding_window)
            heads = query_BHTD.shape[1]
            return value_BKTD.repeat_interleave(heads // value_BKTD.shape[1], dim=1).transpose(1, 2)

    with torch.inference_mode():
        one = torch.zeros(1, dtype=torch.int64, device=model.device)
        model.hidden(one, one, _Probe())
    if len(set(shapes.values())) != 1 or sorted(shapes) != list(range(len(shapes))):
        raise ModelError(f"{type(model.model).__name__} has layers with different key/value shapes {shapes}; the "
                         "embedded sampler's cache needs the same (heads, key size, value size) in all")  # fmt: skip
    kv_heads, key_size, value_size = shapes[0]
    shape = KeyValueShape(num_layers=len(shapes), num_kv_heads=kv_heads, key_size=key_size, value_size=value_size)
    return shape, [calls[layer] for layer in range(len(calls))]


def _similar(counts: Rows) -> list[Slots]:
    """Indices of sequences whose numbers of new tokens lie between the same two powers of two."""
    kind = np.ceil(np.log2(counts)).astype(np.int64)
    return [np.flatnonzero(kind == k) for k in np.unique(kind)]


def _group(
    rows: Rows | slice, cells: Rows | None, slots: Slots | slice, positions: Rows, quantum: int, device: torch.device
) -> Group:
    """Positions are [B] for one query each, or [B, Q]."""
    return Group(
        rows=rows if isinstance(rows, slice) else _tensor(rows, device),
        cells=None if cells is None else _tensor(cells, device),
        slots=slots if isinstance(slots, slice) else _tensor(slots, device),
        positions_BQ=_tensor(positions.reshape(len(positions), -1), device),
        num_keys=up_to(int(positions.max()) + 1, quantum),
    )


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)
