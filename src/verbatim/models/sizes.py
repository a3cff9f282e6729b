"""Reads the sizes of a model from its configuration, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verbatim.core.errors import UsageError


def vocab_size_of(model: str | Path) -> int:
    """The number of rows of the model's output head. All ids are below this number.

    Raises:
        UsageError: the model has no config.json with a vocab_size.
    """
    try:
        return int(_config(model).vocab_size)
    except (OSError, ValueError, AttributeError) as error:
        raise UsageError(f"model {str(model)!r} has no config.json with a vocab_size: {error}") from error


def linear_layers_of(model: str | Path) -> tuple[str, ...]:
    """The last parts of the names of the model's linear layers, sorted, without the output head.

    Example: for a Qwen3, the names are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj and v_proj.

    Raises:
        UsageError: the model has no config.json, or its config.json does not describe a causal language model.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    try:
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    except (OSError, ValueError) as error:
        raise UsageError(f"model {str(model)!r} has no config.json of a causal language model: {error}") from error
    head = made.get_output_embeddings()
    return tuple(
        sorted(
            {
                name.rpartition(".")[2]
                for name, module in made.named_modules()
                if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
            }
        )
    )


def _config(model: str | Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(model).get_text_config()
