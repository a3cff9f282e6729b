"""Losses: pure tensor functions with their formula and source. Importing this package imports no torch."""

from verbatim.losses.base import Loss, LossInputs, LossOutputs
from verbatim.losses.default import default_loss
from verbatim.losses.sft import sft_loss

LOSSES: dict[str, Loss] = {
    "default": Loss(default_loss, level="token"),
    "sft": Loss(sft_loss, level="token", needs_inference_logprobs=False),
}

__all__ = ["LOSSES", "Loss", "LossInputs", "LossOutputs", "default_loss", "sft_loss"]
