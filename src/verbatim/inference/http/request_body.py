"""What a client asks of a sampler's server: read in full, or refused by name; nothing is passed over."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from verbatim.errors import UsageError
from verbatim.inference.base import MOST_STOP_IDS, SampleRequest, SamplingParams
from verbatim.inference.http.protocol import OURS, LogprobStyle, brief, read_ids

_ABOUT_TEXT = {"skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "detokenize",
               "routed_experts_prompt_start"}  # fmt: skip
"""Settings of what is left out here: they change no token, whatever they say."""
NEUTRAL: Mapping[str, Collection[Any]] = {
    "n": (1,), "best_of": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,),
    "min_tokens": (0,), "stop": ([], ""), "bad_words": ([],), "logit_bias": ({},), "prompt_logprobs": (),
}  # fmt: skip
"""The values with which a setting that is not ours to honour asks for nothing."""
_KINDS: Mapping[str, type] = {"temperature": float, "top_p": float, "min_p": float, "max_tokens": int, "top_k": int}
_IN_REQUEST = {"token_ids", "sampling_params", "model", "request_id", "cache_salt", OURS}
_NEUTRAL_IN_REQUEST = {"stream": (False,), "priority": (0,)}
_IN_OURS = {"session", "plain_logprobs", "seed"}
_LONGEST_NAME = 1024
"""Characters of a session's or a request's name."""
_IN_PARAMS = {*_KINDS, *_ABOUT_TEXT, "stop_token_ids", "seed", "logprobs", "ignore_eos"}


class Refused(Exception):
    """A request that ends with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[1])


def read_json(data: bytes | bytearray) -> dict[str, Any]:
    """The JSON object of a body.

    Raises:
        UsageError: it is something else; says what.
    """
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except RecursionError:
        raise UsageError("the body is nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"the body is not JSON: {str(error)[:200]}") from None
    if not isinstance(body, dict):
        raise UsageError(f"the body: expected a JSON object, found {type(body).__name__}")
    return body


def check_model(body: Mapping[str, Any], name: str) -> None:
    """Refuse a request for another model than the one of this name.

    Raises:
        Refused: it names another.
    """
    asked = body.get("model")
    if asked is not None and asked != name:
        raise Refused(404, f"there is no model {brief(asked)} here; this server has {name!r}")


def read_request(
    body: Mapping[str, Any], *, seed: int, room: int, end_ids: Sequence[int], session: str = ""
) -> tuple[SampleRequest, LogprobStyle]:
    """The request in a body, and how logprobs are asked for.

    Args:
        body: As any client of vLLM's endpoint writes it.
        seed: Taken where the request has none.
        room: Tokens of the context; the default of `max_tokens` is what the prompt leaves of it.
        end_ids: The model's own ends, which stop a completion too unless `ignore_eos` is true.
        session: Taken where the request has none.

    Raises:
        UsageError: something is asked for that cannot be honoured; names it.
        RecordError: what should be token ids is not; names the position.
    """
    refuse_others(body, _IN_REQUEST, _NEUTRAL_IN_REQUEST, where="request")
    given = body.get("sampling_params", {})
    if not isinstance(given, dict):
        raise UsageError(f"sampling_params: expected an object, found {brief(given)}")
    refuse_others(given, _IN_PARAMS, NEUTRAL, where="sampling_params")
    ids = read_ids(body.get("token_ids"), "token_ids", room)
    logprobs = given.get("logprobs")
    if logprobs not in (None, 0, 1):
        raise UsageError(f"sampling_params.logprobs = {brief(logprobs)}; only those of the sampled tokens are told: 1")
    ignores_ends = read_flag(given, "ignore_eos")
    if not end_ids and given.get("ignore_eos") is False:
        raise UsageError("sampling_params.ignore_eos = false, but this server knows no end-of-text id; give the ids "
                         "as stop_token_ids")  # fmt: skip
    ours = body.get(OURS)
    ours = {} if ours is None else ours
    if not isinstance(ours, dict):
        raise UsageError(f"{OURS}: expected an object, found {brief(ours)}")
    refuse_others(ours, _IN_OURS, {}, where=OURS)
    request = SampleRequest(
        prompt_ids=ids,
        params=read_params(given, max_tokens=max(1, room - len(ids)), end_ids=() if ignores_ends else end_ids),
        seed=read_seed(ours if ours.get("seed") is not None else given, seed),
        session=read_name(ours, "session") or session[:_LONGEST_NAME],
    )
    return request, None if logprobs is None else "plain" if read_flag(ours, "plain_logprobs") else "objects"


def read_params(given: Mapping[str, Any], *, max_tokens: int, end_ids: Sequence[int] = ()) -> SamplingParams:
    """Sampling parameters among other keys; `max_tokens` where there are none.

    Raises:
        UsageError: a value that cannot be.
    """
    defaults = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "max_tokens": max_tokens}
    values = {name: _read_number(given, name, kind, defaults[name]) for name, kind in _KINDS.items()}
    stop = given.get("stop_token_ids")
    stop = [] if stop is None else stop
    if not isinstance(stop, list):
        raise UsageError(f"stop_token_ids: expected a list of token ids, found {brief(stop)}")
    if len(stop) + len(end_ids) > MOST_STOP_IDS:
        raise UsageError(f"stop_token_ids: {len(stop)} ids; at most {MOST_STOP_IDS - len(end_ids)} are taken")
    if not all(type(i) is int for i in stop):
        raise UsageError(f"stop_token_ids: expected a list of token ids, found {brief(stop)}")
    if values["top_k"] == -1:
        values["top_k"] = 0  # vLLM's other way to say "off"
    try:
        return SamplingParams(**values, stop_token_ids=tuple(dict.fromkeys((*stop, *end_ids))))
    except ValueError as error:
        raise UsageError(str(error)) from None


def read_seed(given: Mapping[str, Any], default: int) -> int:
    """The seed among other keys.

    Raises:
        UsageError: a value that cannot be.
    """
    seed: int = _read_number(given, "seed", int, default)
    if not -(2**63) <= seed < 2**63:
        raise UsageError(f"seed = {brief(seed)}; expected an integer of at most 64 bits")
    return seed


def read_count(given: Mapping[str, Any], name: str) -> int | None:
    """An integer above 0 among other keys; None where there is none.

    Raises:
        UsageError: a value that cannot be.
    """
    value: int | None = _read_number(given, name, int, None)
    if value is not None and value < 1:
        raise UsageError(f"{name} = {brief(value)}; expected at least 1")
    return value


def read_flag(given: Mapping[str, Any], name: str) -> bool:
    """Yes or no among other keys; no where it says nothing.

    Raises:
        UsageError: a value that is neither.
    """
    value = given.get(name)
    if value is not None and not isinstance(value, bool) and value not in (0, 1):
        raise UsageError(f"{name} = {brief(value)}; expected true or false")
    return bool(value)


def read_name(given: Mapping[str, Any], name: str) -> str:
    """A short text among other keys; empty where there is none.

    Raises:
        UsageError: something else, or a text that is too long or cannot be written as UTF-8.
    """
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
    """Refuse what would change the tokens and cannot be honoured; null asks for nothing."""
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
    try:
        if not isinstance(value, bool) and isinstance(value, accepted):
            return kind(value)
    except OverflowError:  # an integer that no float holds
        pass
    raise UsageError(f"{name} = {brief(value)}; expected {'a number' if kind is float else 'an integer'}")


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a number of JSON")
