"""Compares the sampler's logprobs of a few probes with the trainer's: does the sampler hold the published weights?

With each version the trainer publishes its own logprobs of a few fixed sequences. The sampler must find the same
ones, past any prefix cache, before it samples with that version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verbatim.types import Float32, Int32

NUM_PROBES = 4
PROBE_LENGTH = 32

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest mean |difference| of logprobs, by the less precise dtype of the two sides. Rounding alone gives about 1e-6 in
float32 and a few hundredths in bfloat16."""

NEARER = 2.0
"""How much nearer to the old weights' logprobs than to the new ones' the sampler's may be."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Probes:
    """Fixed sequences, and their logprobs under one version of the weights."""

    token_ids: tuple[Int32, ...]
    """int32 [L] each."""
    logprobs: tuple[Float32, ...]
    """Logprob of each token but the first, given those before it, at temperature 1: float32 [L - 1] each."""


def probe_sequences(vocab_size: int, context_length: int) -> tuple[Int32, ...]:
    """The sequences: random ids, the same for every run with this vocabulary.

    Ids that no text would have in this order still pass through every layer, and no cache knows them.
    """
    rng = np.random.default_rng(20_26)
    length = max(2, min(PROBE_LENGTH, context_length))
    return tuple(rng.integers(0, vocab_size, size=length, dtype=np.int32) for _ in range(NUM_PROBES))


def tolerance_of(*dtypes: str) -> float:
    """The tolerance for two sides that compute in these dtypes."""
    return max(TOLERANCES[dtype] for dtype in dtypes)


def find_mismatch(
    published: Probes, found: Sequence[Float32], *, before: Probes | None, tolerance: float
) -> str | None:
    """How a sampler's logprobs show that it does not hold the published version; None if it does.

    Small learning rates change logprobs by less than any tolerance; therefore logprobs that are `NEARER` times
    closer to those of the version before are refused too.

    Args:
        published: The trainer's logprobs.
        found: The sampler's logprobs, for the same sequences: float32 [L - 1] each.
        before: The trainer's logprobs of the version before, or None at the start.
        tolerance: Largest mean absolute difference.

    Example: published [-1.0, -2.0], found [-1.0, -2.5]: a mean difference of 0.25.
    """
    difference = _mean_difference(published, found)
    if not difference <= tolerance:  # NaN is a mismatch too
        return f"its logprobs differ by {difference:.2g} on average, more than {tolerance:g}"
    if before is not None:
        old = _mean_difference(before, found)
        if difference > NEARER * old:
            return (f"its logprobs differ by {difference:.2g} on average from those of the new weights, and by only "
                    f"{old:.2g} from those of the weights before")  # fmt: skip
    return None


def _mean_difference(probes: Probes, found: Sequence[Float32]) -> float:
    ours, theirs = np.concatenate(probes.logprobs), np.concatenate(list(found))
    assert ours.shape == theirs.shape
    return float(np.abs(ours.astype(np.float64) - theirs).mean())
