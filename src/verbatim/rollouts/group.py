"""Runs the episodes of one example concurrently. Each episode is scored by itself; then, if the environment has
`score_group`, all of them are scored together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from verbatim.core.errors import EnvironmentFault, RecordError
from verbatim.core.tasks import run_together
from verbatim.core.texts import LONGEST_ERROR, cut_without_secrets, shown
from verbatim.core.types import Example, Group, RolloutIdentity, Trajectory
from verbatim.environments.environment import IS_SUCCESS, Environment
from verbatim.rollouts import supervised
from verbatim.rollouts.episode import TURN_REWARDS_SUM
from verbatim.rollouts.episode_stats import TRACEBACK, traceback_tail
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.rewards import checked_number
from verbatim.rollouts.runner import EpisodeTask, RolloutSetup
from verbatim.rollouts.seeds import derive_seed
from verbatim.rollouts.supervised import LeftBehind, UserCalls, supervise

T = TypeVar("T")

MOST_IN_LINE = 128
"""Maximum number of training episodes, and also of evaluation episodes, that wait for a slot. It is large enough that a
free slot is taken in the same pass of the event loop. More groups start as these episodes get their slots."""


class GroupRun:
    """A running group of episodes. The group's tokens can be counted at any time, even after a cancellation.

    `samples` are the indices of the episodes to run; by default all `size` episodes run. An episode has the same seed
    and id whether all episodes run or only some.
    """

    def __init__(
        self,
        setup: RolloutSetup,
        example: Example,
        *,
        index: int,
        size: int,
        run_seed: int,
        purpose: str = "train",
        on_sampled: Callable[[int], None] | None = None,
        on_dropped: Callable[[Mapping[str, int]], None] | None = None,
        samples: Sequence[int] | None = None,
        on_placed: Callable[[], None] | None = None,
    ) -> None:
        self.index = index
        self.example = example
        self.setup = setup
        self.group_id = f"{purpose}-{index}"
        self._purpose = purpose
        self._seed = derive_seed(run_seed, purpose, setup.env, example.id, index)
        self._recorders = {
            i: Recorder(
                setup.sampler.vocab_size,
                on_sampled,
                on_dropped,
                trajectory_id=f"{self.group_id}-{i}",
                routing=setup.routing,
            )
            for i in (range(size) if samples is None else samples)
        }
        self._on_placed = on_placed
        self.num_in_line = len(self._recorders)
        """Number of episodes that are still waiting for a slot."""

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens sampled so far, in finished and unfinished episodes."""
        return sum(recorder.num_sampled_tokens for recorder in self._recorders.values())

    async def run(self) -> Group:
        """Run all episodes to their end. An episode that fails does not affect the others. Raises RunStopped if no
        worker is left to run them."""
        ended = await run_together(self._episode(i, recorder) for i, recorder in self._recorders.items())
        trajectories = [
            _set_aside(trajectory, recorder.late)
            for trajectory, recorder in zip(ended, self._recorders.values(), strict=True)
        ]
        score_group = getattr(self.setup.environment, "score_group", None)
        if score_group is not None:
            trajectories = await _score_together(score_group, trajectories, self.setup.limits.timeout)
        trajectories = [judged(self.setup.environment, rewarded_by_its_turns(t)) for t in trajectories]
        for before, after in zip(ended, trajectories, strict=True):
            if before.error is None and after.error is not None:
                self.setup.episode_stats.failed(after)
        return Group(
            group_id=self.group_id,
            index=self.index,
            example_id=self.example.id,
            env=self.setup.env,
            trajectories=tuple(trajectories),
        )

    async def _episode(self, sample_index: int, recorder: Recorder) -> Trajectory:
        setup = self.setup
        seed = derive_seed(self._seed, sample_index)
        identity = RolloutIdentity(
            run_id=setup.run_id,
            env=setup.env,
            example_id=self.example.id,
            group_id=self.group_id,
            sample_index=sample_index,
            trajectory_id=f"{self.group_id}-{sample_index}",
            seed=seed,
        )
        task = EpisodeTask(purpose=self._purpose, example=self.example, session=str(seed), identity=identity)
        async with setup.slots:
            self.num_in_line -= 1
            if self._on_placed is not None:
                self._on_placed()
            trajectory = await setup.runner.run(setup, task, recorder)
        setup.episode_stats.ended(trajectory)
        return trajectory


