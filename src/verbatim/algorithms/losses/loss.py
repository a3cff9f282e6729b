"""Defines a loss: its inputs (one trajectory's logprobs, advantages, mask), its outputs, its level and parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from verbatim.config.parameters import check_parameters
from verbatim.core.errors import ComponentError
from verbatim.core.records.fields import NO_STREAMS, TEACHER, fill

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, init=False)
class LossInputs:
    """One whole trajectory: its samples one after the other, `seq` tokens in all.

    Arguments in this order, or by name: `trainer_logprobs`, `inference_logprobs`, `teacher_logprobs` (the stream
    "teacher"), `advantages`, `loss_mask`, `chunk_ids`; by name alone: `logprob_streams`.

    Outside `loss_mask` both logprobs are 0 and carry no gradient, so a ratio over the sequence is 1 there.
    """

    trainer_logprobs: Tensor
    """pi, the policy being trained: float [seq], carries gradient."""
    inference_logprobs: Tensor
    """mu, the policy that sampled: float [seq]."""
    advantages: Tensor
    """float [seq]."""
    loss_mask: Tensor
    """bool [seq]."""
    chunk_ids: Tensor | None = None
    """The turn of each sampled token: int [seq], -1 outside the mask."""
    logprob_streams: Mapping[str, Tensor] = field(default_factory=dict)
    """Logprobs that other models give to the sampled tokens, by the model's role ("teacher"): float [seq] each."""

    def __init__(
        self,
        trainer_logprobs: Tensor,
        inference_logprobs: Tensor,
        teacher_logprobs: Tensor | None = None,
        advantages: Tensor | None = None,
        loss_mask: Tensor | None = None,
        chunk_ids: Tensor | None = None,
        *,
        logprob_streams: Mapping[str, Tensor] = NO_STREAMS,
    ) -> None:
        if advantages is None or loss_mask is None:
            raise TypeError("LossInputs needs advantages and loss_mask; teacher_logprobs and chunk_ids may be None")
        streams = dict(logprob_streams)
        if teacher_logprobs is not None:
            streams[TEACHER] = teacher_logprobs
        fill(
            self,
            trainer_logprobs=trainer_logprobs,
            inference_logprobs=inference_logprobs,
            advantages=advantages,
            loss_mask=loss_mask,
            chunk_ids=chunk_ids,
            logprob_streams=streams,
        )

    @property
    def teacher_logprobs(self) -> Tensor | None:
        """The stream "teacher": float [seq]; None without a teacher."""
        return self.logprob_streams.get(TEACHER)


@dataclass(frozen=True)
class LossOutputs:
    """A loss and what to log beside it."""

    loss: Tensor
    """The sum over the trained tokens, a scalar; the trainer divides by the normaliser of the optimizer step."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Scalars. Averaged over trained tokens (token level) or trajectories; `*_min` / `*_max` are kept as such;
    the counts `num_*` and `masked_by_loss` are added up."""


@dataclass(frozen=True)
class Loss:
    """An entry of `LOSSES`: the function and what the trainer must know to call it."""

    function: Callable[..., LossOutputs]
    """`function(inputs: LossInputs, **parameters) -> LossOutputs`; its keyword arguments are the parameters."""
    level: Literal["token", "chunk", "sequence"]
    """"token": a sum of per-token terms, so it may be given any tokens. Otherwise it must see a trajectory whole."""
    normalizer: Literal["tokens", "trajectories"] = "tokens"
    """What the sum is divided by, counted over the whole optimizer step and all ranks."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Bound keyword arguments."""
    needs_inference_logprobs: bool = True
    """Whether a trained token without an inference logprob (NaN) is an error, or simply not read."""
    training_mode: Literal["rl", "opd", "sft"] = "rl"
    """The orchestrator.training_mode that it belongs to; modes other than "rl" bring their loss."""
    reward_weight: str | None = None
    """The parameter that weighs the advantage, if there is one: at 0 rewards are not read."""
    teacher_weight: str | None = None
    """The parameter that weighs a teacher's log ratio, if there is one: above 0 a teacher is read."""

    @property
    def reads_rewards(self) -> bool:
        """Whether a rollout without a reward teaches nothing."""
        return self.training_mode == "rl" and self.parameters.get(self.reward_weight or "") != 0

    @property
    def reads_a_teacher(self) -> bool:
        """Whether a token teaches also where its advantage is 0."""
        return self.training_mode == "opd" or bool(self.parameters.get(self.teacher_weight or ""))

    @property
    def reads_a_reference(self) -> bool:
        """Whether a parameter `kl_ref_tau`, which weighs a KL term to a reference, is not 0."""
        parameter = inspect.signature(self.function).parameters.get("kl_ref_tau")
        return bool(self.parameters.get("kl_ref_tau", parameter is not None and parameter.default))

    @property
    def name(self) -> str:
        """What messages call it."""
        function: Any = self.function
        while isinstance(function, functools.partial):  # a custom one, with its parameters
            function = function.func
        return str(getattr(function, "__name__", type(function).__name__))

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Apply the loss with its parameters."""
        return self.function(inputs, **self.parameters)


def refuse_bad_parameters(function: Callable[..., LossOutputs], **parameters: Hashable) -> None:
    """Check a loss's parameters against the types in its signature, as the keys of a file are checked.

    Raises:
        ComponentError: a parameter outside its range.
    """
    for name, message in _wrong_parameters(function, tuple(parameters.items())):
        raise ComponentError(f"trainer.loss.{name}: {message}")


@lru_cache(maxsize=64)
def _wrong_parameters(
    function: Callable[..., LossOutputs], parameters: tuple[tuple[str, Hashable], ...]
) -> tuple[tuple[str, str], ...]:
    """Once for each setting: losses are called thousands of times with the same."""
    _, wrong = check_parameters(function, dict(parameters), num_inputs=1, label="loss")
    return tuple(wrong.items())
