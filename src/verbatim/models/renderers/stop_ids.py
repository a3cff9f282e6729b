"""Decides which tokens end a sampled turn: the format's own tokens, and the tokens that the model's
generation_config.json adds.

The rule is the same for all renderers. Inference servers stop at both kinds, so a model that was published with
additional ids ends its turns with them. The rule in `bridge` decides how prompts continue: if the format writes a
different token at that position, the prompt breaks (`other_end`).

Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.core.errors import ModelError
from verbatim.models.renderers.renderer import Renderer
from verbatim.models.source import base_of, is_adapter

_FILE = "generation_config.json"
_MOST = 1024
"""Maximum number of ids that a file may list."""
_WANTED = f'expected a JSON object with "eos_token_id", an id or a list of ids ({_MOST} at most), or no such file'

_log = logging.getLogger(__name__)


def turn_ends(own: Iterable[int | None], tokenizer: Any, name: str) -> tuple[int, ...]:
    """The ids that end a turn: the format's own ids, then the ids listed in the model's generation_config.json.

    Args:
        own: The format's own ids; None entries are ignored.
        tokenizer: The model's tokenizer; its `name_or_path` locates the model.
        name: The renderer's name, for the log.

    Raises:
        ModelError: the file cannot be read.
    """
    known = dict.fromkeys(int(token) for token in own if token is not None)
    added = [token for token in generation_stops(str(tokenizer.name_or_path or "")) if token not in known]
    if added:
        texts = ", ".join(f"{token} ({tokenizer.decode([token])!r})" for token in added)
        _log.info('renderer "%s" ends turns with %s too, which the model\'s %s lists', name, texts, _FILE)
    return tuple(dict.fromkeys((*known, *added)))


def generation_stops(model: str) -> list[int]:
    """The `eos_token_id` ids in a model's generation_config.json; empty if there is no such file.

    An adapter uses the ids of its base model. For a hub id, the file is read from the cache, to which `load_tokenizer`
    downloads it.

    Args:
        model: A folder in Hugging Face format, or a hub id.

    Raises:
        ModelError: the file cannot be read.
    """
    file = _file_of(model)
    if file is None:
        return []
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read ({error}); {_WANTED}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} holds a JSON {type(value).__name__}; {_WANTED}")
    stops = value.get("eos_token_id")
    if stops is None:
        return []
    ids: list[int] = stops if isinstance(stops, list) else [stops]
    if len(ids) > _MOST or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise ModelError(f"{file} has the eos_token_id {str(stops)[:80]}; {_WANTED}")
    return ids


def ends_within(stop_token_ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """The stop ids below the model's vocabulary size. A tokenizer or generation_config.json may list larger ids."""
    return tuple(dict.fromkeys(token for token in stop_token_ids if token < vocab_size))


def ends_in_words(renderer: Renderer) -> str:
    """The tokens that end a turn, as text to display: `turns end with '<|im_end|>' (2) or '<|endoftext|>' (0)`."""
    shown = [f"{renderer.decode(np.array([token], dtype=np.int32))!r} ({token})" for token in renderer.stop_token_ids]
    return f"turns end with {' or '.join(shown)}"


def _file_of(model: str) -> Path | None:
    if not model:
        return None
    file = Path(model).expanduser() / _FILE
    if file.is_file():
        return file
    if is_adapter(model):
        return _file_of(base_of(model))
    if Path(model).expanduser().exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, _FILE)
    except HFValidationError:
        return None  # not a hub id: the tokenizer was built in memory, not loaded
    return Path(cached) if isinstance(cached, str) else None
