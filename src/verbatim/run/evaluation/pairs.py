"""Compares two policies on one environment: pairs of episodes of the same example and seed, or else all episodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from verbatim.core.records.failed import MAX_FAILED, too_many_failed
from verbatim.run.evaluation.evaluated_episode import EvaluatedEpisode
from verbatim.run.evaluation.intervals import (
    UNKNOWN,
    Estimate,
    are_binary,
    paired_mean,
    paired_share,
    unpaired_mean,
    unpaired_share,
)
from verbatim.run.evaluation.results import rewards_of, successes


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """The second policy minus the first."""

    env: str
    num_pairs: int
    """Episodes of the same example, number and seed; 0: the two have none in common, and are compared as wholes."""
    num_unpaired: tuple[int, int]
    """Episodes of each that have no counterpart; where there are pairs they are left out."""
    success: Estimate = UNKNOWN
    reward: Estimate = UNKNOWN
    """Over the pairs in which both have a reward."""
    gained: int = 0
    """Pairs in which only the second succeeded."""
    lost: int = 0
    """Pairs in which only the first succeeded."""
    too_many_failed: tuple[str | None, str | None] = (None, None)
    """Of each: how many episodes failed, where that is too many to compare it. Then nothing is known of the
    difference."""

    @property
    def is_paired(self) -> bool:
        """Whether the same episodes were compared."""
        return self.num_pairs > 0


def difference(
    env: str, before: Iterable[EvaluatedEpisode], after: Iterable[EvaluatedEpisode], max_failed: float = MAX_FAILED
) -> PairedDifference:
    """What the second policy does better than the first.

    Episodes that failed count as no success, and have no reward.

    Args:
        env: The environment's label.
        before: Episodes of the first.
        after: Episodes of the second.
        max_failed: Largest share of failed episodes of either with which the two are compared.
    """
    first, second = list(before), list(after)
    counterparts = {outcome.key: outcome for outcome in second}
    pairs = [(outcome, counterparts[outcome.key]) for outcome in first if outcome.key in counterparts]
    left = (len(first) - len(pairs), len(second) - len(pairs))
    failed = (_too_many_failed(first, max_failed), _too_many_failed(second, max_failed))
    if any(failed):
        return PairedDifference(env=env, num_pairs=len(pairs), num_unpaired=left, too_many_failed=failed)
    if not pairs:
        return PairedDifference(
            env=env,
            num_pairs=0,
            num_unpaired=left,
            success=unpaired_share(successes(first), successes(second)),
            reward=unpaired_mean(rewards_of(first), rewards_of(second)),
        )
    return PairedDifference(
        env=env,
        num_pairs=len(pairs),
        num_unpaired=left,
        success=paired_share(_differences(pairs, lambda outcome: float(outcome.success))),
        reward=_paired_reward(pairs),
        gained=sum(two.success and not one.success for one, two in pairs),
        lost=sum(one.success and not two.success for one, two in pairs),
    )


def _too_many_failed(outcomes: Sequence[EvaluatedEpisode], most: float) -> str | None:
    return too_many_failed(sum(outcome.error is not None for outcome in outcomes), len(outcomes), most)


def _paired_reward(pairs: Sequence[tuple[EvaluatedEpisode, EvaluatedEpisode]]) -> Estimate:
    """Rewards that are all 0 or 1 are compared as successes are."""
    found = _differences(pairs, lambda outcome: outcome.reward)
    both = [rewards_of(side) for side in zip(*pairs, strict=True)]
    return paired_share(found) if are_binary(*both) else paired_mean(found)


def _differences(
    pairs: Sequence[tuple[EvaluatedEpisode, EvaluatedEpisode]], value_of: Callable[[EvaluatedEpisode], float | None]
) -> dict[str, list[float]]:
    """Of the pairs in which both have a value, by example."""
    found: dict[str, list[float]] = {}
    for one, two in pairs:
        before, after = value_of(one), value_of(two)
        if before is not None and after is not None:
            found.setdefault(one.example_id, []).append(after - before)
    return found
