"""Computes confidence intervals of success rates."""

from __future__ import annotations

import math

Z95 = 1.959963984540054
"""The normal distribution's 97.5% quantile: 95% lie between its negative and it."""


def wilson(successes: float, episodes: int) -> tuple[float, float]:
    """Wilson's score interval of a share (Wilson 1927), 95%.

    Example: 40 successes of 200 give (0.150, 0.261).
    """
    share, spread = successes / episodes, Z95**2 / episodes
    middle = (share + spread / 2) / (1 + spread)
    half = Z95 * math.sqrt(share * (1 - share) / episodes + spread / (4 * episodes)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def gain_interval(before: tuple[float, int], after: tuple[float, int]) -> tuple[float, float]:
    """Newcombe's interval of the difference of two independent shares (Newcombe 1998, method 10), 95%.

    Episodes count as independent: where an example is played several times the interval is too narrow. Where both
    evaluations play the same examples, as ours do, what they have in common makes it wider than it need be.

    Args:
        before: Share of successes, and number of episodes.
        after: The same, later.

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
