"""Intervals of shares, means and differences: against the figures of their papers, by hand, and by simulation."""

import itertools
import math

import numpy as np
import pytest

from verbatim.run.evaluation.intervals import (
    effective_size,
    gain_interval,
    mean_interval,
    paired_mean,
    paired_share,
    pairs_interval,
    share_interval,
    unpaired_mean,
    unpaired_share,
    wilson,
)
from verbatim.run.evaluation.pass_at_k import pass_at_k, pass_hat_k
from verbatim.run.evaluation.student import t_quantile


def test_wilsons_interval_has_published_figures():
    """Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_the_interval_of_a_gain_has_published_figures():
    """Newcombe 1998, "Interval estimation for the difference between independent proportions", table II, method 10."""
    assert gain_interval((48 / 80, 80), (56 / 70, 70)) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert gain_interval((3 / 10, 10), (9 / 10, 10)) == pytest.approx((0.1705, 0.8090), abs=5e-5)
    assert gain_interval((0.0, 10), (1.0, 10)) == pytest.approx((0.6075, 1.0), abs=5e-5)


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (4, 2.776),
        (5, 2.571),
        (9, 2.262),
        (10, 2.228),
        (29, 2.045),
        (30, 2.042),
        (60, 2.000),
        (120, 1.980),
        (10**6, 1.960),
    ],
)
def test_quantiles_of_students_t_are_those_of_the_printed_table(degrees: int, quantile: float):
    assert t_quantile(degrees) == pytest.approx(quantile, abs=5e-4)


def test_the_two_ways_to_a_t_quantile_meet():
    assert t_quantile(1999) == pytest.approx(t_quantile(2000), abs=1e-6)


def test_a_mean_is_over_examples():
    """By hand: the examples' deviations from 4 sum to -4 and 4, so the variance is 2 / 1 * (16 + 16) / 4^2 = 4."""
    found = mean_interval({"a": [1.0, 3.0], "b": [5.0, 7.0]})
    assert (found.value, found.num_examples, found.num_values) == (4.0, 2, 4)
    assert (found.low, found.high) == pytest.approx((4 - 12.7062 * 2, 4 + 12.7062 * 2), abs=1e-3)
    # The same four as independent examples: variance 4 / 3 * (9 + 1 + 1 + 9) / 16 = 5 / 3, and t = 3.1824.
    alone = mean_interval({"a": [1.0], "b": [3.0], "c": [5.0], "d": [7.0]})
    assert alone.high - 4 == pytest.approx(3.1824 * math.sqrt(5 / 3), abs=1e-3)


def test_rewards_that_are_all_equal_say_nothing_of_their_spread():
    assert not mean_interval({"a": [2.5, 2.5], "b": [2.5]}).has_interval
    assert mean_interval({"a": [2.5, 2.5], "b": [2.5]}).value == 2.5
    values = {str(i): [1.0] for i in range(20)}  # 0 and 1 are bounds, and a mean between them is a share
    assert mean_interval(values) == share_interval(values) and share_interval(values).high == 1.0
    assert not mean_interval({"a": [2.0]}).has_interval
    assert math.isnan(mean_interval({}).value) and math.isnan(share_interval({"a": []}).value)


def test_of_one_example_the_episodes_are_the_clusters():
    found = mean_interval({"a": [1.0, 3.0, 5.0, 7.0]})
    assert found.high - 4 == pytest.approx(3.1824 * math.sqrt(5 / 3), abs=1e-3)
    assert (found.num_examples, found.num_values) == (1, 4)
    assert share_interval({"a": [1.0] * 20}).low == pytest.approx(wilson(20, 20)[0])


