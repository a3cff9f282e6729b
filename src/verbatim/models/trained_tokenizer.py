"""Trains a tokenizer on the texts of an environment, for a model that is built. Importing this does not load torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from verbatim.core.types import Message

END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
CONTROL_TOKENS = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
"""Special tokens, which are left out of displayed text."""
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""One token each, but not special, because a parser must see them in decoded text."""

# In order: a number; one newline; anything else. Merges run over whole lines, because the fixed text of a prompt and
# of a call then costs a token or two per line instead of one per word. They never run over digits, so a number that
# the model chooses is a token of its own, nor over a newline, so that text cut at the end of a line keeps its ids.
SPLIT = r"\p{N}+|[\r\n]|[^\p{N}\r\n]+"


def chat_template() -> str:
    """ChatML as a Jinja template, equal to the output of the `qwen3` renderer."""
    return files("verbatim.models").joinpath("chatml.jinja").read_text(encoding="utf-8")


def chat_text(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Render a conversation with the chat template, without a tokenizer, as training text for `build_model`."""
    rendered, _ = render_jinja_template(
        [[dict(message) for message in messages]],
        tools=[dict(tool) for tool in tools] or None,
        chat_template=chat_template(),
    )
    text: str = rendered[0]
    return text


def build_tokenizer(texts: Iterable[str], *, vocab_size: int, context_length: int) -> Any:
    """A byte-level BPE tokenizer with ChatML's control tokens; any text comes back from its ids exactly."""
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
    # After the learned tokens, as Qwen3 numbers them.
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
