"""Serves chat completions over a sampler: renders messages to ids, and parses sampled ids to a message."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from verbatim.errors import RecordError, UsageError, VerbatimError
from verbatim.inference.base import Completion, SampleRequest
from verbatim.inference.chat.answer import read_arguments
from verbatim.inference.http import protocol, request_body
from verbatim.inference.http.limits import BYTES_OF_A_TOKEN, most_text
from verbatim.inference.http.protocol import brief
from verbatim.renderers.base import ParsedResponse, Renderer
from verbatim.texts import error_text
from verbatim.types import Int32, Message, ToolCall

_KNOWN = {"model", "messages", "tools", "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens",
          "stop_token_ids", "seed", "logprobs", "return_token_ids", "ignore_eos", "user", "metadata", "cache_salt",
          "request_id", "skip_special_tokens", protocol.OURS}  # fmt: skip
_NEUTRAL: Mapping[str, Collection[Any]] = {
    **request_body.NEUTRAL, "stream": (False,), "stream_options": (), "response_format": ({"type": "text"},),
    "tool_choice": ("auto",), "parallel_tool_calls": (True,), "top_logprobs": (0,), "echo": (False,),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "priority": (0,), "store": (False,),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatRequest:
    """A rendered chat request."""

    request: SampleRequest
    """The conversation as ids, with sampling parameters."""
    tools: Sequence[Mapping[str, Any]] | None
    """Tool schemas in the prompt; None without tools."""
    logprobs: bool
    """Whether the client requests logprobs."""
    token_ids: bool
    """Whether the client requests ids (vLLM's `return_token_ids`)."""


def read_chat(
    data: bytes, renderer: Renderer, *, model: str, room: int, vocab_size: int, seed: int, session: str
) -> ChatRequest:
    """Read the body of a chat-completions call; refuses as much as possible before it renders.

    Args:
        data: JSON as OpenAI's and vLLM's clients write it.
        renderer: The model's renderer.
        model: The model's name in requests.
        room: Context length in tokens; `max_tokens` defaults to what the prompt leaves of it.
        vocab_size: The model's; the renderer may have stop ids that the model cannot sample.
        seed: Used if the request has none.
        session: Groups requests for prefix caching.

    Raises:
        Refused: the request names another model.
        UsageError: invalid messages, or an unsupported setting; names it.
        RecordError: messages that are longer than the context.
        EnvironmentFault: messages that the model's template refuses.
    """
    body = request_body.read_json(data)
    request_body.check_model(body, model)
    request_body.refuse_others(body, _KNOWN, _NEUTRAL, where="request")
    messages, tools = _read_messages(body.get("messages")), _read_tools(body.get("tools"))
    _refuse_too_long(messages, tools, room)
    given = dict(body)
    most = request_body.read_count(given, "max_completion_tokens")
    given["max_tokens"] = given.get("max_tokens") if most is None else most
    ignores_ends = request_body.read_flag(given, "ignore_eos")
    ends = () if ignores_ends else [token for token in renderer.stop_token_ids if token < vocab_size]
    request_body.read_params(given, max_tokens=1, end_ids=ends)  # refuses invalid values before rendering
    seed = request_body.read_seed(given, seed)
    logprobs, token_ids = (request_body.read_flag(body, name) for name in ("logprobs", "return_token_ids"))
    prompt_ids = _render(renderer, messages, tools)
    if len(prompt_ids) >= room:
        raise RecordError(f"messages: {len(prompt_ids)} ids leave no room in a context of {room} tokens; at most "
                          f"{room - 1} fit")  # fmt: skip
    params = request_body.read_params(given, max_tokens=max(1, room - len(prompt_ids)), end_ids=ends)
    return ChatRequest(
        request=SampleRequest(prompt_ids=prompt_ids, params=params, seed=seed, session=session), tools=tools,
        logprobs=logprobs, token_ids=token_ids,
    )  # fmt: skip


def _render(renderer: Renderer, messages: list[Message], tools: list[dict[str, Any]] | None) -> Int32:
    try:
        return renderer.render_ids(messages, tools, add_generation_prompt=True)
    except VerbatimError:
        raise
    except Exception as error:  # templates and tokenizers raise anything
        about = "messages" if tools is None else "messages or tools"
        raise UsageError(f"{about}: they cannot be rendered ({error_text(error, 200)})") from error


def _refuse_too_long(messages: list[Message], tools: list[dict[str, Any]] | None, room: int) -> None:
    """Check lengths before rendering, which takes seconds for a text of some megabytes."""
    for name, part in (("messages", messages), ("tools", tools or [])):
        size = _text_of(part)
        if size > most_text(room):
            raise UsageError(f"{name}: {size} characters; a context of {room} tokens holds at most {most_text(room)}, "
                             f"{BYTES_OF_A_TOKEN} in a token")  # fmt: skip


def _text_of(value: object) -> int:
    """Number of characters of all strings in a JSON value, keys included."""
    size, left = 0, [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, dict):
            left += part.keys()
            left += part.values()
        elif isinstance(part, list):
            left += part
    return size


def answer_chat(
    asked: ChatRequest, completion: Completion, renderer: Renderer, *, model: str, created: int, policy_version: int
) -> dict[str, Any]:
    """The completion as a chat-completions answer.

    A malformed tool call is included, with its text as arguments; without it the answer would seem to have no calls.

    Raises:
        SamplerFault: the engine's logprobs or versions do not match the ids.
    """
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    prompt_ids = asked.request.prompt_ids
    parsed = renderer.parse_response(completion.ids, prompt_ids, asked.tools)
    body = protocol.completion_body(
        completion, request_id=request_id, model=model, seed=asked.request.seed, num_prompt_tokens=len(prompt_ids),
        policy_version=policy_version, logprobs="objects" if asked.logprobs else None,
    )  # fmt: skip
    (sampled,) = body["choices"]
    finish = sampled["finish_reason"]
    choice: dict[str, Any] = {
        "index": 0,
        "message": _message(parsed, request_id),
        "finish_reason": "tool_calls" if parsed.tool_calls and finish == "stop" else finish,
        "logprobs": sampled["logprobs"],
    }
    for entry in (sampled["logprobs"] or {}).get("content", ()):
        text = renderer.decode(np.array([entry.pop("token_id")], dtype=np.int32))
        entry.update(token=text, bytes=list(text.encode(errors="replace")))
    answer = {"id": request_id, "object": "chat.completion", "created": created, "model": model, "choices": [choice],
              "usage": body["usage"], protocol.OURS: body[protocol.OURS]}  # fmt: skip
    if asked.token_ids:
        choice["token_ids"] = sampled["token_ids"]
        answer["prompt_token_ids"] = prompt_ids.tolist()
    return answer


def _message(parsed: ParsedResponse, request_id: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning_content is not None:
        message["reasoning_content"] = parsed.reasoning_content
    if parsed.tool_calls:
        message["tool_calls"] = [_protocol_call(call, f"{request_id}-{k}") for k, call in enumerate(parsed.tool_calls)]
    return message


def _protocol_call(call: ToolCall, call_id: str) -> dict[str, Any]:
    readable = call.arguments is not None
    arguments = json.dumps(call.arguments, ensure_ascii=False) if readable else call.raw
    return {"id": call.id or call_id, "type": "function",
            "function": {"name": call.name or "", "arguments": arguments}}  # fmt: skip


def _read_messages(value: object) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"messages: expected a list of at least one message, found {brief(value)}")
    return [_read_message(message, f"messages[{k}]") for k, message in enumerate(value)]


def _read_message(value: object, where: str) -> Message:
    """A message as templates render it: content as one text, arguments of tool calls as objects."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise UsageError(f"{where}: expected an object with a role, found {brief(value)}")
    message = {name: part for name, part in value.items() if part is not None}
    message["content"] = _read_content(message.get("content", ""), where)
    if "tool_calls" in message:
        if not isinstance(message["tool_calls"], list):
            raise UsageError(f"{where}.tool_calls: expected a list, found {brief(message['tool_calls'])}")
        message["tool_calls"] = [_read_call(call, where) for call in message["tool_calls"]]
    return cast(Message, message)


def _read_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(f"{where}.content: expected text, found {brief(content)}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UsageError(f"{where}.content: only text is taken here, found {brief(part)}")
    return "".join(part["text"] for part in content)


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = _function_of(call, f"{where}.tool_calls: expected calls of functions")
    given = function.get("arguments")
    arguments = read_arguments(given)[0] if isinstance(given, str) else given
    return {**call, "function": {**function, "arguments": given if arguments is None else arguments}}


def _read_tools(value: object) -> list[dict[str, Any]] | None:
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise UsageError(f"tools: expected a list, found {brief(value)}")
    for tool in value:
        _function_of(tool, "tools: expected functions with a name")
    return value


def _function_of(value: Any, expected: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError(f"{expected}, found {brief(value)}")
    return function
