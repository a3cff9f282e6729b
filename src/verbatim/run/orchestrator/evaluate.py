"""Evaluates the policy, each time on the same episodes with the same seeds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from verbatim.core.errors import UsageError
from verbatim.core.tasks import run_together
from verbatim.core.types import Example, Group, Trajectory
from verbatim.environments.environment import succeeded
from verbatim.environments.resolve import examples_of
from verbatim.rollouts import GroupRun, RolloutSetup
from verbatim.rollouts.group import MOST_IN_LINE
from verbatim.run.evaluation.chosen import chosen
from verbatim.run.evaluation.evaluated_episode import evaluated_episode_of
from verbatim.run.evaluation.results import env_result


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The result of evaluating one environment."""

    env: str
    num_episodes: int
    num_failed: int
    """Number of episodes that ended with an error; they count as failures."""
    metrics: dict[str, float]
    """`success`, `reward/mean`, `turns`, `valid_format`, ... 95% confidence intervals over examples: `success/low` and
    `success/high`; for the mean reward, `reward/low` and `reward/high`, NaN if all rewards are equal."""
    trajectories: tuple[Trajectory, ...]


Plan = tuple[Sequence[Example], int]
"""(1) The examples to play, empty if the environment could not provide any, and (2) the number of episodes per
example."""


def plan(setup: RolloutSetup, *, episodes: int, most: int | None) -> Plan:
    """The examples of the "eval" split that `chosen` selects."""
    try:
        examples = examples_of(setup.environment, setup.env, "eval")
    except UsageError as error:
        setup.episode_stats.not_evaluated(str(error))
        return (), 0
    return chosen(examples, episodes=episodes, most=most)


async def evaluate(setup: RolloutSetup, planned: Plan, *, seed: int) -> Evaluation:
    """Run the planned episodes.

    If the environment could not provide examples, the evaluation has no episodes, its success is NaN, and the failure
    is counted in `errors/environment`.
    """
    examples, size = planned
    if not examples:
        metrics = {"success": math.nan, "examples": 0.0, "episodes": 0.0, "failed": 0.0, "errors/environment": 1.0}
        return Evaluation(env=setup.env, num_episodes=0, num_failed=0, metrics=metrics, trajectories=())

    # This limits how many groups wait for episode slots, so that training rollouts get slots in between.
    line = asyncio.Semaphore(math.ceil(MOST_IN_LINE / size))

    async def play(index: int, example: Example) -> Group:
        def placed() -> None:
            if run.num_in_line == 0:
                line.release()

        await line.acquire()
        run = GroupRun(setup, example, index=index, size=size, run_seed=seed, purpose="eval", on_placed=placed)
        return await run.run()

    ended = await run_together(play(index, example) for index, example in enumerate(examples))
    trajectories = tuple(t for group in ended for t in group.trajectories)
    result = env_result(setup.env, [evaluated_episode_of(t, succeeded(setup.environment, t)) for t in trajectories])
    return Evaluation(
        env=setup.env,
        num_episodes=result.num_episodes,
        num_failed=result.num_failed,
        metrics=result.metrics(),
        trajectories=trajectories,
    )
