"""An evaluation of many groups and training take the places of episodes in turn."""

import asyncio
from types import SimpleNamespace

import pytest
from virtual_runs import on_virtual_time

from verbatim import Example, Trajectory
from verbatim.rollouts import EpisodeStats, GroupRun
from verbatim.rollouts.group import MOST_IN_LINE
from verbatim.run.orchestrator.evaluate import evaluate, plan


class OneSecond:
    """Episodes of one second in `places` places; notes when each began."""

    def __init__(self, places):
        self.began = {}
        self.num_made = 0
        environment = SimpleNamespace(examples=lambda split: [Example(id=f"e{i}") for i in range(1000)])
        self.setup = SimpleNamespace(
            env="e",
            environment=environment,
            sampler=SimpleNamespace(vocab_size=9),
            slots=asyncio.Semaphore(places),
            runner=SimpleNamespace(run=self.run, metrics=dict),
            episode_stats=EpisodeStats(),
            run_id="",
            routing=None,
        )

    async def run(self, setup, task, recorder):
        loop = asyncio.get_running_loop()
        self.began[task.identity.trajectory_id] = loop.time()
        await asyncio.sleep(1.0)
        recorder.count(1)
        recorder.record(prompt_ids=[1], completion_ids=[2], logprobs=[-1.0], policy_versions=[0])
        recorder.close()
        return Trajectory.of(task.identity, turns=recorder.turns, reward=1.0)


@pytest.mark.slow
def test_training_does_not_wait_for_the_end_of_an_evaluation_and_no_place_is_empty():
    """8 places, 2,000 episodes of evaluation: 250 s by themselves. A training group of 16 that comes after ten seconds
    waits for those that are in line before it, and the evaluation ends when the last of 2,016 episodes does."""

    async def run():
        played = OneSecond(places=8)
        evaluating = asyncio.create_task(evaluate(played.setup, plan(played.setup, episodes=2000, most=None), seed=1))
        await asyncio.sleep(10.5)
        assert len(played.began) == 8 * 11
        await GroupRun(played.setup, Example(id="t"), index=0, size=16, run_seed=1).run()
        waited = max(played.began[f"train-0-{k}"] for k in range(16)) - 10.5
        assert waited <= (MOST_IN_LINE + 16) / 8
        result = await evaluating
        return asyncio.get_running_loop().time(), result, played

    ended, result, played = on_virtual_time(run())
    assert ended == 2016 / 8
    assert result.num_episodes == 2000 and result.metrics["success"] == 1.0
    evaluated = [name for name in played.began if name.startswith("eval")]
    assert evaluated == [f"eval-{index}-{k}" for index in range(1000) for k in range(2)]  # in the order of the examples


def test_a_group_that_is_larger_than_the_line_is_evaluated():
    async def run():
        played = OneSecond(places=8)
        played.setup.environment.examples = lambda split: [Example(id="a"), Example(id="b")]
        return await evaluate(played.setup, plan(played.setup, episodes=2 * MOST_IN_LINE + 2, most=None), seed=1)

    assert on_virtual_time(run()).num_episodes == 2 * MOST_IN_LINE + 2
