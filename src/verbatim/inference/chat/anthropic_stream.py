"""Streams Anthropic's Messages: a start event, the content blocks in order, a final delta with token counts, and a stop
event."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from verbatim.inference.chat.anthropic_form import SIGNATURE, call_block, error_body, stop_of, usage_of
from verbatim.inference.chat.protocol import ChatReply, Stamp, pieces
from verbatim.inference.chat.streaming import BlockStream, event

_EMPTY: dict[str, dict[str, Any]] = {
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}


class AnthropicStream(BlockStream):
    """Writes the events of one message.

    Args:
        stamp: Id, creation time and model name of the response.
    """

    ping = event({"type": "ping"}, "ping")

    def __init__(self, stamp: Stamp) -> None:
        super().__init__()
        self._stamp = stamp
        self._block = -1

    def begin(self, num_prompt_tokens: int) -> bytes:
        """The opening event: a message without content."""
        message: dict[str, Any] = {
            "id": f"msg_{self._stamp.id}",
            "type": "message",
            "role": "assistant",
            "model": self._stamp.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": num_prompt_tokens, "output_tokens": 0},
        }
        return _event("message_start", message=message)

    def end(self, replies: Sequence[ChatReply]) -> bytes:
        """The closing events: the remaining text, the tool calls, and the stop reason."""
        (reply,) = replies
        events = [*self._texts(self._said.rest(reply)), *self._close("completed")]
        for call in reply.tool_calls:
            block = call_block(call)
            events += self._start("tool_use", {**block, "input": {}})
            for piece in pieces(json.dumps(block["input"], ensure_ascii=False)):
                events.append(self._delta({"type": "input_json_delta", "partial_json": piece}))
            events += self._close("completed")
        events.append(_event("message_delta", delta=stop_of(reply), usage=usage_of(reply)))
        return b"".join([*events, _event("message_stop")])

    def error(self, status: int, message: str) -> bytes:
        """The error event, sent instead of the closing events."""
        return event(error_body(status, message), "error")

    def _start(self, kind: str, block: dict[str, Any] | None = None) -> list[bytes]:
        self._block += 1
        self._open = kind
        return [_event("content_block_start", index=self._block, content_block=block or _EMPTY[kind])]

    def _grown(self, kind: str, text: str) -> bytes:
        return self._delta({"type": f"{kind}_delta", kind: text})

    def _close(self, status: str) -> list[bytes]:
        if not self._open:
            return []
        signed = [self._delta({"type": "signature_delta", "signature": SIGNATURE})] if self._open == "thinking" else []
        self._open = ""
        return [*signed, _event("content_block_stop", index=self._block)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._block, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)
