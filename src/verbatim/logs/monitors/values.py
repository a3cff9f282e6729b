"""Turns configurations and distributions into what services take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verbatim.config.key_locations import leaves

QUANTILES = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "max": 1.0}
"""By their names in metrics of services that have no histograms."""


def finite(values: Sequence[float]) -> NDArray[np.float64]:
    """The finite values, float64."""
    found = np.asarray(values, dtype=np.float64)
    return found[np.isfinite(found)]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """By the names of `QUANTILES`, linear between neighbours; empty of no values.

    >>> quantiles([0.0, 10.0])
    {'min': 0.0, 'p10': 1.0, 'p50': 5.0, 'p90': 9.0, 'max': 10.0}
    """
    found = finite(values)
    if not len(found):
        return {}
    return dict(zip(QUANTILES, np.quantile(found, list(QUANTILES.values())).tolist(), strict=True))


def flat(config: Mapping[str, Any]) -> dict[str, bool | int | float | str | None]:
    """A configuration by dotted keys; lists of tables count from 0, other lists are texts.

    >>> flat({"seed": 1, "orchestrator": {"train": {"env": [{"id": "game"}]}, "tags": ["a", "b"]}})
    {'seed': 1, 'orchestrator.train.env.0.id': 'game', 'orchestrator.tags': "['a', 'b']"}
    """
    return {
        key: value if value is None or isinstance(value, bool | int | float | str) else str(value)
        for key, value in leaves(config)
    }
