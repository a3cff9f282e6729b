"""Random conversations of which every text is a word of its own, as each chat protocol writes them, and where these
words have to stand in a prompt."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.inference.scripted import ScriptedSampler
from verbatim.models.renderers import create_renderer
from verbatim.models.renderers.stand_in import stand_in_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
        },
    }
]


@dataclass
class Talk:
    """One random conversation, the same for the same seed."""

    seed: int
    with_tools: bool = True
    protocol: bool = False
    """Only what every chat protocol can carry: no arguments that are no object, no tool's answer without its call."""
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._number = 0
        self.tools = TOOLS if self.with_tools else None
        for _ in range(self._random.choice((0, 1, 1, 2, 3))):
            self._say(self._random.choice(("system", "system", "developer")))
        if self.protocol or not self.messages or self._chance(0.9):
            self._say("user")
        self._others(self._random.choice((0, 0, 1, 2)))
        for _ in range(self._random.choice((0, 1, 1, 2, 3))):
            self.turn()
            self.appended()

    def turn(self) -> None:
        """An assistant's message."""
        self.pending = self._random.choice((0, 0, 1, 1, 2, 3)) if self.with_tools else 0
        text = not self.pending or self._chance(0.4)
        message: dict[str, Any] = {"role": "assistant", "content": self._word() if text else ""}
        if self._chance(0.2) and not self.protocol:
            message["reasoning_content"] = "hm"
        if self.pending:
            message["tool_calls"] = [self._call(number) for number in range(self.pending)]
        self.messages.append(message)

    def appended(self) -> None:
        """What comes behind it: answers, users, later instructions."""
        calls = self.messages[-1].get("tool_calls", [])
        if not self.protocol and self._chance(0.1):
            self._others(1)
        given = calls if self.protocol or self._chance(0.8) else calls[:-1]
        for call in given:
            self._say("tool", tool_call_id=call["id"], name="look")
        if not self.protocol and self._chance(0.05):
            self._say("tool", tool_call_id="zzzzzzzzz", name="look")
        if not calls or self._chance(0.4):
            self._others(self._random.choice((1, 1, 1, 2, 3)))

    def _others(self, most: int) -> None:
        for _ in range(most):
            self._say(self._random.choice(("user", "user", "system", "developer")))

    def _say(self, role: str, **more: Any) -> None:
        self.messages.append({"role": role, "content": self._word(), **more})

    def _call(self, number: int) -> dict[str, Any]:
        word = self._word()
        odd = json.dumps([word]) if self._chance(0.5) else word + " {"
        arguments = {"at": word} if self.protocol or self._chance(0.9) else odd
        return {
            "id": f"call{len(self.messages):02}00{number}",
            "type": "function",
            "function": {"name": "look", "arguments": arguments},
        }

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _word(self) -> str:
        self._number += 1
        return f"mk{self._number:03}q"


