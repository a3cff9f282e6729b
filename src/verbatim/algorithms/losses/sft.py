"""The supervised loss: negative log-likelihood of the trained tokens."""

from __future__ import annotations

from verbatim.algorithms.losses.loss import LossInputs, LossOutputs


def sft_loss(inputs: LossInputs) -> LossOutputs:
    """`-sum(l[M])` over the trained tokens M; uses neither inference logprobs nor advantages.

    Example: two trained tokens of probability 1/2 and 1/4 give log 2 + log 4 = log 8.
    """
    return LossOutputs(loss=-inputs.trainer_logprobs[inputs.loss_mask].sum())
