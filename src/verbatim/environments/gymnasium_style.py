"""Adapts Gymnasium-style text environments, which have `reset(seed=) -> obs, info` and `step(text)`, and whose
observations are text."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from verbatim.core.errors import ComponentError, EnvironmentFault, UsageError
from verbatim.core.texts import shown
from verbatim.core.types import Example, Message, Trajectory
from verbatim.environments.environment import Episode, Reply, Score
from verbatim.environments.single_turn import opened_with
from verbatim.environments.tool_class import called, closed_on_failure, made, maker, name_of
from verbatim.environments.tools.threads import in_thread


class GymnasiumStyle:
    """A text environment with the interface of Gymnasium 0.26 or later.

    Each example is a seed, so all episodes of a group begin in the same state. The observation is the user's message,
    and the model's text is the action. The episode ends when `terminated` or `truncated` is True. The reward of an
    environment step is the reward of the turn, and the sum of these rewards is the score. `reset` and `step` run in
    threads.

    Args:
        environment: A class, a function that creates an environment, or the import path of either.
        system_prompt: Instructions to the model, sent as a system message.
        num_train: Number of training examples. Their seeds are 0, 1, 2, ...
        num_eval: Number of evaluation examples. Their seeds follow the seeds of the training examples.
        args: Keyword arguments of the class or function.

    Raises:
        ComponentError: the environment cannot be created, or lacks `reset` or `step`.
        UsageError: the number of training or evaluation examples is less than 1.
    """

    def __init__(
        self,
        environment: Any,
        *,
        system_prompt: str | None = None,
        num_train: int = 1000,
        num_eval: int = 100,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        for name, count in (("num_train", num_train), ("num_eval", num_eval)):
            if count < 1:
                raise UsageError(f"{name}: found {count}, expected at least 1")
        self._make, self._name = maker(environment, args), name_of(environment)
        self._system_prompt = system_prompt
        self._seeds = {"train": range(num_train), "eval": range(num_train, num_train + num_eval)}
        instance = made(self._make, self._name)
        if missing := [method for method in ("reset", "step") if not callable(getattr(instance, method, None))]:
            raise ComponentError(
                f"{self._name} has no {' and no '.join(missing)}; expected `reset(seed=None)`, which "
                "returns (text, info), and `step(text)`, which returns (text, reward, terminated, "
                "truncated, info)"
            )
        if callable(getattr(instance, "close", None)):
            instance.close()

    def examples(self, split: str) -> Sequence[Example]:
        """Return one example for each seed of the split "train" or "eval"."""
        return [Example(id=str(seed), payload={"seed": seed}) for seed in self._seeds[split]]

    async def start(self, example: Example, seed: int) -> Episode:
        """Create an environment and reset it with the example's seed."""
        instance = await in_thread(self._make)
        async with closed_on_failure(instance):
            given = await called(functools.partial(instance.reset, seed=example.payload["seed"]))
            if not isinstance(given, tuple) or len(given) != 2:
                raise EnvironmentFault(f"{self._name}.reset returned {shown(given)}; expected (observation, info)")
            opening: Message = {"role": "user", "content": _text(given[0], f"{self._name}.reset")}
        return _GymnasiumEpisode(self._name, instance, [*opened_with(self._system_prompt), opening])


class _GymnasiumEpisode(Episode):
    turn_rewards_sum_to_reward = True

    def __init__(self, name: str, instance: Any, messages: Sequence[Message]) -> None:
        self._name, self._instance, self._total = name, instance, 0.0
        self.messages = messages

    async def reply(self, message: Message) -> Reply:
        given = await called(functools.partial(self._instance.step, message.get("content") or ""))
        where = f"{self._name}.step"
        if not isinstance(given, tuple) or len(given) != 5:
            older = "; four values are the interface before Gymnasium 0.26" if isinstance(given, tuple) else ""
            raise EnvironmentFault(
                f"{where} returned {shown(given)}; expected (observation, reward, terminated, truncated, info){older}"
            )
        observation, reward, terminated, truncated, _ = given
        try:
            earned = float(reward)
        except (TypeError, ValueError):
            raise EnvironmentFault(f"{where} gave the reward {shown(reward, 80)}; expected a number") from None
        self._total += earned
        if terminated or truncated:
            return Reply(done=True, reward=earned)
        return Reply(messages=[{"role": "user", "content": _text(observation, where)}], reward=earned)

    async def score(self, trajectory: Trajectory) -> Score:
        return self._total

    async def close(self) -> None:
        if callable(getattr(self._instance, "close", None)):
            await called(self._instance.close)


def _text(observation: Any, where: str) -> str:
    if not isinstance(observation, str):
        found = f"{shown(observation, 80)} ({type(observation).__name__})"
        raise EnvironmentFault(
            f"{where} gave the observation {found}; expected a text: wrap the environment so that "
            "it describes the state in words"
        )
    return observation


def is_gymnasium_style(given: object) -> bool:
    """Return True if a class or an object has `reset` and `step`."""
    return all(callable(getattr(given, name, None)) for name in ("reset", "step")) and not inspect.ismodule(given)
