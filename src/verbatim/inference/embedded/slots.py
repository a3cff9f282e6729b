"""Keeps the state of all slots in arrays with one row per slot, so that a decode step takes a few numpy calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from verbatim.core.token_tree import common_prefix_length
from verbatim.core.types import Int32, KeptSets
from verbatim.inference.embedded.sampling import seed_key
from verbatim.inference.sampler import SampleRequest

Slots = NDArray[np.intp]
Drawn: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32], KeptSets | None]
"""(the tokens sampled for some slots, their logprobs, their kept sets). A logprob is NaN if the logits are not finite.
The kept sets are None if no slot needs them."""

WAIT_FOR_PREFIX = 32
"""If another sequence is about to compute a prefix of a request's prompt that is at least this many tokens longer than
any cached prefix, the request waits for one step and then copies that prefix."""


@dataclass(frozen=True, kw_only=True)
class SlotPlacement:
    """The slot for a request, and the cached prefix with which the request begins."""

    slot: int
    """An idle slot of the batch."""
    source: int
    """The slot that holds the longest known prefix; may be `slot` itself."""
    reused: int
    """Number of tokens of the longest known prefix."""


class SlotTable:
    """S slots. The first `num_batch` slots decode; the other slots (parked) only keep prefixes of sequences that may
    return.

    A sequence has `length` known ids; the keys and values of the first `computed` ids are cached. In a decoding
    sequence, `length` is one more than `computed`; if the difference is larger, there is a prompt to process. So after
    `computed` is set to 0, the cache is rebuilt from the exact ids.

    `loaded` is the number of the weight load after which a slot's cache was begun: 0 for the initial weights, then one
    more for each load. Policy versions would not be enough, because two runs that use a server in succession may use
    the same versions for different weights.
    """

    def __init__(self, num_batch: int, num_parked: int, context_length: int) -> None:
        slots = num_batch + num_parked
        self.num_batch = num_batch
        self.ids = np.zeros((slots, context_length), dtype=np.int32)
        self.logprobs = np.zeros((slots, context_length), dtype=np.float32)
        self.versions = np.zeros((slots, context_length), dtype=np.int32)
        self.length = np.zeros(slots, dtype=np.int64)
        self.computed = np.zeros(slots, dtype=np.int64)
        self.prompt_length = np.zeros(slots, dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)
        self.rebuild_until = np.zeros(slots, dtype=np.int64)
        self.old_records = np.zeros(slots, dtype=np.int64)
        """If experts are recorded: length of the prefix whose keys were recomputed with newer weights, while its
        recorded experts still come from older weights."""
        self.active = np.zeros(slots, dtype=np.bool_)
        self.arrival = np.zeros(slots, dtype=np.int64)
        self.last_used = np.zeros(slots, dtype=np.int64)
        self.loaded = np.zeros(slots, dtype=np.int64)
        self.session: list[str] = [""] * slots
        self._slot_of: dict[str, int] = {}
        self.keys = np.zeros(slots, dtype=np.uint64)
        self.temperature = np.ones(slots, dtype=np.float32)
        self.top_k = np.zeros(slots, dtype=np.int64)
        self.top_p = np.ones(slots, dtype=np.float32)
        self.min_p = np.zeros(slots, dtype=np.float32)
        self.truncates = np.zeros(slots, dtype=np.bool_)
        self.needs_kept_sets = np.zeros(slots, dtype=np.bool_)
        self._kept: list[list[Int32]] = [[] for _ in range(slots)]
        self.stop_ids: list[frozenset[int]] = [frozenset()] * slots
        self._clock = 0

    @property
    def usage(self) -> float:
        """Share of the decoding slots' capacity that active sequences fill, 0 to 1."""
        return float(self.computed[: self.num_batch][self.active[: self.num_batch]].sum()) / (
            self.num_batch * self.ids.shape[1]
        )

    def place(self, prompt: Int32, session: str, loaded: int, *, keep: bool) -> SlotPlacement | None:
        """Choose a slot for a request; returns None if the request has to wait.

        The idle slot of the same session is preferred, then the least recently used idle slot. A cached prefix is
        reused if the weights of load number `loaded` computed it or, with `keep`, if it belongs to the same session. A
        prefix whose experts were recorded with older weights is reused only by its own session.
        """
        idle = np.flatnonzero(~self.active[: self.num_batch])
        if not len(idle):
            return None
        own = self._slot_of.get(session)
        if own is not None and not keep and self.loaded[own] != loaded:
            own = None
        at_home = self._cached(own, prompt) if own is not None else 0
        found = self._longest_prefix(prompt, loaded, own or 0, at_home)
        if found is None:
            return None
        source, reused = found
        slot = own if own is not None and at_home and own < self.num_batch and not self.active[own] else None
        if slot is None:
            slot = int(idle[np.argmin(self.last_used[idle])])
        is_as_good = self.loaded[slot] == loaded and (slot == own or not self.old_records[slot])
        if not reused or (is_as_good and self._cached(slot, prompt) == reused):
            source = slot
        return SlotPlacement(slot=slot, source=source, reused=reused)

    def _cached(self, slot: int, prompt: Int32) -> int:
        """Number of leading ids of a prompt whose keys and values a slot holds.

        The last id never counts. It is always computed, because the first token is sampled from its hidden state.
        """
        most = min(len(prompt) - 1, int(self.computed[slot]))
        return common_prefix_length(self.ids[slot, :most], prompt[:most])

    def _longest_prefix(self, prompt: Int32, loaded: int, source: int, reused: int) -> tuple[int, int] | None:
        """(the slot that caches the longest prefix, the prefix's length, which is at least `reused`). Returns None if
        the request should wait for a sequence that is about to compute a longer prefix."""
        longest = len(prompt) - 1
        while reused < longest:
            # A slot that caches a longer prefix must have the next id too, so each match leaves fewer candidates.
            usable = (self.computed > reused) & (self.loaded == loaded) & (self.old_records == 0)
            (some,) = np.nonzero(usable & (self.ids[:, reused] == prompt[reused]))
            for slot in some[np.argsort(-self.computed[some], kind="stable")].tolist():
                cached = self._cached(slot, prompt)
                if cached > reused:
                    source, reused = slot, cached
                    break
            else:
                break
        need = reused + WAIT_FOR_PREFIX
        (busy,) = np.nonzero(self.active & (self.length - self.computed > 1) & (self.length >= need))
        for slot in busy[self.loaded[busy] == loaded].tolist() if longest >= need else ():
            if np.array_equal(self.ids[slot, :need], prompt[:need]):
                return None
        return source, reused

    def parking_place(self) -> int | None:
        """The least recently used parked slot, or None if there are no parked slots."""
        if self.num_batch == len(self.session):
            return None
        return self.num_batch + int(np.argmin(self.last_used[self.num_batch :]))

    def move(self, source: int, target: int) -> None:
        """Record that the cache of `source` has moved to `target`, so that `source` is empty."""
        length = int(self.length[source])
        self.ids[target, :length] = self.ids[source, :length]
        for column in (self.computed, self.length, self.loaded, self.last_used, self.old_records):
            column[target] = column[source]
        session = self.session[source]
        self.forget(source)
        self._name(target, session)

    def _name(self, slot: int, session: str) -> None:
        """Record that the slot holds the newest sequence of this session."""
        if self._slot_of.get(self.session[slot]) == slot:
            del self._slot_of[self.session[slot]]
        self.session[slot] = session
        if session:
            self._slot_of[session] = slot

    def forget(self, slot: int) -> None:
        """Mark the slot's cache as empty; the slot becomes the least recently used."""
        self.computed[slot] = 0
        self.old_records[slot] = 0
        self.last_used[slot] = 0
        self._name(slot, "")

    def start(self, slot: int, request: SampleRequest, reused: int, loaded: int) -> None:
        """Put a request into a slot that caches the first `reused` tokens of the prompt."""
        prompt, params = request.prompt_ids, request.params
        self.ids[slot, : len(prompt)] = prompt
        self.length[slot] = self.prompt_length[slot] = len(prompt)
        self.computed[slot] = reused
        self.rebuild_until[slot] = 0
        self.limit[slot] = min(len(prompt) + params.max_tokens, self.ids.shape[1])
        self.loaded[slot] = loaded
        self._name(slot, request.session)
        self.keys[slot] = seed_key(request.seed)
        self.temperature[slot] = params.temperature
        self.top_k[slot], self.top_p[slot], self.min_p[slot] = params.top_k, params.top_p, params.min_p
        self.truncates[slot] = params.truncates
        self.needs_kept_sets[slot], self._kept[slot] = params.needs_kept_sets, []
        self.stop_ids[slot] = frozenset(params.stop_token_ids)
        self.active[slot] = True
        self._clock += 1
        self.arrival[slot] = self._clock

    def release(self, slot: int) -> None:
        """End a sequence; its cache stays until the slot is used again."""
        self.active[slot] = False
        self._clock += 1
        self.last_used[slot] = self._clock

    def rebuild_all(self, loaded: int) -> None:
        """Invalidate all caches after new weights; sequences in flight are recomputed from their ids."""
        self.loaded[:] = loaded
        self.rebuild_until = np.where(self.active, np.maximum(self.rebuild_until, self.computed), 0)
        self.computed[:] = 0

    def append(self, slots: Slots, drawn: Drawn, version: int) -> Slots:
        """Add one sampled token to each sequence; returns the slots whose sequences end with this token."""
        tokens, logprobs, kept = drawn
        at = self.length[slots]
        if kept is not None:
            for place in np.flatnonzero(self.needs_kept_sets[slots]).tolist():
                own = self._kept[slots[place]]
                del own[self.num_new(slots[place]) :]  # may be left over from a failed pass
                own.append(kept[place])
        self.ids[slots, at] = tokens
        self.logprobs[slots, at] = logprobs
        self.versions[slots, at] = version
        self.length[slots] = at + 1
        return slots[self.stopped(slots) | (at + 1 >= self.limit[slots])]

    def kept_sets(self, slot: int) -> KeptSets | None:
        """The kept sets of the tokens sampled in this slot, or None if its request does not need them."""
        return KeptSets.of(self._kept[slot][: self.num_new(slot)]) if self.needs_kept_sets[slot] else None

    def num_new(self, slot: int) -> int:
        """Number of tokens sampled in this slot."""
        return int(self.length[slot] - self.prompt_length[slot])

    def stopped(self, slots: Slots) -> NDArray[np.bool_]:
        """True for slots whose last id is one of their stop ids. A slot's stop ids are a set, so the number of stop ids
        does not affect the cost."""
        last = self.ids[slots, self.length[slots] - 1].tolist()
        hits = [token in self.stop_ids[slot] for slot, token in zip(slots.tolist(), last, strict=True)]
        return np.array(hits, dtype=np.bool_)

    def snapshot(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Lengths and cached lengths of all sequences. If a pass fails, `restore` puts them back."""
        return self.length.copy(), self.computed.copy()

    def restore(self, before: tuple[NDArray[np.int64], NDArray[np.int64]]) -> None:
        """Undo a failed pass. The repeated pass samples the same tokens, because randomness depends only on seed and
        position."""
        self.length[:], self.computed[:] = before
