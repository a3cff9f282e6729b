"""Decides whether an evaluation can be compared with other evaluations, or too many of its episodes failed."""

from __future__ import annotations

MAX_FAILED = 0.1
"""Default of `orchestrator.eval.max_failed`: a share of the episodes."""


def too_many_failed(num_failed: int, num_episodes: int, most: float = MAX_FAILED) -> str | None:
    """A clause that says how many episodes failed, if the failed share is more than `most` or if all episodes failed;
    otherwise None.

    An evaluation with that many failures measures only the episodes that survived: long or hard episodes may be
    missing.

    >>> too_many_failed(7, 8), too_many_failed(1, 10), too_many_failed(0, 0)
    ('7 of 8 episodes failed', None, None)
    """
    # 1e-9: rounding of `most * num_episodes` must not turn exactly the allowed number into too many.
    if num_failed > most * num_episodes + 1e-9 or num_failed == num_episodes > 0:
        return f"{num_failed:,} of {num_episodes:,} episodes failed"
    return None
