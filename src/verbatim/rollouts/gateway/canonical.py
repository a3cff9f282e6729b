"""Computes digests of chat messages that do not depend on how a client serialises the messages.

A client parses an answer into its own objects and sends it back in the next request. On the way it may reorder the
arguments of a call or change their white space, rename call ids, drop empty fields, or send the content as parts. None
of this changes the digest. Every difference that a template could render does change it.

Example: An assistant message with the content None and a call "call_7" of `add` with the arguments '{"b": 2, "a": 1}'
has the same digest as a message with the content "" and a call "toolu_1" with `{"a": 1.0, "b": 2}`. The tool's answer
that follows the first message and names "call_7" has the same digest as the answer that follows the second message and
names "toolu_1".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verbatim.rollouts.gateway.clocks import frame_words, without_moments

_SYSTEM = ("system", "developer")
_UNREAD = "INVALID_JSON"


@dataclass(frozen=True, slots=True)
class MessageDigest:
    """Identifies a message among all messages that may follow the same history."""

    full: bytes
    """Digest of the whole message."""
    bare: bytes
    """Digest of the message without its reasoning; equal to `full` if the message has no reasoning."""


class Digester:
    """Computes the digests of one conversation's messages, in order. A tool's answer is identified by the position of
    its call and not by the call's id, because clients rename ids."""

    def __init__(self) -> None:
        self._index_of_call: dict[str, int] = {}

    def digest(self, message: Mapping[str, Any]) -> MessageDigest:
        """Compute the digest of the next message, in time linear in its size."""
        role = str(message.get("role", ""))
        content = text_of(message.get("content"))
        if role == "assistant":
            return self._of_assistant(message, content)
        parts = ["system" if role in _SYSTEM else role, content]
        if role == "tool":
            call_id = str(message.get("tool_call_id") or "")
            parts.append(str(self._index_of_call.get(call_id, f"?{call_id}")))
        else:
            parts.append(str(message.get("name") or ""))
        digest = digest_of(parts)
        return MessageDigest(digest, digest)

    def _of_assistant(self, message: Mapping[str, Any], content: str) -> MessageDigest:
        """Compute the digest of an assistant message. White space around its content and its reasoning is ignored,
        because clients and templates strip it."""
        calls = message.get("tool_calls") or ()
        parts = ["assistant", content.strip(), str(message.get("name") or "")]
        for index, call in enumerate(calls):
            self._index_of_call[str(call.get("id") or "")] = index
            parts += [str(call["function"].get("name") or ""), canonical_arguments(call["function"].get("arguments"))]
        bare = digest_of(parts)
        reasoning = text_of(message.get("reasoning_content")).strip()
        return MessageDigest(digest_of([*parts, "reasoning", reasoning]) if reasoning else bare, bare)


def text_of(content: Any) -> str:
    """Return the text of a message's content, which is a string, None, or a list of text parts.

    >>> text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), text_of(None)
    ('ab', '')
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    is_text = isinstance(content, list | tuple) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    )
    return "".join(part["text"] for part in content) if is_text else _json(content)


def canonical_arguments(arguments: Any) -> str:
    """Write the arguments of a call as JSON text with sorted keys. Text that is not a JSON object is only stripped.

    >>> canonical_arguments('{ "b": 1.0, "a": true }')
    '{"a":true,"b":1}'
    >>> canonical_arguments(None), canonical_arguments('{"a": 1')
    ('{}', '{"a": 1')

    pydantic-ai wraps arguments that it cannot parse in an object with one key:

    >>> canonical_arguments({"INVALID_JSON": '{"a": 1'})
    '{"a": 1'
    """
    if isinstance(arguments, str):
        text = arguments.strip()
        if not text:
            return "{}"
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        if not isinstance(value, dict):
            return text
        arguments = value
    if isinstance(arguments, Mapping) and list(arguments) == [_UNREAD] and isinstance(arguments[_UNREAD], str):
        return str(arguments[_UNREAD]).strip()
    return _json(arguments or {})


def tools_digest(tools: Sequence[Mapping[str, Any]] | None) -> bytes:
    """Compute the digest of tool schemas. The order of keys is ignored. The order of the tools matters, since templates
    render it."""
    return digest_of([_json(tool) for tool in tools or ()])


def identity_of(messages: Sequence[Mapping[str, Any]]) -> bytes:
    """Identify an agent that has no name, by the digest of the system messages at the start of the conversation. Dates
    and times in these messages are left out.

    >>> times = "2026-01-31T09:00:00Z", "2027-02-01 17:05", "1790000000"
    >>> len({identity_of([{"role": "system", "content": f"You help. It is {time}."}]) for time in times})
    1
    """
    return digest_of([without_moments(text) for text in opening_of(messages)])


def frame_of(opening: Sequence[str]) -> bytes:
    """Compute the digest of the parts of a system prompt that stay the same while a clock or counter in the prompt
    advances (see `frame_words`).

    >>> prompts = "Thu Nov 26, 9:59 AM. 2 steps left (#..).", "Fri Nov 27, 10:00 AM. 1 step left (##.)."
    >>> len({frame_of([prompt]) for prompt in prompts})
    1
    >>> ids = "run_3f2a91", "run_bc07d2", "run_0f8fad5b-d9cb-afcd-bead-70867728950e"
    >>> len({frame_of([f"Session {name}."]) for name in ids})
    1
    """
    return digest_of(frame_words(opening))


def opening_of(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the texts of the system messages at the start of the conversation."""
    opening = []
    for message in messages:
        if message.get("role") not in _SYSTEM:
            break
        opening.append(text_of(message.get("content")))
    return opening


def _json(value: Any) -> str:
    try:
        return json.dumps(_whole_numbers(value), sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def _whole_numbers(value: Any) -> Any:
    """Convert whole floats to integers, because JavaScript has only one type of numbers and writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _whole_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_whole_numbers(item) for item in value]
    return value


def digest_of(parts: Sequence[str]) -> bytes:
    """Compute the digest of the parts and their lengths, so that ("ab", "c") and ("a", "bc") differ."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part.encode(errors="surrogatepass")
        state.update(b"%d:" % len(data))
        state.update(data)
    return state.digest()
