"""Computes 95% confidence intervals of means, shares and differences of evaluated episodes.

Episodes of the same example are not independent: if the example is easy, all its episodes succeed. So the examples are
treated as the random sample, and each example is a cluster of its episodes. With a single example, its episodes are the
clusters, and the interval is about that example only.

Values are passed by example: `{"secret-7": [1, 0, 1], ...}`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from verbatim.core.records.equality import are_equal
from verbatim.run.evaluation.student import LEVEL, t_quantile

Z95 = NormalDist().inv_cdf(0.5 + LEVEL / 2)
"""The 97.5% quantile of the standard normal distribution: 95% of the distribution lies between -Z95 and Z95."""

ByExample = Mapping[str, Sequence[float]]
"""The values of the episodes, by example."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean, a share or a difference, with its 95% confidence interval."""

    value: float
    """The estimated value; NaN if nothing was measured."""
    low: float = math.nan
    """The lower end of the interval. NaN if the values show no spread: a single value, or values that are all equal."""
    high: float = math.nan
    num_examples: int = 0
    """Number of examples behind the estimate."""
    num_values: int = 0
    """Number of episodes, or pairs of episodes, behind the estimate."""

    @property
    def has_interval(self) -> bool:
        """True if the interval is known."""
        return not math.isnan(self.low)


UNKNOWN = Estimate(value=math.nan)


@dataclass(frozen=True, kw_only=True)
class _Clusters:
    """The statistics from which all intervals are computed."""

    mean: float
    variance: float
    """The variance of the mean; NaN if there is only one cluster."""
    num_clusters: int
    num_values: int
    most_alike: float
    """The largest possible design effect, which is reached if all values in a cluster are equal. It is the size of a
    value's cluster, averaged over all values."""


def _clusters(values: ByExample) -> _Clusters:
    """Mean of all values, and its variance over clusters with the correction for few clusters: K / (K - 1) *
    sum_c (sum_i (x_ci - m))^2 / n^2 (Cameron & Miller 2015, "A practitioner's guide to cluster-robust inference",
    section II, for a regression on a constant).
    """
    groups = [list(group) for group in values.values() if group]
    if len(groups) == 1:
        groups = [[value] for value in groups[0]]
    count, num = sum(map(len, groups)), len(groups)
    mean = math.fsum(map(math.fsum, groups)) / count
    squares = math.fsum(math.fsum(value - mean for value in group) ** 2 for group in groups)
    return _Clusters(
        mean=mean,
        variance=num / (num - 1) * squares / count**2 if num > 1 else math.nan,
        num_clusters=num,
        num_values=count,
        most_alike=sum(len(group) ** 2 for group in groups) / count,
    )


def _sizes(values: ByExample) -> dict[str, int]:
    counts = [len(group) for group in values.values() if group]
    return {"num_examples": len(counts), "num_values": sum(counts)}


def mean_interval(values: ByExample) -> Estimate:
    """The mean of unbounded values, such as rewards: mean ± t * standard error, with K - 1 degrees of freedom for K
    examples. There is no interval if all values are equal. If all values are 0 or 1, `share_interval` is used.

    Example: `{"a": [1, 3], "b": [5, 7]}` has the mean 4, the variance 2 / 1 * (16 + 16) / 16 = 4, and t = 12.71: 4 ±
    25.4.
    """
    if not any(values.values()):
        return UNKNOWN
    return share_interval(values) if are_binary(values) else _mean_interval(values)


def _mean_interval(values: ByExample) -> Estimate:
    found = _clusters(values)
    if found.num_clusters == 1 or _all_equal(values):
        return Estimate(value=found.mean, **_sizes(values))
    half = t_quantile(found.num_clusters - 1) * math.sqrt(found.variance)
    return Estimate(value=found.mean, low=found.mean - half, high=found.mean + half, **_sizes(values))