def test_a_share_counts_the_independent_episodes():
    alike = {str(i): [float(i < 30)] * 4 for i in range(40)}
    assert effective_size(alike) == pytest.approx(40)  # as many as examples: the episodes of one are all alike
    found = share_interval(alike)
    assert (found.low, found.high) == pytest.approx(wilson(30, 40))
    spread = {str(i): [1.0, 0.0, 1.0, 1.0] for i in range(40)}  # no example is easier than another
    assert effective_size(spread) == 160
    # By hand, in between: the sums of deviations from 0.75 are 20 times 1 and 20 times -1, t of 39 degrees is 2.0227.
    mixed = {str(i): [1.0, 1.0, 1.0, float(i < 20)] if i < 20 else [1.0, 1.0, 0.0, 0.0] for i in range(40)}
    effect = (40 / 39 * 40 * (2.02269 / 1.95996) ** 2 + 2.5) / (160 * 0.1875 + 1)
    assert effective_size(mixed) == pytest.approx(160 / effect, rel=1e-4)


def test_of_one_episode_for_each_example_the_interval_is_wilsons():
    for wins in (0, 1, 15, 29, 30):
        found = share_interval({str(i): [float(i < wins)] for i in range(30)})
        assert (found.low, found.high) == pytest.approx(wilson(wins, 30))


def test_where_everything_succeeds_the_episodes_of_an_example_are_taken_as_half_alike():
    """By hand: the design effect is (1 + 8) / 2, and 160 episodes count as 35.6."""
    found = share_interval({str(i): [1.0] * 8 for i in range(20)})
    assert (found.low, found.high) == pytest.approx((wilson(160 / 4.5, 160 / 4.5)[0], 1.0))
    assert share_interval({str(i): [0.0] * 8 for i in range(20)}).high == pytest.approx(1 - found.low)


@pytest.mark.parametrize(("examples", "each"), [(4, 30), (5, 24), (10, 3), (30, 4), (50, 4)])
def test_an_interval_changes_little_with_one_episode(examples: int, each: int):
    """That of 4 x 30 episodes began at 0.51 where all succeed, and at 0.907 where one fails."""
    lows = []
    for failed in range(4):
        values = {str(i): [1.0] * each for i in range(examples)}
        for i in range(failed):
            values[str(i)][0] = 0.0
        found = share_interval(values)
        assert found.low < found.value <= found.high
        lows.append(found.low)
    assert all(abs(one - other) < 0.1 for one, other in itertools.pairwise(lows))


def test_pairs_have_the_adjusted_interval():
    """By hand: 13 / 52 - 5 / 52 ± 1.95996 * sqrt((18 / 52 - (8 / 52)^2) / 52)."""
    half = 1.95996 * math.sqrt((18 / 52 - (8 / 52) ** 2) / 52)
    assert pairs_interval(12, 4, 50) == pytest.approx((8 / 52 - half, 8 / 52 + half), abs=1e-5)
    differences = {str(i): [1.0 if i < 12 else -1.0 if i < 16 else 0.0] for i in range(50)}
    found = paired_share(differences)
    assert found.value == pytest.approx(0.16) and (found.num_examples, found.num_values) == (50, 50)
    assert (found.low, found.high) == pytest.approx(pairs_interval(12, 4, 50))  # 50 pairs of 50 examples


def test_policies_that_agree_in_every_pair_may_still_differ():
    found = paired_share({str(i): [0.0] * 4 for i in range(50)})
    half = 1.95996 * math.sqrt(2) / (200 / 2.5 + 2)  # 50 x 4 pairs count as 80
    assert (found.value, found.low, found.high) == pytest.approx((0.0, -half, half), abs=1e-5)
    assert paired_share({str(i): [1.0] for i in range(50)}).high == 1.0
    assert not paired_mean({"a": [0.0], "b": [0.0]}).has_interval


def test_differences_without_pairs_are_those_of_independent_samples():
    values = {str(i): [float(i < 48)] for i in range(80)}, {str(i): [float(i < 56)] for i in range(70)}
    found = unpaired_share(*values)
    assert found.value == pytest.approx(0.2)
    assert (found.low, found.high) == pytest.approx((0.0524, 0.3339), abs=5e-5)  # the published one, of 80 and 70
    # Welch, by hand: means 2 and 5, variances of the means 1 / 3 and 4 / 3, 3.2 / 1.2 ... -> 2 degrees, t = 4.3027.
    assert unpaired_mean(*values) == found
    rewards = {"a": [1.0], "b": [2.0], "c": [3.0]}, {"a": [3.0], "b": [5.0], "c": [7.0]}
    found = unpaired_mean(*rewards)
    assert found.value == 3.0
    assert found.high - 3 == pytest.approx(4.3027 * math.sqrt(1 / 3 + 4 / 3), abs=1e-3)
    assert not unpaired_mean({"a": [1.0]}, {"a": [2.0]}).has_interval


