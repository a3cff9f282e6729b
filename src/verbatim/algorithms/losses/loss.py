"""Defines a loss: its inputs (logprobs, advantages and mask of a trajectory), outputs, level and parameters."""

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
    """One whole trajectory: its samples concatenated, `seq` tokens in total.

    The first arguments may be positional, in this order: `trainer_logprobs`, `inference_logprobs`, `teacher_logprobs`
    (the stream "teacher"), `advantages`, `loss_mask`, `chunk_ids`. `logprob_streams` is keyword-only.

    Outside `loss_mask`, trainer and inference logprobs are 0 and have no gradient, so their ratio is 1 there.
    """

    trainer_logprobs: Tensor
    """Logprobs under pi, the policy being trained: float [seq], with gradient."""
    inference_logprobs: Tensor
    """Logprobs under mu, the policy that sampled: float [seq]."""
    advantages: Tensor
    """Advantage of each token: float [seq]."""
    loss_mask: Tensor
    """True for tokens that are trained: bool [seq]."""
    chunk_ids: Tensor | None = None
    """Turn index of each sampled token: int [seq], -1 outside the mask."""
    logprob_streams: Mapping[str, Tensor] = field(default_factory=dict)
    """Logprobs of other models for the sampled tokens, by the model's role ("teacher"): float [seq] each."""

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
        """The stream "teacher", float [seq], or None without a teacher."""
        return self.logprob_streams.get(TEACHER)


@dataclass(frozen=True)
class LossOutputs:
    """A loss and its metrics."""

    loss: Tensor
    """Scalar sum over the trained tokens; the trainer divides it by the normalizer of the optimizer step."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Scalars. They are averaged over trained tokens (token level) or trajectories; `*_min` and `*_max` are kept as
    minimum and maximum; the counts `num_*` and `masked_by_loss` are added up."""


@dataclass(frozen=True)
class Loss:
    """An entry of `LOSSES`: the function, and what the trainer must know to call the function."""

    function: Callable[..., LossOutputs]
    """`function(inputs: LossInputs, **parameters) -> LossOutputs`; its keyword arguments are the parameters."""
    level: Literal["token", "chunk", "sequence"]
    """"token": a sum of per-token terms, so any tokens may be passed. The other levels need a whole trajectory."""
    normalizer: Literal["tokens", "trajectories"] = "tokens"
    """The divisor of the sum, counted over the whole optimizer step and all ranks."""
    parameters: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments from the configuration file, passed with every call."""
    needs_inference_logprobs: bool = True
    """If True, a trained token without an inference logprob (NaN) is an error; if False, inference logprobs are not
    used."""
    training_mode: Literal["rl", "opd", "sft"] = "rl"
    """The `orchestrator.training_mode` that the loss is for; modes other than "rl" have their own loss."""
    reward_weight: str | None = None
    """Name of the parameter that weights the advantage, or None if the loss has no such parameter. Rewards are not used
    if the parameter is 0."""
    teacher_weight: str | None = None
    """Name of the parameter that weights the teacher's log ratio, or None if the loss has no such parameter. A teacher
    is used if the parameter is above 0."""

    @property
    def reads_rewards(self) -> bool:
        """True if a rollout without a reward teaches nothing."""
        return self.training_mode == "rl" and self.parameters.get(self.reward_weight or "") != 0

    @property
    def reads_a_teacher(self) -> bool:
        """True if a token can have a policy gradient although its advantage is 0."""
        return self.training_mode == "opd" or bool(self.parameters.get(self.teacher_weight or ""))

    @property
    def reads_a_reference(self) -> bool:
        """True if the parameter `kl_ref_tau`, which weights the reference KL term, is not 0."""
        parameter = inspect.signature(self.function).parameters.get("kl_ref_tau")
        return bool(self.parameters.get("kl_ref_tau", parameter is not None and parameter.default))

    @property
    def name(self) -> str:
        """The name of the loss in messages."""
        function: Any = self.function
        while isinstance(function, functools.partial):  # a custom loss with bound parameters
            function = function.func
        return str(getattr(function, "__name__", type(function).__name__))

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Apply the loss with its parameters."""
        return self.function(inputs, **self.parameters)


def refuse_bad_parameters(function: Callable[..., LossOutputs], **parameters: Hashable) -> None:
    """Check a loss's parameters against the types in its signature, just as parameters from a file are checked.

    Raises:
        ComponentError: a parameter is outside its range.
    """
    for name, message in _wrong_parameters(function, tuple(parameters.items())):
        raise ComponentError(f"trainer.loss.{name}: {message}")


@lru_cache(maxsize=64)
def _wrong_parameters(
    function: Callable[..., LossOutputs], parameters: tuple[tuple[str, Hashable], ...]
) -> tuple[tuple[str, str], ...]:
    """A pair (name, message) for each wrong parameter.

    The result is cached, because losses are called thousands of times with the same parameters.
    """
    _, wrong = check_parameters(function, dict(parameters), num_inputs=1, label="loss")
    return tuple(wrong.items())