def words_of(message: dict[str, Any]) -> list[str]:
    """Those of a message: its text, then its calls."""
    calls = [json.dumps(call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return [text[text.index("mk") :][:6] for text in [message["content"], *calls] if text]


def lost(messages: Sequence[dict[str, Any]], prompt: str, *, thoughts: bool = False) -> list[str]:
    """What is wrong with a prompt: a word that is not there once, or stands behind a later message.

    Inside of a turn and its tools' answers a format has an order of its own for the turn's text.

    Args:
        messages: Their words have to be there.
        prompt: The text.
        thoughts: Whether the format writes a text beside a call as a thought, which goes when the answer is there.
    """
    wrong, blocks = [], []
    for place, message in enumerate(messages):
        words = words_of(message)
        later = any(after["role"] == "assistant" for after in messages[place + 1 :])
        if thoughts and later and message.get("tool_calls") and message["content"] not in prompt:
            words = words[1:] if message["content"] else words
        wrong += [
            f"{word} of messages[{place}] is there {prompt.count(word)} times"
            for word in words
            if prompt.count(word) != 1
        ]
        if message["role"] == "tool" and place and messages[place - 1]["role"] in ("tool", "assistant"):
            ordered = [*blocks[-1][1], *words]
            blocks[-1] = ([*blocks[-1][0], *words], ordered)
        else:
            blocks.append((words, words[1:] if message["role"] == "assistant" and message["content"] else words))
    if not wrong:
        for _, ordered in blocks:
            wrong += [f"{b} stands before {a}" for a, b in pairwise(ordered) if prompt.index(a) > prompt.index(b)]
        filled = [block for block, _ in blocks if block]
        wrong += [
            f"{after} stand before {before}"
            for before, after in pairwise(filled)
            if max(map(prompt.index, before)) > min(map(prompt.index, after))
        ]
    return wrong


# ---- through servers

_FOLDER = Path(__file__).parent / "models" / "renderers" / "data" / "trl_templates"
ROUTES = ("chat/completions", "responses", "messages")


def renderer_of(template: str, **options: Any) -> Any:
    """A renderer by one of the published templates."""
    source = (_FOLDER / f"{template}.jinja").read_text(encoding="utf-8")
    return create_renderer("template", stand_in_tokenizer(source, template), **options)


def end_of_answer(renderer: Any) -> int:
    """The token that the renderer's template writes behind an answer."""
    asks, answers = ({"role": role, "content": f"zq{role}"} for role in ("user", "assistant"))
    dialogues = [asks, answers], [asks, answers, asks]
    texts = [renderer.decode(renderer.write_ids(dialogue, None, False)) for dialogue in dialogues]
    behind = [token for text in texts for token in renderer.tokenizer.encode(text.partition("zqassistant")[2])]
    return next(token for token in behind if token in renderer.stop_token_ids)


def sampler_for(renderer: Any) -> ScriptedSampler:
    """Says "ok" to every prompt."""
    said = np.array([*renderer.tokenizer.encode("ok"), end_of_answer(renderer)], np.int32)
    vocab_size = len(renderer.tokenizer.unescaped)
    return ScriptedSampler(script=lambda _: said, vocab_size=vocab_size, context_length=100_000)


def request_of(route: str, messages: list[dict[str, Any]], tools: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages that this protocol can carry, and the request with them."""
    if route == "chat/completions":
        return list(messages), {
            "model": "m",
            "messages": [_with_text_arguments(m) for m in messages],
            **({"tools": tools} if tools else {}),
        }
    if route == "responses":
        flat = [{"type": "function", **tool["function"]} for tool in tools or ()]
        items = [item for message in messages for item in _items(message)]
        return list(messages), {"model": "m", "input": items, **({"tools": flat} if flat else {})}
    first = next((place for place, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    said = [m for m in messages[first:] if m["role"] not in ("system", "developer")]
    body = {"model": "m", "max_tokens": 64, "messages": _blocks(said)}
    if first:
        body["system"] = [{"type": "text", "text": m["content"]} for m in messages[:first]]
    if tools:
        body["tools"] = [
            {
                "name": t["function"]["name"],
                "description": t["function"]["description"],
                "input_schema": t["function"]["parameters"],
            }
            for t in tools
        ]
    return [*messages[:first], *said], body


def requests(num_seeds: int) -> Iterator[tuple[tuple[int, str], list[dict[str, Any]], dict[str, Any]]]:
    """Random requests in each protocol: (seed and route, the messages, the body)."""
    for seed in range(num_seeds):
        talk = Talk(seed, with_tools=seed % 3 > 0, protocol=True)
        for route in ROUTES:
            yield (seed, route), *request_of(route, talk.messages, talk.tools)


def wrong_with(given: Sequence[dict[str, Any]], status: int, answer: dict[str, Any], prompt: str, template: str) -> Any:
    """What is wrong with an answer: messages that the prompt lacks, or a refusal that names no field.

    Args:
        given: The request's messages.
        status, answer: As the server answered.
        prompt: The text that the sampler was given, if it was.
        template: The server's.
    """
    if status == 200:
        return lost(given, prompt, thoughts=template == "gptoss")
    told = str((answer.get("error") or {}).get("message"))
    return [] if re.match(r"messages(\[\d+\]|: the last)", told) else [answer]


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    kept = {key: value for key, value in message.items() if key != "name"}
    return {**kept, "tool_calls": calls} if calls else kept


def _items(message: dict[str, Any]) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}]
    said = [{"type": "message", "role": message["role"], "content": message["content"]}] if message["content"] else []
    calls = [
        {
            "type": "function_call",
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": json.dumps(call["function"]["arguments"]),
        }
        for call in message.get("tool_calls", ())
    ]
    return [*said, *calls]


def _blocks(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for is_answer, run in groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_answer:
            results = [{"type": "tool_result", "tool_use_id": m["tool_call_id"], "content": m["content"]} for m in run]
            found.append({"role": "user", "content": results})
            continue
        for message in run:
            texts = [{"type": "text", "text": message["content"]}] if message["content"] else []
            uses = [
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": call["function"]["name"],
                    "input": call["function"]["arguments"],
                }
                for call in message.get("tool_calls", ())
            ]
            found.append({"role": message["role"], "content": [*texts, *uses]})
    return found
