"""Parses a chat-completions response: its text, tool calls, and exact ids if the server returns them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verbatim.core.types import ParseStatus, StopReason, ToolCall
from verbatim.inference.http.protocol import OURS, UNKNOWN_LOGPROB
from verbatim.models.renderers.responses import NOT_JSON, is_json, read_json

_STOP_REASONS = {
    "stop": StopReason.STOP,
    "tool_calls": StopReason.STOP,
    "function_call": StopReason.STOP,
    "length": StopReason.LENGTH,
}


class BadAnswer(ValueError):
    """The response is not a chat completion; the message shows what was found."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatAnswer:
    """One assistant message and its tokens.

    Example: `{"choices": [{"message": {"content": "4"}, "finish_reason": "stop", "token_ids": [52]}],
    "prompt_token_ids": [50, 43, 50]}` is the text "4", sampled as the id 52 after the ids 50 43 50.
    """

    content: str
    """The text; "" if there is none."""
    reasoning: str | None
    """The thinking; None if there is no thinking, or if the server returns it as part of the text."""
    tool_calls: tuple[ToolCall, ...]
    """All attempted calls, including malformed calls. `raw` has the arguments as received; `id` is "" if the server
    sent none."""
    stop_reason: StopReason
    """"stop" or "length"."""
    usage: Mapping[str, int]
    """Token counts as the server reports them (prompt_tokens, completion_tokens, ...)."""
    prompt_ids: Sequence[int] | None
    """Ids of the prompt as the server rendered it; None if the server does not return them."""
    completion_ids: Sequence[int] | None
    """Sampled ids; None if the server does not return them."""
    logprobs: Sequence[float] | None
    """Logprobs of `completion_ids`; None if the server does not return them or if the logprob of any id is unknown."""
    policy_versions: Sequence[int] | None = None
    """Policy versions of `completion_ids`; None if the server does not report them (only our own servers do)."""


def read_answer(text: str) -> ChatAnswer:
    """Parse the body of a response.

    Raises:
        BadAnswer: the body is not JSON, or not a completion with exactly one choice.
    """
    try:
        body = json.loads(text)
    except (ValueError, RecursionError):
        raise BadAnswer(f"expected JSON, found {text[:80]!r}") from None
    choices = _object(body).get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        found = f"{len(choices)} choices" if isinstance(choices, list) else f"{text[:200]!r}"
        raise BadAnswer(f"expected a chat completion with one choice, found {found}")
    (choice,) = choices
    message, finish = choice.get("message"), choice.get("finish_reason")
    if not isinstance(message, dict):
        raise BadAnswer(f"expected a message in the choice, found {message!r:.80}")
    if not isinstance(finish, str) or finish not in _STOP_REASONS:
        raise BadAnswer(f"finish_reason {finish!r:.80}; expected one of {', '.join(_STOP_REASONS)}")
    content = message.get("content")
    if content is None:
        content = message.get("refusal") or ""
    if not isinstance(content, str):
        raise BadAnswer(f"expected text as the message's content, found {type(content).__name__}")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise BadAnswer(f"expected a list of tool calls, found {type(calls).__name__}")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return ChatAnswer(
        content=_unicode(content),
        reasoning=_unicode(reasoning) if isinstance(reasoning, str) else None,
        tool_calls=tuple(map(_read_call, calls)),
        stop_reason=_STOP_REASONS[finish],
        usage={name: n for name, n in _object(body.get("usage")).items() if isinstance(n, int)},
        prompt_ids=body.get("prompt_token_ids") or choice.get("prompt_token_ids"),
        completion_ids=choice.get("token_ids"),
        logprobs=_read_logprobs(choice.get("logprobs")),
        policy_versions=_read_versions(body.get(OURS), choice.get("token_ids")),
    )


def _read_call(item: object) -> ToolCall:
    """Read one tool call. A malformed call is kept with its status, because it was sampled and belongs in the
    record."""
    item = _object(item)
    function = _object(item.get("function"))
    name, given, call_id = function.get("name"), function.get("arguments"), item.get("id")
    raw = given if isinstance(given, str) else "" if given is None else json.dumps(given)
    arguments, status = read_arguments(raw)
    if not isinstance(name, str) or not name:
        name, status = None, "missing_name"
    elif not is_json(name):
        name, status = None, "malformed_structure"
    return ToolCall(
        name=name,
        arguments=arguments if status == "ok" else None,
        status=status,
        raw=_unicode(raw),
        id=_unicode(call_id) if isinstance(call_id, str) else "",
    )


def read_arguments(raw: str) -> tuple[dict[str, Any] | None, ParseStatus]:
    """Parse a call's arguments as strict JSON.

    Python's parser also accepts NaN, infinity (1e400), lone surrogates and very deep nesting. Such values are rejected
    here, because they cannot be written back as JSON. Duplicate keys are rejected because a value would be lost."""
    if not raw.strip():
        return {}, "ok"  # some servers send an empty string if a call has no arguments
    value = read_json(raw)
    if value is NOT_JSON or not is_json(value):
        return None, "invalid_json"
    return (value, "ok") if isinstance(value, dict) else (None, "malformed_structure")


def _read_logprobs(logprobs: object) -> list[float] | None:
    content = _object(logprobs).get("content")
    if not isinstance(content, list):
        return None
    try:
        found = [float(token["logprob"]) for token in content]
    except (KeyError, OverflowError, TypeError, ValueError):
        raise BadAnswer("expected a logprob for each token of logprobs.content") from None
    return None if found and min(found) <= UNKNOWN_LOGPROB else found


def _read_versions(ours: object, ids: object) -> list[int] | None:
    versions: Any = _object(ours).get("policy_versions")
    if versions is None or ids is None:
        return None
    is_one_each = isinstance(versions, list) and isinstance(ids, list) and len(versions) == len(ids)
    if not is_one_each or not all(type(version) is int and version >= 0 for version in versions):
        raise BadAnswer(f"expected a policy version for each token id, found {versions!r:.80}")
    return list(versions)


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _unicode(text: str) -> str:
    """Replace each lone surrogate with "?": JSON escapes can express them, but UTF-8 cannot encode them."""
    return text.encode(errors="replace").decode()
