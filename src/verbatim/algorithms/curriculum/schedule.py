"""Draws the next example: environments by ratio, examples in shuffled passes over each environment's normal pool."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verbatim.algorithms.curriculum.pools import DifficultyPools, PoolRules
from verbatim.core.errors import NothingToSample, RunStopped
from verbatim.core.types import Example

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ScheduledExample:
    """The example drawn for one group."""

    index: int
    """Number of the draw, counted from 0; it is also the group's number."""
    env: str
    """The environment's label."""
    example: Example
    """The example."""


class ExampleSchedule:
    """An endless, reproducible order of examples.

    Every unpooled example of an environment is drawn once before any example is drawn again. An environment is no
    longer drawn once all its examples are pooled and none of them returns; the other environments keep their ratios.

    Args:
        examples: Examples of each environment.
        ratios: Relative number of groups of each environment.
        seed: Seed of all draws.
        pool_rules: The rules by which examples go to pools; by default no example goes to a pool.

    Raises:
        RunStopped: an environment has no examples.
    """

    def __init__(
        self,
        examples: Mapping[str, Sequence[Example]],
        ratios: Mapping[str, float],
        seed: int,
        pool_rules: PoolRules | None = None,
    ) -> None:
        for env, rows in examples.items():
            if not rows:
                raise RunStopped(f"environment {env!r} has no training examples: nothing to sample")
        self._examples = {env: {row.id: row for row in rows} for env, rows in examples.items()}
        self._ratios = {env: ratios[env] for env in examples}
        # Not `default_rng`, whose bit generator numpy may change: checkpoints and forks store PCG64's state.
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._pass: dict[str, list[str]] = {env: [] for env in examples}
        self._drained: set[str] = set()
        self._drawn = 0
        ids = {env: list(rows) for env, rows in self._examples.items()}
        self.pools = DifficultyPools(ids, pool_rules or PoolRules())
        """The difficulty pools."""

    def draw(self) -> ScheduledExample:
        """Draw the next example.

        Raises:
            NothingToSample: every example of every environment is pooled.
        """
        while True:
            env = self._draw_env()
            example_id = self._draw_example(env)
            if example_id is not None:
                break
            self._drained.add(env)
        drawn = ScheduledExample(index=self._drawn, env=env, example=self._examples[env][example_id])
        self._drawn += 1
        return drawn

    def _draw_env(self) -> str:
        envs = [env for env in self._examples if env not in self._drained]
        if not envs:
            sizes = "; ".join(
                f"{env}: {len(self.pools.members(env, 'easy'))} easy, {len(self.pools.members(env, 'hard'))} hard"
                for env in self._examples
            )
            raise NothingToSample(
                f"every example is in a difficulty pool ({sizes}): nothing is left to sample. To continue with some of "
                "them, resume with orchestrator.buffer.easy_fraction or hard_fraction above 0"
            )
        if len(envs) == 1:  # this consumes no random number
            return envs[0]
        weights = np.array([self._ratios[env] for env in envs], dtype=np.float64)
        return envs[int(self._rng.choice(len(envs), p=weights / weights.sum()))]

    def _draw_example(self, env: str) -> str | None:
        """The next example of the current pass, skipping pooled examples; None if all examples are pooled, even after
        lifting."""
        if (example_id := self._pop(env)) is not None:
            return example_id
        ids = self.pools.members(env, "normal") or self._lift(env)
        self._pass[env] = [ids[i] for i in self._rng.permutation(len(ids))]
        return self._pop(env)

    def _pop(self, env: str) -> str | None:
        # A pass may contain examples that were pooled after it was shuffled.
        while self._pass[env]:
            example_id = self._pass[env].pop()
            if self.pools.is_normal(env, example_id):
                return example_id
        return None

    def _lift(self, env: str) -> list[str]:
        lifted = self.pools.lift(env, self._rng)
        if lifted:
            logger.warning(
                "environment %r: all examples were in difficulty pools; %d of them are sampled again", env, len(lifted)
            )
        else:
            logger.warning("environment %r is no longer sampled: all of its examples are in difficulty pools", env)
        return lifted

    def lookup(self, env: str, example_id: str, index: int) -> ScheduledExample:
        """Return an earlier draw, so that its example can run again after a resume.

        Raises:
            RunStopped: the environment no longer has this example.
        """
        try:
            return ScheduledExample(index=index, env=env, example=self._examples[env][example_id])
        except KeyError:
            raise RunStopped(
                f"environment {env!r} no longer has the example {example_id!r} that was being run when "
                "the checkpoint was written; resume with the dataset of that run"
            ) from None

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return {
            "rng": self._rng.bit_generator.state,
            "pass": {k: list(v) for k, v in self._pass.items()},
            "drained": sorted(self._drained),
            "drawn": self._drawn,
            "pools": self.pools.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. The draws that follow are the same, unless pooled examples return."""
        self._rng.bit_generator.state = dict(state["rng"])
        # Without examples that the dataset no longer has. New ones are drawn from the next pass on.
        self._pass = {env: [i for i in state["pass"].get(env, []) if i in rows] for env, rows in self._examples.items()}
        self._drawn = state["drawn"]
        self.pools.load_state_dict(state["pools"])
        self._drained = set(state["drained"])
        # The shares that return may have been raised for this resume, also for environments that were drained.
        for env in self._examples:
            lifted = self.pools.lift(env, self._rng)
            if lifted:
                logger.info("environment %r: %d pooled examples return", env, len(lifted))
            if self.pools.members(env, "normal"):
                self._drained.discard(env)
