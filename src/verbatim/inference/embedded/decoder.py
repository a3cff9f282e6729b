"""Runs forward passes over all sequences in flight, mixing prompt tokens and decode tokens in one pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verbatim.core.machine_faults import is_out_of_memory
from verbatim.core.types import Experts, Float32
from verbatim.inference.embedded.expert_record import ExpertRecord
from verbatim.inference.embedded.forward import open_forward
from verbatim.inference.embedded.pass_layout import PassLayout, Rows
from verbatim.inference.embedded.rebuild import Rebuild
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.embedded.slots import SlotPlacement, Slots, SlotTable
from verbatim.inference.sampler import SampleRequest
from verbatim.models.head import CausalLM

_PARKING_BUDGET = 1 << 30
"""Maximum bytes of keys and values in parked prefixes, that is, prefixes of sequences that wait for their next turn.
Each prefix is counted as if it filled the context."""


@dataclass(kw_only=True)
class DecoderCounts:
    """Counts of a decoder since its start."""

    forward_passes: int = 0
    """Number of forward passes of the model."""
    sampled_tokens: int = 0
    """Sampled tokens."""
    prefill_tokens: int = 0
    """Prompt tokens computed for the first time."""
    prefix_hit_tokens: int = 0
    """Prompt tokens taken from a cache."""
    recomputed_tokens: int = 0
    """Tokens of sequences in flight that were computed again because the weights changed."""


class Decoder:
    """The model, its KV cache and its slots. It does not use threads or clocks.

    Usage: `add` a request, call `step` until the request's slot is among the ended slots, read the slot's row of
        `table`, and `release` the slot.

    Args:
        model: The model; its weights may be replaced between two steps, before `set_version`.
        settings: Batch size, prompt tokens per pass, and whether sampling is deterministic.
        context_length: Maximum tokens of one sequence.
        version: Policy version of the weights.
        keep_cache: Keep the cached keys and values when the weights change (`on_weight_update = "keep"`).
        record_experts: Record the experts that compute each token.
        warns: Log a warning if the compiled kernel cannot be used.
    """

    def __init__(
        self,
        model: CausalLM,
        settings: TorchSettings,
        *,
        context_length: int,
        version: int,
        keep_cache: bool = False,
        record_experts: bool = False,
        warns: bool = True,
    ) -> None:
        self.model = model
        self.version = version
        self._num_loads = 0
        self._prefill_chunk = settings.prefill_chunk
        self._keep_cache = keep_cache
        self.counts = DecoderCounts()
        with torch.inference_mode():
            self.forward = open_forward(
                model,
                settings,
                context_length=context_length,
                keep_cache=keep_cache,
                record_experts=record_experts,
                warns=warns,
            )
        num_slots, bytes_per_token = settings.max_batch_size, self.forward.bytes_per_token
        num_parked = min(4 * num_slots, _PARKING_BUDGET // (bytes_per_token * context_length))
        self.cache = self.forward.cache
        self._parked: dict[int, Any] = {}
        self.table = SlotTable(num_slots, num_parked, context_length)
        self._rebuild = Rebuild(self.table, self._copy_rebuilt)
        self._record = None
        if record_experts:
            with torch.inference_mode():
                self._record = ExpertRecord(model, len(self.table.session), context_length)

    # ---- adding and releasing sequences

    @torch.inference_mode()
    def add(self, request: SampleRequest) -> int | None:
        """Give a request a slot that starts with the longest cached prefix of the request's prompt. Returns None if the
        request has to wait.

        If this raises, the request has no slot, and all other sequences are unchanged.
        """
        self.cache.reserve(len(request.prompt_ids))
        table = self.table
        place = table.place(request.prompt_ids, request.session, self._num_loads, keep=self._keep_cache)
        if place is None:
            return None
        try:
            self._start(request, place)
        except BaseException:
            self.drop(place.slot)  # the slot's cache may hold a part of another sequence's keys and values
            raise
        return place.slot

    def _start(self, request: SampleRequest, place: SlotPlacement) -> None:
        table = self.table
        slot, source, reused = place.slot, place.source, place.reused
        loaded = int(table.loaded[source]) if reused else self._num_loads
        old_records = min(reused, int(table.old_records[source]))
        stays = reused if source == slot else 0
        # Park what the slot holds beyond the reused tokens, unless it belongs to the same session.
        if table.session[slot] != request.session and table.computed[slot] > stays:
            self._park(slot, keep_out=source)
        if source >= table.num_batch:
            self.cache.restore(self._parked[source], slot, reused)
            if table.session[source] == request.session:
                self._unpark(source)
        elif source != slot:
            self.cache.copy_prefix(source, slot, reused)
        else:
            self.cache.truncate(slot, reused)
        if self._record is not None:
            self._record.copy(source, slot, reused)
        table.start(slot, request, reused, loaded)
        table.old_records[slot] = old_records
        self.counts.prefix_hit_tokens += reused

    @property
    def has_idle_slot(self) -> bool:
        """True if a request can start now."""
        return not self.table.active[: self.table.num_batch].all()

    def release(self, slot: int) -> None:
        """Free the slot of a sequence that ended or was cancelled. The slot's cached prefix can still be reused."""
        self.table.release(slot)

    @torch.inference_mode()
    def discard(self, slot: int) -> None:
        """Free a slot whose keys or values are not finite, and clear its cache."""
        self.drop(slot)
        self.cache.clear(slot)

    def drop(self, slot: int) -> None:
        """Free a slot and forget its prefix, so that no other sequence reuses it."""
        self.table.release(slot)
        self.table.forget(slot)
        self.cache.truncate(slot, 0)

    @property
    def largest(self) -> int | None:
        """The slot of the longest sequence in flight (the newest if several are equally long), or None if idle."""
        table = self.table
        active = np.flatnonzero(table.active[: table.num_batch])
        if not len(active):
            return None
        return int(active[np.lexsort((table.arrival[active], table.length[active]))[-1]])

    @torch.inference_mode()
    def give_back_memory(self) -> None:
        """Free memory that the sequences in flight do not need: parked prefixes, and room for longer sequences."""
        table = self.table
        for place in list(self._parked):
            self._unpark(place)
        for slot in np.flatnonzero(~table.active[: table.num_batch]).tolist():
            table.forget(slot)
            self.cache.truncate(slot, 0)
        try:
            self.cache.shrink(int(table.length[table.active].max(initial=0)))
        except (MemoryError, RuntimeError) as error:  # shrinking needs a copy, for which there is no memory either
            if not is_out_of_memory(error):
                raise
            table.rebuild_all(self._num_loads)
            self.cache.drop()
            self._share_rebuild()
        np.minimum(table.computed, self.cache.capacity, out=table.computed)
        self.forward.give_back_memory()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def set_version(self, version: int) -> None:
        """Set the policy version after the weights were replaced; tokens sampled from now on carry it."""
        self.version = version
        self._num_loads += 1  # distinguishes loads even if a version is loaded twice
        self.forward.refresh()
        if not self._keep_cache:
            self.table.rebuild_all(self._num_loads)
            for place in list(self._parked):
                self._unpark(place)
            self.cache.clear()
            self._share_rebuild()

    def _share_rebuild(self) -> None:
        """Have the sequences in flight recomputed. A prefix that several of them share is computed only once. If
        experts are recorded, each sequence is recomputed separately, because its record must name the experts that
        computed its own tokens."""
        if self._record is None:
            self._rebuild.begin()
        else:
            self.table.old_records = self.table.rebuild_until.copy()

    def _copy_rebuilt(self, source: int, slot: int, num_tokens: int) -> None:
        """Let a sequence continue after tokens that another sequence has computed."""
        table = self.table
        self.cache.copy_prefix(source, slot, num_tokens)
        table.computed[slot] = num_tokens
        prompt = min(num_tokens, int(table.prompt_length[slot]))
        self.counts.prefix_hit_tokens += max(0, prompt - int(table.rebuild_until[slot]))

    @torch.inference_mode()
    def prompt_logprobs(self, ids: Rows, temperature: float) -> Float32:
        """Logprob of each token given the tokens before it: float32 [L]; the first is NaN. Computed without the KV
        cache, by the same code as the passes.

        Args:
            ids: int64 [L], L at most the context length.
            temperature: Divides the logits; above 0.
        """
        return self.forward.prompt_logprobs(ids, temperature)

    def _park(self, slot: int, *, keep_out: int) -> None:
        """Save an idle slot's cache before another sequence takes the slot, if the slot's sequence has a session, which
        may send a further request."""
        table = self.table
        place = table.parking_place()
        if place is None or place == keep_out or not table.session[slot]:
            return
        kept = self.cache.keep(slot, int(table.computed[slot]))  # may run out of memory, so before anything changes
        self._unpark(place)
        self._parked[place] = kept
        if self._record is not None:
            self._record.copy(slot, place, int(table.computed[slot]))
        table.move(slot, place)

    def _unpark(self, place: int) -> None:
        """Drop the prefix that is parked in a place, if any."""
        if place in self._parked:
            self.cache.release(self._parked.pop(place))
        self.table.forget(place)

    def routed_experts(self, slot: int, start: int) -> Experts | None:
        """The experts of a sequence's tokens, from position `start` to the second to last token (the last sampled token
        is not computed yet): [N, D, K]; None if experts are not recorded."""
        if self._record is None:
            return None
        return self._record.read(slot, start, int(self.table.length[slot]) - 1)

    # ---- one pass

    @torch.inference_mode()
    def step(self) -> tuple[Slots, Slots]:
        """Run one forward pass. Each decoding sequence gets a token, and prompts advance as far as the pass allows.

        If this raises, every sequence is unchanged, and the next pass samples the same tokens.

        Returns:
            (slots whose sequences ended, slots whose logits are not finite).
        """
        self._rebuild.go_on()
        before, counts = self.table.snapshot(), replace(self.counts)
        try:
            return self._pass()
        except BaseException:
            self.table.restore(before)
            self.counts = counts
            raise

    def _pass(self) -> tuple[Slots, Slots]:
        table = self.table
        active = self._rebuild.ready(np.flatnonzero(table.active[: table.num_batch]))
        if not len(active):
            return active, active
        # Number of uncached tokens of each sequence: 1 for decoding, more for prompts and after a weight update.
        ahead = table.length[active] - table.computed[active]
        self.cache.reserve(int(table.length[active].max()))
        slots, counts = (active, ahead) if ahead.max() == 1 else self._share_out(active, ahead)
        one = counts == 1
        if not one.all():  # single tokens first, then prompts, each in slot order: attention groups them by this order
            order = np.argsort(~one, kind="stable")
            slots, counts = slots[order], counts[order]
        layout = self._layout(slots, counts, int(one.sum()))
        hidden = self.forward.hidden(layout, slots, counts, table, self._record)
        self._account(slots, table.computed[slots], counts)
        return self._sample(hidden, layout, slots, counts)

    def _share_out(self, active: Slots, ahead: Rows) -> tuple[Slots, Rows]:
        """Choose the pass's slots, and how many tokens each gets: all decoding slots, then prompts by arrival."""
        decode, prefill = active[ahead == 1], active[ahead > 1]
        needed = ahead[ahead > 1]
        room = self._prefill_chunk
        if self.forward.num_rows:
            room = min(room, self.forward.num_rows - len(decode))
        order = np.argsort(self.table.arrival[prefill])
        prefill, needed = prefill[order], needed[order]
        taken = np.clip(room - (np.cumsum(needed) - needed), 0, needed)
        slots, counts = np.concatenate([decode, prefill]), np.concatenate([np.ones_like(decode), taken])
        slots, counts = slots[counts > 0], counts[counts > 0]
        order = np.argsort(slots)
        return slots[order], counts[order]

    def _layout(self, slots: Slots, counts: Rows, num_single: int) -> PassLayout:
        """Assign tokens to consecutive rows. In deterministic mode, if slot i has only one token, it goes to row i."""
        row_slots = np.repeat(slots, counts)
        starts = np.cumsum(counts) - counts
        positions = np.arange(len(row_slots)) - np.repeat(starts - self.table.computed[slots], counts)
        if not self.forward.num_rows:
            rows = np.arange(len(row_slots))
            return PassLayout(rows=rows, slots=row_slots, positions=positions, num_rows=len(rows))
        single = slots[:num_single]
        free = np.setdiff1d(np.arange(self.forward.num_rows), single, assume_unique=True)
        rows = np.concatenate([single, free[: len(row_slots) - num_single]])
        return PassLayout(rows=rows, slots=row_slots, positions=positions, num_rows=self.forward.num_rows)

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

    def _sample(self, hidden: Tensor, layout: PassLayout, slots: Slots, counts: Rows) -> tuple[Slots, Slots]:
        """Sample the next token of each slot whose known ids are all computed."""
        table = self.table
        done = table.computed[slots] == table.length[slots]
        slots = slots[done]
        if not len(slots):
            return slots, slots
        tokens, logprobs, kept = self.forward.draw(hidden, layout, counts, done, table, slots)
        finite = np.isfinite(logprobs)
        self.counts.sampled_tokens += int(finite.sum())
        if kept is not None:
            kept = kept.picked(np.flatnonzero(finite))
        ended = table.append(slots[finite], (tokens[finite], logprobs[finite], kept), self.version)
        return ended, slots[~finite]