def _set_aside(trajectory: Trajectory, late: RecordError | None) -> Trajectory:
    """Mark an episode as failed if it sampled tokens after its end, because its score was computed before these
    tokens."""
    return trajectory if late is None or trajectory.error else trajectory.replace(error=f"record: {late}")


def rewarded_by_its_turns(trajectory: Trajectory) -> Trajectory:
    """Set the trajectory's reward to the sum of its turns' rewards, unless it has a reward already."""
    rewards = [turn.reward for turn in trajectory.turns if turn.reward is not None]
    if trajectory.error is not None or trajectory.reward is not None or not rewards:
        return trajectory
    try:
        reward = checked_number(math.fsum(rewards), "the turns together")
    except EnvironmentFault as fault:
        return _failed(trajectory, fault)
    return trajectory.replace(reward=reward, info={**trajectory.info, TURN_REWARDS_SUM: True})


async def _score_together(
    score_group: Callable[[Sequence[Trajectory]], Any],
    trajectories: list[Trajectory],
    timeout: float,  # noqa: ASYNC109
) -> list[Trajectory]:
    """Replace the rewards of the completed trajectories by the rewards that `score_group` returns. If `score_group`
    fails, the whole group fails, but not the run. `score_group` has the timeout of one episode; a `score_group` that
    ignores its cancellation is abandoned."""
    completed = [t for t in trajectories if t.error is None]
    if not completed:
        return trajectories
    calls = UserCalls(timeout + supervised.GRACE)

    async def score() -> list[float]:
        async with asyncio.timeout(timeout) as calls.deadline:
            with calls.guard("score_group"):
                given = list(await score_group(completed))
                if len(given) != len(completed):
                    raise EnvironmentFault(
                        f"score_group returned {shown(given)}; expected {len(completed)} finite numbers"
                    )
                return [checked_number(value, f"score_group, for rollout {i}") for i, value in enumerate(given)]

    why = f"score_group took more than {timeout:g} s"
    fault: BaseException
    try:
        rewards = await supervise(score(), calls)
    except EnvironmentFault as error:
        fault, why = error, str(error)
    except TimeoutError as error:
        fault = error
    except LeftBehind as error:
        fault, why = error, f"{why}, ignored its cancellation, and was abandoned"
    except asyncio.CancelledError as error:
        if calls.told_to_end:
            raise
        fault, why = error, "score_group cancelled its own task"
    else:
        by_id = {id(t): r for t, r in zip(completed, rewards, strict=True)}
        return [t.replace(reward=by_id[id(t)], agent_rewards={}) if id(t) in by_id else t for t in trajectories]
    return [t if t.error else _failed(t, fault, why) for t in trajectories]


def judged(environment: Environment, trajectory: Trajectory) -> Trajectory:
    """Add the verdict of the environment's `is_success` to `info`. If `is_success` raises, the trajectory fails."""
    own = getattr(environment, "is_success", None)
    if trajectory.error is not None or own is None:
        return trajectory
    calls = UserCalls(math.inf)  # no time limit: a sync function cannot be cancelled
    try:
        with calls.guard("is_success"):
            return trajectory.replace(info={**trajectory.info, IS_SUCCESS: bool(own(trajectory))})
    except EnvironmentFault as fault:
        return _failed(trajectory, fault)


def _failed(trajectory: Trajectory, fault: BaseException, why: str = "") -> Trajectory:
    error = f"environment: {cut_without_secrets(why or str(fault), 2 * LONGEST_ERROR)}"
    info = {TRACEBACK: traceback_tail(fault.__cause__)} if fault.__cause__ is not None else {}
    return trajectory.replace(error=error, info={**trajectory.info, **info})
