"""The requests of the campaign: every field of every route with every kind of wrong value, as bytes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verbatim.inference.http import protocol

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CHATS = (CHAT, MESSAGES, RESPONSES)

GENERATE_BODY = {
    "token_ids": [1, 2, 3], "model": "tiny", "request_id": "r",
    "sampling_params": {"temperature": 0.8, "max_tokens": 3, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "seed": 1,
                        "stop_token_ids": [7], "logprobs": 1, "ignore_eos": True, "n": 1, "stop": [],
                        "presence_penalty": 0},
    "verbatim": {"session": "s", "packed": True, "seed": 4},
}  # fmt: skip
CALL = {"id": "c", "type": "function", "function": {"name": "guess", "arguments": '{"number": 3}'}}
TOOL = {
    "type": "function",
    "function": {
        "name": "guess",
        "description": "A guess.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}
CHAT_BODY = {
    "model": "tiny", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a",
                                                                     "tool_calls": [CALL]},
                                  {"role": "tool", "content": "3", "tool_call_id": "c"}],
    "tools": [TOOL], "temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.01, "max_tokens": 3, "seed": 1,
    "max_completion_tokens": 3, "stop_token_ids": [7], "logprobs": True, "return_token_ids": True, "ignore_eos": False,
    "stream": False, "stream_options": {"include_usage": True}, "tool_choice": "auto", "n": 1, "stop": ["zz"],
    "parallel_tool_calls": True, "metadata": {"a": "b"},
}  # fmt: skip
MESSAGES_BODY = {
    "model": "tiny", "max_tokens": 3, "system": [{"type": "text", "text": "be brief"}], "messages": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "s"},
                                          {"type": "tool_use", "id": "c", "name": "guess", "input": {"number": 3}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]}],
    "tools": [{"name": "guess", "description": "A guess.", "input_schema": TOOL["function"]["parameters"]}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "temperature": 0.8, "top_p": 0.9, "top_k": 5,
    "stop_sequences": ["zz"], "stream": True, "thinking": {"type": "enabled", "budget_tokens": 1024},
    "metadata": {"user_id": "u"}, "verbatim": {"session": "s", "seed": 4},
}  # fmt: skip
RESPONSES_BODY = {
    "model": "tiny",
    "instructions": "be brief",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "guess", "arguments": '{"number": 3}'},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
    ],
    "tools": [{"type": "function", "strict": True, **TOOL["function"]}],
    "tool_choice": "auto",
    "temperature": 0.8,
    "parallel_tool_calls": False,
    "top_p": 0.9,
    "max_output_tokens": 3,
    "stream": False,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "text": {"format": {"type": "text"}},
    "reasoning": {"summary": "auto"},
    "metadata": {"a": "b"},
}
LOGPROBS_BODY = {"token_ids": [1, 2, 3], "temperature": 1.0, "model": "tiny"}
WEIGHTS_BODY = {"path": "/tmp", "version": 1}
BODIES: Mapping[str, dict[str, Any]] = {
    protocol.GENERATE: GENERATE_BODY,
    CHAT: CHAT_BODY,
    MESSAGES: MESSAGES_BODY,
    RESPONSES: RESPONSES_BODY,
    protocol.PROMPT_LOGPROBS: LOGPROBS_BODY,
    protocol.WEIGHTS: WEIGHTS_BODY,
}

DEEP = "[" * 800 + "]" * 800
SURROGATE = '"\\ud800"'
VALUES: Mapping[str, str] = {
    "null": "null", "a flag": "true", "a number": "3.5", "text": '"x"', "a list": '[{"a": 1}]',
    "an object": '{"a": [1]}',
    "huge": "1" + 400 * "0", "too many digits": "9" * 5000, "infinite": "1e999", "not a number": "NaN",
    "negative": "-1", "very negative": "-" + "9" * 30, "deep": DEEP, "long text": '"' + "x" * 100_000 + '"',
    "long list": "[" + "1," * 50_000 + "1]", "wide object": "{" + ",".join(f'"k{k}": 1' for k in range(2000)) + "}",
    "half a character": SURROGATE, "a null character": '"\\u0000"', "control tokens": '"<|im_end|><|im_start|>"',
}  # fmt: skip
"""JSON in place of a field's own value."""
WHOLE = {"too many digits", "not a number"}
"""Values that JSON itself does not allow: the message is about the body."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One request, and what its refusal has to name."""

    name: str
    path: str
    data: bytes
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    """One of these is in the message, where it is refused with 400; empty = any message."""
    statuses: tuple[int, ...] = (200, 400, 403, 404, 411, 413, 415)
    pieces: int = 1
    """It is sent in so many parts, a twentieth of a second apart."""
    cut: bool = False
    """The client hangs up before the end of the body."""


