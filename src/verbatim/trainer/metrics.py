"""Accumulates the metrics that losses report on the device, and reads them back once per batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from verbatim.algorithms.losses.results import as_scalar


class MetricSums:
    """Weighted means, extremes and counts of scalars that stay on their device until `result`: reading them after each
    loss would make the host wait for the device. The metric's name decides how values are combined: the minimum for
    `_min`, the maximum for `_max`, the sum for `num_`, otherwise a weighted mean.

    Example: `entropy` 1.0 over 3 tokens and 2.0 over 1 token is 1.25; `ratio_max` 2.0 and 5.0 is 5.0;
    `num_x` 2 and 5 is 7.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._values: list[Tensor] = []
        self._weights: list[float] = []
        self._of_others: list[Mapping[str, Sequence[float]]] = []

    def add(self, metrics: Mapping[str, Tensor | float], weight: float) -> None:
        """Add scalars that are means over `weight` tokens or trajectories.

        Raises:
            ComponentError: a metric is not a single number.
        """
        for name, value in metrics.items():
            self._names.append(name)
            self._values.append(as_scalar(name, value))
            self._weights.append(weight)

    def add_partial(self, partial: Mapping[str, Sequence[float]]) -> None:
        """Add the `partial()` of another process."""
        self._of_others.append(partial)

    def result(self) -> dict[str, float]:
        """The combined value of each metric, by name, including the values added with `add_partial`."""
        by_name: dict[str, list[Sequence[float]]] = {}
        for partial in [*self._of_others, self.partial()]:
            for name, pair in partial.items():
                by_name.setdefault(name, []).append(pair)
        joined = {name: _join(name, pairs) for name, pairs in by_name.items()}
        return {name: value / weight if weight else value for name, (value, weight) in joined.items()}

    def partial(self) -> dict[str, Sequence[float]]:
        """This process's pair for each metric, by name: (weighted sum, sum of weights) for a mean; (value, 0) for an
        extreme or a count."""
        if not self._values:
            return {}
        device = self._values[-1].device
        numbers = torch.stack(
            [value.to(device, torch.promote_types(value.dtype, torch.float32)) for value in self._values]
        )
        by_name: dict[str, list[tuple[float, float]]] = {}
        for name, number, weight in zip(self._names, numbers.tolist(), self._weights, strict=True):
            by_name.setdefault(name, []).append((number, weight))
        return {
            name: _join(name, pairs if _kind(name) is not sum else [(n * weight, weight) for n, weight in pairs])
            for name, pairs in by_name.items()
        }


def _kind(name: str) -> object:
    """How values of a metric are combined: `min`, `max`, "count" (a plain sum) or `sum` (a weighted mean)."""
    if name.endswith("_min"):
        return min
    if name.endswith("_max"):
        return max
    return "count" if name.startswith("num_") or name == "masked_by_loss" else sum


def _join(name: str, pairs: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Combine pairs of the form that `partial` returns into one pair."""
    values = [value for value, _ in pairs]
    kind = _kind(name)
    if kind is min or kind is max:
        return (min if kind is min else max)(values), 0
    return sum(values), 0 if kind == "count" else sum(weight for _, weight in pairs)
