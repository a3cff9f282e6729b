"""One forward pass after the other over all sequences in flight: prompt tokens and decode tokens side by side."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verbatim.errors import ModelError
from verbatim.inference.base import SampleRequest
from verbatim.inference.kv_cache import CachePlan, Group, KeyValueCache, KeyValueShape, blocks_of
from verbatim.inference.sampling import Truncation, draw, uniforms
from verbatim.inference.slots import Slots, SlotTable
from verbatim.models.head import CausalLM

_ROW_QUANTUM = 32
"""Deterministic passes have a multiple of this many rows: matrix kernels then have no remainder rows, and
element-wise kernels no remainder elements, that are computed by other instructions than the rest."""

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
        _refuse_batch_dependent_positions(model.config)
        self.model = model
        self.config = config
        self.version = version
        self.counts = Counts()
        dtype = model.output.weight.dtype
        shape = probe_shape(model)
        # In deterministic mode row i of a decode pass is slot i, so there are as many slots as rows.
        self.num_rows = -(-config.num_slots // _ROW_QUANTUM) * _ROW_QUANTUM if config.deterministic else 0
        self.cache = KeyValueCache(shape, max(config.num_slots, self.num_rows), dtype=dtype, device=model.device)
        per_slot = shape.bytes_per_token(dtype) * config.context_length
        num_parked = min(4 * config.num_slots, _PARKING_BUDGET // per_slot)
        self.parked = KeyValueCache(shape, num_parked, dtype=dtype, device=model.device)
        self.table = SlotTable(config.num_slots, num_parked, config.context_length)
        if config.deterministic:
            self._refuse_row_dependent_kernels()

    # ---- sequences come and go

    @torch.inference_mode()
    def add(self, request: SampleRequest) -> int | None:
        """Give a request a slot, with the longest cached prefix; None if it has to wait."""
        table = self.table
        place = table.place(request.prompt_ids, request.session, self.version, keep=self.config.keep_cache)
        if place is None:
            return None
        slot, source, reused = place.slot, place.source, place.reused
        cache_version = int(table.cache_version[source]) if reused else self.version
        stays = reused if source == slot else 0
        if table.session[slot] != request.session and table.computed[slot] > stays:
            self._park(slot, keep_out=source)
        if source != slot:
            held_by, row = self._where(source)
            self.cache.copy_prefix(held_by, row, slot, reused)
            if source >= table.num_batch and table.session[source] == request.session:
                table.forget(source)
        self.cache.reserve(len(request.prompt_ids))
        table.start(slot, request, reused, cache_version)
        self.counts.prefix_hit_tokens += reused
        return slot

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
        self.table.release(slot)
        self.table.forget(slot)
        self.cache.clear(slot)

    @torch.inference_mode()
    def set_version(self, version: int) -> None:
        """The weights have changed: from now on tokens carry this version."""
        self.version = version
        if not self.config.keep_cache:
            self.table.rebuild_all(version)
            self.cache.reset()
            self.parked.reset()

    def _park(self, slot: int, *, keep_out: int) -> None:
        """Save an idle slot's cache, if a session may come back to it, before another sequence takes the slot."""
        table = self.table
        place = table.parking_place()
        if place is None or place == keep_out or not table.session[slot]:
            return
        self.parked.copy_prefix(self.cache, slot, place - table.num_batch, int(table.computed[slot]))
        table.move(slot, place)

    def _where(self, slot: int) -> tuple[KeyValueCache, int]:
        batch = self.table.num_batch
        return (self.cache, slot) if slot < batch else (self.parked, slot - batch)

    # ---- one pass

    @torch.inference_mode()
    def step(self) -> tuple[Slots, Slots]:
        """One forward pass: every decoding sequence gets a token, prompts are processed as far as the pass allows.

        Returns:
            The slots whose sequences ended, and those whose logits are not finite numbers.
        """
        table = self.table
        ahead = np.where(table.active, table.length - table.computed, 0)[: table.num_batch]
        decode, prefill = np.flatnonzero(ahead == 1), np.flatnonzero(ahead > 1)
        if not len(decode) and not len(prefill):
            return decode, decode
        self.cache.reserve(int(table.length[: table.num_batch][table.active[: table.num_batch]].max()))
        if len(prefill):
            prefill, taken = self._share_out(prefill, ahead, len(decode))
            return self._mixed_pass(decode, prefill, taken)
        return self._decode_pass(decode)

    def _share_out(self, prefill: Slots, ahead: Rows, num_decode: int) -> tuple[Slots, Rows]:
        """How many tokens of each prompt this pass takes, first come first served."""
        room = self.config.prefill_chunk
        if self.config.deterministic:
            room = min(room, self.num_rows - num_decode)
        prefill = prefill[np.argsort(self.table.arrival[prefill])]
        before = np.cumsum(ahead[prefill]) - ahead[prefill]
        taken = np.clip(room - before, 0, ahead[prefill])
        return prefill[taken > 0], taken[taken > 0]

    def _decode_pass(self, decode: Slots) -> tuple[Slots, Slots]:
        table, device = self.table, self.model.device
        positions = table.computed[decode]
        slots_W, positions_W = _tensor(decode, device), _tensor(positions, device)
        num_blocks = blocks_of(int(positions.max()) + 1)
        write_rows = None
        if self.config.deterministic:
            write_rows = slots_W
            ids_T = np.zeros(self.num_rows, dtype=np.int64)
            positions_T = np.zeros(self.num_rows, dtype=np.int64)
            ids_T[decode], positions_T[decode] = table.ids[decode, positions], positions
            group = _group(None, None, None, _tensor(positions_T, device)[:, None], num_blocks)
        else:
            ids_T, positions_T = table.ids[decode, positions].astype(np.int64), positions
            group = self._decode_group(slots_W, positions_W, num_blocks)
        plan = CachePlan(cache=self.cache, write_rows=write_rows, write_slots=slots_W, write_positions=positions_W,
                         groups=(group,))  # fmt: skip
        hidden = self.model.hidden(_tensor(ids_T, device), _tensor(positions_T, device), plan)
        self._account(decode, np.ones(len(decode), dtype=np.int64))
        return self._sample(hidden, decode if self.config.deterministic else None, decode)

    def _decode_group(self, slots_W: Tensor, positions_W: Tensor, num_blocks: int) -> Group:
        """All slots in place where most of them decode; where few do, copying their keys costs less."""
        num_slots = self.cache.num_slots
        if len(slots_W) == num_slots:
            return _group(None, None, None, positions_W[:, None], num_blocks)
        if len(slots_W) < 0.6 * num_slots:
            return _group(None, None, slots_W, positions_W[:, None], num_blocks)
        positions = positions_W.new_zeros(num_slots)
        positions[slots_W] = positions_W
        rows = torch.arange(len(slots_W), device=slots_W.device)
        return _group(rows, slots_W, None, positions[:, None], num_blocks)

    def _mixed_pass(self, decode: Slots, prefill: Slots, taken: Rows) -> tuple[Slots, Slots]:
        """The decode rows first, then `taken` prompt tokens of each prefilling slot."""
        table, device = self.table, self.model.device
        slots = np.concatenate([decode, prefill])
        counts = np.concatenate([np.ones(len(decode), dtype=np.int64), taken])
        starts = np.cumsum(counts) - counts
        row_slots = np.repeat(slots, counts)
        row_positions = np.arange(counts.sum()) - np.repeat(starts - table.computed[slots], counts)
        num_real = len(row_slots)
        write_rows = None
        slots_T, positions_T = _tensor(row_slots, device), _tensor(row_positions, device)
        ids_T = _tensor(table.ids[row_slots, row_positions].astype(np.int64), device)
        slots_W, positions_W = slots_T, positions_T
        if self.config.deterministic:
            write_rows = torch.arange(num_real, device=device)
            slots_T, positions_T, ids_T = (_padded(t, self.num_rows) for t in (slots_T, positions_T, ids_T))
            num_blocks = blocks_of(int(row_positions.max()) + 1)
            groups = [_group(None, None, slots_T, positions_T[:, None], num_blocks)]
        else:
            groups = [self._ragged_group(slots[of], starts[of], counts[of]) for of in _similar(counts)]
        plan = CachePlan(cache=self.cache, write_rows=write_rows, write_slots=slots_W, write_positions=positions_W,
                         groups=groups)  # fmt: skip
        hidden = self.model.hidden(ids_T, positions_T, plan)
        self._account(slots, counts)
        done = table.computed[slots] == table.length[slots]
        return self._sample(hidden, (starts + counts - 1)[done], slots[done])

    def _ragged_group(self, slots: Slots, starts: Rows, counts: Rows) -> Group:
        """Sequences with similar numbers of new tokens, padded to the longest."""
        device = self.model.device
        longest, total = int(counts.max()), int(counts.sum())
        within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        sequence = np.repeat(np.arange(len(slots)), counts)
        positions = np.zeros((len(slots), longest), dtype=np.int64)
        positions[sequence, within] = self.table.computed[slots][sequence] + within
        return _group(
            _tensor(starts[sequence] + within, device), _tensor(sequence * longest + within, device),
            _tensor(slots, device), _tensor(positions, device), blocks_of(int(positions.max()) + 1),
        )  # fmt: skip

    def _account(self, slots: Slots, counts: Rows) -> None:
        table, done = self.table, self.counts
        before = table.computed[slots]
        after = before + counts
        rebuilt = np.clip(np.minimum(after, table.rebuild_until[slots]) - before, 0, None).sum()
        first = np.maximum(before, table.rebuild_until[slots])
        prompt = np.clip(np.minimum(after, table.prompt_length[slots]) - first, 0, None).sum()
        table.computed[slots] = after
        done.recomputed_tokens += int(rebuilt)
        done.prefill_tokens += int(prompt)
        done.forward_passes += 1

    def _sample(self, hidden: Tensor, rows: Slots | None, slots: Slots) -> tuple[Slots, Slots]:
        """Draw the next token of each slot from its row of hidden states (None: row i belongs to slots[i]).

        A deterministic pass computes and draws in every row, because shapes decide bits.
        """
        table, device = self.table, hidden.device
        if not len(slots):
            return slots, slots
        spread = self.config.deterministic
        if rows is not None and not spread:
            hidden = hidden[_tensor(rows, device)]
        rows = np.arange(len(slots)) if rows is None or not spread else rows

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
        """The same token in every row, in every slot, must give the same bits in every row."""
        self.cache.reserve(1)
        slots = torch.arange(self.num_rows, device=self.model.device)
        zeros = torch.zeros_like(slots)
        group = _group(None, None, None, zeros[:, None], 1)
        plan = CachePlan(cache=self.cache, write_rows=None, write_slots=slots, write_positions=zeros, groups=(group,))
        logits = self.model.logits(self.model.hidden(zeros + 1, zeros, plan))
        if not bool((logits == logits[0]).all()):
            raise ModelError(
                f"deterministic sampling: on this machine a pass of {self.num_rows} rows gives other bits in other "
                "rows; use another inference.max_batch_size, num_threads = 1, or inference.deterministic = false"
            )


