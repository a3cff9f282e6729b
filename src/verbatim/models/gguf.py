"""Converts a GGUF file to a Hugging Face folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from verbatim.models.loading import load_tokenizer, refuse_not_finite, save_model
from verbatim.models.refusal import refusing


def folder_of_gguf(file: Path, folder: Path, *, dtype: str = "float32", splits_digits: bool = False) -> None:
    """Write config, tokenizer with its chat template, and weights as safetensors; tied weights are stored once.

    `transformers` reads the file and dequantises its weights to float32; "bfloat16" rounds them once more.

    Args:
        file: The GGUF file.
        folder: An existing, empty folder.
        dtype: "float32" or "bfloat16".
        splits_digits: Make every digit a separate token before BPE merges. The file's key `tokenizer.ggml.pre =
            "smollm"` means this, but `transformers` ignores the key.

    Raises:
        ModelError: the file cannot be read.
    """
    import torch

    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with refusing(f"{file} cannot be read as GGUF"):
        transformers_logging.disable_progress_bar()
        tokenizer = AutoTokenizer.from_pretrained(**source)
        read = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = copy.deepcopy(read.config)
    for name in ("quantization_config", "_name_or_path"):  # both would be wrong in the new folder
        if hasattr(config, name):
            delattr(config, name)
    config.architectures = [type(read).__name__]
    model = type(read)(config)  # a new instance, because transformers refuses to save one that was loaded as quantised
    model.load_state_dict(read.state_dict())
    model.to(getattr(torch, dtype))
    config.dtype = dtype
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    refuse_not_finite(model.named_parameters(), str(file))
    if splits_digits:
        _split_digits(tokenizer)
    tokenizer.model_max_length = config.max_position_embeddings
    save_model(model, tokenizer, folder)
    _check_tokenizer(folder)


def _split_digits(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _check_tokenizer(folder: Path) -> None:
    """Assert that the tokenizer decodes what it encodes to the same text."""
    probe = 'Ada paid 12,345 coins.\n\n  {"a": [1, 2]} <tool_call> é 中 🙂\u0000'
    tokenizer = load_tokenizer(folder)
    back = tokenizer.decode(tokenizer.encode(probe), clean_up_tokenization_spaces=False)
    assert back == probe, f"the tokenizer gives {back!r} for {probe!r}"
