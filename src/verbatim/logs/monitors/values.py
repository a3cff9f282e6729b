"""Turns configurations and distributions into what services take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

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


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str | None]:
    """A configuration by dotted keys; lists of tables count from 0, other lists are texts.

    >>> flat({"seed": 1, "orchestrator": {"train": {"env": [{"id": "game"}]}, "tags": ["a", "b"]}})
    {'seed': 1, 'orchestrator.train.env.0.id': 'game', 'orchestrator.tags': "['a', 'b']"}
    """
    found: dict[str, bool | int | float | str | None] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat(value, f"{name}.")
        elif isinstance(value, list | tuple) and any(isinstance(inner, Mapping) for inner in value):
            found |= flat({str(number): inner for number, inner in enumerate(value)}, f"{name}.")
        elif value is None or isinstance(value, bool | int | float | str):
            found[name] = value
        else:
            found[name] = str(value)
    return found
