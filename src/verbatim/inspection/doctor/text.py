"""Decodes token ids, one by one and together, with a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verbatim.core.errors import UsageError


class TokenText:
    """Decodes ids with a Hugging Face tokenizer, without skipping or cleaning up."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.control: frozenset[int] = frozenset(tokenizer.added_tokens_decoder)
        """Control tokens, which are one token next to any text: special tokens and markup."""
        eos = tokenizer.eos_token_id
        self.stops: frozenset[int] = frozenset() if eos is None else frozenset([int(eos)])
        """Ids that end a turn according to the tokenizer."""
        self._pieces: dict[int, str] = {}

    @property
    def name(self) -> str:
        """The folder or id that it was loaded from."""
        return str(self._tokenizer.name_or_path)

    @property
    def chat_template(self) -> str | None:
        """The Jinja text; None without a single template."""
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a run of ids, control tokens included."""
        text: str = self._tokenizer.decode(
            [int(i) for i in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def piece(self, token: int) -> str:
        """The printable text of one token: spaces as `·`, control characters escaped, incomplete UTF-8 by its
        name in the vocabulary."""
        if token not in self._pieces:
            text = self.decode([token])
            if "\ufffd" in text or not text:
                text = str(self._tokenizer.convert_ids_to_tokens(token))
            self._pieces[token] = printable(text)
        return self._pieces[token]

    def refuse_unknown(self, largest_id: int) -> None:
        """Refuse a log of another tokenizer.

        Raises:
            UsageError: an id that is not in the vocabulary.
        """
        size = len(self._tokenizer)
        if largest_id >= size:
            raise UsageError(
                f"the log holds the id {largest_id}, and the tokenizer of {self.name!r} has ids below "
                f"{size}; give the model that the log is of: --model FOLDER_OR_ID"
            )


def printable(text: str, space: str = "·") -> str:
    """Text on one line without control characters."""
    return "".join(
        space if c == " " else c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text
    )
