"""Tiny models for vLLM's tests, and their next versions. vLLM's kernels for CPUs need heads of at least 32 numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from verbatim.config.schema import BuildConfig
from verbatim.inference.embedded.whole_sequence import sequence_logprobs
from verbatim.models.build import random_model
from verbatim.models.head import CausalLM
from verbatim.models.loading import save_model
from verbatim.models.trained_tokenizer import build_tokenizer

CONTEXT = 16384
"""Tokens: a request of nearly all of them goes on for as long as a test looks at it."""
SIZES = BuildConfig(
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=2,
    intermediate_size=96,
    vocab_size=320,
    context_length=CONTEXT,
)


def tiny_tokenizer() -> Any:
    """The tokenizer of the tiny models."""
    return build_tokenizer(["hello world 123\n", "a longer text\n"] * 20, vocab_size=320, context_length=CONTEXT)


class TinyModel:
    """A trainer that publishes random steps.

    Args:
        folder: Where its versions are published.
        tied: Whether the head shares the embedding's weights.
    """

    def __init__(self, folder: Path, *, tied: bool) -> None:
        self._tokenizer = tiny_tokenizer()
        model = random_model(SIZES, self._tokenizer, 0)
        if not tied:
            model.config.tie_word_embeddings = False
            torch.manual_seed(0)
            model = type(model)(model.config)
        self._begin(folder, model)

    def _begin(self, folder: Path, model: Any) -> None:
        self.model = model.eval()
        self._first = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self._folder = folder
        self.vocab_size = int(model.config.vocab_size)
        self.published = self.publish("v0")

    def publish(self, name: str) -> Path:
        """Write the weights of now."""
        path = self._folder / name
        path.mkdir(parents=True)
        save_model(self.model, self._tokenizer, path)
        return path

    def step(self, name: str, size: float) -> Path:
        """Change every weight by about `size`, and publish."""
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * size)
        return self.publish(name)

    def step_towards(self, token: int, name: str) -> Path:
        """Make about every second id that is drawn this one, and publish. Head and embedding must share their weights.

        What is added to all rows gives the hidden states a direction in common; this row gets more of it.
        """
        with torch.no_grad():
            rows = self.model.get_input_embeddings().weight
            rows.add_(0.45)
            rows[token].add_(0.225)
        return self.publish(name)

    def go_back(self) -> Path:
        """The first weights again."""
        self.model.load_state_dict(self._first)
        return self.published

    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        """The trainer's logprobs of all ids but the first: float32 [L - 1]."""
        tokens = torch.from_numpy(ids.astype(np.int64))
        return sequence_logprobs(CausalLM(self.model), tokens, 1.0).numpy()[1:]

    def ids(self, count: int, seed: int = 0) -> np.ndarray:
        """Random ids."""
        return np.random.default_rng(seed).integers(0, self.vocab_size, count, dtype=np.int32)


class MoeModel(TinyModel):
    """A Qwen3-MoE with four experts, of which two compute each token.

    Args:
        folder: Where its versions are published.
    """

    def __init__(self, folder: Path) -> None:
        self._tokenizer = tiny_tokenizer()
        config = Qwen3MoeConfig(
            vocab_size=len(self._tokenizer),
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            initializer_range=0.125,
        )
        torch.manual_seed(0)
        self._begin(folder, Qwen3MoeForCausalLM(config))
