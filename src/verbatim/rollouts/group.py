"""The rollouts of one example: episodes side by side, scored alone and then, where asked for, together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from verbatim.errors import RecordError
from verbatim.rollouts.episode import TURN_REWARDS_SUM
from verbatim.rollouts.player import EpisodeTask, RolloutSetup
from verbatim.rollouts.recorder import Recorder
from verbatim.rollouts.rewards import one_number
from verbatim.rollouts.seeds import derive_seed
from verbatim.rollouts.tally import TRACEBACK, traceback_tail
from verbatim.types import Example, Group, Trajectory

T = TypeVar("T")


class GroupRun:
    """One group under way. What it holds can be counted at any time, also when it is cancelled."""

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
    ) -> None:
        self.index = index
        self.example = example
        self.setup = setup
        self.group_id = f"{purpose}-{index}"
        self._purpose = purpose
        self._seed = derive_seed(run_seed, purpose, setup.env, example.id, index)
        self._recorders = [
            Recorder(setup.sampler.vocab_size, on_sampled, on_dropped, trajectory_id=f"{self.group_id}-{i}")
            for i in range(size)
        ]

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens sampled so far, of finished and unfinished episodes."""
        return sum(recorder.num_sampled_tokens for recorder in self._recorders)

    async def run(self) -> Group:
        """Run all episodes to their end. A failing episode fails alone.

        Raises:
            RunStopped: nobody is left to play them.
        """
        ended = await run_together(self._episode(i, recorder) for i, recorder in enumerate(self._recorders))
        trajectories = [
            _set_aside(trajectory, recorder.late) for trajectory, recorder in zip(ended, self._recorders, strict=True)
        ]
        score_group = getattr(self.setup.environment, "score_group", None)
        if score_group is not None:
            trajectories = await _score_together(score_group, trajectories)
        trajectories = [_rewarded_by_its_turns(t) for t in trajectories]
        for before, after in zip(ended, trajectories, strict=True):
            if before.error is None and after.error is not None:
                self.setup.tally.failed(after)
        return Group(
            group_id=self.group_id, example_id=self.example.id, env=self.setup.env, trajectories=tuple(trajectories)
        )

    async def _episode(self, sample_index: int, recorder: Recorder) -> Trajectory:
        setup = self.setup
        seed = derive_seed(self._seed, sample_index)
        task = EpisodeTask(
            purpose=self._purpose, example=self.example, seed=seed, session=str(seed),
            identity={
                "trajectory_id": f"{self.group_id}-{sample_index}", "group_id": self.group_id,
                "sample_index": sample_index, "env": setup.env, "seed": seed,
            },
        )  # fmt: skip
        async with setup.slots:
            trajectory = await setup.player.play(setup, task, recorder)
        setup.tally.ended(trajectory)
        return trajectory


async def run_together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them return, in order. The first that raises cancels the others; what it raised is raised."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [task.result() for task in running]


def _set_aside(trajectory: Trajectory, late: RecordError | None) -> Trajectory:
    """An episode that went on after its end is not what it says it is."""
    return trajectory if late is None or trajectory.error else trajectory.replace(error=f"record: {late}")


def _rewarded_by_its_turns(trajectory: Trajectory) -> Trajectory:
    """Where nothing else gave a reward, it is the sum of the turns' own."""
    rewards = [turn.reward for turn in trajectory.turns if turn.reward is not None]
    if trajectory.error is not None or trajectory.reward is not None or not rewards:
        return trajectory
    return trajectory.replace(reward=math.fsum(rewards), info={**trajectory.info, TURN_REWARDS_SUM: True})


async def _score_together(
    score_group: Callable[[Sequence[Trajectory]], object], trajectories: list[Trajectory]
) -> list[Trajectory]:
    """Group-level rewards for the completed rollouts; a scorer that fails fails its group, not the run."""
    completed = [t for t in trajectories if t.error is None]
    if not completed:
        return trajectories
    try:
        rewards = [one_number(r) for r in await score_group(completed)]  # type: ignore[misc]
        if len(rewards) != len(completed) or not all(map(math.isfinite, rewards)):
            raise ValueError(f"returned {rewards}; expected {len(completed)} finite numbers")
    except (Exception, asyncio.CancelledError) as error:  # user code; every rollout of the group carries the reason
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise  # the group is being cancelled, not something that the user's code awaited
        reason = f"environment: score_group raised {type(error).__name__}: {error}"
        info = {TRACEBACK: traceback_tail(error)}
        return [t if t.error else t.replace(error=reason, info={**t.info, **info}) for t in trajectories]
    by_id = {id(t): r for t, r in zip(completed, rewards, strict=True)}
    return [t.replace(reward=by_id[id(t)]) if id(t) in by_id else t for t in trajectories]
