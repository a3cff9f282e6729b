"""How batches reach the trainer, and weights the sampler."""

from verbatim.transport.base import StepReport, TrainerLink, TrainerReady
from verbatim.transport.weights import WeightFolders

__all__ = ["StepReport", "TrainerLink", "TrainerReady", "WeightFolders"]
