"""Recognizes objects that a user gives in place of an environment, and adapts them: a class with tools, a
Gymnasium-style environment, a reward function, or a taskset of verifiers."""

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
    "reward": 'the environment\'s name is already the reward function; for several: id = "single_turn", '
    'args = { reward = ["my_rewards.exact", "my_rewards.brief"] }',
    "environment": "the environment is already given by its name; leave this out",
    "args": "write its arguments next to the others: args = { size = 4, num_train = 100 }",
}
"""Arguments of adapters that a configuration must not set, because the environment's name already determines them. Each
has a hint for the error message."""

Adapter = type[SingleTurn] | type[ToolClass] | type[GymnasiumStyle]

EXPECTED = (
    "expected an environment (`examples(split)` and `async start(example, seed)`), a class with `reset` and tool "
    "methods as TRL takes it, a Gymnasium-style one (`reset(seed=)`, `step(text)`), or a reward function "
    "(`def reward(completion, **columns)`)"
)


def taskset_of(make: object) -> str | None:
    """Return the id of a taskset of verifiers, which is the name of its module; None if `make` is not a taskset."""
    # Checked by name and not with issubclass: verifiers is an optional extra, and must not be imported for this check.
    bases = make.__mro__ if inspect.isclass(make) else ()
    is_taskset = any(base.__name__ == "Taskset" and base.__module__.startswith("verifiers.") for base in bases)
    return getattr(make, "__module__", None) if is_taskset else None


def adapter_of(given: object) -> Adapter | None:
    """Return the adapter for a class, an object or a function. Return None if what was given already is an environment,
    or if no adapter fits.

    >>> def exact(completion, answer): ...
    >>> adapter_of(exact).__name__
    'SingleTurn'
    """
    if is_reward_function(given):
        return SingleTurn
    cls = given if inspect.isclass(given) else type(given)
    if all(callable(getattr(cls, name, None)) for name in ("examples", "start")):
        return None
    if is_gymnasium_style(cls):  # before ToolClass, for which `step` would be a tool
        return GymnasiumStyle
    if callable(getattr(cls, "reset", None)) and tool_methods(cls):
        return ToolClass
    return None


def shared_out(given: object, adapter: Adapter, args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split arguments into (the arguments that the class or function itself names, the arguments of its adapter).

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
    """Check and convert the arguments of an environment's class or function, and the arguments of its adapter.

    Returns:
        The arguments, converted as by `check_parameters`; and a message for each invalid argument, keyed by its name.
    """
    adapter = adapter_of(make) if inspect.isclass(make) or inspect.isroutine(make) else None
    if taskset_of(make) is not None:
        return dict(args), {}  # checked when it is created: the check imports verifiers
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
    """Wrap a user's class or function in its adapter. `args` must have been checked before."""
    own, rest = shared_out(make, adapter, args)
    given: dict[str, Any] = {"reward": make} if adapter is SingleTurn else {"environment": make, "args": own}
    return adapter(**given, **rest)
