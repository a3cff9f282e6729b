"""Estimates the success of k attempts at an example: pass@k (at least one attempt succeeds) and pass^k (all attempts
succeed)."""

from __future__ import annotations

import math


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """The probability that at least one of k attempts succeeds, estimated without bias from n attempts with c
    successes: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating large language models trained on code", eq. 1).

    Example: with 2 successes in 4 attempts, pass@2 is 1 - C(2, 2) / C(4, 2) = 5 / 6.

    Args:
        attempts: n, at least k.
        successes: c, 0 to n.
        k: At least 1.
    """
    assert 1 <= k <= attempts and 0 <= successes <= attempts
    return 1 - math.comb(attempts - successes, k) / math.comb(attempts, k)


def pass_hat_k(attempts: int, successes: int, k: int) -> float:
    """The probability that k attempts all succeed, estimated without bias: C(c, k) / C(n, k) (Yao et al. 2024,
    "tau-bench", section 3).

    Example: with 3 successes in 4 attempts, pass^2 is C(3, 2) / C(4, 2) = 1 / 2.

    Args:
        attempts: n, at least k.
        successes: c, 0 to n.
        k: At least 1.
    """
    assert 1 <= k <= attempts and 0 <= successes <= attempts
    return math.comb(successes, k) / math.comb(attempts, k)


def powers_up_to(attempts: int) -> tuple[int, ...]:
    """The values of k that are reported by default: 1, 2, 4 and 8, up to the number of attempts.

    >>> powers_up_to(1), powers_up_to(6), powers_up_to(100)
    ((1,), (1, 2, 4), (1, 2, 4, 8))
    """
    return tuple(k for k in (1, 2, 4, 8) if k <= attempts)
