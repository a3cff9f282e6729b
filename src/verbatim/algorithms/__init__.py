"""Decides what is learned: advantages, filters and losses are pure functions, the curriculum has a state.

In: the trajectories of a group, or the logprobs of a micro-batch. Out: advantages, verdicts, the next example, a loss
with its metrics. What a loss, an advantage or a filter of your own takes and returns is imported from here. Read first:
`credit/advantage.py`, `filters/filter.py`, `losses/loss.py`. Imports `core`, `config`; no torch before a loss is
computed.
"""

from verbatim.algorithms.credit import ADVANTAGES, Advantage, AdvantageInputs, AdvantageOutputs
from verbatim.algorithms.filters import FILTERS, Filter, FilterVerdict
from verbatim.algorithms.losses import LOSSES, Loss, LossInputs, LossOutputs, ReferenceTerm, reference_term

__all__ = [
    "ADVANTAGES",
    "FILTERS",
    "LOSSES",
    "Advantage",
    "AdvantageInputs",
    "AdvantageOutputs",
    "Filter",
    "FilterVerdict",
    "Loss",
    "LossInputs",
    "LossOutputs",
    "ReferenceTerm",
    "reference_term",
]
