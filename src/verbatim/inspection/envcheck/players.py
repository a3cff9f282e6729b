"""Defines players that need no model: one acts at random, the others follow a script."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from verbatim.core.errors import EnvironmentFault
from verbatim.core.texts import error_text, shown
from verbatim.core.types import Message, ToolCall
from verbatim.environments.environment import Episode
from verbatim.inspection.envcheck.arguments import random_arguments
from verbatim.models.renderers.renderer import ParsedResponse

CALLS = 0.7
"""Probability that the random player calls a tool, if any are offered."""
BRACKETED = 0.6
"""Probability that the random player, when it does not call a tool, repeats text in square brackets from the
conversation, if there is any. Games write their moves in brackets."""
CARELESS = 0.1
"""Probability that a call of the random player names an unknown tool or leaves out the arguments."""
_WORDS = ("yes", "no", "0", "7", "42", "a", "red", "", "the answer is 3", '{"x": 1}', "Ünïcødé ✓", "word " * 60)


class Player(Protocol):
    """Plays the assistant in one episode."""

    def meet(self, episode: Episode) -> None:
        """Receive the episode. Called when the episode has started."""

    def say(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> ParsedResponse:
        """Return the answer to these messages, which may call tools with these schemas."""


class RandomPlayer:
    """Calls tools with random valid arguments, or says random words, some of which are from the conversation."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._move: Callable[[random.Random], str | None] | None = None

    def meet(self, episode: Episode) -> None:
        """If the episode has a `random_move` method, decide with probability 1/2 to play only the moves that this
        method returns."""
        move = getattr(episode, "random_move", None)
        self._move = move if move is not None and self._rng.random() < 0.5 else None

    def say(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> ParsedResponse:
        """Reply with a tool call or with text."""
        rng = self._rng
        move = self._move(rng) if self._move is not None else None
        if move is not None:
            return ParsedResponse(content=move)
        words = [*_WORDS, *_words_of(messages)]
        if not schemas or rng.random() >= CALLS:
            moves = _bracketed(messages)
            said = rng.choice(moves) if moves and rng.random() < BRACKETED else rng.choice(words)
            return ParsedResponse(content=said)
        function = rng.choice(list(schemas))["function"]
        name, arguments = function["name"], random_arguments(function.get("parameters", {}), words, rng)
        if rng.random() < CARELESS:
            name, arguments = rng.choice([("no_such_tool", arguments), (name, {})])
        call = ToolCall(name=name, arguments=arguments, raw=json.dumps({"name": name, "arguments": arguments}))
        return ParsedResponse(content="", tool_calls=(call,))


class WrittenPlayer:
    """Says the given assistant messages in order, and empty messages after the last of them. Which agent is asked makes
    no difference."""

    def __init__(self, written: Iterable[Message] = ()) -> None:
        self._left: Iterator[Message] = iter(written)

    def meet(self, episode: Episode) -> None:
        """Do nothing, because the messages do not depend on the episode."""

    def say(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> ParsedResponse:
        """Return the next message."""
        return _read(next(self._left, {"role": "assistant", "content": ""}))


class SolutionPlayer(WrittenPlayer):
    """Says the messages of the episode's own `solution`, one per turn."""

    def meet(self, episode: Episode) -> None:
        """Remember the `solution` method of the episode, which is called at the first turn."""
        self._solve: Callable[[], Iterable[Message]] = episode.solution  # type: ignore[attr-defined]
        self._began = False

    def say(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> ParsedResponse:
        """Return the next message.

        Raises:
            EnvironmentFault: `solution` raised an exception, or returned something other than assistant messages.
        """
        try:
            if not self._began:
                self._began, self._left = True, iter(self._solve())
            return super().say(messages, schemas)
        except EnvironmentFault:
            raise
        except Exception as error:
            raise EnvironmentFault(f"solution raised {error_text(error)}") from error


def has_solution(episode: object) -> bool:
    """True if the episode has a `solution` method."""
    return callable(getattr(episode, "solution", None))


def assistant_messages(messages: Iterable[Message]) -> list[Message]:
    """The assistant messages of a conversation."""
    return [message for message in messages if message["role"] == "assistant"]


def _read(message: Any) -> ParsedResponse:
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        raise EnvironmentFault(
            f"solution returned {shown(message)}; expected assistant messages: "
            '{"role": "assistant", "content": "..."} '
            "or verbatim.environments.tool_call(name, {...})"
        )
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        read = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        calls.append(ToolCall(name=call["function"]["name"], arguments=read, raw=json.dumps(read)))
    return ParsedResponse(content=str(message.get("content") or ""), tool_calls=tuple(calls))


def _words_of(messages: Sequence[Message]) -> list[str]:
    """The last 60 words of the last three messages, and then the last line of these messages as one string."""
    text = "\n".join(str(message.get("content") or "") for message in messages[-3:])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [*re.findall(r"\w+", text)[-60:], *(line[:200] for line in lines[-1:])]


def _bracketed(messages: Sequence[Message]) -> list[str]:
    """The strings in square brackets: at most 40 from the first two messages, and at most 40 from the last message."""
    texts = ["\n".join(str(message.get("content") or "") for message in some) for some in (messages[:2], messages[-1:])]
    return [move for text in texts for move in re.findall(r"\[[^\[\]\n]{1,40}\]", text)[-40:]]
