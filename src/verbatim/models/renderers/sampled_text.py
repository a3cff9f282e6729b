"""Decodes sampled ids so that text that merely looks like a control token is not mistaken for a control token.

A model may spell `<tool_call>` out of ordinary tokens. In the decoded text, such a spelling would be indistinguishable
from the control token, so `hide` marks it with a noncharacter, and `shown` removes the mark again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from verbatim.models.renderers.special_token_escaping import EscapingTokenizer

_HIDDEN = "\ufdd5"
_SHOWN = re.compile(f"{_HIDDEN}({_HIDDEN}?)")


def hide(text: str, tokens: re.Pattern[str]) -> str:
    """Mark everything in a sampled text that looks like a control token, so that searches do not find it.

    `shown` removes the marks.
    """
    hidden = text.replace(_HIDDEN, 2 * _HIDDEN)
    return tokens.sub(lambda found: found[0][0] + _HIDDEN + found[0][1:], hidden)


def shown(text: str) -> str:
    """Undo `hide`: the text as it was sampled."""
    return _SHOWN.sub(r"\1", text) if _HIDDEN in text else text


class SampledText:
    """Decodes sampled ids of one tokenizer."""

    def __init__(self, tokenizer: EscapingTokenizer) -> None:
        self._tokenizer = tokenizer
        self.control_tokens = sorted(tokenizer.control_tokens, key=len, reverse=True)
        """The control tokens as text, longest first, so that the pattern prefers the longest match."""
        self.control = re.compile("|".join(map(re.escape, self.control_tokens)) or r"(?!)")
        """Finds control tokens in a text. `(?!)` matches nothing, for a tokenizer without control tokens."""
        self._token_of = {i: token for token, i in tokenizer.control_tokens.items()}

    def of(self, ids: Sequence[int]) -> str:
        """The text of ids. Ordinary text is treated with `hide`, so that searches find only real control tokens."""
        text, ordinary = "", list[int]()
        for i in [*ids, None]:
            if i is not None and i not in self._token_of:
                ordinary.append(i)
                continue
            if ordinary:
                text += hide(self._tokenizer.decode(ordinary), self.control)
            text += "" if i is None else self._token_of[i]
            ordinary = []
        return text

    def without_control(self, text: str) -> str:
        """The sampled text for display, without control tokens."""
        return shown(self.control.sub("", text))
