"""Defines the protocols of environments: tasks, tools and rewards, in messages only, never in token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from verbatim.core.errors import UsageError
from verbatim.core.records.equality import is_at_least
from verbatim.core.types import Example, FunctionCall, Message, MessageToolCall, StopReason, Trajectory
from verbatim.environments.tools.tool import Tool


@dataclass(frozen=True, kw_only=True)
class AgentScores:
    """A score in which agents have rewards of their own.

    Advantages are then computed for each of these agents by itself: its turns, its reward, compared with the same agent
    of the group's other rollouts. Turns of other agents are credited by `reward`.

    Example: `AgentScores(agents={"player_0": 1.0, "player_1": -1.0})` has the reward 0.0.
    """

    agents: Mapping[str, float]
    """The reward of each agent that has one, by the name in `agent.sample(..., agent="player_0")`."""
    reward: float | Mapping[str, float] | None = None
    """The episode's reward, or its named parts; None: the mean of the agents'."""


Score = float | Mapping[str, float] | AgentScores | None
"""A reward, or its named parts, which are summed, or rewards for each agent; None: no reward. In mode "rl" episodes
without a reward are not trained on; with a teacher ("opd", "sft") they are trained on like any other."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The environment's answer to a message without tool calls."""

    messages: Sequence[Message] = ()
    """Messages to append to the conversation."""
    done: bool = False
    """Whether the episode ends: nothing is sampled after it."""
    reward: float | None = None
    """The reward of the turn that was answered."""


class Agent(Protocol):
    """Samples turns for an environment that owns its control flow."""

    async def sample(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), agent: str = "main", *, trained: bool = True
    ) -> Message:
        """Record one turn of the named agent and return the assistant's message.

        With `trained=False` the turn is sampled from the same model but not trained (a user or an opponent that the
        policy plays): it is context only, and its tokens are counted as `untrained`.

        Raises:
            EpisodeOver: the trajectory ran out of turns or tokens; do not catch it.
        """


class Episode:
    """The state of one rollout. Subclass it, or give any object with these attributes.

    Three more methods are optional: `async run(agent)` replaces `reply` where the episode owns its control flow;
    `solution()` gives what an agent says that solves it (assistant messages in order, as a list or a generator), and
    `random_move(rng)` a text that is a legal answer now, or None: `verbatim env check` plays both.

    An attribute `hears_last_turn = False` is optional too: `reply` is then not called for a message after which the
    model has no turn left.
    """

    messages: Sequence[Message] = ()
    """The opening messages."""
    tools: Sequence[Tool] = ()
    """The episode's tools, bound to its state."""
    info: Mapping[str, Any] = {}
    """Further facts of the finished episode (JSON values), copied to the trajectory's `info`."""
    turn_rewards_sum_to_reward: bool = False
    """Whether the turns' rewards sum to the score; credit per turn then counts them once."""

    async def reply(self, message: Message) -> Reply:
        """Answer a message without a tool call. The default ends the episode."""
        return Reply(done=True)

    async def score(self, trajectory: Trajectory) -> Score:
        """The reward of the finished episode."""
        raise NotImplementedError(f"{type(self).__name__} must say what an episode earned: write `score`")

    def state_key(self) -> str | None:
        """A key of the state before the next turn, for advantages that compare equal states."""
        return None

    async def close(self) -> None:
        """Release resources. Called exactly once, also after an error."""


@runtime_checkable
class Environment(Protocol):
    """A task. `run(agent)` on its episodes replaces `reply` where the environment owns its control flow."""

    def examples(self, split: str) -> Sequence[Example]:
        """The examples of "train" or "eval"."""

    async def start(self, example: Example, seed: int) -> Episode:
        """A new episode of this example; all its randomness comes from the seed."""


IS_SUCCESS = "is_success"
"""The key of `Trajectory.info` for the result of the environment's `is_success`."""


def succeeded(environment: Environment, trajectory: Trajectory) -> bool:
    """Whether an episode reached its goal: by the environment's `is_success`, or else by a reward of at least 1.

    A rollout calls `is_success` once, when its group has ended, and stores the result in `info`. A failed episode,
    or one that ended because of malformed tool calls, is not a success.
    """
    if trajectory.error is not None or trajectory.stop_reason is StopReason.MALFORMED:
        return False
    own = getattr(environment, "is_success", None)
    if own is None:
        return trajectory.reward is not None and is_at_least(trajectory.reward, 1.0)
    return bool(trajectory.info[IS_SUCCESS] if IS_SUCCESS in trajectory.info else own(trajectory))


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """One finished conversation to imitate before reinforcement learning, or to train a tokenizer on."""

    messages: Sequence[Message]
    """All messages; the assistant's are imitated."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools in the prompt."""


def tool_call(name: str, arguments: Mapping[str, Any], *, call_id: str = "call_0") -> Message:
    """The assistant's message that calls one tool.

    Example: `tool_call("look", {"at": "Bonn"})["tool_calls"][0]["function"]` is
    `{"name": "look", "arguments": {"at": "Bonn"}}`.
    """
    function: FunctionCall = {"name": name, "arguments": dict(arguments)}
    call: MessageToolCall = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def tool_exchange(name: str, arguments: Mapping[str, Any], answer: str, *, call_id: str = "call_0") -> list[Message]:
    """The two messages of a tool call and its answer, for a demonstration.

    Args:
        name: The tool's name.
        arguments: The arguments of the call (JSON values).
        answer: The tool's answer.
        call_id: Links the answer to its call; templates that write ids need a different one for each call.

    Example: `tool_exchange("look", {"at": "Bonn"}, "rain")` gives an assistant message whose `tool_calls` holds
    `look(at="Bonn")`, and the message `{"role": "tool", "content": "rain", "tool_call_id": "call_0", "name": "look"}`.
    """
    return [
        tool_call(name, arguments, call_id=call_id),
        {"role": "tool", "content": answer, "tool_call_id": call_id, "name": name},
    ]


@runtime_checkable
class Demonstrates(Protocol):
    """An environment with demonstrations, as `warm_start` and `[model.build]` require."""

    def demonstrations(self, count: int, seed: int) -> Sequence[Demonstration]:
        """`count` conversations; the same seed gives the same ones."""


def check_split(environment: str, split: str) -> None:
    """Refuse a split that the environment has not."""
    if split not in ("train", "eval"):
        raise UsageError(f'{environment} has no split {split!r}; there are "train" and "eval"')
