"""Checks requests before sampling: prompts, stop ids, temperatures, policy versions."""

from __future__ import annotations

import numpy as np

from verbatim.core.errors import RecordError, UsageError
from verbatim.core.sampling import COLDEST, HOTTEST, INT32_END
from verbatim.core.types import Ids, Int32
from verbatim.inference.sampler import SampleRequest


def check_ids(ids: Ids, vocab_size: int, what: str) -> Int32:
    """Check ids and return them as an int32 array [L].

    Raises:
        RecordError: there are no ids, they are not a list of integers, or an id is outside the vocabulary; the message
            has that id's position and value.
    """
    array = np.asarray(ids)
    if array.ndim != 1 or array.size == 0:
        raise RecordError(f"{what}: expected a list of at least one token id, found shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise RecordError(f"{what}: token ids are integers, found {array.dtype}")
    if array.min() < 0 or array.max() >= vocab_size:
        bad = np.flatnonzero((array < 0) | (array >= vocab_size))
        raise RecordError(
            f"{what}: id {int(array[bad[0]])} at position {int(bad[0])} is outside the vocabulary of "
            f"{vocab_size} ids; does the tokenizer belong to this model?"
        )
    return array.astype(np.int32)


def check_version(version: int) -> None:
    """Refuse an invalid policy version.

    Raises:
        UsageError: the version is negative or does not fit into int32.
    """
    if not 0 <= version < INT32_END:
        raise UsageError(f"policy version {version!s:.80}; expected an integer in [0, 2**31)")


def check_temperature(temperature: float) -> None:
    """Refuse a temperature at which logprobs are undefined or overflow.

    Raises:
        RecordError: the temperature is not above 0, too close to 0, or too large.
    """
    if not COLDEST <= temperature <= HOTTEST:
        raise RecordError(f"temperature = {temperature}; expected a number from {COLDEST} to {HOTTEST:.0f}")


def refuse_stop_strings(request: SampleRequest) -> None:
    """Refuse stop strings, because a sampler handles only ids and has no tokenizer with which it could find text.

    Raises:
        RecordError: the request has stop strings.
    """
    if request.params.stop:
        raise RecordError(
            f"stop: a sampler takes token ids only, found {str(list(request.params.stop))[:80]}; for stop strings use "
            "an AgentLoop or the chat routes of a server, or give stop_token_ids"
        )


def check_prompt(request: SampleRequest, *, vocab_size: int, context_length: int) -> None:
    """Refuse a prompt without room for one more token, stop ids outside the vocabulary, and stop strings.

    Raises:
        RecordError: the prompt is empty or too long, an id is outside the vocabulary (the message has that id's
            position and value), or there are stop strings.
    """
    refuse_stop_strings(request)
    prompt = check_ids(request.prompt_ids, vocab_size, "prompt_ids")
    if len(prompt) >= context_length:
        raise RecordError(
            f"prompt_ids: {len(prompt)} ids leave no room in a context of {context_length} tokens; "
            f"at most {context_length - 1} fit"
        )
    stops = request.params.stop_token_ids
    if stops and max(stops) >= vocab_size:
        position = next(k for k, token in enumerate(stops) if token >= vocab_size)
        raise RecordError(
            f"stop_token_ids: id {stops[position]} at position {position} is outside the vocabulary of "
            f"{vocab_size} ids, so the model can never sample it"
        )
