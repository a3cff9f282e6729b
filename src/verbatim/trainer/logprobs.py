"""Computes logprobs of the targets in chunks, so that full-vocabulary logits exist for one chunk at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from verbatim.core.types import Int32, MicroBatch, TrainingSample
from verbatim.models.attention import WholeSequencePlan
from verbatim.models.head import CausalLM
from verbatim.models.kept_sets import DeviceKeptSets
from verbatim.trainer.device_batch import DeviceBatch
from verbatim.trainer.parallel.sequence import SequenceGroup

BLOCKS_PER_CHUNK = 8
"""The softmax of a chunk is computed in this many blocks of rows, which keeps its float32 temporaries small."""


@dataclass(frozen=True)
class ChunkLogprobs:
    """The results of one chunk of targets."""

    logprobs_M: Tensor
    """Logprob of each target at its temperature, over its kept set: float32 [M] (float64 for float64 logits), no
    graph."""
    entropy_M: Tensor
    """Entropy in nats of the distribution that each target was sampled from: [M], same dtype."""


class AskedTargets(Protocol):
    """The fields of `DeviceTargets` that logprobs depend on."""

    target_ids_M: Tensor
    """Token ids: int64 [M]."""
    temperatures_M: Tensor
    """Divisors of the logits, above 0: float32 [M]."""
    kept_sets: DeviceKeptSets | None
    """The ids over which each target's distribution is normalised; None for the full vocabulary."""


@dataclass(frozen=True)
class TargetLogprobs:
    """A model as a source of target logprobs.

    Legend: M targets, D width, V vocabulary. In the methods, `hidden_MD` is the last hidden state that predicts each
    target.
    """

    model: CausalLM
    chunk: int
    """Maximum number of targets whose logits exist at the same time."""
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    """Creates the context manager in which forward passes run."""
    sequence: SequenceGroup | None = None
    """The ranks that each compute a slice of every micro-batch; None if this process computes whole micro-batches."""

    def batch(self, micro_batch: MicroBatch) -> DeviceBatch:
        """A micro-batch, or this rank's slice of it, on the model's device."""
        return DeviceBatch(micro_batch, self.model.device, self.sequence)

    def hidden(self, batch: DeviceBatch) -> Tensor:
        """The hidden state that predicts each target, [M, D]."""
        with self.autocast():
            return batch.hidden(self.model)

    @torch.no_grad()
    def forward(self, hidden_MD: Tensor, targets: AskedTargets) -> ChunkLogprobs:
        """Logprobs and entropies without a graph."""
        if not len(targets.target_ids_M):
            none = hidden_MD.new_zeros(0, dtype=torch.promote_types(hidden_MD.dtype, torch.float32))
            return ChunkLogprobs(none, none)
        parts = []
        for at in _chunks(len(targets.target_ids_M), self.chunk):
            logits_MV = self._logits(hidden_MD[at])
            parts.append(_log_softmax(logits_MV, targets, at).result)
            del logits_MV  # otherwise two chunks of logits would be in memory at once
        return ChunkLogprobs(torch.cat([p.logprobs_M for p in parts]), torch.cat([p.entropy_M for p in parts]))

    def backward(
        self,
        hidden_MD: Tensor,
        targets: AskedTargets,
        gradient: Callable[[slice, ChunkLogprobs], Tensor],
    ) -> None:
        """Forward and backward, chunk by chunk. Accumulates into the `grad` of the head and of all parameters in the
        graph of `hidden_MD`.

        The backward pass of a chunk runs down to its hidden states before the next chunk's logits are computed. So
        nothing is computed twice, and the gradient of the logits overwrites the logits.

        Args:
            hidden_MD: Hidden states with a graph.
            targets: The targets that they predict.
            gradient: Called with each chunk's slice of the targets and its logprobs, in order. Returns dL/dlogprob,
                float [chunk].
        """

        def down(at: slice) -> Tensor:
            """One chunk's gradient: [chunk, D]. It is a function so that its logits are freed when it returns."""
            leaf_MD = hidden_MD[at].detach().requires_grad_()
            logits_MV = self._logits(leaf_MD)
            softmax = _log_softmax(logits_MV.detach(), targets, at)
            grad_M = gradient(at, softmax.result)
            torch.autograd.backward(logits_MV, softmax.backward(grad_M))
            assert leaf_MD.grad is not None
            return leaf_MD.grad

        grads = [down(at) for at in _chunks(len(targets.target_ids_M), self.chunk)]
        torch.autograd.backward(hidden_MD, torch.cat(grads) if grads else torch.zeros_like(hidden_MD))

    def _logits(self, hidden_MD: Tensor) -> Tensor:
        """The logits, [M, V]. On a CPU the head is computed in float32 even under bfloat16 autocast, because bfloat16
        keeps only 8 bits of a logit."""
        with self.autocast():
            if hidden_MD.device.type != "cpu" or not torch.is_autocast_enabled("cpu"):
                return self.model.logits(hidden_MD)
        return self.model.logits(hidden_MD.float())

    def idle_pass(self) -> None:
        """Run one token forward and, if gradients are enabled, backward with gradient 0. A rank without work calls this
        to join the collectives that the other ranks of a sharded model run in their pass."""
        device = self.model.device
        token = torch.zeros(1, dtype=torch.int64, device=device)
        with self.autocast():
            hidden_UD = self.model.hidden(token, token, WholeSequencePlan())
        if torch.is_grad_enabled():
            torch.autograd.backward(hidden_UD, torch.zeros_like(hidden_UD))


