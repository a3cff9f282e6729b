"""Reads the bodies of requests: every setting is honoured or refused by name, none ignored.

All readers raise `UsageError` for a value that cannot be; the message names the setting and quotes what was found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from verbatim.core.errors import UsageError
from verbatim.core.sampling import MOST_STOP_IDS, SamplingParams
from verbatim.inference.base import SampleRequest
from verbatim.inference.http.json_size import MOST_VALUES
from verbatim.inference.http.json_text import read_value
from verbatim.inference.http.packed import PACKED
from verbatim.inference.http.protocol import OURS, LogprobStyle, brief, read_ids
from verbatim.inference.http.refused import Refused

_ABOUT_TEXT = {"skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "detokenize"}
"""Settings of features that this server lacks; no value of theirs changes a token."""
NEUTRAL: Mapping[str, Collection[Any]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "stop": ([], ""),
    "bad_words": ([],),
    "logit_bias": ({},),
    "prompt_logprobs": (),
}
"""Values at which an unsupported setting is off."""
_KINDS: Mapping[str, type] = {"temperature": float, "top_p": float, "min_p": float, "max_tokens": int, "top_k": int}
_IN_REQUEST = {"token_ids", "sampling_params", "model", "request_id", "cache_salt", OURS}
_NEUTRAL_IN_REQUEST = {"stream": (False,), "priority": (0,)}
_IN_OURS = {"session", PACKED, "seed"}
_LONGEST_NAME = 1024
"""Most characters of a session's or a request's name."""
_EXPERTS_START = "routed_experts_prompt_start"
_IN_PARAMS = {*_KINDS, *_ABOUT_TEXT, "stop_token_ids", "seed", "logprobs", "ignore_eos", _EXPERTS_START}


def read_json(data: bytes | bytearray, most_values: int = MOST_VALUES) -> dict[str, Any]:
    """The JSON object in a body of at most so many values, each key of an object once."""
    body = read_value(data, most_values)
    if not isinstance(body, dict):
        raise UsageError(f"the body: expected a JSON object, found {type(body).__name__}")
    return body


def check_model(body: Mapping[str, Any], name: str) -> None:
    """Raises `Refused` where a request names another model."""
    asked = body.get("model")
    if asked is not None and asked != name:
        raise Refused(404, f"there is no model {brief(asked)} here; this server has {name!r}")


def read_request(
    body: Mapping[str, Any], *, seed: int, room: int, end_ids: Sequence[int], session: str = ""
) -> tuple[SampleRequest, LogprobStyle]:
    """The request in a body, and the style of the requested logprobs.

    Args:
        body: As clients of vLLM's endpoint write it.
        seed: Used if the request has none.
        room: Context length in tokens; `max_tokens` defaults to what the prompt leaves of it.
        end_ids: The model's end ids; they also stop a completion unless `ignore_eos` is true.
        session: Used if the request has none.

    Raises:
        RecordError: invalid token ids; names the position.
    """
    refuse_others(body, _IN_REQUEST, _NEUTRAL_IN_REQUEST, where="request")
    given = _read_object("sampling_params", body.get("sampling_params", {}))
    refuse_others(given, _IN_PARAMS, NEUTRAL, where="sampling_params")
    ids = read_ids(body.get("token_ids"), "token_ids", room)
    logprobs = given.get("logprobs")
    if logprobs not in (None, 0, 1):
        raise UsageError(f"sampling_params.logprobs = {brief(logprobs)}; those of sampled tokens are returned: 1")
    ignores_ends = read_flag(given, "ignore_eos")
    if not end_ids and given.get("ignore_eos") is False:
        raise UsageError(
            "sampling_params.ignore_eos = false, but this server knows no end-of-text id; give the ids "
            "as stop_token_ids"
        )
    ours = _read_object(OURS, {} if body.get(OURS) is None else body[OURS])
    refuse_others(ours, _IN_OURS, {}, where=OURS)
    request = SampleRequest(
        prompt_ids=ids,
        params=read_params(given, max_tokens=max(1, room - len(ids)), end_ids=() if ignores_ends else end_ids),
        seed=read_seed(ours if ours.get("seed") is not None else given, seed),
        session=read_name(ours, "session") or session[:_LONGEST_NAME],
        routed_experts_start=_read_start(given, len(ids)),
    )
    return request, None if logprobs is None else "packed" if read_flag(ours, PACKED) else "objects"


def _read_start(given: Mapping[str, Any], most: int) -> int:
    start: int = _read_number(given, _EXPERTS_START, int, 0)
    if not 0 <= start <= most:
        raise UsageError(f"{_EXPERTS_START} = {brief(start)}; expected 0 to {most}, the length of the prompt")
    return start


def read_params(given: Mapping[str, Any], *, max_tokens: int, end_ids: Sequence[int] = ()) -> SamplingParams:
    """Read sampling parameters; `max_tokens` is used if the request gives none."""
    defaults = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "max_tokens": max_tokens}
    values = {name: _read_number(given, name, kind, defaults[name]) for name, kind in _KINDS.items()}
    stop = given.get("stop_token_ids")
    stop = [] if stop is None else stop
    most = MOST_STOP_IDS - len(end_ids)
    if isinstance(stop, list) and len(stop) > most:
        raise UsageError(f"stop_token_ids: {len(stop)} ids; at most {most} are taken")
    if not isinstance(stop, list) or not all(type(i) is int for i in stop):
        raise UsageError(f"stop_token_ids: expected a list of token ids, found {brief(stop)}")
    if values["top_k"] == -1:
        values["top_k"] = 0  # "off" in vLLM
    try:
        return SamplingParams(**values, stop_token_ids=tuple(dict.fromkeys((*stop, *end_ids))))
    except ValueError as error:
        raise UsageError(str(error)) from None


def read_seed(given: Mapping[str, Any], default: int) -> int:
    """Read the seed, an integer of 64 bits."""
    seed: int = _read_number(given, "seed", int, default)
    if not -(2**63) <= seed < 2**63:
        raise UsageError(f"seed = {brief(seed)}; expected an integer of at most 64 bits")
    return seed


def read_count(given: Mapping[str, Any], name: str) -> int | None:
    """Read an integer above 0; None if it is missing or null."""
    value: int | None = _read_number(given, name, int, None)
    if value is not None and value < 1:
        raise UsageError(f"{name} = {brief(value)}; expected at least 1")
    return value


def read_flag(given: Mapping[str, Any], name: str) -> bool:
    """Read a boolean; False if it is missing or null."""
    value = given.get(name)
    if value is not None and not isinstance(value, bool) and value not in (0, 1):
        raise UsageError(f"{name} = {brief(value)}; expected true or false")
    return bool(value)


def read_name(given: Mapping[str, Any], name: str) -> str:
    """Read a short text that UTF-8 can hold; empty if it is missing or null."""
    value = given.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > _LONGEST_NAME:
        raise UsageError(f"{name} = {brief(value)}; expected a text of at most {_LONGEST_NAME} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{name} = {brief(value)}; expected a text that UTF-8 can hold") from None
    return value


def refuse_others(
    given: Mapping[str, Any], known: Collection[str], neutral: Mapping[str, Collection[Any]], *, where: str
) -> None:
    """Refuse unsupported settings that would change the tokens; null is off."""
    for name, value in given.items():
        if name in known or value is None or any(value == ok for ok in neutral.get(name, ())):
            continue
        ok = neutral.get(name)
        hint = f"; only {' or '.join(repr(v) for v in ok)} is taken" if ok else ""
        raise UsageError(f"{where}: {name[:80]} = {brief(value)} cannot be honoured here{hint}")


def _read_number(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = given.get(name)
    if value is None:
        return default
    accepted = (int, float) if kind is float else int
    if not isinstance(value, bool) and isinstance(value, accepted):
        with contextlib.suppress(OverflowError):  # an integer beyond the range of floats
            return kind(value)
    raise UsageError(f"{name} = {brief(value)}; expected {'a number' if kind is float else 'an integer'}")


def _read_object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"{name}: expected an object, found {brief(value)}")
    return value
