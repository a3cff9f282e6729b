"""Compares two policies on one environment: over episodes of the same example and seed, or else over all episodes."""

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
    """The difference between two policies: second minus first."""

    env: str
    num_pairs: int
    """Number of pairs: episodes with the same example, sample index and seed. If it is 0, all episodes are compared
    instead."""
    num_unpaired: tuple[int, int]
    """Number of episodes of each policy without a counterpart; these episodes are ignored if there are pairs."""
    success: Estimate = UNKNOWN
    reward: Estimate = UNKNOWN
    """The difference in reward, over the pairs in which both episodes have a reward."""
    gained: int = 0
    """Number of pairs in which only the second policy succeeded."""
    lost: int = 0
    """Number of pairs in which only the first policy succeeded."""
    too_many_failed: tuple[str | None, str | None] = (None, None)
    """For each policy, a clause about its failed episodes if there are too many of them for a comparison. There are no
    estimates then."""

    @property
    def is_paired(self) -> bool:
        """True if the same episodes were compared."""
        return self.num_pairs > 0


def difference(
    env: str, before: Iterable[EvaluatedEpisode], after: Iterable[EvaluatedEpisode], max_failed: float = MAX_FAILED
) -> PairedDifference:
    """Compare the second policy with the first.

    Episodes that ended with an error count as failures, and have no reward.

    Args:
        env: The environment's label.
        before: The episodes of the first policy.
        after: The episodes of the second policy.
        max_failed: The largest share of failed episodes that either policy may have for the two to be compared.
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
    """The difference in reward; rewards that are all 0 or 1 are compared like successes."""
    found = _differences(pairs, lambda outcome: outcome.reward)
    both = [rewards_of(side) for side in zip(*pairs, strict=True)]
    return paired_share(found) if are_binary(*both) else paired_mean(found)


def _differences(
    pairs: Sequence[tuple[EvaluatedEpisode, EvaluatedEpisode]], value_of: Callable[[EvaluatedEpisode], float | None]
) -> dict[str, list[float]]:
    """The difference in each pair in which both episodes have a value, by example."""
    found: dict[str, list[float]] = {}
    for one, two in pairs:
        before, after = value_of(one), value_of(two)
        if before is not None and after is not None:
            found.setdefault(one.example_id, []).append(after - before)
    return found
