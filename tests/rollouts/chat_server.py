"""A chat-completions server on loopback: its answers follow from the conversation, and tests give it faults.

The model adds: asked "3 4 5" it calls `add(3, 4)`, is told 7, calls `add(7, 5)`, is told 12, and says "12". With
`return_token_ids` it tells the ids of a toy template: every message is its role's id, its bytes, and END.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

END = 256
ROLES = {"system": 257, "user": 258, "assistant": 259, "tool": 260}


@dataclass(frozen=True)
class Raw:
    """What a fault answers instead."""

    status: int = 200
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    drop: bool = False


Script = Callable[[dict[str, Any]], dict[str, Any]]
Fault = Callable[[dict[str, Any], int], Raw | None]


def add_numbers(body: Mapping[str, Any]) -> dict[str, Any]:
    """The next message of the adding model."""
    messages = body["messages"]
    numbers = [int(word) for word in next(m for m in messages if m["role"] == "user")["content"].split()]
    told = [m["content"] for m in messages if m["role"] == "tool"]
    if len(told) == len(numbers) - 1:
        return {"content": told[-1] if told else str(numbers[0])}
    arguments = {"a": int(told[-1]) if told else numbers[0], "b": numbers[len(told) + 1]}
    return call("add", arguments, call_id=f"c{len(told)}")


def call(name: str, arguments: Any, call_id: str | None = "c0") -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}],
    }


def message_ids(message: Mapping[str, Any]) -> list[int]:
    """Bytes of what a message says and calls, and END."""
    calls = [c["function"] for c in message.get("tool_calls") or ()]
    text = (message.get("content") or "") + (json.dumps(calls, sort_keys=True) if calls else "")
    return [*text.encode(), END]


def prompt_ids(messages: list[Mapping[str, Any]]) -> list[int]:
    ids = [i for m in messages for i in (ROLES[m["role"]], *message_ids(m))]
    return [*ids, ROLES["assistant"]]


def completion(body: Mapping[str, Any], message: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A whole answer, as vLLM gives it. A message may carry its own `finish_reason`."""
    finish = message.pop("finish_reason", "tool_calls" if message.get("tool_calls") else "stop")
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    prompt, sampled = prompt_ids(body["messages"]), message_ids(message)
    answer = {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": body["model"],
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(sampled),
            "total_tokens": len(prompt) + len(sampled),
        },
    }
    if body.get("return_token_ids"):
        choice["token_ids"], answer["prompt_token_ids"] = sampled, prompt
    if body.get("logprobs"):
        choice["logprobs"] = {"content": [{"token": "?", "logprob": -(k % 8 + 1) / 8} for k in range(len(sampled))]}
    return {**answer, **changes}


class ChatServer:
    """What was asked, in order of arrival, and where to ask."""

    def __init__(self, script: Script, fault: Fault | None) -> None:
        self.script = script
        self.fault = fault or (lambda body, tries: None)
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.tries: Counter[str] = Counter()
        self.asked = threading.Event()
        self.num_open = 0
        self.most_open = 0
        self.lock = threading.Lock()
        self.url = ""

    def answer(self, body: dict[str, Any], headers: Mapping[str, str]) -> Raw:
        key = json.dumps(body["messages"], sort_keys=True)
        with self.lock:
            self.requests.append(body)
            self.headers.append({name.lower(): value for name, value in headers.items()})
            self.asked.set()
            tries = self.tries[key]
            self.tries[key] += 1
            self.num_open += 1
            self.most_open = max(self.most_open, self.num_open)
        try:
            raw = self.fault(body, tries) or Raw(body=json.dumps(completion(body, self.script(body))))
            time.sleep(raw.seconds)
        finally:
            with self.lock:
                self.num_open -= 1
        return raw


@contextlib.contextmanager
def chat_server(script: Script = add_numbers, fault: Fault | None = None) -> Iterator[ChatServer]:
    """Serves for as long as the block lasts. `fault(body, tries)` may answer in the script's place; `tries` counts how
    often the same conversation was asked before."""
    state = ChatServer(script, fault)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 1 << 16  # headers and body in one packet: the second would wait for the first to be acknowledged

        def log_message(self, *args: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/chat/completions"
            raw = state.answer(body, self.headers)
            if raw.drop:
                self.close_connection = True
                return
            data = raw.body.encode()
            with contextlib.suppress(OSError):  # the client has hung up
                self.send_response(raw.status)
                for name, value in {"Content-Type": "application/json", **raw.headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False
        request_queue_size = 64

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
