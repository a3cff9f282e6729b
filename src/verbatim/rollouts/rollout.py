"""The interface of rollout engines: they take a list of conversations, and return one trajectory for each, in the same
order."""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from verbatim.core.errors import UsageError
from verbatim.core.types import TRAJECTORY_KEYS, Example, Message, RolloutIdentity, Trajectory
from verbatim.core.user_values import why_refused

Conversation: TypeAlias = Example | Trajectory | Mapping[str, Any]
"""What a rollout can start from. A mapping must have `messages`, and may have `tools`, `id` and any other fields."""

T = TypeVar("T")


@runtime_checkable
class Rollout(Protocol):
    """Continues conversations until they end. Subclass it and implement `__call__`, or write an object with both
    `__call__` and `run`.

    Example:
        >>> class Echo(Rollout):
        ...     def __call__(self, trajectories, **overrides):
        ...         return [Trajectory(example_id="e", messages=t["messages"]) for t in trajectories]
        >>> Echo()([{"messages": [{"role": "user", "content": "hi"}]}])[0]["messages"]
        [{'role': 'user', 'content': 'hi'}]
    """

    def __call__(self, trajectories: Sequence[Conversation], **overrides: Any) -> list[Trajectory]:
        """Return one trajectory for each conversation, in the same order. The input is not modified. `overrides`
        replace settings of the engine for this call only."""
        raise NotImplementedError(
            f"{type(self).__name__} must implement `__call__(self, trajectories, **overrides) -> list[Trajectory]`"
        )

    async def run(self, trajectories: Sequence[Conversation], **overrides: Any) -> list[Trajectory]:
        """Async version of `__call__`. The default runs `__call__` in a thread."""
        return await asyncio.to_thread(self, trajectories, **overrides)


@dataclass(frozen=True, kw_only=True, eq=False)
class Opening:
    """The start of one episode, read from what the caller passed as a conversation."""

    messages: tuple[Message, ...]
    """A copy of the conversation so far."""
    tools: tuple[Mapping[str, Any], ...]
    """A copy of the conversation's tool schemas. If it is empty, the schemas of the tool manager are used."""
    identity: RolloutIdentity
    """Identity of the rollout. The engine adds the sampling seed to it later."""
    task: Mapping[str, Any]
    """All other fields of the caller's object, such as the reference answer. They are not copied, and never modified.
    The trajectory has them in `info["task"]`, and its mapping view has each of them under its own name."""


_OWN = ("messages", "tools", "id", "example_id", "trajectory_id", "group_id", "sample_index", "env")
"""Keys of a mapping that become fields of an `Opening`. All other keys go into `task`."""


def read_openings(trajectories: Sequence[Conversation]) -> list[Opening]:
    """Convert conversations to `Opening`s.

    A conversation without an id gets its index as the id. Conversations with the same id are samples of one example,
    and are numbered unless they have a `sample_index`. Every `trajectory_id` is unique: a repeated id is replaced by
    `<example_id>-<number>`.

    Raises:
        UsageError: an item is not a conversation; the message names the item.
    """
    if isinstance(trajectories, Mapping) or not isinstance(trajectories, Sequence):
        raise UsageError(
            f"a rollout takes a list of conversations, found a {type(trajectories).__name__}; write "
            "rollout([conversation])"
        )
    num_samples: Counter[str] = Counter()
    taken: set[str] = set()
    return [_read_opening(given, index, num_samples, taken) for index, given in enumerate(trajectories)]


def _read_opening(given: Conversation, index: int, num_samples: Counter[str], taken: set[str]) -> Opening:
    fields, task = _parts(given, index)
    _refuse(task, f"trajectories[{index}]", of_json=False)
    example_id = str(fields.get("id", fields.get("example_id", index)))
    sample = fields.get("sample_index", num_samples[example_id])
    name = str(fields.get("trajectory_id") or f"{example_id}-{sample}")
    # The same conversation may be passed several times, and a generated name may collide with a given one.
    while name in taken:
        sample = num_samples[example_id]
        name = f"{example_id}-{sample}"
        num_samples[example_id] += name in taken
    taken.add(name)
    num_samples[example_id] += 1
    return Opening(
        messages=_checked_copy(fields.get("messages"), f"trajectories[{index}]"),
        tools=_checked_tools(fields.get("tools"), f"trajectories[{index}]"),
        identity=RolloutIdentity(
            example_id=example_id,
            trajectory_id=name,
            group_id=fields.get("group_id", ""),
            sample_index=sample,
            env=fields.get("env", ""),
        ),
        task=task,
    )


def _refuse(value: Any, where: str, *, of_json: bool = True) -> None:
    if (why := why_refused(value, of_json=of_json)) is not None:
        raise UsageError(f"{where}: {why}")


def _parts(given: Conversation, index: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Split a conversation into (the fields of an `Opening`, the task's own fields)."""
    if isinstance(given, Example):
        return {name: getattr(given, name) for name in ("id", "env", "messages", "tools")}, given.payload
    if isinstance(given, Trajectory):
        names = ("example_id", "trajectory_id", "group_id", "sample_index", "env", "messages", "tools")
        return {name: getattr(given, name) for name in names}, _task_of(given.info)
    # The mapping view of a trajectory: its keys for the record itself are not fields of the task.
    if (
        isinstance(given, Mapping)
        and given.keys() >= {"trajectory_id", "turns", "info"}
        and (isinstance(given["info"], Mapping))
    ):
        task = {name: value for name, value in given.items() if name not in TRAJECTORY_KEYS}
        return given, {**_task_of(given["info"]), **task}
    if isinstance(given, Mapping):
        return given, {name: value for name, value in given.items() if name not in _OWN}
    raise UsageError(
        f"trajectories[{index}] is a {type(given).__name__}; expected an Example, a Trajectory, or a "
        'mapping such as {"messages": [...], "tools": [...]}'
    )


def _task_of(info: Any) -> Mapping[str, Any]:
    task = info.get("task") if isinstance(info, Mapping) else None
    return task if isinstance(task, Mapping) else {}


def _checked_copy(messages: Any, where: str) -> tuple[Message, ...]:
    if isinstance(messages, str) or not isinstance(messages, Sequence) or not messages:
        raise UsageError(f"{where} has messages = {messages!r:.80}; expected a list with at least one")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(f'{where}.messages[{index}] is {message!r:.80}; expected {{"role": ..., "content": ...}}')
        _refuse(message, f"{where}.messages[{index}]")
    return tuple(copy.deepcopy(dict(message)) for message in messages)  # type: ignore[misc]


def _checked_tools(tools: Any, where: str) -> tuple[dict[str, Any], ...]:
    if tools is None:
        return ()
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise UsageError(f"{where} has tools = {tools!r:.80}; expected a list of schemas")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UsageError(
                f'{where}.tools[{index}] is {tool!r:.80}; expected a schema, {{"type": "function", '
                '"function": {"name": ...}}; the function that runs it goes into the tool manager'
            )
        _refuse(tool, f"{where}.tools[{index}]")
    return tuple(copy.deepcopy(dict(tool)) for tool in tools)
