"""Moves a micro-batch to the trainer's device, and selects the inputs of losses from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from verbatim.algorithms.losses import LossInputs
from verbatim.core.types import MicroBatch, Targets
from verbatim.models.attention import AttentionPlan
from verbatim.models.experts import Choices, RouterPass
from verbatim.models.head import CausalLM
from verbatim.models.kept_sets import DeviceKeptSets
from verbatim.trainer.attention.flex import BLOCK as FLEX_BLOCK
from verbatim.trainer.attention.forest import forest_plan
from verbatim.trainer.attention.rows import RowsPlan
from verbatim.trainer.attention.tree import TreePlan
from verbatim.trainer.bfloat16 import rounds_now
from verbatim.trainer.last_layer import Wanted
from verbatim.trainer.linear import ROW_MULTIPLE
from verbatim.trainer.parallel.sequence import SequenceGroup, SequencePlan

_RAGGED = ("logprob_streams", "kept_sets")
"""Names of the fields of `Targets` that are not arrays with one entry per target."""


class DeviceTargets:
    """The targets of a micro-batch on a device: ids and offsets as int64; logprobs, advantages and temperatures as
    float32; [M] each. Also the kept set from which each target was sampled."""

    def __init__(self, micro_batch: MicroBatch, device: torch.device) -> None:
        targets = micro_batch.targets
        ids = partial(torch.tensor, dtype=torch.int64, device=device)
        floats = partial(torch.tensor, dtype=torch.float32, device=device)
        self.host = micro_batch
        self.target_ids_M = ids(targets.target_ids)
        self.temperatures_M = floats(targets.temperatures)
        self.inference_logprobs_M = floats(targets.inference_logprobs)
        """The sampler's logprobs; NaN means missing."""
        self.advantages_M = floats(targets.advantages)
        self.chunk_ids_M = ids(targets.chunk_ids)
        self.logprob_streams_M = {name: floats(stream) for name, stream in targets.logprob_streams.items()}
        self.offsets_M = ids(targets.offsets)
        self.kept_sets = None if targets.kept_sets is None else DeviceKeptSets(targets.kept_sets, device)

    def __len__(self) -> int:
        return len(self.host.targets)

    def inputs(self, logprobs_M: Tensor, at: slice | Tensor) -> LossInputs:
        """Loss inputs of the targets `at`, in the dtype of `logprobs_M`, the trainer's logprobs of these targets. The
        loss mask is all true, because every target is a trained token."""
        dtype = logprobs_M.dtype
        return LossInputs(
            trainer_logprobs=logprobs_M,
            inference_logprobs=self.inference_logprobs_M[at].to(dtype),
            advantages=self.advantages_M[at].to(dtype),
            loss_mask=torch.ones_like(logprobs_M, dtype=torch.bool),
            chunk_ids=self.chunk_ids_M[at],
            logprob_streams={name: stream[at].to(dtype) for name, stream in self.logprob_streams_M.items()},
        )


