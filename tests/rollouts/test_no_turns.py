"""A rollout in which the policy sampled nothing has failed under a reason of its own, and nothing is learned of it."""

import asyncio
import math

import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer, say
from verbatim import Example
from verbatim.algorithms.credit.baselines import default_advantage
from verbatim.algorithms.curriculum import flatness
from verbatim.environments.environment import Episode
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import EpisodeLimits, EpisodeStats, GroupRun, RolloutSetup
from verbatim.run.orchestrator.assemble import GroupRules, assemble_group, rollout_metrics
from verbatim.run.orchestrator.evaluate import Evaluation, evaluate, plan

ROOM = 40
"""Tokens of a context: an opening of "go" has 5 in `ByteRenderer`, one of 60 characters has none left."""


class Spoken(Episode):
    """Earns what it is told, whatever is said."""

    def __init__(self, text, reward):
        self.messages, self.reward, self.scored = [{"role": "user", "content": text}], reward, 0

    async def score(self, trajectory):
        self.scored += 1
        return self.reward


class Sampling(Spoken):
    """Owns its control flow: asks with these arguments, one after the other."""

    def __init__(self, asks, reward):
        super().__init__("go", reward)
        self.asks = asks

    async def run(self, agent):
        for how in self.asks:
            await agent.sample(self.messages, **how)


class Dealt:
    """Gives each sample of a group, or each example, its own episode."""

    def __init__(self, *episodes):
        self.episodes, self.left = episodes, list(episodes)

    def examples(self, split):
        return [Example(id=f"e{number}") for number in range(len(self.episodes))]

    async def start(self, example, seed):
        return self.left.pop(0)


def setup_of(environment, episode_stats=None, **params):
    return RolloutSetup(
        env="dealt",
        environment=environment,
        renderer=ByteRenderer(),
        params=SamplingParams(**params),
        sampler=ScriptedSampler(script=lambda request: say("ok"), vocab_size=VOCAB_SIZE, context_length=1000),
        limits=EpisodeLimits(max_context=ROOM),
        slots=asyncio.Semaphore(1),
        episode_stats=episode_stats or EpisodeStats(),
    )


async def play(*episodes, episode_stats=None, **params):
    setup = setup_of(Dealt(*episodes), episode_stats, **params)
    return await GroupRun(setup, Example(id="e"), index=0, size=len(episodes), run_seed=0).run()


NOTHING = {
    "a prompt without room": lambda: Spoken("x" * 60, -1.0),
    "a run without a sample": lambda: Sampling([], -1.0),
    "an opponent alone": lambda: Sampling([{"agent": "opponent", "trained": False}], -1.0),
}


@pytest.mark.parametrize("make", NOTHING.values(), ids=NOTHING)
async def test_what_it_would_earn_reaches_no_sibling_and_no_metric(make):
    empty = make()
    group = await play(empty, Spoken("go", 1.0), Spoken("go", 0.0), Spoken("go", 0.0))
    first, *others = group.trajectories
    assert first.error.startswith("no_turns: the policy sampled nothing")
    assert (first.reward, empty.scored) == (None, 0)
    assert [t.error for t in others] == [None] * 3
    rules = GroupRules(
        advantage=default_advantage, filters={}, strategy="interleaved", max_length=ROOM, max_off_policy_steps=8
    )
    assembled = assemble_group(group, rules, step=0)
    assert [t.advantage for t in assembled.group.trajectories[1:]] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    metrics = rollout_metrics([assembled], 0, {t.trajectory_id: t.reward == 1 for t in group.trajectories})
    assert (metrics["rollouts"], metrics["rollouts/failed"], metrics["errors/no_turns"]) == (4, 1, 1)
    assert metrics["reward/mean"] == metrics["success"] == pytest.approx(1 / 3)
    assert (metrics["turns"], metrics["truncated"]) == (1, 0)


async def test_its_stop_reason_says_how_it_ended():
    long, silent = (await play(Spoken("x" * 60, 1.0), Sampling([], 1.0))).trajectories
    assert (long.stop_reason, long.truncated) == ("length", True)
    assert "its prompt of 63 tokens leaves no room in a context of 40 (orchestrator.seq_len)" in long.error
    assert (silent.stop_reason, silent.truncated) == ("stop", False)


async def test_whoever_samples_for_the_policy_and_greedy_turns_are_its_own():
    sub = Sampling([{"agent": "sub/1"}], 1.0)
    both = Sampling([{"agent": "opponent", "trained": False}, {}], 1.0)
    assert [t.error for t in (await play(sub, both)).trajectories] == [None, None]
    greedy = Sampling([{"trained": False}], 1.0)  # as the gateway records what a greedy evaluation samples
    assert [t.error for t in (await play(greedy, temperature=0.0)).trajectories] == [None]


async def test_a_group_of_them_is_not_flat_and_says_nothing_of_its_example():
    group = await play(Spoken("x" * 60, 0.0), Spoken("x" * 60, 0.0))
    assert (group.scored, flatness(group)) == ((), None)


async def test_an_evaluation_and_its_interval_leave_it_out():
    """Rewards 1 and 0 of two examples; the third does not fit. The interval is that of the two examples alone."""

    async def evaluated(*said: Spoken) -> Evaluation:
        setup = setup_of(Dealt(*said))
        return await evaluate(setup, plan(setup, episodes=len(said), most=None), seed=0)

    with_it = await evaluated(Spoken("go", 1.0), Spoken("go", 0.0), Spoken("x" * 60, 0.0))
    alone = await evaluated(Spoken("go", 1.0), Spoken("go", 0.0))
    assert (with_it.num_episodes, with_it.num_failed) == (3, 1)
    for name in ("reward/mean", "reward/low", "reward/high", "turns", "completion_tokens", "truncated"):
        assert with_it.metrics[name] == alone.metrics[name] and math.isfinite(alone.metrics[name]), name
    assert with_it.metrics["success"] == pytest.approx(1 / 3)  # a failed episode is no success


async def test_it_is_warned_of_once_for_each_example_and_counted_by_kind(caplog):
    episode_stats = EpisodeStats()
    for name in ("e1", "e2", "e1"):
        environment = Dealt(Spoken("x" * 60, 0.0), Spoken("x" * 61, 0.0))
        await GroupRun(setup_of(environment, episode_stats), Example(id=name), index=0, size=2, run_seed=0).run()
    assert ["example 'e1'" in said for said in caplog.messages] == [True, False]
    assert ["example 'e2'" in said for said in caplog.messages] == [False, True]
    assert all("counted in errors/no_turns" in said for said in caplog.messages)
    ((kind, count),) = episode_stats.failures.items()
    assert count == 6 and kind.startswith("no_turns: the policy sampled nothing, because its prompt of # tokens")
