"""Defines what a run learns from. Advantages, filters and losses are pure functions; the curriculum has state.

Input: the trajectories of a group, or the logprobs of a micro-batch. Output: advantages, verdicts, the next example, or
a loss with its metrics. Import from here the types that your own loss, advantage or filter takes and returns.
Read first: `credit/advantage.py`, `filters/filter.py`, `losses/loss.py`. Imports `core` and `config`; torch only when a
loss is computed.
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
