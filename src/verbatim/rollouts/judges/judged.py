"""Wraps an environment so that a judge gives the reward. Everything else stays as in the environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from verbatim.config.parameters import check_parameters
from verbatim.core.errors import JudgeFailed, UsageError
from verbatim.core.texts import shown
from verbatim.core.types import Example, Message, Trajectory
from verbatim.environments.environment import Environment, Episode, Score
from verbatim.environments.resolve import create_environment
from verbatim.rollouts.judges.judge import Judge
from verbatim.rollouts.judges.reward_model import RewardModel
from verbatim.rollouts.loop import JUDGE_USAGE
from verbatim.rollouts.rewards import read_score


@runtime_checkable
class Grades(Protocol):
    """The interface that `Judged` needs: a `Judge`, a `RewardModel`, or a class of your own."""

    async def grade(
        self, messages: Sequence[Message], usage: Counter[str], fields: Mapping[str, Any] | None = None
    ) -> Mapping[str, float]:
        """Return the named parts of the reward, as for `Judge.grade`."""


class Judged:
    """An environment whose episodes are scored by a judge or a reward model.

    Args:
        environment: An environment object, or the id or import path of an environment.
        judge: A `Judge`, a `RewardModel`, or the settings of either as a mapping. A mapping with the key `url` has the
            settings of a `RewardModel`.
        args: Arguments of the environment, if `environment` is an id or import path.
        own_reward: Weight of the environment's own reward, which becomes a part named `own`; 0 if it is not used.

    Raises:
        UsageError: the environment or the judge cannot be created; the message says what was found and expected.

    Example: `Judged("single_turn", {"model": "gpt-5-mini"}, args={"data": "prompts.jsonl"})`.
    """

    def __init__(
        self, environment: Any, judge: Any, *, args: Mapping[str, Any] | None = None, own_reward: float = 0.0
    ) -> None:
        if isinstance(environment, str):
            self._inner = create_environment(environment, args)
        elif isinstance(environment, type) or not isinstance(environment, Environment):
            raise UsageError(
                f"judged: environment: found {shown(environment, 80)}, expected an environment, MyEnv(), "
                'or its id or import path, "my_env.MyEnv"'
            )
        elif args:
            raise UsageError(
                f"judged: args: found {shown(args, 80)} for an environment that already exists; pass them to its class"
            )
        else:
            self._inner = environment
        self._judge = _read_judge(judge)
        self._own_reward = own_reward

    def __getattr__(self, name: str) -> Any:
        """Forward optional attributes of the environment, such as `demonstrations` and `is_success`. `score_group` is
        not forwarded, because it would replace the judge's reward."""
        if name.startswith("_") or name == "score_group":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def examples(self, split: str) -> Sequence[Example]:
        """Return the examples of the environment."""
        return self._inner.examples(split)

    async def start(self, example: Example, seed: int) -> Episode:
        """Start the environment's episode, wrapped so that the judge scores it."""
        episode = await self._inner.start(example, seed)
        return _JudgedEpisode(episode, self._judge, example, self._own_reward)  # type: ignore[return-value]


class _JudgedEpisode:
    def __init__(self, inner: Episode, judge: Grades, example: Example, own_reward: float) -> None:
        self._inner, self._judge, self._example, self._own_reward = inner, judge, example, own_reward
        self._usage = Counter(dict.fromkeys(("requests", "cached", "retries", "failed"), 0))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    @property
    def turn_rewards_sum_to_reward(self) -> bool:
        """Always False, because the judge's parts are added to the rewards of the turns."""
        return False

    @property
    def info(self) -> Mapping[str, Any]:
        """The episode's own `info`, plus the judge's usage."""
        return {**getattr(self._inner, "info", {}), JUDGE_USAGE: dict(self._usage)}

    async def score(self, trajectory: Trajectory) -> Score:
        """Return the judge's parts, plus the episode's own reward if it has a weight."""
        own: dict[str, float] = {}
        if self._own_reward:
            reward, _ = read_score(await self._inner.score(trajectory), "score")
            own = {} if reward is None else {"own": self._own_reward * reward}
        try:
            graded = await self._judge.grade(trajectory.messages, self._usage, self._example.payload)
        except JudgeFailed:
            self._usage["failed"] += 1
            raise
        return {**own, **graded}


def _read_judge(given: Any) -> Grades:
    if isinstance(given, Mapping):
        made: Any = RewardModel if "url" in given else Judge
        settings, wrong = check_parameters(made, dict(given), num_inputs=0, label="judge")
        if wrong:
            raise UsageError("judge: " + "; ".join(f"{key}: {why}" for key, why in wrong.items()))
        return made(**settings)  # type: ignore[no-any-return]
    if isinstance(given, type) or not isinstance(given, Grades):
        raise UsageError(
            f"judge: found {shown(given, 80)} ({type(given).__name__}), expected Judge(model=...), "
            'RewardModel(url=...), or their settings, { model = "gpt-5-mini" }'
        )
    return given
