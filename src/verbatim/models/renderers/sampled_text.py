"""The text of sampled ids, in which what only looks like a control token is not found as one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from verbatim.models.renderers.special_token_escaping import EscapingTokenizer

_HIDDEN = "\ufdd5"
_SHOWN = re.compile(f"{_HIDDEN}({_HIDDEN}?)")


def hide(text: str, tokens: re.Pattern[str]) -> str:
    """Sampled text in which what only looks like a control token is not found as one; `shown` undoes it."""
    hidden = text.replace(_HIDDEN, 2 * _HIDDEN)
    return tokens.sub(lambda found: found[0][0] + _HIDDEN + found[0][1:], hidden)


def shown(text: str) -> str:
    """Undo `hide`: the text as it was sampled."""
    return _SHOWN.sub(r"\1", text) if _HIDDEN in text else text


class SampledText:
    """Reads ids of one tokenizer."""

    def __init__(self, tokenizer: EscapingTokenizer) -> None:
        self._tokenizer = tokenizer
        self.control_tokens = sorted(tokenizer.control_tokens, key=len, reverse=True)
        """The longest first."""
        self.control = re.compile("|".join(map(re.escape, self.control_tokens)) or r"(?!)")
        """Finds control tokens in a text."""
        self._token_of = {i: token for token, i in tokenizer.control_tokens.items()}

    def of(self, ids: Sequence[int]) -> str:
        """The text of ids as `hide` leaves it: only control tokens are found as such."""
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
        """The sampled text for people, control tokens left out."""
        return shown(self.control.sub("", text))
