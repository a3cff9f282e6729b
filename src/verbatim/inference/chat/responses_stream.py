"""Streams OpenAI's Responses. Each item is added, grows, and is then done. The last event has the whole response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verbatim.core.types import ToolCall
from verbatim.inference.chat.protocol import ChatReply, ChatRequest, Stamp, pieces
from verbatim.inference.chat.responses_form import (
    call_item,
    has_text,
    message_item,
    reasoning_item,
    response_body,
    text_part,
)
from verbatim.inference.chat.streaming import BlockStream, event


class ResponsesStream(BlockStream):
    """Writes the events of one response.

    Args:
        request: The request.
        stamp: Id, creation time and model name of the response.
    """

    def __init__(self, request: ChatRequest, stamp: Stamp) -> None:
        super().__init__()
        self._request, self._stamp = request, stamp
        self._sequence = -1
        self._index = -1
        """Index of the item that was added last."""

    def begin(self, num_prompt_tokens: int) -> bytes:
        """The opening events, with a response that has no items yet."""
        body = response_body(self._request, self._stamp, None)
        return self._event("response.created", response=body) + self._event("response.in_progress", response=body)

    def end(self, replies: Sequence[ChatReply]) -> bytes:
        """The closing events: the remaining text, the tool calls, and the complete response."""
        (reply,) = replies
        rest = self._said.rest(reply)
        status = "incomplete" if reply.finish == "length" else "completed"
        events = self._texts(rest)
        if has_text(reply) and self._open != "text":
            events += [*self._close(status), *self._start("text")]
        events += self._close(status)
        for number, call in enumerate(reply.tool_calls):
            events += self._call(number, call)
        whole = response_body(self._request, self._stamp, reply)
        kind = "response.incomplete" if reply.finish == "length" else "response.completed"
        return b"".join([*events, self._event(kind, response=whole)])

    def error(self, status: int, message: str) -> bytes:
        """The event of a failed response, sent instead of the closing events."""
        body = response_body(self._request, self._stamp, None)
        failed = {**body, "status": "failed", "error": {"code": "server_error", "message": message}}
        return self._event("response.failed", response=failed)

    def _start(self, kind: str) -> list[bytes]:
        self._open = kind
        self._index += 1
        part = text_part("") if kind == "text" else {"type": "reasoning_text", "text": ""}
        added = self._event(
            "response.output_item.added", output_index=self._index, item=self._item(None, "in_progress")
        )
        return [added, self._part("response.content_part.added", part=part)]

    def _grown(self, kind: str, text: str) -> bytes:
        if kind == "text":
            return self._part("response.output_text.delta", delta=text, logprobs=[])
        return self._part("response.reasoning_text.delta", delta=text)

    def _close(self, status: str) -> list[bytes]:
        kind, text = self._open, self._said.content if self._open == "text" else self._said.reasoning
        if not kind:
            return []
        if kind == "text":
            part, done = text_part(text), self._part("response.output_text.done", text=text, logprobs=[])
        else:
            part = {"type": "reasoning_text", "text": text}
            done = self._part("response.reasoning_text.done", text=text)
        ends = [done, self._part("response.content_part.done", part=part)]
        ends.append(self._event("response.output_item.done", output_index=self._index, item=self._item(text, status)))
        self._open = ""
        return ends

    def _call(self, number: int, call: ToolCall) -> list[bytes]:
        """All events of one call. The events are sent at the end, because a call is only known once it is complete."""
        self._index += 1
        item = call_item(self._request, self._stamp, number, call)
        place = {"item_id": item["id"], "output_index": self._index}
        is_custom = item["type"] == "custom_tool_call"
        holds, named = ("input", {}) if is_custom else ("arguments", {"name": item["name"]})
        kind = f"response.{'custom_tool_call_input' if is_custom else 'function_call_arguments'}"
        added = {**item, holds: "", **({} if is_custom else {"status": "in_progress"})}
        return [
            self._event("response.output_item.added", output_index=self._index, item=added),
            *(self._event(f"{kind}.delta", **place, delta=piece) for piece in pieces(item[holds])),
            self._event(f"{kind}.done", **place, **named, **{holds: item[holds]}),
            self._event("response.output_item.done", output_index=self._index, item=item),
        ]

    def _item(self, text: str | None, status: str) -> dict[str, Any]:
        if self._open == "text":
            return message_item(self._stamp, text, status)
        return reasoning_item(self._stamp, text)

    def _part(self, kind: str, **fields: Any) -> bytes:
        item_id = self._item(None, "")["id"]
        return self._event(kind, item_id=item_id, output_index=self._index, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return event({"type": kind, "sequence_number": self._sequence, **fields}, kind)
