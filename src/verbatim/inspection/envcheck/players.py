"""Players that need no model: one acts at random, the others say what was written down for them."""

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
"""Probability that the random player calls a tool, where it has any."""
BRACKETED = 0.6
"""Probability that it says something that stands in square brackets in the conversation, where anything does: games
write their moves so."""
CARELESS = 0.1
"""Probability that such a call names no tool of the episode, or leaves its arguments out."""
_WORDS = ("yes", "no", "0", "7", "42", "a", "red", "", "the answer is 3", '{"x": 1}', "Ünïcødé ✓", "word " * 60)


class Player(Protocol):
    """Takes the assistant's part in one episode."""

    def meet(self, episode: Episode) -> None:
        """The episode has started."""

    def say(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> ParsedResponse:
        """The answer to these messages, with tools of these schemas."""


class RandomPlayer:
    """Calls tools with random valid arguments, and says random words, some of them from the conversation."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._move: Callable[[random.Random], str | None] | None = None

    def meet(self, episode: Episode) -> None:
        """In half of the episodes that have `random_move`, it says only what that gives."""
        move = getattr(episode, "random_move", None)
        self._move = move if move is not None and self._rng.random() < 0.5 else None

    def say(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> ParsedResponse:
        """A call, or words."""
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
    """Says assistant messages in order, to whichever agent is asked; then nothing."""

    def __init__(self, written: Iterable[Message] = ()) -> None:
        self._left: Iterator[Message] = iter(written)

    def meet(self, episode: Episode) -> None:
        """Nothing to learn about it."""

    def say(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> ParsedResponse:
        """The next message."""
        return _read(next(self._left, {"role": "assistant", "content": ""}))


class SolutionPlayer(WrittenPlayer):
    """Says what the episode's own `solution` gives, each message when its turn comes."""

    def meet(self, episode: Episode) -> None:
        """Ask it for its solution."""
        self._solve: Callable[[], Iterable[Message]] = episode.solution  # type: ignore[attr-defined]
        self._began = False

    def say(self, messages: Sequence[Message], schemas: Sequence[Mapping[str, Any]]) -> ParsedResponse:
        """The next message.

        Raises:
            EnvironmentFault: `solution` raised, or gave something else than messages.
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
    """Whether an episode says how it is solved."""
    return callable(getattr(episode, "solution", None))


def assistant_messages(messages: Iterable[Message]) -> list[Message]:
    """What the assistant says in a conversation."""
    return [message for message in messages if message["role"] == "assistant"]


def _read(message: Any) -> ParsedResponse:
    if not isinstance(message, Mapping) or message.get("role") != "assistant":
        raise EnvironmentFault(
            f'solution gave {shown(message)}; expected assistant messages: {{"role": "assistant", "content": "..."}} '
            "or verbatim.environments.tool_call(name, {...})"
        )
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        read = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        calls.append(ToolCall(name=call["function"]["name"], arguments=read, raw=json.dumps(read)))
    return ParsedResponse(content=str(message.get("content") or ""), tool_calls=tuple(calls))


def _words_of(messages: Sequence[Message]) -> list[str]:
    """Words of the last messages: at most 60, and the last line as a whole."""
    text = "\n".join(str(message.get("content") or "") for message in messages[-3:])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return [*re.findall(r"\w+", text)[-60:], *(line[:200] for line in lines[-1:])]


def _bracketed(messages: Sequence[Message]) -> list[str]:
    """What stands in square brackets in the first messages and the last: at most 40 of each."""
    texts = ["\n".join(str(message.get("content") or "") for message in some) for some in (messages[:2], messages[-1:])]
    return [move for text in texts for move in re.findall(r"\[[^\[\]\n]{1,40}\]", text)[-40:]]
