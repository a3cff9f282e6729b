"""Cuts the thinking off a completion, for families of the package `renderers` whose parser does not do it.

The parsers of GLM and DeepSeek V4 walk over the marks of thinking and of calls alike: a call that was written inside
of a thought is taken for one that was made, and GLM's begins in a thought whatever the prompt says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verbatim.models.renderers.renderer import ParsedResponse
from verbatim.models.renderers.responses import read_completion

_LONGEST_OPENING = 8
"""The most ids of a generation prompt from the token on that opens a thought."""

Read = Callable[[Sequence[int]], ParsedResponse]
"""Reads ids of a completion by the family's parser."""


@dataclasses.dataclass(frozen=True)
class Thoughts:
    """Reads the thinking between two tokens; there is one thought at most, and it comes first."""

    opens: int
    """The id of `<think>`."""
    closes: int
    """The id of `</think>`."""
    texts: Mapping[int, Sequence[int]]
    """Both tokens' text, as ids that are not control tokens."""
    decode: Callable[[Sequence[int]], str]
    """The text of ids, control tokens included."""

    def read(self, read: Read, ids: Sequence[int], prompt_ids: Sequence[int] | None) -> ParsedResponse:
        """Read `ids`, which end before the token that closed the turn, by `read`.

        A thought goes from the mark that opens it, in the prompt or before all text of the completion, to the first
        one that closes it. What is inside is thinking, calls too; marks behind it are text. Without `prompt_ids` none
        was opened in the prompt.
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
        """The place where the thinking begins; None without any."""
        if self.opens in ids:
            place = list(ids).index(self.opens)
            if not self.decode(ids[:place]).strip():
                return place + 1
        marks = [i for i in (prompt_ids or ())[-_LONGEST_OPENING:] if i in (self.opens, self.closes)]
        return 0 if marks[-1:] == [self.opens] else None

    def _outside(self, read: Read, ids: Sequence[int]) -> ParsedResponse:
        """Read ids that are outside of thinking."""
        return read([self.closes, *(part for i in ids for part in self.texts.get(i, (i,)))])


def find_thoughts(family: Any, tokenizer: Any) -> Thoughts | None:
    """How to cut thoughts off for a family whose parser takes a mark in the middle of a text for a thought; else None.

    The others' parsers read one thought, which comes first, and no call in it.
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
