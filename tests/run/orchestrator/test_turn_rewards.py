"""Rewards of turns: what they add up to, who reads them, and what is said where no one does."""

from __future__ import annotations

import functools

import pytest

from run.orchestrator.loop_runs import Coin, Coins, make
from verbatim.algorithms.credit import AdvantageInputs
from verbatim.algorithms.credit.chunk_returns import chunk_returns_advantage
from verbatim.environments.environment import Reply


class Rewarded(Coin):
    """Two turns, the first worth 1 or 0 by the seed and the second half a point; `score` says what it is told to."""

    def __init__(self, seed, scored, sums):
        super().__init__(seed, fails=False)
        self.scored, self.turn_rewards_sum_to_reward, self.num_turns = scored, sums, 0

    async def reply(self, message):
        self.num_turns += 1
        if self.num_turns == 1:
            return Reply(messages=[{"role": "user", "content": "again"}], reward=self.reward)
        return Reply(done=True, reward=0.5)

    async def score(self, trajectory):
        return self.reward + 0.5 if self.scored == "sum" else self.scored


class Rewarding(Coins):
    def __init__(self, scored, sums=False):
        super().__init__()
        self.scored, self.sums = scored, sums

    async def start(self, example, seed):
        return Rewarded(seed, self.scored, self.sums)


async def played(tmp_path, environment, reads=False):
    orchestrator, notes, _ = make(tmp_path, environment=environment, steps=3, reads_turn_rewards=reads)
    assert await orchestrator.run()
    return orchestrator, [t for _, _, groups in notes.steps for group in groups for t in group.trajectories]


async def test_where_score_gives_none_the_reward_is_the_sum_of_the_turns(tmp_path, caplog):
    orchestrator, trajectories = await played(tmp_path, Rewarding(None))
    assert {t.reward for t in trajectories} == {0.5, 1.5}
    for trajectory in trajectories:
        assert trajectory.reward == sum(turn.reward for turn in trajectory.turns)
        assert trajectory.error is None
    assert orchestrator.ledger_for_tests.trained == orchestrator.ledger_for_tests.sampled > 0
    assert orchestrator.has_learned
    assert caplog.messages == []


async def test_credit_for_turns_counts_such_rewards_once(tmp_path):
    _, trajectories = await played(tmp_path, Rewarding(None))
    advantage = functools.partial(chunk_returns_advantage, gamma=1.0)
    for trajectory in trajectories:
        (found,) = advantage(AdvantageInputs(rollouts=[trajectory])).advantages
        assert found == [trajectory.reward, 0.5]  # not twice the sum


async def test_rewards_of_turns_that_the_advantage_does_not_read_are_said_once(tmp_path, caplog):
    await played(tmp_path, Rewarding(0.0))
    (said,) = caplog.messages
    assert "environment 'coins' gives turn rewards, but the advantage default_advantage does not read them" in said
    assert 'type = "chunk_returns"' in said and "let `score` return None" in said


@pytest.mark.parametrize(("environment", "reads"), [(Rewarding(0.0), True), (Rewarding("sum", sums=True), False)])
async def test_rewards_of_turns_that_are_read_are_not_complained_about(tmp_path, caplog, environment, reads):
    await played(tmp_path, environment, reads=reads)
    assert caplog.messages == []
