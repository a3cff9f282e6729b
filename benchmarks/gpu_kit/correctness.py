"""Part a: what is computed on the card is what plain `transformers` computes. In the order of value."""

from __future__ import annotations

from . import attention_checks, sampler_checks, trainer_checks

_BY_NAME = {check.name: check for each in (attention_checks, sampler_checks, trainer_checks) for check in each.CHECKS}
_FIRST = (
    "gradients: dense",
    "sampler: dense",
    "flex attention",
    "experts",
    "kept sets",
    "adapters",
    "sampler: experts",
)
CHECKS = (*(_BY_NAME[name] for name in _FIRST), *(check for name, check in _BY_NAME.items() if name not in _FIRST))
"""Those that compile for long come last: where time runs out, they are the ones that did not run."""