def test_the_standard_error_is_that_of_a_bootstrap_over_examples():
    rng = np.random.default_rng(0)
    centres = rng.normal(size=80)
    rewards = centres[:, None] + 0.5 * rng.normal(size=(80, 6))
    drawn = rng.integers(80, size=(20_000, 80))
    error = rewards.mean(axis=1)[drawn].mean(axis=1).std()
    found = mean_interval({str(i): list(row) for i, row in enumerate(rewards)})
    assert (found.high - found.low) / 2 / t_quantile(79) == pytest.approx(error, rel=0.02)


def _simulated(rng: np.random.Generator, examples: int, each: int, easy: float, hard: float) -> dict[str, list[float]]:
    """Successes of examples that differ in difficulty: Beta(easy, hard)."""
    shares = rng.beta(easy, hard, size=examples)
    return {str(i): [float(x) for x in rng.random(each) < share] for i, share in enumerate(shares)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("examples", "each", "easy", "hard"), [(50, 8, 1.0, 1.0), (20, 4, 2.0, 0.3), (100, 2, 3, 1), (4, 30, 0.6, 0.07)]
)
def test_intervals_of_clustered_episodes_hold_the_truth_as_often_as_they_say(examples, each, easy, hard):
    rng, truth = np.random.default_rng(1), easy / (easy + hard)
    runs = [_simulated(rng, examples, each, easy, hard) for _ in range(600)]
    found = [share_interval(run) for run in runs]
    held = np.mean([interval.low <= truth <= interval.high for interval in found])
    assert 0.93 <= held <= 0.985
    independent = [wilson(interval.value * examples * each, examples * each) for interval in found]
    if each > 2:  # with few episodes of each example independence is not so wrong
        assert np.mean([low <= truth <= high for low, high in independent]) < held - 0.05


def test_intervals_of_pairs_hold_the_truth_and_are_narrower_than_those_without():
    """The second policy solves each example with a probability that is 0.1 higher; both share the difficulty."""
    rng, held, narrower = np.random.default_rng(2), [], []
    for _ in range(600):
        shares = 0.9 * rng.beta(0.5, 0.5, size=60)
        sides = [
            {str(i): list((rng.random(4) < share + add).astype(float)) for i, share in enumerate(shares)}
            for add in (0.0, 0.1)
        ]
        pairs = {key: [b - a for a, b in zip(sides[0][key], sides[1][key], strict=True)] for key in sides[0]}
        found, apart = paired_share(pairs), unpaired_share(*sides)
        held.append(found.low <= 0.1 <= found.high)
        narrower.append((found.high - found.low) / (apart.high - apart.low))
    assert 0.93 <= np.mean(held) <= 0.985
    assert np.mean(narrower) < 0.6


@pytest.mark.parametrize("attempts", [1, 4, 7])
def test_pass_at_k_is_the_share_of_choices_that_hold_a_success(attempts: int):
    for successes, k in itertools.product(range(attempts + 1), range(1, attempts + 1)):
        chosen = list(itertools.combinations([True] * successes + [False] * (attempts - successes), k))
        assert pass_at_k(attempts, successes, k) == pytest.approx(sum(map(any, chosen)) / len(chosen), abs=1e-15)
        assert pass_hat_k(attempts, successes, k) == pytest.approx(sum(map(all, chosen)) / len(chosen), abs=1e-15)


def test_pass_at_k_by_hand_and_of_many_attempts():
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    assert pass_hat_k(4, 3, 2) == pytest.approx(1 / 2)
    assert pass_at_k(200, 20, 1) == pytest.approx(0.1)
    assert pass_at_k(10_000, 1, 5000) == pytest.approx(0.5)  # the factorials themselves have no float
