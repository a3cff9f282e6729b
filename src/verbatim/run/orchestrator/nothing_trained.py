"""Explains why a finished run trained no token, and what to do about it."""

from __future__ import annotations

from verbatim.core.trajectories import Ledger
from verbatim.rollouts import EpisodeStats

_REMEDIES = {
    "filter:zero_advantage": "the rewards of each group were equal, so that every advantage was 0: give partial "
    "reward, or choose examples that the model sometimes solves",
    "filter:gibberish": "the model itself finds its completions improbable: give it a [warm_start], or list "
    "[[orchestrator.filters]] without this filter",
    "filter:repetition": "list [[orchestrator.filters]] with a higher threshold, or without this filter",
    "filter:truncated": "every rollout was cut off: raise orchestrator.sampling.max_tokens, orchestrator.seq_len or "
    "the environment's max_turns, or list [[orchestrator.filters]] without this filter",
    "difficulty": "the rewards of each group were equal: choose other examples, or set "
    "orchestrator.buffer.online_difficulty_filtering = false",
    "stale": "rollouts were too old when they were trained: raise orchestrator.max_off_policy_steps",
    "over_length": "every turn ends beyond orchestrator.seq_len: raise it",
    "untrained": "every turn was sampled with trained=False: leave that out for the agent that is to be trained",
    "missing_logprobs": "the sampler returned no logprobs: have it return those of the distribution it samples from",
}
"""Advice on what to do, by the reason for which most tokens were dropped."""


def why_nothing_was_trained(ledger: Ledger, episode_stats: EpisodeStats, *, num_steps: int) -> str:
    """Explain why the run's tokens were dropped, which failures this process saw, and what to do.

    Example:
        >>> ledger, episode_stats = Ledger(), EpisodeStats()
        >>> ledger.sampled_tokens(12)
        >>> ledger.drop({"stale": 12})
        >>> print(why_nothing_was_trained(ledger, episode_stats, num_steps=2))
        in 2 steps no token was trained.
          of 12 sampled tokens: 12 stale
          rollouts were too old when they were trained: raise orchestrator.max_off_policy_steps
    """
    lines = [f"in {num_steps} step{'' if num_steps == 1 else 's'} no token was trained."]
    taken = ledger.dropped.most_common()
    if ledger.trained:
        lines = [f"{ledger.trained} tokens were trained, but the advantage of every one was 0: nothing was learned."]
        lines.append(_REMEDIES["filter:zero_advantage"])
    elif taken:
        lines.append(f"of {ledger.sampled} sampled tokens: {', '.join(f'{count} {name}' for name, count in taken)}")
        lines += [_REMEDIES[taken[0][0]]] if taken[0][0] in _REMEDIES else []
    return "\n  ".join([*lines, *episode_stats.summary()])
