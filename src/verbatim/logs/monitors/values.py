"""Converts configurations and distributions to values that services accept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbatim.config.key_locations import leaves

QUANTILES = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
"""The quantiles that are reported to services without histograms, by their names in metrics."""


def finite(values: Sequence[float]) -> NDArray[np.float64]:
    """The finite values, as float64."""
    found = np.asarray(values, dtype=np.float64)
    return found[np.isfinite(found)]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """The quantiles of the finite values by name, linearly interpolated; empty if there are no values.

    >>> quantiles([0.0, 10.0])
    {'min': 0.0, 'p10': 1.0, 'p50': 5.0, 'p90': 9.0, 'max': 10.0}
    """
    found = finite(values)
    if not len(found):
        return {}
    return dict(zip(QUANTILES, np.quantile(found, list(QUANTILES.values())).tolist(), strict=True))


def flat(config: Mapping[str, Any]) -> dict[str, bool | int | float | str | None]:
    """Flatten a configuration to dotted keys. Items in lists of tables are numbered from 0. Other lists become strings.

    >>> flat({"seed": 1, "orchestrator": {"train": {"env": [{"id": "game"}]}, "tags": ["a", "b"]}})
    {'seed': 1, 'orchestrator.train.env.0.id': 'game', 'orchestrator.tags': "['a', 'b']"}
    """
    return {
        key: value if value is None or isinstance(value, bool | int | float | str) else str(value)
        for key, value in leaves(config)
    }
