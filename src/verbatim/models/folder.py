"""Checks a model's configuration without its weights."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from verbatim.errors import ModelError
from verbatim.models.refusal import refusing
from verbatim.models.source import find_source


def check_model_config(name: str | Path, *, context_length: int) -> None:
    """Refuse a model that is not a causal language model, or that has too few positions.

    Args:
        name: A folder or hub id in Hugging Face format.
        context_length: Most tokens of one sequence, `orchestrator.seq_len`.

    Raises:
        ModelError: no such model, or an unsuitable one; says what was found.
    """
    source = find_source(name)
    with refusing(f"the config.json of model {str(name)!r} cannot be read"):
        config = AutoConfig.from_pretrained(source)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"model {str(name)!r} is of type {config.model_type!r}, which is no causal language model; "
                         "expected a folder that AutoModelForCausalLM loads")  # fmt: skip
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and context_length > longest:
        raise ModelError(f"orchestrator.seq_len = {context_length}, but the positions of model {str(name)!r} end at "
                         f"{longest}; use at most that")  # fmt: skip
