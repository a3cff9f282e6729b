"""Chat completions over a sampler: messages to ids with the model's renderer, and the sampled ids back to a message."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from verbatim.errors import UsageError
from verbatim.inference import server_request, wire
from verbatim.inference.base import Completion, SampleRequest
from verbatim.inference.chat_answer import read_arguments
from verbatim.renderers.base import ParsedResponse, Renderer
from verbatim.types import Message, StopReason, ToolCall

_KNOWN = {"model", "messages", "tools", "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens",
          "stop_token_ids", "seed", "logprobs", "return_token_ids", "ignore_eos", "user", "metadata", "cache_salt",
          "request_id", "skip_special_tokens", wire.OURS}  # fmt: skip
_NEUTRAL: Mapping[str, Collection[Any]] = {
    **server_request.NEUTRAL, "stream": (False,), "stream_options": (), "response_format": ({"type": "text"},),
    "tool_choice": ("auto",), "parallel_tool_calls": (True,), "top_logprobs": (0,), "echo": (False,),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "priority": (0,), "store": (False,),
}  # fmt: skip
_FINISH = {StopReason.STOP: "stop", StopReason.LENGTH: "length", StopReason.CANCELLED: "abort"}


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatRequest:
    """A conversation that is to be continued, rendered."""

    request: SampleRequest
    """The same as ids."""
    tools: Sequence[Mapping[str, Any]] | None
    """The schemas that the model was shown."""
    logprobs: bool
    """Whether logprobs are asked for."""
    token_ids: bool
    """Whether ids are asked for (vLLM's `return_token_ids`)."""


def read_chat(
    body: Mapping[str, Any], renderer: Renderer, *, room: int, seed: int, session: str
) -> ChatRequest:
    """The request in the body of a chat-completions call.

    Rendering stays on the event loop's thread: a tokenizer has state, and an engine beside the server may use it too.

    Args:
        body: As OpenAI's and vLLM's clients write it.
        renderer: The model's.
        room: Tokens of the context; the default of `max_tokens` is what the prompt leaves of it.
        seed: Taken where the request has none.
        session: Groups requests for prefix caching.

    Raises:
        UsageError: messages that cannot be read, or something that cannot be honoured; names it.
    """
    server_request.refuse_others(body, _KNOWN, _NEUTRAL, where="request")
    messages, tools = _read_messages(body.get("messages")), _read_tools(body.get("tools"))
    prompt_ids = renderer.render_ids(messages, tools, add_generation_prompt=True)
    given = dict(body)
    if given.get("max_completion_tokens") is not None:
        given["max_tokens"] = given["max_completion_tokens"]
    ends = () if given.get("ignore_eos") else renderer.stop_token_ids
    params = server_request.read_params(given, max_tokens=max(1, room - len(prompt_ids)), end_ids=ends)
    seed = server_request.read_seed(given, seed)
    return ChatRequest(
        request=SampleRequest(prompt_ids=prompt_ids, params=params, seed=seed, session=session),
        tools=tools,
        logprobs=bool(body.get("logprobs")),
        token_ids=bool(body.get("return_token_ids")),
    )


def answer_chat(
    asked: ChatRequest, completion: Completion, renderer: Renderer, *, model: str, created: int, policy_version: int
) -> dict[str, Any]:
    """The completion as a chat-completions answer.

    A call that cannot be read is told too, its text in place of the arguments: left out, it would pass for an answer
    without calls.

    Raises:
        SamplerFault: the engine's logprobs or versions cannot be those of the ids.
    """
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    prompt_ids = asked.request.prompt_ids
    parsed = renderer.parse_response(completion.ids, prompt_ids, asked.tools)
    told = wire.completion_body(
        completion, request_id=request_id, model=model, seed=asked.request.seed, num_prompt_tokens=len(prompt_ids),
        policy_version=policy_version, logprobs="objects" if asked.logprobs else None,
    )  # fmt: skip
    (sampled,) = told["choices"]
    finish = _FINISH[completion.stop_reason]
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
              "usage": told["usage"], wire.OURS: told[wire.OURS]}  # fmt: skip
    if asked.token_ids:
        choice["token_ids"] = sampled["token_ids"]
        answer["prompt_token_ids"] = prompt_ids.tolist()
    return answer


def _message(parsed: ParsedResponse, request_id: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
    if parsed.reasoning_content is not None:
        message["reasoning_content"] = parsed.reasoning_content
    if parsed.tool_calls:
        message["tool_calls"] = [_wire_call(call, f"{request_id}-{k}") for k, call in enumerate(parsed.tool_calls)]
    return message


def _wire_call(call: ToolCall, call_id: str) -> dict[str, Any]:
    readable = call.arguments is not None
    arguments = json.dumps(call.arguments, ensure_ascii=False) if readable else call.raw
    return {"id": call.id or call_id, "type": "function",
            "function": {"name": call.name or "", "arguments": arguments}}  # fmt: skip


def _read_messages(value: object) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise UsageError(f"messages: expected a list of at least one message, found {value!r:.80}")
    return [_read_message(message, f"messages[{k}]") for k, message in enumerate(value)]


def _read_message(value: object, where: str) -> Message:
    """A message with its content as one text, and the arguments of its calls as objects, as templates render them."""
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise UsageError(f"{where}: expected an object with a role, found {value!r:.80}")
    message = {name: part for name, part in value.items() if part is not None}
    message["content"] = _read_content(message.get("content", ""), where)
    if "tool_calls" in message:
        if not isinstance(message["tool_calls"], list):
            raise UsageError(f"{where}.tool_calls: expected a list, found {message['tool_calls']!r:.80}")
        message["tool_calls"] = [_read_call(call, where) for call in message["tool_calls"]]
    return cast(Message, message)


def _read_content(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UsageError(f"{where}.content: expected text, found {content!r:.80}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise UsageError(f"{where}.content: only text is taken here, found {part!r:.80}")
    return "".join(part["text"] for part in content)


def _read_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise UsageError(f"{where}.tool_calls: expected calls of functions, found {call!r:.80}")
    assert isinstance(call, dict)
    given = function.get("arguments")
    arguments = read_arguments(given)[0] if isinstance(given, str) else given
    return {**call, "function": {**function, "arguments": given if arguments is None else arguments}}


def _read_tools(value: object) -> list[dict[str, Any]] | None:
    if not value:
        return None
    if not isinstance(value, list):
        raise UsageError(f"tools: expected a list, found {value!r:.80}")
    for tool in value:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UsageError(f"tools: expected functions with a name, found {tool!r:.80}")
    return value
