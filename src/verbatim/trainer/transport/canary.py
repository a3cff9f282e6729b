"""The weight canary: compares sampler and trainer logprobs of a few probes, to check that the sampler holds the
published weights.

With each version, the trainer publishes its own logprobs of a few fixed sequences. The sampler must compute the same
logprobs, bypassing any prefix cache, before it samples with that version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verbatim.core.types import Float32, Int32

NUM_PROBES = 4
"""Number of short probes. In addition, there is one long probe for the prefix cache."""
PROBE_LENGTH = 32
"""Number of tokens in a short probe."""
CACHED_LENGTH = 288
"""Number of tokens in the long probe, which is the last probe. An engine caches prefixes in blocks of 16 to 256 tokens;
the long probe is longer than a block by more than `NUM_CACHED` tokens, so that the beginning of the probe is cached."""
NUM_CACHED = 4
"""Number of tokens at the end of the long probe whose logprobs are requested through the prefix cache."""

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest mean absolute difference of logprobs, by the less precise dtype of trainer and sampler. Rounding alone gives
about 1e-6 in float32 and a few hundredths in bfloat16; deep models have larger rounding errors, which `Probes.rounding`
measures."""
MISMATCH = 4.0
"""If trainer or sampler computes in bfloat16, the logprobs of the two may differ by up to this many times
`Probes.rounding`."""

NEARER = 2.0
"""The sampler's logprobs may be at most this many times closer to the logprobs of the old weights than to the logprobs
of the new weights."""

STALE_SHARE = 0.1
"""A step changes the probes' logprobs by some amount. Logprobs through the prefix cache and logprobs that bypass the
cache may differ by this share of that amount. If the previous weights filled the cache, the two differ by about 0.3 of
that amount."""
ROUNDING = 4.0
"""Two computations by the same engine may differ by this many times the difference between engine and trainer, whatever
the step changed."""
LEAST_ROUNDING = 0.02
"""Two computations by the same engine may differ by this share of the tolerance, whatever the step changed."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Probes:
    """Fixed sequences, and their logprobs under one version of the weights."""

    token_ids: tuple[Int32, ...]
    """Token ids of each sequence: int32 [L] each."""
    logprobs: tuple[Float32, ...]
    """Logprob of each token except the first, given the tokens before it, at temperature 1: float32 [L - 1] each."""
    rounding: float | None = None
    """Mean absolute change of these logprobs if each layer's output is rounded to bfloat16; None if not measured. The
    trainer measures it on its own weights, so it does not depend on the sampler's weights."""


def probe_sequences(vocab_size: int, context_length: int) -> tuple[Int32, ...]:
    """The probe sequences: random ids, the same in every run with this vocabulary size.

    Random ids pass through every layer like text does, and no cache contains them. The last sequence is longer than a
    block of a prefix cache. Each sequence leaves room for one more token in the context; without this room, vLLM would
    not score the sequence.
    """
    rng = np.random.default_rng(20_26)  # an arbitrary seed
    lengths = [*[PROBE_LENGTH] * NUM_PROBES, CACHED_LENGTH]
    return tuple(
        rng.integers(0, vocab_size, size=max(2, min(length, context_length - 1)), dtype=np.int32) for length in lengths
    )


def cached_prefixes(probes: Probes) -> tuple[Int32, ...]:
    """The prefixes of the last probe that are requested through the prefix cache, shortest first: one prefix that ends
    at each of the probe's last `NUM_CACHED` tokens.

    Example: for a last probe of 288 ids, the prefixes of 285, 286, 287 and 288 ids.
    """
    ids = probes.token_ids[-1]
    return tuple(ids[:length] for length in range(max(2, len(ids) - NUM_CACHED + 1), len(ids) + 1))


def tolerance_of(*dtypes: str) -> float:
    """The tolerance for a trainer and a sampler that compute in these dtypes."""
    return max(TOLERANCES[dtype] for dtype in dtypes)


