"""Compares the sampler's logprobs of a few probes with the trainer's: does the sampler hold the published weights?

With each version the trainer publishes its own logprobs of a few fixed sequences. The sampler must find the same
ones, past any prefix cache, before it samples with that version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verbatim.core.types import Float32, Int32

NUM_PROBES = 4
PROBE_LENGTH = 32
CACHED_LENGTH = 288
"""Length of the last probe, whose beginning engines keep in their prefix caches: longer than a block of a cache, 16 to
256 tokens, by `NUM_CACHED` and more."""
NUM_CACHED = 4
"""Tokens at the end of the last probe that are asked for through the prefix cache."""

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest mean |difference| of logprobs, by the less precise dtype of the two sides. Rounding alone gives about 1e-6 in
float32 and a few hundredths in bfloat16; in deep models more, which `Probes.rounding` tells."""
MISMATCH = 4.0
"""How many times `Probes.rounding` two sides may differ where one of them computes in bfloat16."""

NEARER = 2.0
"""How much nearer to the old weights' logprobs than to the new ones' the sampler's may be."""

STALE_SHARE = 0.1
"""Share of a step's change of logprobs by which those over the prefix cache may differ from those past it. Over a cache
of the weights before they differ by about 0.3 of it."""
ROUNDING = 4.0
"""How many times the rounding between the trainer and the engine may be between two computations of the engine..."""
LEAST_ROUNDING = 0.02
"""...and at least this share of the tolerance."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Probes:
    """Fixed sequences, and their logprobs under one version of the weights."""

    token_ids: tuple[Int32, ...]
    """int32 [L] each."""
    logprobs: tuple[Float32, ...]
    """Logprob of each token but the first, given those before it, at temperature 1: float32 [L - 1] each."""
    rounding: float | None = None
    """By how much these logprobs change, in the mean, where what each layer gives to the next one is rounded to
    bfloat16; None: not measured. The trainer finds it with its own weights, whatever the sampler holds."""


def probe_sequences(vocab_size: int, context_length: int) -> tuple[Int32, ...]:
    """The sequences: random ids, the same for every run with this vocabulary.

    Ids that no text would have in this order still pass through every layer, and no cache knows them. The last one is
    longer than a block of a prefix cache. Each leaves room for one more token in the context: vLLM scores no others.
    """
    rng = np.random.default_rng(20_26)
    lengths = [*[PROBE_LENGTH] * NUM_PROBES, CACHED_LENGTH]
    return tuple(
        rng.integers(0, vocab_size, size=max(2, min(length, context_length - 1)), dtype=np.int32) for length in lengths
    )


def cached_prefixes(probes: Probes) -> tuple[Int32, ...]:
    """The last probe up to each of its last tokens: what is asked through the prefix cache, the longest last.

    Example: of a last probe of 288 ids, those of 285, 286, 287 and 288.
    """
    ids = probes.token_ids[-1]
    return tuple(ids[:length] for length in range(max(2, len(ids) - NUM_CACHED + 1), len(ids) + 1))


def tolerance_of(*dtypes: str) -> float:
    """The tolerance for two sides that compute in these dtypes."""
    return max(TOLERANCES[dtype] for dtype in dtypes)


def allowed_difference(tolerance: float, probes: Probes | None) -> float:
    """The largest mean difference: the tolerance, or `MISMATCH` times what rounding alone was measured to change.

    Example: a tolerance of 0.1 and a rounding of 0.05: 0.2. With a rounding of 0.02: 0.1.
    """
    if probes is None or probes.rounding is None:
        return tolerance
    return max(tolerance, MISMATCH * probes.rounding)


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
    difference = mean_difference(published, found)
    if not difference <= tolerance:  # NaN is a mismatch too
        return f"its logprobs differ by {difference:.2g} on average, more than {tolerance:g}"
    if before is not None:
        old = mean_difference(before, found)
        if difference > NEARER * old:
            return (
                f"its logprobs differ by {difference:.2g} on average from those of the new weights, and by only "
                f"{old:.2g} from those of the weights before"
            )
    return None


def find_stale_prefix(
    published: Probes, cached: Sequence[float], whole: Float32, *, before: Probes | None, tolerance: float
) -> str | None:
    """How an engine's logprobs show that its prefix cache outlived the weights that filled it; None if they do not.

    The same engine computed the same tokens twice: over its prefix cache, and past it. What differs between the two
    is rounding, or an old cache. They may differ by a tenth of what the step changed these tokens by, and by rounding,
    whose size is known from the engine's difference from the trainer; never by more than the tolerance.

    Args:
        published: The trainer's logprobs.
        cached: The engine's logprobs of the last tokens of the last probe over its prefix cache, as `cached_prefixes`.
        whole: Its logprobs of the last probe past the cache: float32 [L - 1].
        before: The trainer's logprobs of the version before, or None at the start.
        tolerance: Largest mean absolute difference.

    Example: over the cache [-1.0, -2.5], past it [-1.0, -2.0]: a mean difference of 0.25.
    """
    past = whole[-len(cached) :].astype(np.float64)
    difference = float(np.abs(np.asarray(cached, np.float64) - past).mean())
    said = f"logprobs of a new request over the prefix cache differ by {difference:.2g} on average from those past it"
    if not difference <= tolerance:
        return f"{said}, more than {tolerance:g}"
    if before is not None:
        new, old = (p.logprobs[-1][-len(cached) :].astype(np.float64) for p in (published, before))
        change = float(np.abs(new - old).mean())
        rounding = ROUNDING * float(np.abs(whole.astype(np.float64) - published.logprobs[-1]).mean())
        if difference > max(change * STALE_SHARE, rounding, LEAST_ROUNDING * tolerance):
            return f"{said}, and the weights changed them by {change:.2g}: the cache is that of the weights before"
    return None


def mean_difference(probes: Probes, found: Sequence[Float32]) -> float:
    ours, theirs = np.concatenate(probes.logprobs), np.concatenate(list(found))
    assert ours.shape == theirs.shape
    return float(np.abs(ours.astype(np.float64) - theirs).mean())
