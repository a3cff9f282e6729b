"""Names the agents of a session. If a request has no agent name, its agent is recognised by the system prompt and by
earlier answers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from verbatim.rollouts.gateway.canonical import digest_of, frame_of, opening_of

LONGEST = 2**18
"""Maximum length, in characters, of a system prompt that is searched for clocks and counters. A longer prompt is
compared as a whole."""


class SystemPrompt:
    """A system prompt and its digests. `frame` is computed lazily, because few requests need it."""

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._texts = opening_of(messages)
        self.digest = digest_of(self._texts)

    @functools.cached_property
    def frame(self) -> bytes:
        """Digest of the prompt without clocks and counters; if the prompt is long, the digest of the whole text."""
        return frame_of(self._texts) if sum(map(len, self._texts)) <= LONGEST else self.digest


class Agents:
    """The names of a session's agents. The first agent is "main"; the others are "sub/1", "sub/2", ... in order of
    appearance."""

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}
        self._said: dict[tuple[bytes, bytes], dict[bytes, str]] = {}
        """The agent that received an answer. The outer key is (digest of the tools, digest of the answer); the inner
        key is the digest of the system prompt, and the newest entry is the last."""
        self._openings: dict[bytes, SystemPrompt] = {}

    def name_of(self, identity: bytes) -> str:
        """Return the name of the agent with this identity, which is a client's thread id or the digest of a system
        prompt."""
        if identity not in self._names:
            self._names[identity] = f"sub/{len(self._names)}" if self._names else "main"
        return self._names[identity]

    def answered(self, agent: str, opening: SystemPrompt, tools: bytes, answer: bytes) -> None:
        """Remember that an agent received an answer.

        Args:
            agent: The agent's name.
            opening: The request's system prompt.
            tools: Digest of the tools that the agent was shown.
            answer: Digest of the answer without its reasoning.
        """
        said = self._said.setdefault((tools, answer), {})
        said.pop(opening.digest, None)
        said[opening.digest] = agent
        self._openings.setdefault(opening.digest, opening)

    def whose_clock_went_on(self, opening: SystemPrompt, tools: bytes, answers: Sequence[bytes]) -> str | None:
        """Find the agent whose conversation a request continues although numbers, dates or random ids in the system
        prompt have changed. Return None if there is no such agent.

        Args:
            opening: System prompt of a request that matched no turn.
            tools: Digest of the tools that the request shows.
            answers: Digests of the request's assistant messages, up to the first message that was never seen before.
        """
        for answer in reversed(answers):
            said = self._said.get((tools, answer), {})
            for digest in reversed(said):
                if digest == opening.digest or self._openings[digest].frame == opening.frame:
                    return said[digest]
        return None