def allowed_difference(tolerance: float, probes: Probes | None) -> float:
    """The largest allowed mean difference: the tolerance or, if larger, `MISMATCH` times the measured rounding.

    Example: a tolerance of 0.1 and a rounding of 0.05 give 0.2; with a rounding of 0.02, they give 0.1.
    """
    if probes is None or probes.rounding is None:
        return tolerance
    return max(tolerance, MISMATCH * probes.rounding)


def find_mismatch(
    published: Probes, found: Sequence[Float32], *, before: Probes | None, tolerance: float
) -> str | None:
    """Explain, for an error message, why a sampler's logprobs show that the sampler does not hold the published
    version; None if the sampler holds it.

    With a small learning rate, a step changes logprobs by less than any tolerance. So logprobs that are more than
    `NEARER` times closer to the logprobs of the previous version are refused too.

    Args:
        published: The trainer's logprobs.
        found: The sampler's logprobs for the same sequences: float32 [L - 1] each.
        before: The trainer's logprobs of the previous version; None at the start.
        tolerance: Largest mean absolute difference.

    Example: published [-1.0, -2.0] and found [-1.0, -2.5] have a mean difference of 0.25.
    """
    difference = mean_difference(published, found)
    if not difference <= tolerance:  # NaN is a mismatch too
        return f"its logprobs differ by {difference:.2g} on average, more than {tolerance:g}"
    if before is not None:
        old = mean_difference(before, found)
        if difference > NEARER * old:
            return (
                f"its logprobs differ by {difference:.2g} on average from those of the new weights, and by only "
                f"{old:.2g} from those of the previous weights"
            )
    return None


def find_stale_prefix(
    published: Probes, cached: Sequence[float], whole: Float32, *, before: Probes | None, tolerance: float
) -> str | None:
    """Explain, for an error message, why an engine's logprobs show that the engine's prefix cache is stale (filled by
    old weights); None if the cache is not stale.

    The same engine computes the same tokens twice, through its prefix cache and bypassing it. The two results differ by
    rounding only, unless the cache is stale. They may differ by `STALE_SHARE` of the change that the step made to these
    logprobs, plus rounding, which is estimated from the difference between engine and trainer, but never by more than
    the tolerance.

    Args:
        published: The trainer's logprobs.
        cached: The engine's logprobs through its prefix cache, of the last token of each of `cached_prefixes`.
        whole: The engine's logprobs of the last probe, bypassing the cache: float32 [L - 1].
        before: The trainer's logprobs of the previous version; None at the start.
        tolerance: Largest mean absolute difference.

    Example: [-1.0, -2.5] through the cache and [-1.0, -2.0] bypassing it have a mean difference of 0.25.
    """
    past = whole[-len(cached) :].astype(np.float64)
    difference = float(np.abs(np.asarray(cached, np.float64) - past).mean())
    said = (
        f"logprobs of a new request through the prefix cache differ by {difference:.2g} on average from those past it"
    )
    if not difference <= tolerance:
        return f"{said}, more than {tolerance:g}"
    if before is not None:
        new, old = (p.logprobs[-1][-len(cached) :].astype(np.float64) for p in (published, before))
        change = float(np.abs(new - old).mean())
        rounding = ROUNDING * float(np.abs(whole.astype(np.float64) - published.logprobs[-1]).mean())
        if difference > max(change * STALE_SHARE, rounding, LEAST_ROUNDING * tolerance):
            return f"{said}, and the step changed them by {change:.2g}: the cache was filled by the previous weights"
    return None


def mean_difference(probes: Probes, found: Sequence[Float32]) -> float:
    """Mean absolute difference between the probes' logprobs and `found`, over all tokens; NaN if any logprob is NaN."""
    ours, theirs = np.concatenate(probes.logprobs), np.concatenate(list(found))
    assert ours.shape == theirs.shape
    return float(np.abs(ours.astype(np.float64) - theirs).mean())
