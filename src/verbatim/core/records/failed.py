"""Decides whether so many episodes of an evaluation failed that it compares with nothing."""

from __future__ import annotations

MAX_FAILED = 0.1
"""`orchestrator.eval.max_failed` by default: a share of the episodes."""


def too_many_failed(num_failed: int, num_episodes: int, most: float = MAX_FAILED) -> str | None:
    """How many failed, as a clause, where that is more than this share, or all; None where it is not.

    What is left of such an evaluation are its survivors: long episodes, or hard ones, may be missing.

    >>> too_many_failed(7, 8), too_many_failed(1, 10), too_many_failed(0, 0)
    ('7 of 8 episodes failed', None, None)
    """
    if num_failed > most * num_episodes + 1e-9 or num_failed == num_episodes > 0:
        return f"{num_failed:,} of {num_episodes:,} episodes failed"
    return None
