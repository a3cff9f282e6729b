"""Streams OpenAI's chat completions: chunks of one or several choices, the token counts, and [DONE]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verbatim.core.types import ToolCall
from verbatim.inference.chat.openai_form import call_body, ending, error_body, logprobs_body, usage_of
from verbatim.inference.chat.protocol import ChatDelta, ChatReply, ChatRequest, Stamp, pieces
from verbatim.inference.chat.streaming import PING, StreamedReply, event

DONE = b"data: [DONE]\n\n"


class OpenAIChatStream:
    """Writes the chunks of one response.

    Args:
        request: The request.
        stamp: Id, creation time and model name of the response.
    """

    ping = PING

    def __init__(self, request: ChatRequest, stamp: Stamp) -> None:
        self._request = request
        self._head = {
            "id": f"chatcmpl-{stamp.id}",
            "object": "chat.completion.chunk",
            "created": stamp.created,
            "model": stamp.model,
        }
        self._said = [StreamedReply() for _ in range(request.n)]

    def begin(self, num_prompt_tokens: int) -> bytes:
        """The opening chunks, with the role of each choice."""
        return b"".join(self._chunk(k, {"role": "assistant", "content": ""}) for k in range(self._request.n))

    def delta(self, delta: ChatDelta) -> bytes:
        """The chunks for a delta of one choice."""
        self._said[delta.index].add(delta)
        return self._texts(delta)

    def end(self, replies: Sequence[ChatReply]) -> bytes:
        """The closing chunks: the rest of each choice and its finish reason, the token counts if requested, and
        [DONE]."""
        rests = [said.rest(reply, index) for index, (said, reply) in enumerate(zip(self._said, replies, strict=True))]
        events = [
            piece
            for index, (rest, reply) in enumerate(zip(rests, replies, strict=True))
            for piece in self._ending(index, rest, reply)
        ]
        if self._request.include_usage:
            events.append(event({**self._head, "choices": [], "usage": usage_of(replies)}))
        return b"".join([*events, DONE])

    def error(self, status: int, message: str) -> bytes:
        """The error event, sent instead of the closing chunks."""
        return event(error_body(status, message))

    def _ending(self, index: int, rest: ChatDelta, reply: ChatReply) -> list[bytes]:
        events = [self._texts(rest)]
        if reply.reasoning_content == "":
            events.append(self._chunk(index, {"reasoning_content": ""}))
        for number, call in enumerate(reply.tool_calls):
            events += self._call(index, number, call)
        last = self._chunk(index, {}, **ending(self._request, reply))
        if self._request.include_token_ids and reply.prompt_ids is not None:
            last = self._chunk(index, {}, **ending(self._request, reply), prompt_token_ids=reply.prompt_ids.tolist())
        return [*events, last]

    def _call(self, index: int, number: int, call: ToolCall) -> list[bytes]:
        whole = call_body(call)
        arguments = whole["function"]["arguments"]
        start = {"index": number, **whole, "function": {**whole["function"], "arguments": ""}}
        events = [self._chunk(index, {"tool_calls": [start]})]
        for piece in pieces(arguments):
            part = {"index": number, "function": {"arguments": piece}}
            events.append(self._chunk(index, {"tool_calls": [part]}))
        return events

    def _texts(self, delta: ChatDelta) -> bytes:
        """The chunks for a delta's text. The logprobs are sent with the first chunk, or with an empty chunk if there is
        no text yet."""
        parts = [{"reasoning_content": delta.reasoning}] if delta.reasoning else []
        parts += [{"content": delta.content}] if delta.content else []
        tokens = {"logprobs": {"content": logprobs_body(delta.tokens)}} if delta.tokens else {}
        if tokens and not parts:
            parts = [{}]
        return b"".join(self._chunk(delta.index, part, **(tokens if k == 0 else {})) for k, part in enumerate(parts))

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        usage = {"usage": None} if self._request.include_usage else {}
        return event({**self._head, "choices": [choice], **usage})
