"""Writes and reads requests and completions as JSON, in the format of vLLM's token endpoint with extensions.

A float32 is converted to the equal double and written as its shortest decimal, so logprobs survive bit for bit. Our
clients request packed responses (see `packed`), and can also read responses that are not packed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from verbatim.core.errors import RecordError, SamplerFault
from verbatim.core.records.experts import experts_from_text, experts_to_text
from verbatim.core.records.kept import as_kept_sets
from verbatim.core.sampling import INT32_END, SamplingParams
from verbatim.core.texts import brief
from verbatim.core.types import Experts, Float32, Int32, KeptSets, StopReason
from verbatim.inference.http.packed import PACKED, pack, read_packed
from verbatim.inference.http.protocol import KEPT_SETS, OURS, UNKNOWN_LOGPROB, LogprobStyle
from verbatim.inference.sampler import Completion, SampleRequest

_LARGEST = float(np.finfo(np.float32).max)
_NUMBER = re.compile(r"[0-9]{1,10}")

_FINISH = {StopReason.STOP: "stop", StopReason.LENGTH: "length", StopReason.CANCELLED: "abort"}
_STOP_REASONS = {finish: reason for reason, finish in _FINISH.items()}


def request_body(
    request: SampleRequest, model: str | None, *, seed_for_all: bool = False, cache_salt: str | None = None
) -> dict[str, Any]:
    """The body of a request for one completion. Every setting is sent, because servers differ in their defaults. The
    ids stay an array, which `client.encode` writes.

    `logprobs` is 0, which requests only the logprob of the sampled token. With 1, vLLM 0.32 loses the logprob of a
    sampled token 0 if the same step serves a request with `logprob_token_ids` (such as the canary's), because it pads
    the other requests of the step with id 0.

    `ignore_eos` is true, so that only the given stop ids end a completion. The seed is under our own key, which only
    our servers read, because a vLLM for CPUs that computes a prompt in several parts crashes on a seed.

    Args:
        request: The request.
        model: The model's name on the server; None to leave the field out.
        seed_for_all: True to also put the seed where vLLM reads it.
        cache_salt: vLLM shares its prefix cache only among requests with the same salt; None for no salt.
    """
    params = request.params
    start = request.routed_experts_start
    seed = {"seed": request.seed} if seed_for_all else {}
    body: dict[str, Any] = {
        "token_ids": request.prompt_ids,
        "sampling_params": {
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "stop_token_ids": list(params.stop_token_ids),
            "logprobs": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,
            **seed,
            **({"routed_experts_prompt_start": start} if start else {}),
        },
        OURS: {
            "session": request.session,
            PACKED: True,
            "seed": request.seed,
            **({KEPT_SETS: True} if params.needs_kept_sets else {}),
        },
    }
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    return body if model is None else {**body, "model": model}


def bounded(params: SamplingParams) -> SamplingParams:
    """Adapt the parameters to a vLLM started with `--return-sampling-mask`, which accepts only requests whose kept sets
    are bounded by `top_k`. Greedy decoding becomes `top_k = 1`, which samples the same tokens.

    >>> bounded(SamplingParams(temperature=0)).top_k
    1

    Raises:
        RecordError: `top_k` is 0 at a temperature above 0.
    """
    if params.temperature == 0:
        return replace(params, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0)
    if not params.top_k:
        raise RecordError(
            "sampling: top_k = 0; a vLLM server that returns kept sets accepts only requests with a top_k, which "
            "bounds their size: set one, for example 512"
        )
    return params


def read_ids(value: object, what: str, room: int | None = None) -> Int32:
    """Read token ids from JSON: int32 [L]. Does not check that the ids are in the vocabulary; the sampler checks this.

    Args:
        value: The parsed JSON.
        what: The field's name for error messages.
        room: Maximum number of ids; checked first, so that a huge list is refused cheaply.

    Raises:
        RecordError: the value is not a list, has too many ids, or has an item that is not an id; the message has its
            position.
    """
    if not isinstance(value, list):
        raise RecordError(f"{what}: expected a list of token ids, found {brief(value)}")
    if room is not None and len(value) > room:
        raise RecordError(f"{what}: {len(value)} ids leave no room in a context of {room} tokens")
    for position, token in enumerate(value):
        if type(token) is not int or not 0 <= token < INT32_END:  # compare `type`, because True is an int too
            raise RecordError(f"{what}: expected token ids, found {brief(token)} at position {position}")
    return np.array(value, dtype=np.int32)


def completion_body(
    completion: Completion,
    *,
    request_id: str,
    model: str,
    seed: int,
    num_prompt_tokens: int,
    policy_version: int,
    logprobs: LogprobStyle,
    server: str | None = None,
) -> dict[str, Any]:
    """The body of a response in vLLM's format, with policy versions and timings under our own key.

    Raises:
        SamplerFault: the engine's logprobs or versions do not match the ids.
    """
    check_completion(completion)
    values, versions, count = completion.logprobs, completion.policy_versions, len(completion.ids)
    is_packed = logprobs == "packed"
    ids = None if is_packed else completion.ids.tolist()
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": ids,
        "logprobs": None,
        "finish_reason": _FINISH[completion.stop_reason],
        "weight_versions": None if versions is None else _spans(versions),
    }
    if completion.routed_experts is not None:
        choice["routed_experts"] = experts_to_text(completion.routed_experts)
    if (kept := completion.kept_sets) is not None:
        choice["sampling_mask"] = [kept[place].tolist() for place in range(len(kept))]
    if values is not None and logprobs == "objects":
        content = [
            {"token": f"token_id:{token}", "token_id": token, "logprob": logprob, "bytes": None, "top_logprobs": []}
            for token, logprob in zip(completion.ids.tolist(), values.tolist(), strict=True)
        ]
        choice["logprobs"] = {"content": content}
    cached = (
        {}
        if completion.num_cached_tokens is None
        else {"prompt_tokens_details": {"cached_tokens": completion.num_cached_tokens}}
    )
    return {
        "id": request_id,
        "request_id": request_id,
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": count,
            "total_tokens": num_prompt_tokens + count,
            **cached,
        },
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        **({PACKED: pack(completion.ids, values)} if is_packed else {}),
        OURS: {
            "policy_versions": None if versions is None or is_packed else versions.tolist(),
            "policy_version": policy_version,
            "seed": seed,
            "server": server,
            "queued_seconds": completion.queued_seconds,
            "generated_seconds": completion.generated_seconds,
        },
    }


def _spans(versions: Int32) -> list[dict[str, Any]]:
    """Policy versions in vLLM's format: spans of tokens with the same version.

    >>> _spans(np.array([7, 7, 8], dtype=np.int32))
    [{'version': '7', 'start': 0, 'end': 2}, {'version': '8', 'start': 2, 'end': 3}]
    """
    changes = np.flatnonzero(np.diff(versions, prepend=-1, append=-1)).tolist()
    return [{"version": str(versions[start]), "start": start, "end": end} for start, end in pairwise(changes)]


def check_completion(completion: Completion) -> None:
    """Refuse a completion whose logprobs or versions do not match its ids.

    Raises:
        SamplerFault: the number of logprobs or versions differs from the number of ids, or a logprob is not finite.
    """
    values, versions, count = completion.logprobs, completion.policy_versions, len(completion.ids)
    if values is not None:
        if len(values) != count:
            raise SamplerFault(f"the engine returned {len(values)} logprobs for {count} ids")
        finite = np.isfinite(values)
        if not finite.all():
            position = int(np.flatnonzero(~finite)[0])
            raise SamplerFault(f"the engine returned {values[position]} as the logprob at position {position}")
    if versions is not None and len(versions) != count:
        raise SamplerFault(f"the engine returned {len(versions)} policy versions for {count} ids")


def read_completion(body: object, told_version: int | None = None) -> tuple[Completion, Mapping[str, Any] | None]:
    """(the completion in a response, the additions of our servers). The additions are None if the server is not one of
    ours.

    Args:
        body: The parsed response.
        told_version: Policy version of tokens whose version is not reported, because the server is not one of ours. If
            None, a completion with such tokens has no versions.

    Raises:
        ValueError: the response is malformed; the message says how.
    """
    choices = body.get("choices") if isinstance(body, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise ValueError(f"expected a response with one choice, found {brief(body)}")
    assert isinstance(body, dict)
    (choice,) = choices
    finish, ours = choice.get("finish_reason"), body.get(OURS)
    if not isinstance(finish, str) or finish not in _STOP_REASONS:
        raise ValueError(f"finish_reason {brief(finish)}; expected one of {', '.join(_STOP_REASONS)}")
    extras = ours if isinstance(ours, dict) else {}
    queued, generated = (number_of(extras.get(name, 0.0), name) for name in ("queued_seconds", "generated_seconds"))
    packed, own_versions, spans = body.get(PACKED), extras.get("policy_versions"), choice.get("weight_versions")
    if packed is None:
        ids = read_ids(choice.get("token_ids"), "token_ids")
        logprobs = _read_logprobs(choice.get("logprobs"), ids)
    else:
        ids, logprobs = read_packed(packed)
    if not isinstance(ours, dict):
        versions = _read_spans(spans, len(ids), told_version)
        if logprobs is not None and (logprobs <= UNKNOWN_LOGPROB).any():
            logprobs = None
    elif own_versions is not None:
        versions = _read_versions(own_versions, len(ids))
    else:
        versions = None if spans is None else _read_spans(spans, len(ids), None)
    completion = Completion(
        ids=ids,
        logprobs=logprobs,
        policy_versions=versions,
        stop_reason=_STOP_REASONS[finish],
        queued_seconds=queued,
        generated_seconds=generated,
        num_cached_tokens=read_cached_tokens(body),
        routed_experts=_read_experts(choice.get("routed_experts")),
        kept_sets=_read_kept_sets(choice.get("sampling_mask"), ids),
    )
    return completion, ours if isinstance(ours, dict) else None


def read_cached_tokens(answer: object) -> int | None:
    """Number of prompt tokens that came from the prefix cache; None if the server does not report it.

    >>> read_cached_tokens({"usage": {"prompt_tokens": 160, "prompt_tokens_details": {"cached_tokens": 128}}})
    128
    """
    usage = answer.get("usage") if isinstance(answer, dict) else None
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    found = details.get("cached_tokens") if isinstance(details, dict) else None
    return found if isinstance(found, int) else None


def _read_experts(text: object) -> Experts | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError(f"routed_experts: expected an array as base64, found {brief(text)}")
    return experts_from_text(text)


def _read_kept_sets(sets: object, ids: Int32) -> KeptSets | None:
    if sets is None:
        return None
    if not isinstance(sets, list):
        raise ValueError(f"sampling_mask: expected a list of ids for each token, found {brief(sets)}")
    return as_kept_sets(sets, ids)


def check_experts(completion: Completion, request: SampleRequest) -> Completion:
    """Check that the routed experts cover the requested tokens, and return the completion. A cancelled completion may
    have fewer rows of experts, in which case its experts are removed.

    Raises:
        ValueError: the number of tokens with experts is wrong.
    """
    experts = completion.routed_experts
    if experts is None:
        return completion
    # The last sampled token is never fed to the model, so it has no experts.
    expected = len(request.prompt_ids) + len(completion.ids) - 1 - request.routed_experts_start
    if len(experts) == expected:
        return completion
    if completion.stop_reason is StopReason.CANCELLED:
        return replace(completion, routed_experts=None)
    raise ValueError(f"routed_experts: found the experts of {len(experts)} tokens, expected those of {expected}")


def _read_versions(values: object, count: int) -> Int32:
    known = values if isinstance(values, list) else []
    if len(known) != count or not all(type(version) is int and 0 <= version < INT32_END for version in known):
        raise ValueError(f"expected {count} policy versions, found {brief(values)}")
    return np.array(known, dtype=np.int32)


def _read_spans(spans: object, count: int, told: int | None) -> Int32 | None:
    """Read policy versions from vLLM's spans: int32 [C]. vLLM's versions are arbitrary strings, "default" for the
    weights that it was started with. A string that is not a number means `told`. Returns None if such a string occurs
    and `told` is None.

    >>> _read_spans([{"version": "default", "start": 0, "end": 2}, {"version": "8", "start": 2, "end": 3}], 3, 0)
    array([0, 0, 8], dtype=int32)
    """
    versions: list[int | None] = []
    ends = [0]
    for span in spans if isinstance(spans, list) else [{"version": None, "start": 0, "end": count}]:
        name, start, end = (span.get(key) if isinstance(span, dict) else None for key in ("version", "start", "end"))
        if start != ends[-1] or not isinstance(end, int) or not start <= end <= count:
            raise ValueError(f"weight_versions: expected spans of {count} tokens, found {brief(spans)}")
        number = int(name) if isinstance(name, str) and _NUMBER.fullmatch(name) else INT32_END
        if end > start:
            versions.append(number if number < INT32_END else told)
            ends.append(end)
    if ends[-1] != count:
        raise ValueError(f"weight_versions: expected spans of {count} tokens, found {brief(spans)}")
    return None if None in versions else np.repeat(np.array(versions, dtype=np.int32), np.diff(ends))


def read_plain(values: object, count: int) -> Float32:
    """Convert a JSON list of `count` logprobs to float32. Raises `ValueError` for anything else."""
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"expected {count} logprobs, found {brief(values)}")
    if set(map(type, values)) == {float}:  # fast path, without bool and int, which need `number_of`
        found = np.array(values)
        if (np.abs(found) <= _LARGEST).all():
            return found.astype(np.float32)
    return np.array([number_of(value, "a logprob") for value in values], dtype=np.float32)


def _read_logprobs(value: object, ids: Int32) -> Float32 | None:
    """Read the logprobs of these ids, and check them against the id that vLLM reports with each logprob."""
    if value is None:
        return None
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, list) or len(content) != len(ids):
        raise ValueError(f"expected a logprob for each of {len(ids)} ids, found {brief(value)}")
    with contextlib.suppress(TypeError, KeyError):  # fast path; if it fails, the loop below reports the bad entry
        if [entry["token_id"] for entry in content] == ids.tolist():
            return read_plain([entry["logprob"] for entry in content], len(ids))
    for position, (entry, token) in enumerate(zip(content, ids.tolist(), strict=True)):
        named = entry.get("token_id", entry.get("token")) if isinstance(entry, dict) else None
        if named not in (token, f"token_id:{token}"):  # vLLM 0.32 and older versions
            raise ValueError(f"logprobs: expected id {token} at position {position}, found {brief(entry)}")
    return np.array([number_of(entry.get("logprob"), "a logprob") for entry in content], dtype=np.float32)


def number_of(value: object, what: str) -> float:
    """Read a finite number from JSON.

    Raises:
        ValueError: the value is not a number, or not finite in float32; the message shows it.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_LARGEST <= value <= _LARGEST:
        raise ValueError(f"{what}: expected a finite number, found {brief(value)}")
    return float(value)
