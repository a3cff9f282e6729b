"""What a user writes: tasks, tools and rewards, in messages only, never in token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from verbatim.tools.base import Tool
from verbatim.types import Example, FunctionCall, Message, StopReason, Trajectory

Score = float | Mapping[str, float] | None
"""A reward, or its named parts, which are added up; None where nothing is earned. Such episodes are not trained on in
mode "rl"; where a teacher is followed ("opd", "sft") they are trained on like any other."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What an environment answers when the model speaks without calling a tool."""

    messages: Sequence[Message] = ()
    """Appended to the conversation."""
    done: bool = False
    """Ends the episode: nothing is sampled after it."""
    reward: float | None = None
    """The reward of the turn that was answered."""


class Agent(Protocol):
    """What an environment with its own control flow samples through."""

    async def sample(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), agent: str = "main"
    ) -> Message:
        """Record one turn of the named agent and return the assistant's message.

        Raises:
            EpisodeOver: the trajectory ran out of turns or tokens; let it pass through.
        """


class Episode:
    """One rollout's state. Subclass it, or write any object with these names."""

    messages: Sequence[Message] = ()
    """The opening messages."""
    tools: Sequence[Tool] = ()
    """Its own tools, bound to its own state."""
    info: Mapping[str, Any] = {}
    """What else is known of it once it has ended (JSON values): kept in the trajectory's `info`."""
    turn_rewards_sum_to_reward: bool = False
    """Whether the turns' own rewards add up to what `score` says: credit per turn then counts them once."""

    async def reply(self, message: Message) -> Reply:
        """Answer a message without a tool call. The default ends the episode."""
        return Reply(done=True)

    async def score(self, trajectory: Trajectory) -> Score:
        """What the finished episode earned."""
        raise NotImplementedError(f"{type(self).__name__} must say what an episode earned: write `score`")

    def state_key(self) -> str | None:
        """Names the state the next turn acts in, for advantages that compare equal states."""
        return None

    async def close(self) -> None:
        """Release what the episode holds. Called exactly once, whatever happened."""


@runtime_checkable
class Environment(Protocol):
    """A task. `run(agent)` on its episodes replaces `reply` where the environment owns its control flow."""

    def examples(self, split: str) -> Sequence[Example]:
        """The rows of "train" or "eval"."""

    async def start(self, example: Example, seed: int) -> Episode:
        """A fresh episode about this example; all its randomness comes from the seed."""


IS_SUCCESS = "is_success"
"""The key of `Trajectory.info` for what the environment's own `is_success` said of it."""


def succeeded(environment: Environment, trajectory: Trajectory) -> bool:
    """Whether an episode reached its goal: the environment's own `is_success`, or else a reward of at least 1.

    A rollout asks `is_success` once, when its group has ended, and keeps the answer in `info`. An episode that failed,
    or ended because no more tool calls could be read, is no success.
    """
    if trajectory.error is not None or trajectory.stop_reason is StopReason.MALFORMED:
        return False
    own = getattr(environment, "is_success", None)
    if own is None:
        return trajectory.reward is not None and trajectory.reward >= 1.0
    return bool(trajectory.info[IS_SUCCESS] if IS_SUCCESS in trajectory.info else own(trajectory))


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """One finished conversation to imitate before reinforcement learning, or to train a tokenizer on."""

    messages: Sequence[Message]
    """From the opening to the answer to the last tool call; assistant messages are what is imitated."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The schemas of the tools that were offered."""


def tool_exchange(name: str, arguments: Mapping[str, Any], answer: str, *, call_id: str = "call_0") -> list[Message]:
    """A tool call and its answer, as the two messages that a demonstration holds.

    Args:
        name: The tool's name.
        arguments: What the assistant calls it with (JSON values).
        answer: The text that the tool gives back.
        call_id: Ties the answer to its call; templates that write ids need a different one for each call.

    Example: `tool_exchange("look", {"at": "Bonn"}, "rain")` gives an assistant message whose `tool_calls` holds
    `look(at="Bonn")`, and the message `{"role": "tool", "content": "rain", "tool_call_id": "call_0", "name": "look"}`.
    """
    function: FunctionCall = {"name": name, "arguments": dict(arguments)}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]},
        {"role": "tool", "content": answer, "tool_call_id": call_id, "name": name},
    ]


@runtime_checkable
class Demonstrates(Protocol):
    """An environment that can show how to talk in it: needed for `warm_start` and `[model.build]`."""

    def demonstrations(self, count: int, seed: int) -> Sequence[Demonstration]:
        """That many conversations; the same seed gives the same ones."""
