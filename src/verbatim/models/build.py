"""Builds a small Qwen3 model with random weights, and a tokenizer trained on the texts of an environment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.chat_template_utils import render_jinja_template

from verbatim.config.schema import BuildConfig
from verbatim.core.errors import ModelError
from verbatim.core.types import Message
from verbatim.models.loading import load_tokenizer, save_model

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


def build_model(folder: Path, build: BuildConfig, texts: Sequence[str], seed: int) -> None:
    """Write a folder in Hugging Face format: the same arguments give the same bytes of weights and tokenizer.

    Raises:
        ModelError: the folder already holds a model, the sizes are inconsistent, or there is no text.
    """
    if (folder / "config.json").exists():
        raise ModelError(f'{folder} already holds a model; load it with model.name = "{folder}", or remove it')
    if not texts:
        raise ModelError(
            "a tokenizer is trained on text, and none was given; an environment gives it by its `demonstrations`"
        )
    tokenizer = build_tokenizer(texts, vocab_size=build.vocab_size, context_length=build.context_length)
    model = random_model(build, tokenizer, seed)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, folder)
    probe = texts[0] + " é中🙂\u0000"
    loaded = load_tokenizer(folder)
    assert loaded.encode(probe) == tokenizer.encode(probe), "the saved tokenizer is another one"


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


def build_config(
    build: BuildConfig, vocab_size: int, *, end_of_turn: int | None = None, end_of_text: int | None = None
) -> Qwen3Config:
    """The configuration of the model that a `[model.build]` table describes.

    Raises:
        ModelError: the sizes are inconsistent.
    """
    head_dim, rest = divmod(build.hidden_size, build.num_heads)
    if rest or head_dim % 2 or build.num_heads % build.num_kv_heads:
        raise ModelError(
            f"model.build: hidden_size = {build.hidden_size}, num_heads = {build.num_heads}, num_kv_heads = "
            f"{build.num_kv_heads} do not fit; hidden_size must be an even multiple of num_heads, and num_heads a "
            "multiple of num_kv_heads, for example 128, 4 and 2"
        )
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=build.hidden_size,
        intermediate_size=build.intermediate_size,
        num_hidden_layers=build.num_layers,
        num_attention_heads=build.num_heads,
        num_key_value_heads=build.num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=build.context_length,
        tie_word_embeddings=True,
        # The usual 0.02 suits widths in the thousands; a narrow model then needs three times the steps to learn its
        # first words.
        initializer_range=build.hidden_size**-0.5,
        eos_token_id=end_of_turn,
        pad_token_id=end_of_text,
    )


def random_model(build: BuildConfig, tokenizer: Any, seed: int) -> Any:
    """A Qwen3 with tied embeddings and weights that depend on the seed only, in float32."""
    end_of_turn, end_of_text = tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])
    config = build_config(build, len(tokenizer), end_of_turn=end_of_turn, end_of_text=end_of_text)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[end_of_turn, end_of_text], pad_token_id=end_of_text)
    return model
