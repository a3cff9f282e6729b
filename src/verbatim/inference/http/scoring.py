"""Requests the logprobs of given ids from vLLM's token endpoint, and reads the responses.

Every request has a `top_k`, because a server that returns kept sets refuses requests without a `top_k`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from verbatim.core.sampling import INT32_END
from verbatim.core.texts import brief
from verbatim.core.types import Float32, Int32
from verbatim.inference.http.completions import number_of
from verbatim.inference.http.protocol import UNKNOWN_LOGPROB

_NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "max_tokens": 1,
    "ignore_eos": True,
    "skip_special_tokens": False,
}


def scoring_body(token_ids: Int32, model: str | None) -> dict[str, Any]:
    """The body of a request for the logprobs of all ids except the first. vLLM bypasses its prefix cache for such a
    request.

    vLLM refuses `max_tokens = 0`, so one more token is sampled and needs room in the context. `top_k = 1` keeps the
    kept set of that token small, and does not change the prompt logprobs."""
    return _named(model, {"token_ids": token_ids, "sampling_params": {**_NEUTRAL, "top_k": 1, "prompt_logprobs": 0}})


def last_logprob_body(token_ids: Int32, model: str | None, cache_salt: str | None) -> dict[str, Any]:
    """The body of a request for the logprob of the last id. It is an ordinary request, with the ids before the last as
    the prompt, so that it reads and writes the prefix cache.

    vLLM 0.32 returns at most `logprobs` = 2 entries, the first of which is always for the sampled token. The last id is
    listed twice, so that it is among them. A `top_k` above the size of the vocabulary cuts nothing."""
    last = int(token_ids[-1])
    asked = {**_NEUTRAL, "top_k": INT32_END - 1, "logprobs": 2, "logprob_token_ids": [last, last]}
    salt = {} if cache_salt is None else {"cache_salt": cache_salt}
    return _named(model, {"token_ids": token_ids[:-1], "sampling_params": asked, **salt})


def _named(model: str | None, body: dict[str, Any]) -> dict[str, Any]:
    return body if model is None else {**body, "model": model}


def read_scores(answer: object, token_ids: Int32) -> Float32:
    """Read the logprobs in the response to `scoring_body`: float32 [L]; the first is NaN.

    >>> read_scores({"prompt_logprobs": [None, {"7": {"logprob": -0.5}}]}, np.array([3, 7], dtype=np.int32))
    array([ nan, -0.5], dtype=float32)

    Raises:
        ValueError: the logprob of an id is missing; the message names the id.
    """
    rows = answer.get("prompt_logprobs") if isinstance(answer, dict) else None
    if not isinstance(rows, list) or len(rows) != len(token_ids):
        raise ValueError(f"expected prompt_logprobs of {len(token_ids)} ids, found {brief(rows)}")
    found = np.full(len(token_ids), np.nan, dtype=np.float32)
    for position, token in enumerate(token_ids.tolist()[1:], start=1):
        row = rows[position]
        entry = row.get(str(token)) if isinstance(row, dict) else None
        found[position] = _logprob(entry, token, position)
    return found


def read_last_logprob(answer: object, token_ids: Int32) -> float:
    """Read the logprob in the response to `last_logprob_body`.

    Raises:
        ValueError: the logprob of the last id is missing.
    """
    try:
        (choice,) = answer["choices"]  # type: ignore[index]
        (content,) = choice["logprobs"]["content"]
        entries = [content, *content["top_logprobs"]]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"expected the logprobs of one token, found {brief(answer)}") from None
    token = int(token_ids[-1])
    named = (token, f"token_id:{token}")
    entry = next((entry for entry in entries if entry.get("token_id", entry.get("token")) in named), None)
    return _logprob(entry, token, len(token_ids) - 1)


def _logprob(entry: object, token: int, position: int) -> float:
    found = entry.get("logprob") if isinstance(entry, dict) else None
    value = number_of(found, f"the logprob of id {token} at position {position}")
    if value <= UNKNOWN_LOGPROB:
        raise ValueError(f"the server has no logprob of id {token} at position {position}")
    return value
