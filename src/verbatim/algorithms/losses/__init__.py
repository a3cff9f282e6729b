"""Contains the losses: pure tensor functions with their formula and source. Importing this package does not import
torch."""

from verbatim.algorithms.losses.cispo import cispo_loss
from verbatim.algorithms.losses.default import default_loss
from verbatim.algorithms.losses.gspo import gspo_loss
from verbatim.algorithms.losses.ipa import ipa_loss
from verbatim.algorithms.losses.loss import Loss, LossInputs, LossOutputs
from verbatim.algorithms.losses.opd import opd_loss
from verbatim.algorithms.losses.ppo import ppo_loss
from verbatim.algorithms.losses.reference import ReferenceTerm, reference_term
from verbatim.algorithms.losses.sft import sft_loss
from verbatim.algorithms.losses.tis import tis_loss

LOSSES: dict[str, Loss] = {
    "default": Loss(default_loss, level="token", reward_weight="adv_tau", teacher_weight="teacher_tau"),
    "ppo": Loss(ppo_loss, level="token"),
    "gspo": Loss(gspo_loss, level="sequence", normalizer="trajectories"),
    "cispo": Loss(cispo_loss, level="token"),
    "tis": Loss(tis_loss, level="token"),
    "ipa": Loss(ipa_loss, level="chunk"),
    "opd": Loss(opd_loss, level="token", training_mode="opd"),
    "sft": Loss(sft_loss, level="token", needs_inference_logprobs=False, training_mode="sft"),
}

__all__ = [
    "LOSSES", "Loss", "LossInputs", "LossOutputs", "ReferenceTerm", "cispo_loss", "default_loss", "gspo_loss",
    "ipa_loss", "opd_loss", "ppo_loss", "reference_term", "sft_loss", "tis_loss",
]  # fmt: skip
