"""Reads the bodies of token-id requests. Every setting is honoured or refused by name; none is silently ignored."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from verbatim.core.errors import UsageError
from verbatim.core.sampling import MOST_STOP_IDS, SamplingParams
from verbatim.core.texts import brief
from verbatim.inference.chat.fields import (
    Fields,
    check_values,
    read_flag,
    read_integer,
    read_object,
    read_sampling,
    read_session,
)
from verbatim.inference.http.completions import read_ids
from verbatim.inference.http.json_size import MOST_VALUES
from verbatim.inference.http.json_text import read_value
from verbatim.inference.http.packed import PACKED
from verbatim.inference.http.protocol import KEPT_SETS, OURS, LogprobStyle
from verbatim.inference.http.refused import Refused
from verbatim.inference.sampler import SampleRequest

_EXPERTS_START = "routed_experts_prompt_start"
REQUEST = Fields(
    honoured={"token_ids", "sampling_params", "model", "request_id", "cache_salt", OURS},
    neutral={"stream": (False,), "priority": (0,)},
)
"""How each field of a request is treated."""
PARAMS = Fields(
    honoured={
        "temperature", "top_p", "min_p", "max_tokens", "top_k", "stop_token_ids", "seed", "logprobs", "ignore_eos",
        _EXPERTS_START,
    },
    without_effect={
        "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "detokenize",
    },
    neutral={
        "n": (1,), "best_of": (1,), "presence_penalty": (0, 0.0), "frequency_penalty": (0, 0.0),
        "repetition_penalty": (1, 1.0), "min_tokens": (0,), "stop": ([], ""), "bad_words": ([],), "logit_bias": ({},),
        "prompt_logprobs": (),
    },
)  # fmt: skip
"""How each field of `sampling_params` is treated. Settings that only affect text have no effect, because no text is
returned."""
_OURS = Fields(honoured={"session", PACKED, "seed", KEPT_SETS})


def read_json(data: bytes | bytearray, most_values: int = MOST_VALUES) -> dict[str, Any]:
    """Read the JSON object in a body, which may have at most `most_values` values and no duplicate keys.

    Raises:
        UsageError: the body is not a JSON object, has too many values or levels, or repeats a key.
    """
    body = read_value(data, most_values)
    if not isinstance(body, dict):
        raise UsageError(f"the body: expected a JSON object, found {type(body).__name__}")
    return body


def check_model(asked: object, name: str) -> None:
    """Raise `Refused` if the request names a model other than `name`."""
    if asked and asked != name:
        raise Refused(404, f"there is no model {brief(asked)} here; this server has {name!r}", field="model")


def read_request(
    body: Mapping[str, Any], *, seed: int, room: int, end_ids: Sequence[int], headers: Mapping[str, str] | None = None
) -> tuple[SampleRequest, LogprobStyle]:
    """Read the request in a body, and the requested format of the logprobs.

    Args:
        body: The body, in the format of vLLM's token endpoint.
        seed: Seed to use if the request has none.
        room: Context length in tokens. `max_tokens` defaults to the context that the prompt leaves.
        end_ids: The model's end ids. They end a completion unless `ignore_eos` is true.
        headers: Request headers. They may have the session if the body does not.

    Raises:
        BadField: a field is invalid or cannot be honoured.
        RecordError: the token ids are invalid; the message has the position.
        UsageError: the completion should stop at end-of-text, but the server knows no end id.
    """
    # `token_ids` may have a million numbers, so it is only checked once, by `read_ids`.
    check_values({name: value for name, value in body.items() if name != "token_ids"})
    REQUEST.check(body)
    given, ours = read_object(body, "sampling_params"), read_object(body, OURS)
    PARAMS.check(given, where="sampling_params")
    _OURS.check(ours, where=OURS)
    ids = read_ids(body.get("token_ids"), "token_ids", room)
    logprobs = read_integer(given, "logprobs", least=0, most=1)
    if not end_ids and given.get("ignore_eos") is False:
        raise UsageError(
            "sampling_params.ignore_eos = false, but this server knows no end-of-text id; give the ids that end "
            "a text as stop_token_ids"
        )
    ends = () if read_flag(given, "ignore_eos") else end_ids
    asked = read_sampling(given, ours, max_tokens=("max_tokens",), most_stop_ids=MOST_STOP_IDS - len(ends))
    params = asked.params(SamplingParams(), room=asked.max_tokens or max(1, room - len(ids)), end_ids=ends)
    request = SampleRequest(
        prompt_ids=ids,
        params=dataclasses.replace(params, return_kept_sets=read_flag(ours, KEPT_SETS)),
        seed=seed if asked.seed is None else asked.seed,
        session=read_session(ours, headers or {}),
        routed_experts_start=read_integer(given, _EXPERTS_START, least=0, most=len(ids)) or 0,
    )
    return request, None if logprobs is None else "packed" if read_flag(ours, PACKED) else "objects"
