"""Draws the next example: environments by ratio, and each environment's examples in shuffled passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verbatim.errors import RunStopped
from verbatim.types import Example


@dataclass(frozen=True, kw_only=True)
class ScheduledExample:
    """One draw: what a group is about."""

    index: int
    """Counts draws from 0: the group's number."""
    env: str
    """The environment's label."""
    example: Example
    """The row."""


class ExampleSchedule:
    """An endless, reproducible order of examples.

    Every example of an environment is drawn once before any is drawn again.

    Raises:
        RunStopped: an environment has no examples.
    """

    def __init__(self, examples: Mapping[str, Sequence[Example]], ratios: Mapping[str, float], seed: int) -> None:
        for env, rows in examples.items():
            if not rows:
                raise RunStopped(f"environment {env!r} has no training examples: nothing to sample")
        self._examples = {env: {row.id: row for row in rows} for env, rows in examples.items()}
        self._envs = list(examples)
        weights = np.array([ratios[env] for env in self._envs], dtype=np.float64)
        self._weights = weights / weights.sum()
        self._rng = np.random.Generator(np.random.PCG64(seed))
        self._pass: dict[str, list[str]] = {env: [] for env in self._envs}
        self._drawn = 0

    def draw(self) -> ScheduledExample:
        """The next example."""
        env = self._envs[0]
        if len(self._envs) > 1:
            env = self._envs[int(self._rng.choice(len(self._envs), p=self._weights))]
        if not self._pass[env]:
            ids = list(self._examples[env])
            self._pass[env] = [ids[i] for i in self._rng.permutation(len(ids))]
        example_id = self._pass[env].pop()
        drawn = ScheduledExample(index=self._drawn, env=env, example=self._examples[env][example_id])
        self._drawn += 1
        return drawn

    def lookup(self, env: str, example_id: str, index: int) -> ScheduledExample:
        """A draw that was made before, to be run again after a resume.

        Raises:
            RunStopped: the environment no longer has this example.
        """
        try:
            return ScheduledExample(index=index, env=env, example=self._examples[env][example_id])
        except KeyError:
            raise RunStopped(f"environment {env!r} no longer has the example {example_id!r} that was being run when "
                             "the checkpoint was written; resume with the data set of that run") from None  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"rng": self._rng.bit_generator.state, "pass": {k: list(v) for k, v in self._pass.items()},
                "drawn": self._drawn}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`: the same draws follow."""
        self._rng.bit_generator.state = dict(state["rng"])
        self._pass = {env: [i for i in state["pass"].get(env, []) if i in self._examples[env]] for env in self._envs}
        self._drawn = state["drawn"]
