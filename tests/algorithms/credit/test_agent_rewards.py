"""Agents with rewards of their own: each is compared with the same agent of the other rollouts, and with no other."""

import math

import pytest

from algorithms.credit.groups import group_of
from verbatim import Trajectory, Turn, build_samples
from verbatim.algorithms.credit import ADVANTAGES, AdvantageOutputs, assign_advantages
from verbatim.algorithms.credit.baselines import default_advantage
from verbatim.algorithms.credit.chunk_returns import chunk_returns_advantage
from verbatim.algorithms.curriculum.pools import flatness
from verbatim.algorithms.filters.zero_advantage import ZeroAdvantage
from verbatim.config.schema import LengthPenaltyConfig
from verbatim.core.errors import ComponentError, RecordError


def played(agents: str, rewards: dict[str, float], *, reward: float = 0.0, untrained: str = "", tokens: int = 1):
    """A rollout whose turns are by these agents, a letter each; prompts of two agents differ."""
    turns = [
        Turn(
            prompt_ids=[ord(agent), k + 1],
            completion_ids=[7] * tokens,
            logprobs=[-0.5] * tokens,
            agent=agent,
            trained=agent not in untrained,
        )
        for k, agent in enumerate(agents)
    ]
    return Trajectory(example_id="x", turns=tuple(turns), reward=reward, agent_rewards=rewards)


def advantages(credited):
    return [[turn.advantage for turn in t.turns] for t in credited.trajectories]


def test_each_agent_has_its_own_baseline():
    """A zero-sum game: every episode's mean is 0, and yet each side learns."""
    won, lost = played("abab", {"a": 1.0, "b": -1.0}), played("aba", {"a": -1.0, "b": 1.0})
    drawn = played("ab", {"a": 0.0, "b": 0.0})
    again = played("ab", {"a": 1.0, "b": -1.0})
    credited = assign_advantages(group_of(won, lost, drawn, again), default_advantage)
    # a: 1, -1, 0, 1 around 0.25; b: -1, 1, 0, -1 around -0.25
    assert advantages(credited) == [[0.75, -0.75, 0.75, -0.75], [-1.25, 1.25, -1.25], [-0.25, 0.25], [0.75, -0.75]]
    assert [t.reward for t in credited.trajectories] == [0.0] * 4
    assert credited.trajectories[0].agent_rewards == {"a": 1.0, "b": -1.0}


def test_samples_hold_the_advantage_of_whose_tokens_they_are():
    credited = assign_advantages(
        group_of(played("ab", {"a": 1.0, "b": -1.0}), played("ab", {"a": 0.0, "b": 0.0})), default_advantage
    )
    first, second = build_samples(credited.trajectories[0])
    assert (first.advantages.tolist(), second.advantages.tolist()) == ([0.0, 0.0, 0.5], [0.0, 0.0, -0.5])


def test_agents_without_a_reward_of_their_own_share_the_rollouts():
    one, two = played("mss", {"m": 4.0}, reward=1.0), played("ms", {"m": 0.0}, reward=0.0)
    credited = assign_advantages(group_of(one, two), default_advantage)
    assert advantages(credited) == [[2.0, 0.5, 0.5], [-2.0, -0.5]]


def test_an_untrained_opponent_gets_no_credit():
    one, two = (played("ao", {"a": reward}, untrained="o") for reward in (1.0, 0.0))
    assert advantages(assign_advantages(group_of(one, two), default_advantage)) == [[0.5, None], [-0.5, None]]


def test_an_agent_that_never_spoke_counts_in_its_baseline():
    one, two = played("ab", {"a": 1.0, "b": 1.0}), played("a", {"a": 1.0, "b": -1.0})
    assert advantages(assign_advantages(group_of(one, two), default_advantage)) == [[0.0, 1.0], [0.0]]


def test_credit_for_each_turn_is_taken_over_the_agents_own_turns():
    """The opponent's turns between its own discount nothing."""
    alone = assign_advantages(group_of(played("aa", {}, reward=1.0)), chunk_returns_advantage)
    against = assign_advantages(group_of(played("abab", {"a": 1.0, "b": -1.0})), chunk_returns_advantage)
    assert advantages(alone) == [[0.95, 1.0]]
    assert advantages(against) == [[0.95, -0.95, 1.0, -1.0]]


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_gives_agents_what_they_would_get_alone(name):
    pairs = [(1.0, 0.0), (0.0, 0.5), (0.25, 1.0)]
    together = advantages(
        assign_advantages(group_of(*(played("aba", {"a": a, "b": b}) for a, b in pairs)), ADVANTAGES[name])
    )
    for agent, places in ("a", (0, 2)), ("b", (1,)):
        own = group_of(*(played(agent * len(places), {}, reward=pair["ab".index(agent)]) for pair in pairs))
        for found, alone in zip(together, assign_advantages(own, ADVANTAGES[name]).trajectories, strict=True):
            expected = [t.advantage if t.advantage is not None else alone.advantage for t in alone.turns]
            assert [found[k] for k in places] == expected


def test_a_length_penalty_is_for_the_agents_own_tokens():
    penalty = LengthPenaltyConfig(type="tokens", kind="target", target=3, slope=0.1)
    long, short = played("aab", {"a": 1.0, "b": 1.0}, tokens=4), played("aab", {"a": 1.0, "b": 1.0}, tokens=1)
    credited = assign_advantages(group_of(long, short), default_advantage, penalty)
    # a: 1 - 0.1 (8 - 3) and 1; b: 1 - 0.1 (4 - 3) and 1
    assert advantages(credited)[0] == pytest.approx([-0.25, -0.25, -0.05])


def test_a_bad_reward_of_one_agent_fails_its_rollout():
    group = group_of(played("ab", {"a": 1.0, "b": math.nan}), played("ab", {"a": 0.0, "b": 1.0}))
    credited = assign_advantages(group, default_advantage)
    assert [t.error for t in credited.trajectories] == ["reward: nan is not finite", None]
    with pytest.raises(RecordError, match=r"agent_rewards\['a'\]: None"):
        played("a", {"a": None})


def test_a_function_that_returns_too_few_is_told_for_which_agent():
    with pytest.raises(ComponentError, match="agent a: 1 advantages for the 2 turns"):
        assign_advantages(
            group_of(played("aab", {"a": 1.0, "b": 0.0})), lambda inputs: AdvantageOutputs(advantages=[[1.0]])
        )


def test_a_group_in_which_only_agents_differ_is_not_flat():
    mirrored = group_of(played("ab", {"a": 1.0, "b": -1.0}), played("ab", {"a": -1.0, "b": 1.0}))
    same = group_of(played("ab", {"a": 1.0, "b": -1.0}), played("ab", {"a": 1.0, "b": -1.0}))
    assert (flatness(mirrored), flatness(same)) == (None, "hard")
    flags = ZeroAdvantage()
    assert [flags(t) for t in assign_advantages(mirrored, default_advantage).trajectories] == [False, False]
    assert [flags(t) for t in assign_advantages(same, default_advantage).trajectories] == [True, True]
