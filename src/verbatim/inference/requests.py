"""What a sampler refuses before it starts: prompts that no model could continue."""

from __future__ import annotations

import numpy as np

from verbatim.errors import RecordError
from verbatim.inference.base import SampleRequest
from verbatim.types import Ids, Int32


def check_ids(ids: Ids, vocab_size: int, what: str) -> Int32:
    """The ids as an int32 array [L].

    Raises:
        RecordError: no ids, no list of integers, or an id outside the vocabulary (names position and value).
    """
    array = np.asarray(ids)
    if array.ndim != 1 or array.size == 0:
        raise RecordError(f"{what}: expected a list of at least one token id, found shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise RecordError(f"{what}: token ids are integers, found {array.dtype}")
    if array.min() < 0 or array.max() >= vocab_size:
        bad = np.flatnonzero((array < 0) | (array >= vocab_size))
        raise RecordError(f"{what}: id {int(array[bad[0]])} at position {int(bad[0])} is outside the vocabulary of "
                          f"{vocab_size} ids; is the tokenizer the model's own?")  # fmt: skip
    return array.astype(np.int32)


def check_prompt(request: SampleRequest, *, vocab_size: int, context_length: int) -> None:
    """Refuse a request that cannot be continued by at least one token.

    Raises:
        RecordError: an empty or too long prompt, or an id outside the vocabulary (names position and value).
    """
    prompt = check_ids(request.prompt_ids, vocab_size, "prompt_ids")
    if len(prompt) >= context_length:
        raise RecordError(f"prompt_ids: {len(prompt)} ids leave no room in a context of {context_length} tokens; "
                          f"at most {context_length - 1} fit")  # fmt: skip
