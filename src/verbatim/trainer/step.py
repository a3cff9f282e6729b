"""Computes the gradient of one optimizer step: forward, loss and backward over its micro-batches."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from verbatim.algorithms.losses import Loss, LossInputs
from verbatim.algorithms.losses.ratios import k3
from verbatim.algorithms.losses.results import checked_outputs
from verbatim.core.errors import ComponentError, RunStopped, VerbatimError
from verbatim.core.machine_faults import describe, is_out_of_memory
from verbatim.core.records.fields import REFERENCE
from verbatim.core.texts import error_text
from verbatim.core.types import MicroBatch
from verbatim.trainer.device_batch import DeviceBatch, whole_trajectory
from verbatim.trainer.logprobs import ChunkLogprobs, TargetLogprobs
from verbatim.trainer.metrics import MetricSums
from verbatim.trainer.parallel.ranks import Ranks
from verbatim.trainer.router_loss import RouterLoss
from verbatim.trainer.token_values import TokenValues

logger = logging.getLogger(__name__)

_OBSERVED = ("entropy", "mismatch_kl", "ref_kl")
"""Metrics measured here, per token and for every loss. If a loss reports metrics with these names, they are dropped."""


@dataclass
class GradientPass:
    """Accumulates the gradient of one optimizer step on a model; the trainer then updates the weights.

    A token-level loss runs on each chunk of targets as soon as the chunk's logits exist. Any other loss needs whole
    trajectories. Where a trajectory spans several micro-batches, a first forward pass without a graph computes the
    logprobs, the loss runs on these logprobs as leaves, and a second pass backpropagates dL/dlogprob through the model.
    """

    lm: TargetLogprobs
    """The model in training, as a source of target logprobs."""
    loss: Loss
    denominator: int
    """Divisor of the loss summed over the optimizer step, at least 1."""
    metrics: MetricSums
    frozen: Mapping[str, TargetLogprobs] = field(default_factory=dict)
    """Frozen models, by the name of the logprob stream that each provides to the loss."""
    ranks: Ranks | None = None
    """The processes that share this optimizer step, each with its own micro-batches; None for one process."""
    router_loss: RouterLoss | None = None
    """The load-balancing loss. It adds to the gradient and is reported as a metric, but `loss_sum` does not include
    it."""
    tokens: TokenValues | None = None
    """Collects each target's logprob and gradient; None to discard them."""
    before_pass: Callable[[], None] = lambda: None
    """Called before the forward pass of each micro-batch."""
    num_trained: int = 0
    """Number of targets whose gradient has been taken so far."""
    _losses: list[tuple[Tensor, Callable[[], list[str]]]] = field(default_factory=list)
    """The loss value of each call of the loss, with a function that lists the responsible trajectories if the value is
    not finite."""
    _error: Exception | None = None
    """The first error that the loss raised. With several ranks the error is held back until all passes are done:
    otherwise the other ranks would hang in a collective."""

    def run(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Forward and backward over all micro-batches.

        With several ranks, each rank makes as many passes as the rank with the most micro-batches, and gradients are
        summed over ranks. If the loss fails on a rank, that rank still makes all its passes, and `loss_sum` raises the
        error. Any other error leaves the other ranks waiting in a collective; `Failures` then ends these ranks.

        Raises:
            ComponentError: in a single-process run, the loss returned something that cannot be minimised.
        """
        batches = [self.lm.batch(micro_batch) for micro_batch in micro_batches]
        cut = _cut(batches) if self.loss.level != "token" else []
        most_cut, most = len(cut), len(batches)
        if self.ranks is not None:
            most_cut, most = self.ranks.most(most_cut, most)
        self._add_streams(batches, num_idle=most - len(batches))
        if self.router_loss is not None:
            self.metrics.add(*self.router_loss.measure(batches, self.ranks, num_idle=most - len(batches)))
        if self.loss.level == "token":
            for batch in batches:
                self._backward(batch, partial(self._token_gradient, batch))
        else:
            self._run_whole(batches, cut, num_idle=most_cut - len(cut))
        for _ in range(most - len(batches)):
            self.lm.idle_pass()

    def loss_sum(self) -> float:
        """The loss summed over this process's micro-batches, before division by the denominator. Call it after `run`.

        Raises:
            RunStopped: the loss is not finite; the message names the trajectories.
            ComponentError: in a run with several ranks, the loss failed on this rank.
        """
        if self._error is not None:
            raise self._shared_error(self._error) from self._error
        return self._finite_loss()

    @torch.no_grad()
    def _add_streams(self, batches: Sequence[DeviceBatch], num_idle: int) -> None:
        """Score all micro-batches with the frozen models, before any backward pass.

        Models run one at a time, and each is released after its passes, so a sharded model is gathered for its own
        passes only."""
        for name, lm in self.frozen.items():
            for batch in batches:
                found = lm.forward(lm.hidden(batch), batch)
                batch.add_stream(name, found.logprobs_M)
            for _ in range(num_idle):
                lm.idle_pass()
            lm.model.calls.release()

    # ---- token-level losses

    def _token_gradient(self, batch: DeviceBatch, at: slice, result: ChunkLogprobs) -> Tensor:
        """dL/dlogprob of a chunk of targets, for a token-level loss."""
        self._observe(batch, at, result)
        leaf_M = result.logprobs_M.requires_grad_()
        inputs = batch.inputs(leaf_M, at)
        num_tokens = at.stop - at.start
        grad_M = self._gradient(inputs, leaf_M, num_tokens, partial(self._culprits, batch, at, inputs))
        if self.tokens is not None:
            # The gradient is recorded before the division, so that a token's gradient does not depend on the size of
            # the batch.
            self.tokens.add_gradient(batch, at, grad_M * self.denominator)
        return grad_M

    def _culprits(self, batch: DeviceBatch, at: slice, inputs: LossInputs) -> list[str]:
        """The trajectories in a chunk that make the chunk's loss non-finite, found by running the loss on each
        trajectory alone."""
        numbers = batch.host.targets.trajectories[at]
        culprits = []
        for number in np.unique(numbers).tolist():
            mine = torch.from_numpy(np.flatnonzero(numbers == number)).to(self.lm.model.device)
            alone = batch.inputs(inputs.trainer_logprobs.detach()[mine], at.start + mine)
            if not torch.isfinite(self.loss(alone).loss):
                culprits.append(batch.host.trajectory_ids[number])
        return culprits or list(batch.host.trajectory_ids)  # each trajectory's loss is finite, but not their sum

    # ---- losses that see trajectories whole

    def _run_whole(self, batches: list[DeviceBatch], cut: list[int], num_idle: int) -> None:
        """Train batches that share a trajectory with another batch (`cut`) in two passes, and all other batches in one
        pass."""
        with torch.no_grad():
            logprobs = [self._logprobs(batches[i], self.lm.hidden(batches[i])) for i in cut]
            for _ in range(num_idle):
                self.lm.idle_pass()
            self.lm.model.calls.release()
        if cut:
            grads = self._whole_gradients([batches[i] for i in cut], logprobs)
            for i, grad_M in zip(cut, grads, strict=True):
                self._carry_back(batches[i], grad_M)
        for i, batch in enumerate(batches):  # ranks may mix both kinds: each kind makes a forward and a backward pass
            if i not in cut:
                self._backward_alone(batch)

    def _backward_alone(self, batch: DeviceBatch) -> None:
        """Forward, loss and backward of a batch that shares no trajectory with another batch."""
        self.before_pass()
        hidden_MD = self.lm.hidden(batch)
        (grad_M,) = self._whole_gradients([batch], [self._logprobs(batch, hidden_MD.detach())])
        self._carry_back(batch, grad_M, hidden_MD)

    def _carry_back(self, batch: DeviceBatch, grad_M: Tensor, hidden_MD: Tensor | None = None) -> None:
        """Backpropagate a dL/dlogprob that is already known, with a forward pass first if there is no `hidden_MD`."""
        if self.tokens is not None:
            self.tokens.add_gradient(batch, slice(0, len(batch)), grad_M * self.denominator)
        self._backward(batch, lambda at, _: grad_M[at], hidden_MD)

    def _logprobs(self, batch: DeviceBatch, hidden_MD: Tensor) -> Tensor:
        """The logprobs of all targets in the micro-batch; every rank that shares the micro-batch gets all of them."""
        result = self.lm.forward(hidden_MD, batch)
        if len(batch):
            self._observe(batch, slice(0, len(batch)), result)
        return batch.gathered(result.logprobs_M)

    def _whole_gradients(self, shared: list[DeviceBatch], logprobs: list[Tensor]) -> list[Tensor]:
        """dL/dlogprob of this rank's targets, for trajectories that lie entirely in these batches.

        Ranks that share the batches compute the same loss from the logprobs of all targets. Only one of these ranks
        adds this loss to `loss_sum` and the metrics; otherwise the loss would be counted once per rank.
        """
        batches, speaks = [batch.whole for batch in shared], all(batch.speaks for batch in shared)
        grads = [torch.zeros_like(logprobs_M) for logprobs_M in logprobs]
        pieces: dict[str, list[tuple[int, Tensor]]] = {}
        lengths: dict[str, int] = {}
        for i, batch in enumerate(batches):
            numbers = batch.host.targets.trajectories
            order = torch.from_numpy(np.argsort(numbers, kind="stable")).to(self.lm.model.device)
            picked = torch.split_with_sizes(order, np.bincount(numbers).tolist())
            for trajectory_id, length, at in zip(
                batch.host.trajectory_ids, batch.host.trajectory_lengths.tolist(), picked, strict=True
            ):
                pieces.setdefault(trajectory_id, []).append((i, at))
                lengths[trajectory_id] = length
        for trajectory_id, places in pieces.items():
            leaf_M = torch.cat([logprobs[i][at] for i, at in places]).requires_grad_()
            sizes = [len(at) for _, at in places]
            parts = torch.split_with_sizes(leaf_M, sizes)
            inputs = whole_trajectory(
                [batches[i].inputs(part, at) for part, (i, at) in zip(parts, places, strict=True)],
                torch.cat([batches[i].offsets_M[at] for i, at in places]),
                lengths[trajectory_id],
            )
            grad_M = self._gradient(inputs, leaf_M, 1, partial(list, [trajectory_id]), counts=speaks)
            for (i, at), part in zip(places, torch.split_with_sizes(grad_M, sizes), strict=True):
                grads[i][at] = part
        return [batch.own(grad_M) for batch, grad_M in zip(shared, grads, strict=True)]

    # ---- both

    def _backward(
        self, batch: DeviceBatch, gradient: Callable[[slice, ChunkLogprobs], Tensor], hidden_MD: Tensor | None = None
    ) -> None:
        """Backward pass of a micro-batch, with a forward pass first if there is no `hidden_MD`."""
        if hidden_MD is None:
            self.before_pass()
            hidden_MD = self.lm.hidden(batch)
        self.lm.backward(hidden_MD, batch, gradient)
        self.num_trained += len(batch)

    def _gradient(
        self,
        inputs: LossInputs,
        leaf_M: Tensor,
        weight: float,
        culprits: Callable[[], list[str]],
        *,
        counts: bool = True,
    ) -> Tensor:
        """dL/dlogprob over these inputs, divided by the optimizer step's denominator."""
        try:
            return self._checked_gradient(inputs, leaf_M, weight, culprits, counts)
        except Exception as error:
            if self.ranks is None:
                raise
            self._error = self._error or error
            return torch.zeros_like(leaf_M)  # a zero gradient keeps this rank in step; the optimizer step is discarded

    def _checked_gradient(
        self, inputs: LossInputs, leaf_M: Tensor, weight: float, culprits: Callable[[], list[str]], counts: bool
    ) -> Tensor:
        with torch.enable_grad():
            total, metrics = checked_outputs(self.loss(inputs), self.loss.name)
            (grad_M,) = torch.autograd.grad(total.reshape(()) / self.denominator, leaf_M)
        # `loss_sum` checks at the end that all values are finite: a check here would wait for the device.
        if counts:
            self._losses.append((total.detach().reshape(()), culprits))
            self.metrics.add({k: v for k, v in metrics.items() if k not in _OBSERVED}, weight)
        return grad_M

    def _observe(self, batch: DeviceBatch, at: slice, result: ChunkLogprobs) -> None:
        """Record the metrics that do not depend on the loss (`_OBSERVED`)."""
        if self.tokens is not None:
            self.tokens.add_logprobs(batch, at, result.logprobs_M)
        num_tokens = at.stop - at.start
        self.metrics.add({"entropy": result.entropy_M.mean()}, num_tokens)
        if REFERENCE in batch.logprob_streams_M:
            ahead = batch.logprob_streams_M[REFERENCE][at] - result.logprobs_M.detach()
            self.metrics.add({"ref_kl": k3(ahead).mean()}, num_tokens)
        if self.loss.needs_inference_logprobs:
            log_ratio = result.logprobs_M.detach() - batch.inference_logprobs_M[at]
            self.metrics.add({"mismatch_kl": (log_ratio.expm1() - log_ratio).mean()}, num_tokens)

    def _shared_error(self, error: Exception) -> VerbatimError:
        """Convert an error of the loss into an error that `Ranks.agree` can raise on all ranks."""
        if isinstance(error, VerbatimError):
            return error
        if is_out_of_memory(error):
            return RunStopped(describe(error))
        logger.error("the loss %s failed", self.loss.name, exc_info=error)
        return ComponentError(f"the loss {self.loss.name} raised {error_text(error)}")

    def _finite_loss(self) -> float:
        """The sum of all losses.

        Raises:
            RunStopped: a loss is not finite; the message names the trajectories.
        """
        if not self._losses:
            return 0.0
        values = torch.stack([value for value, _ in self._losses]).tolist()
        total = sum(values)
        for value, (_, culprits) in zip(values, self._losses, strict=True):
            if not math.isfinite(value):
                names = culprits()
                raise RunStopped(f"the loss is {value} on {len(names)} trajectories: {', '.join(names[:5])}")
        return float(total)


def _cut(batches: Sequence[DeviceBatch]) -> list[int]:
    """Indices of the batches that share a trajectory with another batch."""
    places: dict[str, set[int]] = {}
    for i, batch in enumerate(batches):
        for trajectory_id in batch.host.trajectory_ids:
            places.setdefault(trajectory_id, set()).add(i)
    return sorted(set().union(*(at for at in places.values() if len(at) > 1)))
