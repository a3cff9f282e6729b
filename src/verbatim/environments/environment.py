"""Defines the protocols of environments: their tasks, tools and rewards. They see messages only, never token ids."""

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
    """A score with one reward per agent.

    Advantages are then computed per agent: the turns of an agent are credited with its own reward, compared with the
    rewards of the same agent in the group's other rollouts. Turns of agents that are not listed are credited with
    `reward`.

    Example: `AgentScores(agents={"player_0": 1.0, "player_1": -1.0})` gives the episode the reward 0.0.
    """

    agents: Mapping[str, float]
    """Rewards by agent name. An agent's name is the argument `agent` of `sample`: `agent.sample(...,
    agent="player_0")`."""
    reward: float | Mapping[str, float] | None = None
    """The episode's reward, or its named parts; None for the mean of the agents' rewards."""


Score = float | Mapping[str, float] | AgentScores | None
"""A reward, its named parts (whose sum is the reward), one reward per agent, or None for no reward. In mode "rl" an
episode without a reward is not trained on; with a teacher ("opd", "sft") it is trained on like any other episode."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """The environment's reply to a message of the model that has no tool calls."""

    messages: Sequence[Message] = ()
    """Messages to append to the conversation."""
    done: bool = False
    """True if the episode ends here, so that nothing more is sampled."""
    reward: float | None = None
    """The reward of the turn to which this is the reply, or None."""


class Agent(Protocol):
    """Samples turns for an environment that has its own control flow."""

    async def sample(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), agent: str = "main", *, trained: bool = True
    ) -> Message:
        """Sample and record one turn of the named agent, and return the assistant's message.

        With `trained=False` the turn is sampled from the same model but not trained on, for example when the policy
        plays a user or an opponent. Such a turn is context only, and its tokens are counted as `untrained`.

        Raises:
            EpisodeOver: the trajectory ran out of turns or tokens; do not catch this error.
        """


class Episode:
    """The state of one rollout. Subclass it, or use any object with these attributes and methods.

    An episode may define three further methods. `async run(agent)` replaces `reply` if the episode has its own control
    flow. `solution()` returns the assistant messages that solve the episode, in order, as a list or a generator.
    `random_move(rng)` returns a string that is a legal answer in the current state, or None. `verbatim env check` plays
    `solution` and `random_move`.

    An episode may also define the attribute `hears_last_turn`. If it is False, `reply` is not called for the last turn
    that the model gets before a limit ends the episode.
    """

    messages: Sequence[Message] = ()
    """The opening messages."""
    tools: Sequence[Tool] = ()
    """The episode's tools, bound to the episode's state."""
    info: Mapping[str, Any] = {}
    """Further facts about the finished episode, as JSON values. They are copied to the trajectory's `info`."""
    turn_rewards_sum_to_reward: bool = False
    """True if the rewards of the turns sum to the score, so that per-turn credit does not count them twice."""

    async def reply(self, message: Message) -> Reply:
        """Answer a message without a tool call. The default ends the episode."""
        return Reply(done=True)

    async def score(self, trajectory: Trajectory) -> Score:
        """Return the reward of the finished episode."""
        raise NotImplementedError(f"{type(self).__name__} has no `score`: write it to return the episode's reward")

    def state_key(self) -> str | None:
        """Return a key for the state before the next turn, for advantages that compare turns taken in equal states."""
        return None

    async def close(self) -> None:
        """Release resources. Called exactly once, even after an error."""


@runtime_checkable
class Environment(Protocol):
    """A task: it has examples, and starts an episode for each rollout of an example."""

    def examples(self, split: str) -> Sequence[Example]:
        """Return the examples of the split "train" or "eval"."""

    async def start(self, example: Example, seed: int) -> Episode:
        """Start a new episode of this example. All randomness of the episode must come from the seed."""


IS_SUCCESS = "is_success"
"""Key of `Trajectory.info` under which the result of the environment's `is_success` is stored."""


def succeeded(environment: Environment, trajectory: Trajectory) -> bool:
    """Return True if an episode reached its goal: `environment.is_success` decides this or, if there is no such method,
    a reward of at least 1.

    The rollout engine calls `is_success` once, when the group has ended, and stores the result in `info`. An episode
    that failed, or that ended because of malformed tool calls, is not a success.
    """
    if trajectory.error is not None or trajectory.stop_reason is StopReason.MALFORMED:
        return False
    own = getattr(environment, "is_success", None)
    if own is None:  # rewards are sums: 0.7 + 0.2 + 0.1 is just below 1, so compare with a tolerance
        return trajectory.reward is not None and is_at_least(trajectory.reward, 1.0)
    return bool(trajectory.info[IS_SUCCESS] if IS_SUCCESS in trajectory.info else own(trajectory))


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """One complete conversation to imitate in the supervised warm start, or to train a tokenizer on."""

    messages: Sequence[Message]
    """All messages of the conversation. The loss covers only the assistant's messages."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Schemas of the tools that the prompt shows."""


def tool_call(name: str, arguments: Mapping[str, Any], *, call_id: str = "call_0") -> Message:
    """Create an assistant message that calls one tool.

    Example: `tool_call("look", {"at": "Bonn"})["tool_calls"][0]["function"]` is
    `{"name": "look", "arguments": {"at": "Bonn"}}`.
    """
    function: FunctionCall = {"name": name, "arguments": dict(arguments)}
    call: MessageToolCall = {"id": call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def tool_exchange(name: str, arguments: Mapping[str, Any], answer: str, *, call_id: str = "call_0") -> list[Message]:
    """Create the two messages of a tool call and its answer, for a demonstration.

    Args:
        name: The tool's name.
        arguments: The arguments of the call (JSON values).
        answer: The tool's answer.
        call_id: Id that links the answer to the call. Chat templates that print ids need a different id for each call.

    Example: `tool_exchange("look", {"at": "Bonn"}, "rain")` gives an assistant message whose `tool_calls` holds
    `look(at="Bonn")`, and the message `{"role": "tool", "content": "rain", "tool_call_id": "call_0", "name": "look"}`.
    """
    return [
        tool_call(name, arguments, call_id=call_id),
        {"role": "tool", "content": answer, "tool_call_id": call_id, "name": name},
    ]


@runtime_checkable
class Demonstrates(Protocol):
    """An environment that has demonstrations, which `warm_start` and `[model.build]` need."""

    def demonstrations(self, count: int, seed: int) -> Sequence[Demonstration]:
        """Return `count` conversations. The same seed gives the same conversations."""


def check_split(environment: str, split: str) -> None:
    """Refuse a split that the environment does not have."""
    if split not in ("train", "eval"):
        raise UsageError(f'{environment} has no split {split!r}; expected "train" or "eval"')
