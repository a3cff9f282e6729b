"""Decodes token ids with a tokenizer, one at a time or together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verbatim.core.errors import UsageError


class TokenText:
    """Decodes ids with a Hugging Face tokenizer, without skipping special tokens or cleaning up spaces."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.control: frozenset[int] = frozenset(tokenizer.added_tokens_decoder)
        """Control tokens, that is, special tokens and markup. Each stays a single token, whatever text is next to
        it."""
        eos = tokenizer.eos_token_id
        self.stops: frozenset[int] = frozenset() if eos is None else frozenset([int(eos)])
        """The ids that end a turn according to the tokenizer."""
        self._pieces: dict[int, str] = {}

    @property
    def name(self) -> str:
        """The folder or Hugging Face id from which the tokenizer was loaded."""
        return str(self._tokenizer.name_or_path)

    @property
    def chat_template(self) -> str | None:
        """The Jinja text of the chat template; None if the tokenizer has no chat template, or has several."""
        template = self._tokenizer.chat_template
        return template if isinstance(template, str) else None

    def decode(self, ids: Sequence[int]) -> str:
        """The text of consecutive ids, including control tokens."""
        text: str = self._tokenizer.decode(
            [int(i) for i in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def piece(self, token: int) -> str:
        """The printable text of one token. Spaces are shown as `·`, and control characters are escaped. A token that is
        incomplete UTF-8 is shown by its name in the vocabulary."""
        if token not in self._pieces:
            text = self.decode([token])
            if "\ufffd" in text or not text:
                text = str(self._tokenizer.convert_ids_to_tokens(token))
            self._pieces[token] = printable(text)
        return self._pieces[token]

    def refuse_unknown(self, largest_id: int) -> None:
        """Reject a log that was written with a different tokenizer.

        Raises:
            UsageError: `largest_id` is not in the vocabulary.
        """
        size = len(self._tokenizer)
        if largest_id >= size:
            raise UsageError(
                f"the log contains the id {largest_id}, but all ids of the tokenizer of {self.name!r} are below "
                f"{size}; name the model that the log came from: --model FOLDER_OR_ID"
            )


def printable(text: str, space: str = "·") -> str:
    """The text on one line, with control characters escaped and each space replaced by `space`."""
    return "".join(
        space if c == " " else c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode()
        for c in text
    )
