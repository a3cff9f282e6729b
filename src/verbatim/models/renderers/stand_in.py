"""Builds a tokenizer for a chat template without its model, from bytes and the special tokens in the template."""

from __future__ import annotations

import re
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

_SPECIAL = re.compile(
    r'<\|[\w/"]+\|?>|<\w+\|>|<｜[^｜<>]+｜>|<(?:start|end)_of_\w+>|</?s>|\[gMASK\]|<sop>|\[/?INST\]|</?think>'
    r"|</?tool_call>|</?tool_response>|</?arg_(?:key|value)>"
)
"""Matches text that looks like a special token of published models."""
_GIVEN = {"bos_token": "<bos_token>", "eos_token": "<eos_token>", "pad_token": "<pad_token>"}
"""The special tokens that a template gets as variables."""


def stand_in_tokenizer(template: str, name: str) -> Any:
    """Build a tokenizer with this chat template. The template is all that a template renderer needs from a model.

    Args:
        template: The Jinja source.
        name: The name of the template, for messages.
    """
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokens = [*_GIVEN.values(), *sorted(set(_SPECIAL.findall(template)))]
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **_GIVEN)
    made.name_or_path = name
    return made
