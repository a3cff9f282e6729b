"""[model] and [warm_start]: the model that a run begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from verbatim.config.sections import PositiveInt, Section
from verbatim.config.trainer import OptimConfig


class BuildConfig(Section):
    """A small model made on the spot: random weights, and a tokenizer trained on the environments' own text."""

    hidden_size: PositiveInt = 128
    """Width."""
    num_layers: PositiveInt = 3
    """Depth."""
    num_heads: PositiveInt = 4
    """Query heads."""
    num_kv_heads: PositiveInt = 2
    """Key/value heads."""
    intermediate_size: PositiveInt = 384
    """Width of the feed-forward part."""
    vocab_size: Annotated[int, Field(ge=300)] = 1024
    """Most tokens the tokenizer learns."""
    context_length: PositiveInt = 2048
    """Longest sequence of the model."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.hidden_size % (2 * self.num_heads):
            raise ValueError(
                f"hidden_size = {self.hidden_size} does not give {self.num_heads} heads an even width; for example "
                f"hidden_size = {2 * self.num_heads * max(1, self.hidden_size // (2 * self.num_heads))}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}; for example "
                f"num_kv_heads = {self.num_heads}"
            )
        return self


class ModelConfig(Section):
    """The model: a folder or hub id in Hugging Face format, or one to build."""

    name: str | None = None
    """A local folder or a hub id of a causal language model."""
    build: BuildConfig | None = None
    """Instead of a name: make a small model in the run folder."""

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if (self.name is None) == (self.build is None):
            raise ValueError("give either name = \"folder or hub id\" or a [model.build] table, not both or neither")
        return self


class WarmStartConfig(Section):
    """Supervised optimizer steps before reinforcement learning, on the environment's own demonstrations or a file."""

    steps: PositiveInt = 100
    """How many optimizer steps."""
    batch_size: PositiveInt = 64
    """Conversations of each optimizer step."""
    conversations: PositiveInt = 1024
    """How many demonstrations the environment is asked for."""
    data: Path | None = None
    """A JSONL file of `{"messages": [...], "tools": [...]}` rows instead of the environment's demonstrations."""
    optim: OptimConfig = OptimConfig(lr=1e-3)
    """Its own optimizer, dropped afterwards."""
