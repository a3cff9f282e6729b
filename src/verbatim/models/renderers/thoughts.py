"""Splits off a completion's thinking, for families of the package `renderers` whose parser does not split off the
thinking reliably.

The parsers of GLM and DeepSeek V4 treat the marks of thinking and of calls the same way, so they report a call inside a
thought as an actual call. GLM's parser also always starts inside a thought, even if the prompt did not open one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verbatim.models.renderers.renderer import ParsedResponse
from verbatim.models.renderers.responses import read_completion

_LONGEST_OPENING = 8
"""The token that opens a thought is searched for in this many ids at the end of a prompt."""

Read = Callable[[Sequence[int]], ParsedResponse]
"""Parses ids of a completion with the family's parser."""


@dataclasses.dataclass(frozen=True)
class Thoughts:
    """Parses the thinking between two tokens. A completion has at most one thought, at its start."""

    opens: int
    """The id of `<think>`."""
    closes: int
    """The id of `</think>`."""
    texts: Mapping[int, Sequence[int]]
    """For each of the two tokens: the ids of the token's text, encoded without control tokens."""
    decode: Callable[[Sequence[int]], str]
    """Decodes ids to text, control tokens included."""

    def read(self, read: Read, ids: Sequence[int], prompt_ids: Sequence[int] | None) -> ParsedResponse:
        """Use `read` to parse `ids`, which end before the token that closed the turn.

        A thought extends from its opening mark (in the prompt, or before any text of the completion) to the first
        closing mark. Everything in between is thinking, including calls; later marks are text. Without `prompt_ids` the
        prompt is assumed not to open a thought.
        """
        start = self._start(ids, prompt_ids)
        if start is None:
            return self._outside(read, ids)
        if self.closes not in ids[start:]:
            return read([self.opens, *ids[start:]])
        close = list(ids).index(self.closes, start)
        thought = self.decode([i for i in ids[start:close] if i != self.opens]).rstrip()
        return dataclasses.replace(self._outside(read, ids[close + 1 :]), reasoning_content=thought or None)

    def _start(self, ids: Sequence[int], prompt_ids: Sequence[int] | None) -> int | None:
        """The index where the thinking begins; None if there is no thinking."""
        if self.opens in ids:
            place = list(ids).index(self.opens)
            if not self.decode(ids[:place]).strip():
                return place + 1
        marks = [i for i in (prompt_ids or ())[-_LONGEST_OPENING:] if i in (self.opens, self.closes)]
        return 0 if marks[-1:] == [self.opens] else None

    def _outside(self, read: Read, ids: Sequence[int]) -> ParsedResponse:
        """Parse ids outside the thinking.

        A closing mark is put first, so that GLM's parser leaves the thought in which it starts. Other marks are
        replaced by plain text.
        """
        return read([self.closes, *(part for i in ids for part in self.texts.get(i, (i,)))])


def find_thoughts(family: Any, tokenizer: Any) -> Thoughts | None:
    """A `Thoughts` for a family whose parser finds a thought even in the middle of a text; None for other families.

    The other families' parsers accept only one thought, at the start, and no call inside it.
    """
    opens, closes = (tokenizer.control_tokens.get(tag) for tag in ("<think>", "</think>"))
    if opens is None or closes is None:
        return None
    alpha, beta = (tokenizer.encode(text) for text in ("zqalpha", "zqbeta"))
    probe = [*alpha, opens, *beta, closes]
    if read_completion(family, tokenizer, probe, alpha, None, lambda *_: None).reasoning_content is None:
        return None
    words = {opens: "think>", closes: "/think>"}
    texts = {i: [*tokenizer.encode("<"), *tokenizer.encode(word)] for i, word in words.items()}
    return Thoughts(opens, closes, texts, tokenizer.decode)