def share_interval(values: ByExample) -> Estimate:
    """The mean of values between 0 and 1, such as successes: Wilson's interval for `effective_size` episodes. The
    interval stays between 0 and 1, and has a width even if all episodes succeed or all fail.

    Example: 30 of 40 examples succeed in all of their 4 episodes, and 10 examples succeed in none. The 160 episodes
    count as 40, and 0.75 has the interval (0.598, 0.858); with 160 independent episodes the interval would be (0.678,
    0.811). If all 120 episodes of 4 examples succeed, the interval is (0.668, 1); if 119 of them succeed, it is (0.762,
    1.000).
    """
    if not any(values.values()):
        return UNKNOWN
    found = _clusters(values)
    size = effective_size(values)
    low, high = wilson(found.mean * size, size)
    return Estimate(value=found.mean, low=low, high=high, **_sizes(values))


def effective_size(values: ByExample) -> float:
    """The number of independent episodes that carry the same information as these.

    It is the number n of episodes divided by the design effect, which is the factor by which the variance of p exceeds
    p (1 - p) / n (Dean & Pagano 2015, "Evaluating confidence interval methods for binomial proportions in clustered
    surveys"). With m episodes per example, the design effect is 1 if the episodes of an example are independent, and m
    if they are all alike (Kish 1965, "Survey sampling"). Only episodes that differ from the majority show how alike the
    episodes of an example are. If few episodes differ (none, if all succeed), the variance over examples is unreliable.
    So the estimate starts from the middle, (1 + m) / 2, with the weight of one episode that differs from the majority:

        ((t / z)^2 * n^2 * variance of p + (1 + m) / 2) / (n p (1 - p) + 1), between 1 and m

    (t / z)^2 accounts for the small number of examples behind the variance (Korn & Graubard 1998, "Confidence intervals
    for proportions with small expected number of positive counts estimated from survey data"). The middle value is our
    choice. The usual choice, if all episodes succeed, is a design effect of 1: then, for 4 examples with 30 episodes
    each, only 6 of 10 intervals contain the true share if the episodes of an example are all alike. An effect of m
    instead makes the interval jump from (0.51, 1) to (0.91, 1) at the first failure.
    """
    found = _clusters(values)
    return _effective(found.mean * (1 - found.mean), found)


def _effective(spread: float, found: _Clusters) -> float:
    """The effective size. `spread` is the variance of one value if all values were independent."""
    if found.num_clusters == 1:
        return float(found.num_values)
    count, alike = found.num_values, found.most_alike
    seen = (t_quantile(found.num_clusters - 1) / Z95) ** 2 * count**2 * found.variance
    effect = (seen + (1 + alike) / 2) / (count * spread + 1)
    return count / min(max(effect, 1.0), alike)


def paired_mean(differences: ByExample) -> Estimate:
    """The mean difference of pairs with unbounded values, such as rewards of the same example and seed: mean ± t *
    standard error of the differences. There is no interval if all differences are equal."""
    return _mean_interval(differences) if any(differences.values()) else UNKNOWN


def paired_share(differences: ByExample) -> Estimate:
    """The mean of differences that are -1, 0 or 1: successes of the same example and seed under two policies.
    The interval is computed by `pairs_interval` for the effective number of pairs, which is computed as in
    `effective_size`.

    Example: one pair for each of 50 examples, with 12 gained and 4 lost, gives 0.16 and (-0.001, 0.308).
    """
    if not any(differences.values()):
        return UNKNOWN
    found = _clusters(differences)
    everything = [value for group in differences.values() for value in group]
    gained = sum(value > 0 for value in everything) / len(everything)
    lost = sum(value < 0 for value in everything) / len(everything)
    size = _effective(gained + lost - found.mean**2, found)
    low, high = pairs_interval(gained * size, lost * size, size)
    return Estimate(value=found.mean, low=low, high=high, **_sizes(differences))