def probe_shape(model: CausalLM) -> KeyValueShape:
    """Read the shape of keys and values off one forward pass of the model itself.

    Raises:
        ModelError: layers whose shapes differ, which one cache cannot hold.
    """
    shapes: dict[int, tuple[int, int, int]] = {}

    class _Probe:
        def attend(
            self, layer_index: int, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, *, scale: float,
            sliding_window: int | None,
        ) -> Tensor:  # fmt: skip
            shapes[layer_index] = (key_BKTD.shape[1], key_BKTD.shape[-1], value_BKTD.shape[-1])
            heads = query_BHTD.shape[1]
            return value_BKTD.repeat_interleave(heads // value_BKTD.shape[1], dim=1).transpose(1, 2)

    with torch.inference_mode():
        one = torch.zeros(1, dtype=torch.int64, device=model.device)
        model.hidden(one, one, _Probe())
    if len(set(shapes.values())) != 1 or sorted(shapes) != list(range(len(shapes))):
        raise ModelError(f"{type(model.model).__name__} has layers with different key/value shapes {shapes}; the "
                         "embedded sampler's cache needs the same (heads, key size, value size) in all")  # fmt: skip
    kv_heads, key_size, value_size = shapes[0]
    return KeyValueShape(num_layers=len(shapes), num_kv_heads=kv_heads, key_size=key_size, value_size=value_size)


def _refuse_batch_dependent_positions(config: Any) -> None:
    """Some position encodings change with the longest sequence of the batch: cached keys would be of another model."""
    found = sorted({"dynamic", "longrope"} & set(_rope_types(getattr(config, "rope_parameters", None))))
    if found:
        raise ModelError(f"the model's position encoding ({found[0]!r} rope) depends on the longest sequence of the "
                         "batch, so a cached key would differ from the trainer's; use a model without it")  # fmt: skip


def _rope_types(parameters: Any) -> Iterable[str]:
    if isinstance(parameters, dict):
        for name, value in parameters.items():
            if name == "rope_type" and isinstance(value, str):
                yield value
            else:
                yield from _rope_types(value)


def _similar(counts: Rows) -> list[Slots]:
    """Indices of sequences whose numbers of new tokens lie between the same two powers of two."""
    kind = np.ceil(np.log2(counts)).astype(np.int64)
    return [np.flatnonzero(kind == k) for k in np.unique(kind)]


def _group(
    rows: Tensor | None, cells: Tensor | None, slots: Tensor | None, positions: Tensor, num_blocks: int
) -> Group:
    return Group(rows=rows, cells=cells, slots_B=slots, positions_BQ=positions, num_blocks=num_blocks)


def _padded(values: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, length - len(values)))


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)
