"""Builds a chat-completions request from a conversation and sampling settings, in a form that any server accepts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from verbatim.core.sampling import SamplingParams
from verbatim.core.types import Message
from verbatim.inference.chat.answer import read_arguments
from verbatim.inference.chat.anthropic_form import UNREADABLE

_UNCHANGED: Mapping[str, tuple[Any, ...]] = {
    "temperature": (1,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "repetition_penalty": (1,),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "logit_bias": ({}, None),
}
"""Values that leave the model's own distribution unchanged. None, which means that the field is not sent, is listed
only if the default of every server is neutral."""


def chat_body(
    model: str,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    *,
    extra_body: Mapping[str, Any],
    seed: int | None = None,
    send_reasoning: bool = False,
) -> dict[str, Any]:
    """The JSON body of one request.

    Fields that only some servers know are sent only if they differ from their neutral value. With
    `extra_body={"return_token_ids": True}`, logprobs are requested and every setting is sent, because servers differ in
    their defaults. `extra_body` overrides everything; None in it removes a key.
    """
    body: dict[str, Any] = {
        "model": model,
        "messages": [_wire_message(message, send_reasoning) for message in messages],
        "temperature": params.temperature,
        "max_tokens": params.max_tokens,
    }
    everything = bool(extra_body.get("return_token_ids"))
    if params.top_p < 1 or everything:
        body["top_p"] = params.top_p
    if params.top_k or everything:
        body["top_k"] = params.top_k or -1
    if params.min_p or everything:
        body["min_p"] = params.min_p
    if params.stop:
        body["stop"] = list(params.stop)
    if params.stop_token_ids:
        body["stop_token_ids"] = list(params.stop_token_ids)
    if everything:
        body |= {"repetition_penalty": 1.0, "logprobs": True}
    if tools:
        body["tools"] = [dict(tool) for tool in tools]
    if seed is not None:
        body["seed"] = seed
    return {name: value for name, value in {**body, **extra_body}.items() if value is not None}


def samples_as_modelled(body: Mapping[str, Any]) -> bool:
    """True if a request samples from the model's own distribution. A server's logprobs refer either to the model's own
    distribution or to the sampling distribution; for such a request, the two are the same."""
    return all(body.get(name) in unchanged for name, unchanged in _UNCHANGED.items())


def _wire_message(message: Message, send_reasoning: bool) -> dict[str, Any]:
    """Convert a message to the form that servers accept: the arguments of calls must be a JSON object as text."""
    wire: dict[str, Any] = dict(message)
    if not send_reasoning:
        wire.pop("reasoning_content", None)
    if message.get("tool_calls"):
        wire["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _wire_arguments(call["function"].get("arguments"))}}
            for call in message["tool_calls"]
        ]
    return wire


def _wire_arguments(arguments: object) -> str:
    """Arguments as the text of a JSON object. Arguments that are not an object are wrapped in an object, so that
    nothing is lost.

    >>> _wire_arguments('{"at": 5}'), _wire_arguments("[1, 2]"), _wire_arguments("")
    ('{"at": 5}', '{"unreadable_arguments": "[1, 2]"}', '{}')
    """
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    value, _ = read_arguments(text)
    return text if value is not None else json.dumps({UNREADABLE: text}, ensure_ascii=False)
