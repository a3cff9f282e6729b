"""Finds examples and groups that are too easy or too hard.

Groups with equal rewards have no gradient. Examples that are always solved or never solved go to a pool and are no
longer sampled.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from verbatim.core.records.equality import are_equal, is_at_least, is_at_most
from verbatim.core.types import Group

Pool: TypeAlias = Literal["easy", "hard"]
Flatness: TypeAlias = Literal["easy", "hard", "flat"]
POOLS: tuple[Pool, ...] = ("easy", "hard")


@dataclass(frozen=True, kw_only=True)
class PoolRules:
    """The rules by which examples go to pools and return."""

    easy_threshold: float | None = None
    """An example with this mean reward or more is easy; None if no example counts as easy."""
    hard_threshold: float | None = None
    """An example with this mean reward or less is hard; None if no example counts as hard."""
    easy_fraction: float = 0.0
    """Share of the easy examples that return to sampling on resume, or when all examples are pooled."""
    hard_fraction: float = 0.0
    """Share of the hard examples that return to sampling on resume, or when all examples are pooled."""
    window: int = 1
    """Number of an example's latest groups over which the mean reward is taken."""

    def pool_of(self, mean_reward: float) -> Pool | None:
        """The pool for this mean reward, or None if the example continues to be sampled."""
        if self.easy_threshold is not None and is_at_least(mean_reward, self.easy_threshold):
            return "easy"
        if self.hard_threshold is not None and is_at_most(mean_reward, self.hard_threshold):
            return "hard"
        return None


class DifficultyPools:
    """Assigns each example of an environment to exactly one pool: easy, hard or normal.

    Example: with `easy_threshold = 0.95`, an example whose group earned a mean reward of 1.0 becomes easy; an example
    whose group earned 0.9 stays normal.

    Args:
        example_ids: The ids of the examples, by environment.
        rules: The rules by which examples go to pools and return.
    """

    def __init__(self, example_ids: Mapping[str, Sequence[str]], rules: PoolRules) -> None:
        self._ids = {env: list(ids) for env, ids in example_ids.items()}
        self._rules = rules
        self._pooled: dict[str, dict[str, tuple[Pool, float]]] = {env: {} for env in self._ids}
        self._recent: dict[str, dict[str, deque[float]]] = {env: {} for env in self._ids}
        self._evicted: Counter[tuple[str, Pool]] = Counter()
        self._observed: Counter[str] = Counter()

    def is_normal(self, env: str, example_id: str) -> bool:
        """True if the example is in the normal pool, and so is sampled."""
        return example_id not in self._pooled[env]

    def members(self, env: str, pool: Pool | Literal["normal"]) -> list[str]:
        """The examples of a pool, in the order of the dataset."""
        pooled = self._pooled[env]
        return [i for i in self._ids[env] if (pooled[i][0] if i in pooled else "normal") == pool]

    def observe(self, env: str, example_id: str, mean_reward: float) -> None:
        """Record the mean raw reward of a finished group. A pooled example stays in its pool."""
        self._observed[env] += 1
        if not self.is_normal(env, example_id):
            return
        recent = self._recent[env].setdefault(example_id, deque(maxlen=self._rules.window))
        recent.append(mean_reward)
        mean = sum(recent) / len(recent)
        pool = self._rules.pool_of(mean)
        if pool is not None:
            self._pooled[env][example_id] = (pool, mean)
            del self._recent[env][example_id]
            self._evicted[env, pool] += 1

    def lift(self, env: str, rng: np.random.Generator) -> list[str]:
        """Return a random share of the pooled examples to sampling, at least one per pool if the pool's share is above
        0."""
        lifted: list[str] = []
        for pool, fraction in zip(POOLS, (self._rules.easy_fraction, self._rules.hard_fraction), strict=True):
            members = self.members(env, pool)
            if members and fraction > 0:
                count = max(1, round(fraction * len(members)))
                lifted += [members[i] for i in sorted(rng.permutation(len(members))[:count].tolist())]
        for example_id in lifted:
            del self._pooled[env][example_id]
        return lifted

    def metrics(self) -> dict[str, float]:
        """The metrics of the pools, by name.

        `pool/{env}/{easy,normal,hard}` are the current shares of the dataset. `evicted_examples/{env}/{easy,hard}`: of
        the groups that finished since the last call, the share whose example went to the easy or hard pool.
        """
        found: dict[str, float] = {}
        for env, ids in self._ids.items():
            pooled = Counter(pool for pool, _ in self._pooled[env].values())
            found[f"pool/{env}/normal"] = (len(ids) - pooled.total()) / len(ids)
            for pool in POOLS:
                found[f"pool/{env}/{pool}"] = pooled[pool] / len(ids)
                found[f"evicted_examples/{env}/{pool}"] = self._evicted[env, pool] / max(1, self._observed[env])
        self._evicted.clear()
        self._observed.clear()
        return found

    def state_dict(self) -> dict[str, Any]:
        """The state as plain JSON values: a row per pooled example, and the recent rewards of the other examples."""
        rows: dict[str, list[dict[str, Any]]] = {pool: [] for pool in POOLS}
        for env, pooled in self._pooled.items():
            for example_id, (pool, mean) in pooled.items():
                rows[pool].append({"env": env, "example_id": example_id, "mean_reward": mean})
        recent = {env: {i: list(values) for i, values in examples.items()} for env, examples in self._recent.items()}
        return {**rows, "recent": recent}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`. Examples that are no longer in the dataset are dropped."""
        known = {env: set(ids) for env, ids in self._ids.items()}
        self._pooled = {env: {} for env in self._ids}
        for pool in POOLS:
            for row in state[pool]:
                if row["example_id"] in known.get(row["env"], ()):
                    self._pooled[row["env"]][row["example_id"]] = (pool, row["mean_reward"])
        self._recent = {
            env: {
                i: deque(values, maxlen=self._rules.window)
                for i, values in state["recent"].get(env, {}).items()
                if i in known[env] and i not in self._pooled[env]
            }
            for env in self._ids
        }


def flatness(group: Group) -> Flatness | None:
    """Why a group has no gradient under a group baseline, or None if it has a gradient.

    The function compares the environment's rewards, before length penalties, of the rollouts that get credit. Failed
    and unscored rollouts do not count. If agents have their own rewards, the rewards of each agent must be equal as
    well. Equal rewards are "hard" at 0 or less, "easy" at 1 or more, and otherwise "flat". A group without any reward
    gives None.

    Example: rewards 0 and 0 give "hard"; 1 and 1 give "easy"; 0.5 and 0.5 give "flat"; 0 and 1 give None; 1 and a
    missing reward give "easy".
    """
    rewards = [trajectory.reward for trajectory in group.scored if trajectory.reward is not None]
    of_agents: dict[str, list[float]] = {}
    for trajectory in group.scored:
        for agent, earned in trajectory.agent_rewards.items():
            of_agents.setdefault(agent, []).append(earned)
    if not rewards or not all(map(are_equal, (rewards, *of_agents.values()))):
        return None
    reward = statistics.fmean(rewards)
    if is_at_most(reward, 0.0):
        return "hard"
    return "easy" if is_at_least(reward, 1.0) else "flat"
