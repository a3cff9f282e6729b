"""Losses: pure tensor functions with their formula and source. Importing this package imports no torch."""

from verbatim.losses.base import Loss, LossInputs, LossOutputs

__all__ = ["Loss", "LossInputs", "LossOutputs"]
