"""Sums the metrics that losses report, and reads them back once per batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verbatim.losses.results import as_scalar


class MetricSums:
    """Weighted means, extremes and counts of scalars that stay on their device until `result`.

    Example: `entropy` 1.0 over 3 tokens and 2.0 over 1 token is 1.25; `ratio_max` 2.0 and 5.0 is 5.0;
    `num_x` 2 and 5 is 7.
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._values: list[Tensor] = []
        self._weights: list[float] = []

    def add(self, metrics: Mapping[str, Tensor | float], weight: float) -> None:
        """Add scalars that are means over `weight` tokens or trajectories.

        Raises:
            ComponentError: something that is not one number.
        """
        for name, value in metrics.items():
            self._names.append(name)
            self._values.append(as_scalar(name, value))
            self._weights.append(weight)

    def result(self) -> dict[str, float]:
        if not self._values:
            return {}
        device = self._values[-1].device
        numbers = torch.stack([value.to(device, torch.promote_types(value.dtype, torch.float32))
                               for value in self._values])  # fmt: skip
        by_name: dict[str, list[tuple[float, float]]] = {}
        for name, number, weight in zip(self._names, numbers.tolist(), self._weights, strict=True):
            by_name.setdefault(name, []).append((number, weight))
        return {name: _reduce(name, pairs) for name, pairs in by_name.items()}


def _reduce(name: str, pairs: list[tuple[float, float]]) -> float:
    if name.endswith("_min"):
        return min(number for number, _ in pairs)
    if name.endswith("_max"):
        return max(number for number, _ in pairs)
    if name.startswith("num_") or name == "masked_by_loss":
        return sum(number for number, _ in pairs)
    return sum(number * weight for number, weight in pairs) / sum(weight for _, weight in pairs)
