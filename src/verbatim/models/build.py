"""Builds a small Qwen3 model with random weights, and a tokenizer trained on an environment's texts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from verbatim.config.schema import BuildConfig
from verbatim.core.errors import ModelError
from verbatim.models.loading import load_tokenizer, save_model
from verbatim.models.trained_tokenizer import END_OF_TEXT, END_OF_TURN, build_tokenizer


def build_model(folder: Path, build: BuildConfig, texts: Sequence[str], seed: int) -> None:
    """Write a model folder in Hugging Face format. The same arguments give byte-identical weights and tokenizer.

    Raises:
        ModelError: the folder already holds a model, the sizes are inconsistent, or there is no text.
    """
    if (folder / "config.json").exists():
        raise ModelError(f'{folder} already holds a model; load it with model.name = "{folder}", or remove it')
    if not texts:
        raise ModelError(
            "training a tokenizer needs text, and there is none; an environment provides it through `demonstrations`"
        )
    tokenizer = build_tokenizer(texts, vocab_size=build.vocab_size, context_length=build.context_length)
    model = random_model(build, tokenizer, seed)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, folder)
    probe = texts[0] + " é中🙂\u0000"
    loaded = load_tokenizer(folder)
    assert loaded.encode(probe) == tokenizer.encode(probe), "the saved tokenizer encodes differently"


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
        # The usual 0.02 suits widths in the thousands. With that value, a narrow model needs three times as many steps
        # to learn its first words.
        initializer_range=build.hidden_size**-0.5,
        eos_token_id=end_of_turn,
        pad_token_id=end_of_text,
    )


def random_model(build: BuildConfig, tokenizer: Any, seed: int) -> Any:
    """A float32 Qwen3 with tied embeddings, whose weights depend only on sizes and seed."""
    end_of_turn, end_of_text = tokenizer.convert_tokens_to_ids([END_OF_TURN, END_OF_TEXT])
    config = build_config(build, len(tokenizer), end_of_turn=end_of_turn, end_of_text=end_of_text)
    with torch.random.fork_rng(devices=[]):  # do not change the caller's random state
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[end_of_turn, end_of_text], pad_token_id=end_of_text)
    return model
