"""Trains a tokenizer on an environment's texts, for `[model.build]`. Importing this module does not load torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from verbatim.core.types import Message
from verbatim.core.user_values import as_atom

END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
CONTROL_TOKENS = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
"""Special tokens, which are left out when ids are decoded for display."""
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Added tokens that are not special, so that parsers see them in decoded text."""

# The pattern matches, in order: a number; one newline; anything else. Merges may span whole lines, so that the fixed
# text of a prompt or a call costs one or two tokens per line instead of one per word. They never include digits, so
# that a number that the model chooses is a separate token, and never a newline, so that text cut at the end of a line
# keeps its ids.
SPLIT = r"\p{N}+|[\r\n]|[^\p{N}\r\n]+"


_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The fields in which a message may carry its reasoning. The template reads only the first of them."""


@cache
def chat_template() -> str:
    """ChatML as a Jinja template. Its output equals the output of the `qwen3` renderer."""
    return files("verbatim.models").joinpath("chatml.jinja").read_text(encoding="utf-8")


def chat_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Render a conversation with the chat template but without a tokenizer, as training text for `build_model`.

    The result equals the text that `transformers` renders, and takes half the time: our own template is trusted, so it
    needs no sandbox.
    """
    written = []
    for message in messages:
        fields: dict[str, Any] = dict(message)
        reasoning = next((fields[name] for name in _REASONING if fields.get(name) is not None), None)
        written.append(fields if reasoning is None else {**fields, "reasoning_content": reasoning})
    return _program().render(messages=written, tools=list(tools) or None)


@cache
def _program() -> jinja2.Template:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(_plain(value), ensure_ascii=False)
    return environment.from_string(chat_template())


def _plain(value: Any) -> Any:
    """A value converted to JSON's own types. Users' values may contain numpy numbers."""
    if isinstance(value, Mapping):
        return {as_atom(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else as_atom(value)


def build_tokenizer(texts: Iterable[str], *, vocab_size: int, context_length: int) -> Any:
    """Train a byte-level BPE tokenizer with ChatML's control tokens. Decoding an encoded text returns the same text."""
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    added = CONTROL_TOKENS + MARKUP_TOKENS
    trainer = BpeTrainer(
        vocab_size=vocab_size - len(added),
        min_frequency=2,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    control = re.compile("|".join(map(re.escape, added)))
    backend.train_from_iterator((piece for text in texts for piece in control.split(text)), trainer)
    # Added last, so that their ids follow those of the learned tokens, as in Qwen3.
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in CONTROL_TOKENS])
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=["<|im_start|>"],
        model_max_length=context_length,
        clean_up_tokenization_spaces=False,
        chat_template=chat_template(),
    )