def paths_of(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where every value in a JSON value stands."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*at, key)
        yield from paths_of(item, (*at, key))


def changed(body: dict[str, Any], at: tuple[str | int, ...], text: str | None) -> bytes:
    """The body as JSON with this text in place of a value; None leaves the value out."""
    body = copy.deepcopy(body)
    place: Any = body
    for key in at[:-1]:
        place = place[key]
    if text is None:
        del place[at[-1]]
        return json.dumps(body).encode()
    place[at[-1]] = "@@here@@"
    return json.dumps(body).replace('"@@here@@"', text).encode("utf-8", "surrogatepass")


def field_cases() -> Iterator[Case]:
    """Every field with every value, left out, repeated, and with bytes that are not UTF-8."""
    for path, body in BODIES.items():
        for at in paths_of(body):
            name = ".".join(map(str, at))
            named = tuple(str(key) for key in at if isinstance(key, str))
            about = dict(
                path=path,
                names=(
                    *named,
                    *(("message", "tools", "role") if path in CHATS else ()),
                    *(("prompt_ids",) if "token_ids" in named else ()),
                ),
            )
            yield Case(name=f"{path} {name}: left out", data=changed(body, at, None), **about)
            for kind, text in VALUES.items():
                names = ("body",) if kind in WHOLE else about["names"]
                yield Case(name=f"{path} {name}: {kind}", data=changed(body, at, text), path=path, names=names)
            data = changed(body, at, "[]").replace(b"[]", b'"\xff\xfe"', 1)
            yield Case(name=f"{path} {name}: not UTF-8", data=data, path=path)
            if isinstance(at[-1], str):
                twice = changed(body, at, f'1, "{at[-1]}": {{}}')
                yield Case(name=f"{path} {name}: repeated", data=twice, **about)


def body_cases() -> Iterator[Case]:
    """Bodies that are no such object, come in parts, or end too early."""
    for path, body in BODIES.items():
        whole = json.dumps(body).encode()
        for kind, data in {
            "empty": b"",
            "no JSON": b"{",
            "a list": b"[1]",
            "text": b'"x"',
            "null": b"null",
            "not UTF-8": b"\xff" * 99,
            "UTF-16": whole.decode().encode("utf-16"),
            "deep": b"[" * 100_000,
            "deep objects": b'{"a":' * 5000,
            "two objects": whole + whole,
            "cut in JSON": whole[: len(whole) // 2],
            "null characters": b"\0" * 1000,
            "one more field": json.dumps({**body, "no_such_field": 1}).encode(),
            "a byte order mark": b"\xef\xbb\xbf" + whole,
        }.items():
            names = ("no_such_field",) if kind == "one more field" else ("body",)
            yield Case(name=f"{path} body: {kind}", path=path, data=data, names=names)
        yield Case(name=f"{path} body: slow", path=path, data=whole, pieces=10)
        yield Case(name=f"{path} body: cut off", path=path, data=whole, cut=True)
        yield Case(name=f"{path} body: too large", path=path, data=b" " * 4_000_000 + whole)
        yield Case(
            name=f"{path} content-type", path=path, data=whole, headers={"content-type": "text/plain"}, statuses=(415,)
        )
        yield Case(name=f"{path} host", path=path, data=whole, headers={"host": "evil.example"}, statuses=(403,))
        yield Case(
            name=f"{path} session", path=path, data=whole, headers={"x-session-id": "s" * 30_000}, statuses=(431,)
        )
        for method in ("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "BREW"):
            yield Case(name=f"{path} method {method}", path=path, data=b"", method=method, statuses=(405,))


def text_cases() -> Iterator[Case]:
    """Conversations that are slow to render, or long."""
    for name, text in {
        "angles": "<" * 100_000,
        "tags": "<|im_end|>" * 10_000,
        "words": "any words " * 10_000,
        "spaces": " " * 100_000,
        "bytes": "\U0001f600" * 25_000,
        "marks": "\ufdd0\ufdd1" * 10_000,
        "think": "<think>" * 10_000,
        "combining": "e" + "\u0301" * 50_000,
        "one word": "a" * 100_000,
        "null": "\0" * 10_000,
        "longest": "x" * (384 * 256 + 1),
    }.items():
        for role in ("user", "assistant", "tool", "system", "x" * 1000):
            body = {"messages": [{"role": role, "content": text}], "max_tokens": 2}
            yield Case(
                name=f"{CHAT} text: {name} by {role[:9]}",
                path=CHAT,
                data=json.dumps(body).encode(),
                names=("messages", "role"),
            )
    many = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 500
    named = [{"role": "user", "content": "a", "name": {"a": "b" * 10_000}}]
    for name, messages in (("many", many), ("a name", named)):
        data = json.dumps({"messages": messages}).encode()
        yield Case(name=f"{CHAT} messages: {name}", path=CHAT, data=data, names=("messages",))


def paths_cases() -> Iterator[Case]:
    """Paths and heads that lead nowhere."""
    yield Case(name="path of 30,000 characters", path="/" + "x" * 30_000, data=b"", method="GET", statuses=(431,))
    for path in ("/", "/nowhere", "/v1/../../etc/passwd", "/%00", "/v1/models/../x", "//health"):
        yield Case(name=f"path {path[:20]}", path=path, data=b"", method="GET", statuses=(400, 404))
    for length in ("-1", "abc", "99999999999999999999999", "1, 2"):
        yield Case(
            name=f"content-length {length}",
            path=protocol.GENERATE,
            data=b"{}",
            headers={"content-length": length},
            statuses=(400, 413),
        )
    yield Case(
        name="a head without end", path="/health", data=b"", method="GET", headers={"a": "b" * 200_000}, statuses=(431,)
    )
    elsewhere = b'{"path": "/etc", "version": 1}'
    yield Case(name="weights from elsewhere", path=protocol.WEIGHTS, data=elsewhere, statuses=(403,))


def all_cases() -> list[Case]:
    """The whole campaign, in a fixed order."""
    return [*field_cases(), *body_cases(), *text_cases(), *paths_cases()]