def whole_sample(token_ids: Int32, trajectory_id: str = "") -> TrainingSample:
    """A sample whose targets are all tokens except the first, which has no context. It serves for scoring, not for
    training."""
    length = len(token_ids)
    return TrainingSample(
        token_ids=token_ids,
        loss_mask=np.arange(length) > 0,
        logprobs=np.full(length, np.nan, dtype=np.float32),
        advantages=np.zeros(length, dtype=np.float32),
        chunk_ids=np.zeros(length, dtype=np.int32),
        policy_versions=np.full(length, -1, dtype=np.int32),
        temperatures=np.ones(length, dtype=np.float32),
        trajectory_id=trajectory_id,
    )


def _chunks(num_targets: int, chunk: int) -> Iterator[slice]:
    for start in range(0, num_targets, chunk):
        yield slice(start, min(start + chunk, num_targets))


@dataclass(frozen=True)
class _Softmax:
    """A chunk's unnormalised softmax, stored in the memory of its logits."""

    exp_MV: Tensor
    """exp(logits / T - row maximum), in the memory of the logits."""
    sum_M: Tensor
    """Row sums of the exponentials."""
    target_ids_M: Tensor
    temperatures_M: Tensor
    result: ChunkLogprobs

    def backward(self, grad_M: Tensor) -> Tensor:
        """dL/dlogits, which overwrites the softmax: `(1[v = target] - softmax_v) grad / T`."""
        scale_M = (grad_M / self.temperatures_M).to(self.sum_M.dtype)
        grad_MV = self.exp_MV.mul_((-scale_M / self.sum_M)[:, None])
        grad_MV.scatter_add_(1, self.target_ids_M[:, None], scale_M[:, None].to(grad_MV.dtype))
        return grad_MV


def _log_softmax(logits_MV: Tensor, targets: AskedTargets, chunk: slice) -> _Softmax:
    """The log-softmax of a chunk, in at least float32, at each row's temperature and over its kept set. Overwrites the
    logits."""
    target_ids_M, temperatures_M, kept = targets.target_ids_M[chunk], targets.temperatures_M[chunk], targets.kept_sets
    dtype = torch.promote_types(logits_MV.dtype, torch.float32)
    logprobs, entropies, sums = [], [], []
    block = -(-len(logits_MV) // BLOCKS_PER_CHUNK)
    for at in _chunks(len(logits_MV), block):
        scaled_MV = logits_MV[at].to(dtype) / temperatures_M[at, None].to(dtype)
        outside_MV = None
        if kept is not None:
            outside_MV = kept.outside(slice(chunk.start + at.start, chunk.start + at.stop), scaled_MV.shape[1])
            scaled_MV.masked_fill_(outside_MV, -torch.inf)
        scaled_MV -= scaled_MV.amax(dim=1, keepdim=True)
        exp_MV = scaled_MV.exp()
        if outside_MV is not None:
            scaled_MV.masked_fill_(outside_MV, 0.0)  # in the entropy, 0 times -inf would be NaN
        sum_M = exp_MV.sum(dim=1)
        log_sum_M = sum_M.log()
        logprobs.append(scaled_MV.gather(1, target_ids_M[at, None])[:, 0] - log_sum_M)
        entropies.append(log_sum_M - torch.linalg.vecdot(exp_MV, scaled_MV) / sum_M)
        sums.append(sum_M)
        logits_MV[at] = exp_MV
    result = ChunkLogprobs(torch.cat(logprobs), torch.cat(entropies))
    return _Softmax(logits_MV, torch.cat(sums), target_ids_M, temperatures_M, result)