def unpaired_mean(before: ByExample, after: ByExample) -> Estimate:
    """The difference of two means over different examples or seeds: Welch's interval over examples. It is wider than
    the interval of `paired_mean`, because variation that the two policies have in common does not cancel out. If all
    values are 0 or 1, `unpaired_share` is used."""
    if not any(before.values()) or not any(after.values()):
        return UNKNOWN
    if are_binary(before, after):
        return unpaired_share(before, after)
    first, second = _clusters(before), _clusters(after)
    sizes = {name: min(_sizes(before)[name], _sizes(after)[name]) for name in ("num_examples", "num_values")}
    value = second.mean - first.mean
    variance = first.variance + second.variance
    if math.isnan(variance) or (_all_equal(before) and _all_equal(after)):
        return Estimate(value=value, **sizes)
    parts = [(side.variance, side.num_clusters - 1) for side in (first, second)]
    degrees = variance**2 / sum(part**2 / count for part, count in parts)
    half = t_quantile(max(1, int(degrees))) * math.sqrt(variance)
    return Estimate(value=value, low=value - half, high=value + half, **sizes)


def unpaired_share(before: ByExample, after: ByExample) -> Estimate:
    """The difference of two shares over different examples or seeds: Newcombe's interval for their effective sizes."""
    if not any(before.values()) or not any(after.values()):
        return UNKNOWN
    sizes = {name: min(_sizes(before)[name], _sizes(after)[name]) for name in ("num_examples", "num_values")}
    first, second = (_clusters(side).mean for side in (before, after))
    low, high = gain_interval((first, effective_size(before)), (second, effective_size(after)))
    return Estimate(value=second - first, low=low, high=high, **sizes)


def wilson(successes: float, episodes: float) -> tuple[float, float]:
    """Wilson's 95% score interval of a share (Wilson 1927).

    Example: 40 successes of 200 give (0.150, 0.261).
    """
    share, spread = successes / episodes, Z95**2 / episodes
    middle = (share + spread / 2) / (1 + spread)
    half = Z95 * math.sqrt(share * (1 - share) / episodes + spread / (4 * episodes)) / (1 + spread)
    return 0.0 if share <= 0 else max(0.0, middle - half), 1.0 if share >= 1 else min(1.0, middle + half)


def gain_interval(before: tuple[float, float], after: tuple[float, float]) -> tuple[float, float]:
    """Newcombe's 95% interval of the difference of two independent shares (Newcombe 1998, method 10).

    Args:
        before: The share of successes, and the number of independent episodes (an effective size).
        after: The same two numbers for the second policy.

    Example: 56 of 70 against 48 of 80 gives (0.052, 0.334), as in the paper's table II.
    """
    (share_1, num_1), (share_2, num_2) = before, after
    low_1, high_1 = wilson(share_1 * num_1, num_1)
    low_2, high_2 = wilson(share_2 * num_2, num_2)
    gain = share_2 - share_1
    return (
        gain - math.hypot(share_2 - low_2, high_1 - share_1),
        gain + math.hypot(high_2 - share_2, share_1 - low_1),
    )


def pairs_interval(gained: float, lost: float, pairs: float) -> tuple[float, float]:
    """The 95% interval of the difference of two shares measured on the same pairs: with G = (gained + 1) / (pairs + 2)
    and L = (lost + 1) / (pairs + 2), G - L ± z sqrt((G + L - (G - L)^2) / (pairs + 2)) (Bonett & Price 2012, "Adjusted
    Wald confidence interval for a difference of binomial proportions based on paired data").

    Example: 12 gained and 4 lost of 50 give (-0.001, 0.308).
    """
    up, down = (gained + 1) / (pairs + 2), (lost + 1) / (pairs + 2)
    half = Z95 * math.sqrt((up + down - (up - down) ** 2) / (pairs + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)


def are_binary(*given: ByExample) -> bool:
    """True if all values are 0 or 1, so that their mean is a share.

    >>> are_binary({"a": [0.0, 1.0]}, {"a": [1.0]}), are_binary({"a": [0.5]})
    (True, False)
    """
    return all(value in (0.0, 1.0) for values in given for group in values.values() for value in group)


def _all_equal(values: ByExample) -> bool:
    return are_equal(value for group in values.values() for value in group)
