"""A chat format of bytes and a few markers, small enough to write ids by hand in tests."""

import json

import numpy as np

from verbatim.core.types import ToolCall
from verbatim.models.renderers.renderer import ParsedResponse

ROLES = {"system": 256, "user": 257, "assistant": 258, "tool": 259}
END, CALL, CALL_END = 260, 261, 262
VOCAB_SIZE = 263


def text(string: str) -> list[int]:
    return list(string.encode())


def say(string: str) -> list[int]:
    """A completion that speaks."""
    return [*text(string), END]


def call(name: str, **arguments) -> list[int]:
    """A completion that calls a tool."""
    return [CALL, *text(json.dumps({"name": name, "arguments": arguments})), CALL_END, END]


class ByteRenderer:
    name = "bytes"
    stop_token_ids = (END,)

    def __init__(self, bridges: bool = True) -> None:
        self.bridges = bridges

    def render_ids(self, messages, tools=None, add_generation_prompt=True):
        ids = []
        for message in messages:
            ids += self._one(message)
        return np.array([*ids, ROLES["assistant"]] if add_generation_prompt else ids, dtype=np.int32)

    def _one(self, message):
        body = text(message["content"])
        for c in message.get("tool_calls", ()):
            body += call(c["function"]["name"], **c["function"]["arguments"])[:-1]
        return [ROLES[message["role"]], *body, END]

    def parse_response(self, completion_ids, prompt_ids=None, tools=None):
        ids = [i for i in completion_ids.tolist() if i != END]
        calls = []
        while CALL in ids:
            at = ids.index(CALL)
            closed = CALL_END in ids[at:]
            end = ids.index(CALL_END, at) if closed else len(ids)
            raw = bytes(i for i in ids[at + 1 : end] if i < 256).decode(errors="replace")
            ids = ids[:at] + ids[end + 1 :]
            try:
                value = json.loads(raw)
                status = "ok" if closed else "unclosed_block"
                calls.append(ToolCall(name=value["name"], arguments=value["arguments"], status=status, raw=raw))
            except ValueError:
                calls.append(ToolCall(name=None, arguments=None, status="invalid_json", raw=raw))
        content = bytes(i for i in ids if i < 256).decode(errors="replace")
        return ParsedResponse(content=content, tool_calls=tuple(calls))

    def bridge_to_next_turn(self, prev_prompt_ids, prev_completion_ids, new_messages, tools=None):
        if not self.bridges or not len(prev_completion_ids) or prev_completion_ids[-1] != END:
            return None
        return np.concatenate([prev_prompt_ids, prev_completion_ids, self.render_ids(new_messages)])

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode(errors="replace")
