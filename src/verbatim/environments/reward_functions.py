"""Calls users' reward functions. A function follows one of two conventions: it takes one completion at a time, or lists
of completions as in TRL."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verbatim.core.errors import ComponentError, EnvironmentFault
from verbatim.core.imports import import_object
from verbatim.core.texts import numbered, shown
from verbatim.core.types import Example, Trajectory
from verbatim.environments.tools.threads import in_thread

LISTS = ("completions", "prompts", "completion_ids", "environments")
"""Arguments that TRL's functions take in addition to the data's columns: lists with one item per rollout."""
OURS = ("completion", "prompt", "messages", "trajectory")
"""Arguments that a function for one completion at a time takes in addition to the data's columns."""
_EXPECTED = (
    "expected `def {name}(completion, answer, **columns) -> float`, with the sampled text and fields of the row by "
    "name, or TRL's `def {name}(completions, answer, **columns) -> list[float]`"
)


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """One reward function and its calling convention."""

    name: str
    """The function's name in metrics."""
    call: Callable[..., Any]
    """The function."""
    takes_lists: bool
    """True if the function follows TRL's convention and takes lists."""
    names: frozenset[str]
    """Names of the function's named parameters."""
    required: frozenset[str]
    """Names of those named parameters that have no default."""
    takes_any: bool
    """True if the function has `**kwargs`."""
    weight: float = 1.0
    """Factor by which the function's values are multiplied."""

    async def __call__(self, given: Mapping[str, Any]) -> Any:
        """Return the function's value for one rollout. Functions that are not async run in threads, several at a time.

        Raises:
            EnvironmentFault: the function follows TRL's convention and did not return a list of length one.
        """
        known = {name: value for name, value in given.items() if self.takes_any or name in self.names}
        result = await _result(functools.partial(self.call, **known), self.call)
        if not self.takes_lists:
            return result
        try:
            if isinstance(result, str | Mapping):  # iterable, but not a list of numbers
                raise TypeError
            (value,) = list(result)
        except (TypeError, ValueError):
            raise EnvironmentFault(
                f"reward function {self.name} returned {shown(result)}; expected a list with one "
                "number, because it was called with one completion"
            ) from None
        return value


def read_reward_function(given: Any, weight: float = 1.0) -> RewardFunction:
    """Create a `RewardFunction` from a callable or its import path.

    Raises:
        ComponentError: the function cannot be imported or called, or has no parameter for the sampled text.
    """
    function = import_object(given) if isinstance(given, str) else given
    if not callable(function) or inspect.isclass(function):
        what = f"{given} is {shown(function, 80)}" if isinstance(given, str) else f"found {shown(function, 80)}"
        raise ComponentError(
            f'reward: {what} ({type(function).__name__}), expected a function or its import path, "my_rewards.exact"'
        )
    name = getattr(function, "__name__", type(function).__name__)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise ComponentError(
            f"reward function {name}: its signature cannot be read; {_EXPECTED.format(name=name)}"
        ) from error
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = frozenset(p.name for p in named)
    takes_lists = not names.isdisjoint(LISTS) and "completion" not in names
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if not takes_lists and names.isdisjoint(("completion", "trajectory", "messages")):
        raise ComponentError(
            f"reward function {name}{inspect.signature(function)} has no parameter for the sampled text; "
            f"{_EXPECTED.format(name=name)}"
        )
    return RewardFunction(
        name=name,
        call=function,
        takes_lists=takes_lists,
        names=names,
        takes_any=takes_any,
        weight=weight,
        required=frozenset(p.name for p in named if p.default is p.empty),
    )


