"""Recognizes what people bring in place of an environment: a class with tools, a Gymnasium-style environment, a reward
function, a taskset of verifiers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from verbatim.config.parameters import check_parameters
from verbatim.environments.gymnasium_style import GymnasiumStyle, is_gymnasium_style
from verbatim.environments.reward_functions import is_reward_function
from verbatim.environments.single_turn import SingleTurn
from verbatim.environments.tool_class import ToolClass, tool_methods

_SET = {
    "reward": 'the reward function is the one that is named already; for several: id = "single_turn", '
    'args = { reward = ["my_rewards.exact", "my_rewards.brief"] }',
    "environment": "the environment is the one that is named already; leave this out",
    "args": "write its arguments beside the others: args = { size = 4, num_train = 100 }",
}
"""Arguments of adapters that the name of the environment stands for."""

Adapter = type[SingleTurn] | type[ToolClass] | type[GymnasiumStyle]

EXPECTED = (
    "expected an environment (`examples(split)` and `async start(example, seed)`), a class with `reset` and tool "
    "methods as TRL takes it, a Gymnasium-style one (`reset(seed=)`, `step(text)`), or a reward function "
    "(`def reward(completion, **columns)`)"
)


def taskset_of(make: object) -> str | None:
    """The id of a taskset of verifiers, which is its module; None for anything else. Imports nothing."""
    bases = make.__mro__ if inspect.isclass(make) else ()
    is_taskset = any(base.__name__ == "Taskset" and base.__module__.startswith("verifiers.") for base in bases)
    return getattr(make, "__module__", None) if is_taskset else None


def adapter_of(given: object) -> Adapter | None:
    """What makes an environment of a class, an object or a function; None for all that needs no adapter, or fits none.

    >>> def exact(completion, answer): ...
    >>> adapter_of(exact).__name__
    'SingleTurn'
    """
    if is_reward_function(given):
        return SingleTurn
    cls = given if inspect.isclass(given) else type(given)
    if all(callable(getattr(cls, name, None)) for name in ("examples", "start")):
        return None
    if is_gymnasium_style(cls):
        return GymnasiumStyle
    if callable(getattr(cls, "reset", None)) and tool_methods(cls):
        return ToolClass
    return None


def shared_out(given: object, adapter: Adapter, args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the class or function itself, which are those that it names, and those of its adapter.

    >>> class Game:
    ...     def __init__(self, size=3): ...
    ...     def reset(self, seed=None): ...
    ...     def step(self, text): ...
    >>> shared_out(Game, GymnasiumStyle, {"size": 4, "num_train": 10})
    ({'size': 4}, {'num_train': 10})
    """
    if adapter is SingleTurn:
        return {}, dict(args)
    parameters = inspect.signature(given).parameters.values() if callable(given) else ()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        names |= {*args} - {*inspect.signature(adapter).parameters}
    own = {name: value for name, value in args.items() if name in names}
    return own, {name: value for name, value in args.items() if name not in names}


def check_arguments(make: Callable[..., Any], args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The arguments of an environment's class or function, converted as `check_parameters` does, those of its adapter
    included; and a message for each wrong one."""
    adapter = adapter_of(make) if inspect.isclass(make) or inspect.isroutine(make) else None
    if taskset_of(make) is not None:
        return dict(args), {}  # checked where it is made: its adapter imports verifiers
    if adapter is None:
        return check_parameters(make, args, num_inputs=0, label="environment")
    own, rest = shared_out(make, adapter, args)
    wrong: dict[str, str] = {}
    if adapter is not SingleTurn:
        own, wrong = check_parameters(make, own, num_inputs=0, label="environment")
    given = "reward" if adapter is SingleTurn else "environment"
    taken = ("reward",) if adapter is SingleTurn else ("environment", "args")
    wrong |= {key: _SET[key] for key in taken if key in rest}
    known, more = check_parameters(adapter, {**rest, given: ""}, num_inputs=0, label="environment")
    return {**own, **{key: value for key, value in known.items() if key != given}}, {**more, **wrong}


def adapted(make: Callable[..., Any], adapter: Adapter, args: Mapping[str, Any]) -> Any:
    """The environment around what a person brought; `args` are checked."""
    own, rest = shared_out(make, adapter, args)
    given: dict[str, Any] = {"reward": make} if adapter is SingleTurn else {"environment": make, "args": own}
    return adapter(**given, **rest)
