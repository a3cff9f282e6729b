"""Names the agents of a session that do not say who they are: by their system prompts, and by what they said before."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from verbatim.rollouts.gateway.canonical import digest_of, frame_of, opening_of

LONGEST = 2**18
"""Characters of a system prompt up to which it is looked at for what a clock or a counter has changed."""


class SystemPrompt:
    """A system prompt. What is only compared is found when it is asked for."""

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._texts = opening_of(messages)
        self.digest = digest_of(self._texts)

    @functools.cached_property
    def frame(self) -> bytes:
        """What a clock or a counter does not change in it; of a long one all of it."""
        return frame_of(self._texts) if sum(map(len, self._texts)) <= LONGEST else self.digest


class Agents:
    """The agents of one session, by what identifies them.

    The first one is "main", the others are "sub/1", "sub/2", ... as they appear.
    """

    def __init__(self) -> None:
        self._names: dict[bytes, str] = {}
        self._said: dict[tuple[bytes, bytes], dict[bytes, str]] = {}
        """Who was given an answer: by the digests of the tools that were shown and of the answer, then by the system
        prompt's digest, the newest last."""
        self._openings: dict[bytes, SystemPrompt] = {}

    def name_of(self, identity: bytes) -> str:
        """The name that goes with an identity: a thread, or the opening of a conversation."""
        if identity not in self._names:
            self._names[identity] = f"sub/{len(self._names)}" if self._names else "main"
        return self._names[identity]

    def answered(self, agent: str, opening: SystemPrompt, tools: bytes, answer: bytes) -> None:
        """An agent was given an answer.

        Args:
            agent: Its name.
            opening: Of the request.
            tools: Digest of the tools it was shown.
            answer: Digest of the answer, without its reasoning.
        """
        said = self._said.setdefault((tools, answer), {})
        said.pop(opening.digest, None)
        said[opening.digest] = agent
        self._openings.setdefault(opening.digest, opening)

    def whose_clock_went_on(self, opening: SystemPrompt, tools: bytes, answers: Sequence[bytes]) -> str | None:
        """The agent whose conversation goes on under a system prompt that is another one in numbers and dates alone;
        None where there is none.

        Args:
            opening: Of a request that continues nothing.
            tools: Digest of the tools it shows.
            answers: Digests of the answers in it, where all that is before the last of them was seen before.
        """
        for answer in reversed(answers):
            said = self._said.get((tools, answer), {})
            for digest in reversed(said):
                if digest == opening.digest or self._openings[digest].frame == opening.frame:
                    return said[digest]
        return None