class DeviceBatch(DeviceTargets):
    """A micro-batch on a device, or this rank's slice of one: the tokens, and the targets predicted from them.

    Legend: U tokens including padding, T tokens in this rank's slice, M targets.

    Rows of padding round the number of tokens in each slice up to a multiple of `ROW_MULTIPLE` on a CPU, where products
    are faster in recurring shapes, or of FlexAttention's block size on CUDA. Nothing is predicted from padding and no
    other row attends to it, so the padding's gradient is 0. Padding rows are never longer than the longest real row,
    because some position encodings depend on the largest position.

    Args:
        micro_batch: The whole micro-batch, on each rank of the group.
        device: The device to compute on.
        sequence: The ranks that each hold a slice of the micro-batch; None if this rank holds all of it.
    """

    def __init__(self, micro_batch: MicroBatch, device: torch.device, sequence: SequenceGroup | None = None) -> None:
        multiple = {"cpu": ROW_MULTIPLE, "cuda": FLEX_BLOCK}.get(device.type, 1)
        multiple *= 1 if sequence is None else sequence.size
        num_padding = -micro_batch.num_tokens % multiple
        longest = int(micro_batch.position_ids.max()) + 1
        padding = np.arange(num_padding, dtype=np.int32) % longest
        paddings = [min(longest, num_padding - start) for start in range(0, num_padding, longest)]
        position_ids = np.concatenate([micro_batch.position_ids, padding])
        ids = partial(torch.tensor, dtype=torch.int64, device=device)
        self._make_plan: Callable[[], AttentionPlan]
        if micro_batch.is_rows:
            self._make_plan = partial(RowsPlan, [*micro_batch.row_lengths.tolist(), *paddings], device)
        else:
            ends = micro_batch.num_tokens + np.cumsum(paddings, dtype=np.int32)
            ends_U = np.append(micro_batch.ends, np.repeat(ends, paddings))
            self._make_plan = partial(forest_plan, position_ids, ends_U, device)
        self._sequence = sequence
        self._own_M = torch.zeros(0, dtype=torch.int64, device=device)
        mine, own = slice(0, len(position_ids)), micro_batch
        if sequence is not None:
            mine = sequence.slice(len(position_ids))
            sources = micro_batch.targets.source_positions
            numbers = np.flatnonzero((mine.start <= sources) & (sources < mine.stop))
            own = replace(micro_batch, targets=_picked(micro_batch.targets, numbers))
            self._own_M = ids(numbers)
        super().__init__(own, device)
        self.whole: DeviceTargets = self if sequence is None else DeviceTargets(micro_batch, device)
        """All targets of the micro-batch, on every rank; the batch's own targets are those of this rank's slice."""
        self.input_ids_T = ids(np.append(micro_batch.input_ids, np.zeros_like(padding))[mine])
        self.position_ids_T = ids(position_ids[mine])
        self.source_positions_M = ids(own.targets.source_positions) - mine.start
        self._wanted = None
        if sequence is None and device.type == "cpu":
            self._wanted = Wanted.among(len(position_ids), micro_batch.targets.source_positions, device)
        self.router_pass = _replay(micro_batch, num_padding, mine, device)
        """How to observe or override the routers of a mixture of experts in a pass; None to leave the routers alone."""

    @property
    def speaks(self) -> bool:
        """True on one of the ranks that share the micro-batch. Results that are the same on all of these ranks are
        reported only by this rank."""
        return self._sequence is None or self._sequence.leads

    def gathered(self, values_M: Tensor) -> Tensor:
        """Values of all targets in the micro-batch, [M], from each rank's values of its own targets. Collective."""
        if self._sequence is None:
            return values_M
        # A target belongs to exactly one rank, so a sum over zeros gathers values of different lengths.
        whole_M = values_M.new_zeros(len(self.whole)).index_copy_(0, self._own_M, values_M)
        return self._sequence.total(whole_M)

    def own(self, values_M: Tensor) -> Tensor:
        """Select this rank's part from values of all targets: the inverse of `gathered`."""
        return values_M if self._sequence is None else values_M[self._own_M]

    def add_stream(self, name: str, logprobs_M: Tensor) -> None:
        """Add another model's logprobs of this rank's targets."""
        assert name not in self.logprob_streams_M, f"the samples already have the logprob stream {name!r}"
        self.logprob_streams_M[name] = logprobs_M
        self.whole.logprob_streams_M[name] = self.gathered(logprobs_M)

    def plan(self) -> AttentionPlan:
        """A new attention plan for one pass. Plans are not reused, so that their masks are freed after the pass: with a
        sliding window the masks are as large as activations, and an optimizer step has many micro-batches."""
        whole = self._make_plan()
        return whole if self._sequence is None else SequencePlan(whole, self._sequence)

    def hidden(self, model: CausalLM) -> Tensor:
        """The hidden state that predicts each target, [M, D]."""
        assert self.host.is_rows or not model.rows_alone, "a tree for a model that mixes tokens outside attention"
        plan, wanted = self.plan(), self._wanted
        if isinstance(plan, TreePlan | RowsPlan):
            plan.wanted = wanted
        if isinstance(plan, TreePlan):
            plan.rounds = rounds_now(model.model)
        hidden_TD = model.hidden(self.input_ids_T, self.position_ids_T, plan, self.router_pass)
        if wanted is not None and len(hidden_TD) == len(wanted.tokens):  # `narrow_last_layer` returned only those
            return hidden_TD.index_select(0, wanted.places_M)
        return hidden_TD.index_select(0, self.source_positions_M)


def _picked(targets: Targets, numbers: np.ndarray) -> Targets:
    """The targets with these indices."""
    arrays = {f.name: getattr(targets, f.name)[numbers] for f in fields(targets) if f.name not in _RAGGED}
    return Targets(
        **arrays,
        logprob_streams={name: stream[numbers] for name, stream in targets.logprob_streams.items()},
        kept_sets=None if targets.kept_sets is None else targets.kept_sets.picked(numbers),
    )


def _replay(micro_batch: MicroBatch, num_padding: int, mine: slice, device: torch.device) -> RouterPass | None:
    """The router pass that replays recorded experts for this rank's tokens. Padding is treated as having no recorded
    experts."""
    routed = micro_batch.routed_experts
    if routed is None:
        return None
    small = routed.experts.dtype == np.uint8
    experts = torch.from_numpy(routed.experts if small else routed.experts.astype(np.int32))
    known = torch.from_numpy(routed.known)
    padded = (torch.cat([x, x.new_zeros(num_padding, *x.shape[1:])]) for x in (experts, known))
    return RouterPass(choices=Choices(*(x[mine].to(device) for x in padded)))


def whole_trajectory(pieces: Sequence[LossInputs], offsets_M: Tensor, length: int) -> LossInputs:
    """Loss inputs of one whole trajectory, joined from its pieces in several micro-batches.

    Args:
        pieces: Loss inputs of the trajectory's targets in each micro-batch.
        offsets_M: The position of each target in the trajectory, for all pieces in order: int64 [M].
        length: Number of tokens in the trajectory. Tokens that are not targets get logprob 0, mask false and chunk id
            -1.
    """

    def lay(parts: list[Tensor], fill: float = 0.0) -> Tensor:
        values = torch.cat(parts)
        return values.new_full((length,), fill).index_copy(0, offsets_M, values)

    return LossInputs(
        trainer_logprobs=lay([piece.trainer_logprobs for piece in pieces]),
        inference_logprobs=lay([piece.inference_logprobs for piece in pieces]),
        advantages=lay([piece.advantages for piece in pieces]),
        loss_mask=lay([piece.loss_mask for piece in pieces]),
        chunk_ids=lay([piece.chunk_ids for piece in pieces if piece.chunk_ids is not None], -1),
        logprob_streams={
            name: lay([piece.logprob_streams[name] for piece in pieces]) for name in pieces[0].logprob_streams
        },
    )
