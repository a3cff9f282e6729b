"""Moves batches to the trainer and weights to the sampler: by files in a shared folder, or as broadcasts."""

from verbatim.trainer.transport.trainer_link import StepReport, TrainerLink, TrainerReady
from verbatim.trainer.transport.weights import WeightFolders

__all__ = ["StepReport", "TrainerLink", "TrainerReady", "WeightFolders"]