def is_reward_function(given: object) -> bool:
    """Return True if `given`, which a user passed as an environment, is a reward function."""
    if not inspect.isroutine(given):
        return False
    try:
        names = set(inspect.signature(given).parameters)
    except ValueError:
        return False
    return not names.isdisjoint(("completion", "completions"))  # not `prompts`: an environment's factory may take those


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """The reward functions of an environment. If there are several, each gives a named part of the reward, and the sum
    of the parts is the reward."""

    functions: Sequence[RewardFunction] = field(default=())
    """The functions; empty if a judge gives the reward."""

    @classmethod
    def of(cls, given: Any, weights: Sequence[float] | None = None) -> Rewards:
        """Create `Rewards` from a function or import path, or from a list of these; None for no functions.

        Raises:
            ComponentError: an item is not a reward function, or there are more or fewer weights than functions.
        """
        if given is None and weights is None:
            return cls()
        items = list(given) if isinstance(given, list | tuple) else [given]
        if weights is not None and len(weights) != len(items):
            raise ComponentError(
                f"weights: found {shown(weights, 80)}, expected one number for each of the "
                f"{len(items)} reward functions"
            )
        functions: list[RewardFunction] = []
        for item, weight in zip(items, weights or [1.0] * len(items), strict=True):
            made = read_reward_function(item, weight)
            name = numbered(made.name, [other.name for other in functions])
            functions.append(RewardFunction(**{**vars(made), "name": name}))
        return cls(functions=functions)

    def check(self, columns: Collection[str], *, has_environments: bool = False) -> None:
        """Refuse functions that require a field that the data lacks. The ComponentError lists the data's fields."""
        for function in self.functions:
            given = {*columns, *(LISTS if function.takes_lists else OURS)}
            given -= set() if has_environments else {"environments"}
            if missing := sorted(function.required - given):
                fields = ", ".join(sorted(columns)) or "none"
                raise ComponentError(
                    f"reward function {function.name} needs {', '.join(missing)}; fields of the data: "
                    f"{fields}; rename the parameter or the field, or give it a default"
                )

    async def score(
        self, trajectory: Trajectory, example: Example, prompt: Any, *, num_opening: int, environment: object = None
    ) -> float | Mapping[str, float] | None:
        """Return the reward of one rollout. A function that returns None does not apply to the rollout, and adds no
        part.

        Args:
            trajectory: The rollout.
            example: The rollout's row.
            prompt: The row's prompt, as a string or as messages.
            num_opening: Number of opening messages. These messages were not sampled, not even an assistant's message.
            environment: The user's object if a `ToolClass` started the episode, else None.

        Raises:
            EnvironmentFault: a function returned an invalid value.
        """
        found: dict[str, Any] = {}
        for function in self.functions:
            value = await function(_given(function, trajectory, example, prompt, num_opening, environment))
            if value is None:
                continue
            parts = value if isinstance(value, Mapping) else {"": value}
            for part, number in parts.items():
                name = f"{function.name}/{part}" if part and len(self.functions) > 1 else str(part) or function.name
                found[name] = number if function.weight == 1.0 else function.weight * number
        if not found:
            return None
        alone = len(self.functions) == 1 and list(found) == [self.functions[0].name]
        return next(iter(found.values())) if alone else found


def _given(
    function: RewardFunction,
    trajectory: Trajectory,
    example: Example,
    prompt: Any,
    num_opening: int,
    environment: object,
) -> dict[str, Any]:
    after = list(trajectory.messages)[num_opening:]
    answers = [message for message in after if message["role"] == "assistant"]
    text = str(answers[-1].get("content") or "") if answers else ""
    if not function.takes_lists:
        return {
            **example.payload,
            "completion": text,
            "prompt": prompt,
            "messages": list(trajectory.messages),
            "trajectory": trajectory,
        }
    ids = [int(token) for turn in trajectory.turns[-1:] for token in turn.completion_ids]
    return {
        **{name: [value] for name, value in example.payload.items()},
        # As in TRL: the completion is a string if the prompt is one, and messages if the prompt is a conversation.
        "completions": [text if isinstance(prompt, str) and environment is None else after],
        "prompts": [prompt],
        "completion_ids": [ids],
        **({} if environment is None else {"environments": [environment]}),
    }


async def _result(call: Callable[[], Any], function: Callable[..., Any]) -> Any:
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    value = call() if is_async else await in_thread(call)
    return await value if inspect.isawaitable(value) else value
