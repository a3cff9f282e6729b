"""Finds a run's tokenizer and decodes single ids. Needs neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from verbatim.core.imports import is_installed
from verbatim.inspection.viewer.run_state import read_config, read_text

FILE = "tokenizer.json"


def find_tokenizer(run: Path) -> Path | None:
    """Find the folder that holds the tokenizer of a run's model: a folder in the run folder, or the configured model
    folder."""
    for folder in _candidates(run):
        # A run folder may come from an untrusted person, and a link in it may lead to any file.
        if (folder / FILE).is_file() and not (folder / FILE).is_symlink():
            return folder
    return None


def _candidates(run: Path) -> Iterator[Path]:
    yield from (run / "model", run / "final", run / "warm_start")
    yield from sorted((run / "weights").glob("*"), reverse=True)
    yield from sorted((run / "checkpoints").glob("*/weights"), reverse=True)
    model = read_config(run).get("model")
    name = model.get("name") if isinstance(model, dict) else None
    if isinstance(name, str):
        yield Path(name).expanduser()


class RunTokenizer:
    """A tokenizer that is loaded from `tokenizer.json`, with the methods that the doctor needs.

    Args:
        folder: The folder of a model, which contains `tokenizer.json`.

    Raises:
        ValueError: the file is not a tokenizer, or the package `tokenizers` is missing.
    """

    def __init__(self, folder: Path) -> None:
        if not is_installed("tokenizers"):
            raise ValueError("decoding ids needs the package tokenizers: pip install 'verbatim-rl[viewer]'")
        from tokenizers import Tokenizer

        self.name_or_path = str(folder)
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / FILE))
        except Exception as error:  # the library raises plain `Exception`s
            raise ValueError(f"{folder / FILE} is not a tokenizer: {error}") from error
        self._folder = folder
        self.added_tokens_decoder: dict[int, Any] = self._tokenizer.get_added_tokens_decoder()

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    @cached_property
    def _config(self) -> dict[str, Any]:
        try:
            found = json.loads(read_text(self._folder / "tokenizer_config.json"))
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a turn; None if the tokenizer's configuration does not name that token."""
        token = self._config.get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        return self._tokenizer.token_to_id(text) if isinstance(text, str) else None

    @cached_property
    def chat_template(self) -> str | None:
        """The Jinja text of the chat template; None if there is no chat template, or more than one."""
        try:
            return read_text(self._folder / "chat_template.jinja")
        except (OSError, ValueError):
            template = self._config.get("chat_template")
            return template if isinstance(template, str) else None

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        """The text of consecutive ids, including control tokens. Options of `transformers` are ignored."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def convert_ids_to_tokens(self, token: int) -> str | None:
        """The name of an id in the vocabulary."""
        name: str | None = self._tokenizer.id_to_token(token)
        return name

    @cached_property
    def _is_byte_level(self) -> bool:
        # Search the JSON text, because "ByteLevel" may be one of several decoders in a sequence.
        return '"ByteLevel"' in json.dumps(json.loads(self._tokenizer.to_str()).get("decoder"))

    def pieces(self, ids: Iterable[int]) -> dict[str, Any]:
        r"""Return the texts of token ids and two lists of ids, under three keys.

        `pieces` has the text of each id. `byte_pieces` lists the ids whose bytes are incomplete UTF-8; their text is
        like `\xf0\x9f`. `special` lists the control tokens. Ids that are not in the vocabulary are left out.
        """
        pieces: dict[int, str] = {}
        byte_pieces, special = [], []
        for token in sorted(set(ids)):
            if token in self.added_tokens_decoder:
                pieces[token] = self.added_tokens_decoder[token].content
                special.append(token)
                continue
            # Ids are int32; `tokenizers` raises OverflowError for numbers that are negative or too large.
            name = self.convert_ids_to_tokens(token) if 0 <= token < 2**31 else None
            if name is None:
                continue
            raw = self._bytes_of(token, name)
            try:
                pieces[token] = raw.decode()
            except UnicodeDecodeError:
                pieces[token] = "".join(f"\\x{byte:02x}" for byte in raw)
                byte_pieces.append(token)
        return {"pieces": pieces, "byte_pieces": byte_pieces, "special": special}

    def _bytes_of(self, token: int, name: str) -> bytes:
        if self._is_byte_level:
            try:
                return bytes(_BYTES[character] for character in name)
            except KeyError:  # a character stands for no byte, so the name is the text
                return name.encode()
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            try:
                return bytes([int(name[3:5], 16)])
            except ValueError:
                return name.encode()
        if "\u2581" in name:  # SentencePiece's space, which decoding a single id would lose
            return name.replace("\u2581", " ").encode()
        text = self.decode([token])
        return (text or name).encode()


def _byte_table() -> dict[str, int]:
    """The byte that each character represents in byte-level vocabularies (Radford et al. 2019, GPT-2's encoder)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTES = _byte_table()
