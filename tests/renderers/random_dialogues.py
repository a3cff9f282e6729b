"""Random dialogues against chat templates: for each turn, is the bridge what the template itself gives?"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from verbatim.errors import EnvironmentFault
from verbatim.renderers.template import TemplateRenderer, with_arguments
from verbatim.renderers.tool_support import COMPLETE

SPECIAL = re.compile(
    r'<\|[\w/"]+\|?>|<\w+\|>|<｜[^｜<>]+｜>|<(?:start|end)_of_\w+>|</?s>|\[gMASK\]|<sop>|\[/?INST\]|</?think>'
    r"|</?tool_call>|</?tool_response>|</?arg_(?:key|value)>"
)
"""What looks like a special token in a template."""

_WORDS = ("sun", "Köln", "日本語", "🙂", "é", "a b", "{}", "x=1;", "<b>", "&amp;", "\\n", '"quoted"', "it's", "</")
_HOSTILE = ("<tool_response>", "</tool_response>", "<think>", "</think>", "<|im_end|>", "<tool_call>{", "<|", "\ufdd0")
_SPACES = (" ", " ", " ", "\n", "\n\n", "  ")


def byte_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Bytes, and the special tokens that a template writes: what a template does depends on no more."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokens = ["<bos>", "<eos>", *sorted(set(SPECIAL.findall(template)))]
    backend.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", chat_template=template
    )  # fmt: skip


class Dialogues:
    """Random dialogues, the same for the same seed."""

    def __init__(self, seed: int, hostile: bool = True) -> None:
        self._random = random.Random(seed)
        self._num_calls = 0
        self._hostile = self._random.choice((0.0, 0.0, 0.0, 0.2)) if hostile else 0.0

    def tools(self) -> list[dict[str, Any]] | None:
        """None or a few."""
        return [self._tool(number) for number in range(self._random.randint(1, 3))] if self._chance(0.7) else None

    def opening(self) -> list[dict[str, Any]]:
        """A question, maybe after a system message."""
        first = [self._message("system", self._text())] if self._chance(0.5) else []
        return [*first, self._message("user", self._text() or "?")]

    def reply(self, calls: bool, thinks: bool) -> dict[str, Any]:
        """What an assistant says; the message that is read from it, too."""
        message = self._message("assistant", self._text() if not calls or self._chance(0.5) else "")
        if thinks:
            message["reasoning_content"] = self._text().strip() or "hm"
        if calls:
            message["tool_calls"] = [self._call() for _ in range(self._random.choice((1, 1, 1, 2, 3)))]
        return message

    def answers(self, reply: dict[str, Any]) -> list[dict[str, Any]]:
        """What comes next: the tools' answers, the user, or both."""
        named = self._chance(0.7)
        new = [
            self._message("tool", self._text()) | {"tool_call_id": call["id"]}
            | ({"name": call["function"]["name"]} if named else {})
            for call in reply.get("tool_calls", ())
        ]  # fmt: skip
        return new if new and self._chance(0.9) else [*new, self._message("user", self._text())]

    def turns(self) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """(reply, what is appended), for 1 to 12 turns."""
        calls, thinks = self._random.choice((0.0, 0.6, 0.9)), self._random.choice((0.0, 0.5, 1.0))
        for _ in range(self._random.choice((1, 2, 2, 3, 3, 4, 6, 12))):
            reply = self.reply(self._chance(calls), self._chance(thinks))
            yield reply, self.answers(reply)

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _text(self) -> str:
        words = [
            self._random.choice(_HOSTILE if self._chance(self._hostile) else _WORDS)
            for _ in range(self._random.choice((0, 1, 3, 6)))
        ]
        return "".join(word + self._random.choice(_SPACES) for word in words)[: None if self._chance(0.5) else -1]

    def _message(self, role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": text}

    def _call(self) -> dict[str, Any]:
        self._num_calls += 1
        names = self._random.sample(("place", "days", "note", "deep"), self._random.randint(0, 3))
        function = {"name": self._random.choice(("look", "go_to")), "arguments": {n: self._value(2) for n in names}}
        return {"id": f"call{self._num_calls:05d}", "type": "function", "function": function}

    def _value(self, depth: int) -> Any:
        kind = self._random.randint(0, 5 if depth else 3)
        if kind == 4:
            return [self._value(depth - 1) for _ in range(self._random.randint(0, 2))]
        if kind == 5:
            return {name: self._value(depth - 1) for name in self._random.sample(("a", "ü", "c d"), 2)}
        return (self._text().strip() or "x", self._random.randint(-5, 99), self._chance(0.5), "Bonn")[kind]

    def _tool(self, number: int) -> dict[str, Any]:
        properties = {"place": {"type": "string", "description": self._text()}}
        return {"type": "function", "function": {
            "name": ("look", "go_to", "add")[number], "description": self._text(),
            "parameters": {"type": "object", "properties": properties, "required": ["place"]},
        }}  # fmt: skip


@dataclass
class Tally:
    """What dialogues showed of one template."""

    name: str
    tried: Counter[str] = field(default_factory=Counter)
    """Turns that were continued, by kind of appended message."""
    refuted: Counter[str] = field(default_factory=Counter)
    """Of them, those where the template changed what was there, given the turn as it was read."""
    bridged: Counter[str] = field(default_factory=Counter)
    wrong: list[Any] = field(default_factory=list)
    differs: int = 0
    """Prompts that are not `apply_chat_template`'s own."""
    num_dialogues: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Turns whose continuation the template itself refuses."""


def check(renderer: TemplateRenderer, tokenizer: Any, tally: Tally, seed: int, hostile: bool = True) -> None:
    """One dialogue, turn by turn, each prompt bridged from the one before where that is right."""
    renderer.tool_support = COMPLETE  # bridges are right also where a run with tools would be refused
    dialogues = Dialogues(seed, hostile)
    tools, messages = dialogues.tools(), dialogues.opening()
    tally.num_dialogues += 1
    prompt: np.ndarray | None = None
    for meant, answers in dialogues.turns():
        try:
            if prompt is None:
                prompt = renderer.render_ids(messages, tools)
                given = renderer._wrapped(messages, tools)
                theirs = tokenizer.apply_chat_template(
                    [with_arguments(m, as_text=renderer._arguments_as_text) for m in given],
                    tools=renderer._given(tools), add_generation_prompt=True, return_dict=False,
                )  # fmt: skip
                tally.differs += not _hostile(messages, tools) and prompt.tolist() != theirs
            start = _text(renderer, messages, tools, True)
            completion = _sampled(renderer, messages, meant, answers, tools)
            reply, new = _read(renderer, prompt, completion, meant, answers)
            alone = _text(renderer, [*messages, reply], tools, False)
            whole = _text(renderer, [*messages, reply, *new], tools, True)
        except EnvironmentFault:
            tally.refused["+".join(sorted({message["role"] for message in answers}))] += 1
            return
        kind = "+".join(sorted({message["role"] for message in new}))
        tally.tried[kind] += 1
        now, then = _turn(renderer, start, alone), _turn(renderer, start, whole)
        if completion is None or then is None or _squeezed(then[0]) != _squeezed((now or then)[0]):
            tally.refuted[kind] += 1
        bridged = None
        if completion is not None:
            bridged = renderer.bridge_to_next_turn(prompt, completion, new, tools)
        if bridged is not None:
            tally.bridged[kind] += 1
            if not _right(renderer, bridged, prompt, completion, then, whole, start):
                tally.wrong.append((seed, kind, len(messages)))
        prompt = bridged if bridged is not None and bridged.tolist() == renderer._tokenizer.encode(whole) else None
        messages += [reply, *new]


def _sampled(
    renderer: TemplateRenderer, messages: Sequence[Any], reply: Any, new: Sequence[Any], tools: Any
) -> np.ndarray | None:
    """A turn as the template itself writes it after these messages; None if it keeps none of its prompts."""
    start, alone = _text(renderer, messages, tools, True), _text(renderer, [*messages, reply], tools, False)
    turn = _turn(renderer, start, alone)
    if turn is None:
        turn = _turn(renderer, start, _text(renderer, [*messages, reply, *new], tools, True))
    return None if turn is None else np.asarray(renderer._tokenizer.encode("".join(turn)), dtype=np.int32)


def _read(
    renderer: TemplateRenderer, prompt: np.ndarray, completion: np.ndarray | None, meant: Any, answers: list[Any]
) -> tuple[dict[str, Any], list[Any]]:
    """What a rollout goes on with: the message that is read from a turn, and what answers that one."""
    if completion is None:
        return meant, answers
    read: dict[str, Any] = dict(renderer.parse_response(completion, prompt).message())
    calls, ids = read.get("tool_calls", []), [call["id"] for call in meant.get("tool_calls", [])]
    if len(calls) != len(ids):
        return {**read, "tool_calls": []} if calls else read, [{"role": "user", "content": "hm?"}]
    if calls:
        read["tool_calls"] = [{**call, "id": name} for call, name in zip(calls, ids, strict=True)]
    return read, answers


def _right(
    renderer: TemplateRenderer, bridged: np.ndarray, prompt: np.ndarray, completion: np.ndarray,
    then: tuple[str, str] | None, whole: str, before: str,
) -> bool:  # fmt: skip
    """Whether a bridge is what the template gives, with the sampled turn in place of its own."""
    start = [*prompt.tolist(), *completion.tolist()]
    if then is None or bridged[: len(start)].tolist() != start:
        return False
    rest = whole[len(before) + len(then[0]) :]
    return start[-1:] + bridged[len(start) :].tolist() == renderer._tokenizer.encode(rest)


def _turn(renderer: TemplateRenderer, before: str, whole: str) -> tuple[str, str] | None:
    """The text of the turn after a prompt, and the token that ends it; None if the prompt is not kept."""
    if not whole.startswith(before):
        return None
    rest = whole[len(before) :]
    stops = [renderer.decode(np.asarray([i])) for i in renderer.stop_token_ids]
    found = re.search("|".join(map(re.escape, stops)), rest)
    return (rest[: found.start()], found[0]) if found else None


def _text(renderer: TemplateRenderer, messages: Sequence[Any], tools: Any, prompt: bool) -> str:
    guard = renderer._tokenizer.guard
    shown = guard.tools(tools)
    return renderer._render(renderer._wrapped(guard.messages(messages), shown), renderer._given(shown), prompt)


def _hostile(messages: Sequence[Any], tools: Any) -> bool:
    return bool(SPECIAL.search(json.dumps([messages, tools], ensure_ascii=False)))


def _squeezed(text: str) -> str:
    return "".join(text.split())
