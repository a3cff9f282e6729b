"""Random dialogues against chat templates: does each bridge go on with what the template writes behind the turn?"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from bridge_oracle import MARK, stand_in
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from verbatim.core.errors import EnvironmentFault
from verbatim.models.renderers import BreakReason, Conversation
from verbatim.models.renderers.template import TemplateRenderer, with_arguments
from verbatim.models.renderers.tool_support import COMPLETE

SPECIAL = re.compile(
    r'<\|[\w/"]+\|?>|<\w+\|>|<｜[^｜<>]+｜>|<(?:start|end)_of_\w+>|</?s>|\[gMASK\]|<sop>|\[/?INST\]|</?think>'
    r"|</?tool_call>|</?tool_response>|</?arg_(?:key|value)>|</?seed:\w+>|\]~!?b\[?\]|\[e~\["
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
    )


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
            self._message("tool", self._text())
            | {"tool_call_id": call["id"]}
            | ({"name": call["function"]["name"]} if named else {})
            for call in reply.get("tool_calls", ())
        ]
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
        return {
            "type": "function",
            "function": {
                "name": ("look", "go_to", "add")[number],
                "description": self._text(),
                "parameters": {"type": "object", "properties": properties, "required": ["place"]},
            },
        }


@dataclass
class CampaignCounts:
    """What dialogues showed of one template."""

    name: str
    tried: Counter[str] = field(default_factory=Counter)
    """Turns that were continued, by kind of appended message."""
    bridged: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)
    """The others, by reason."""
    wrong: list[Any] = field(default_factory=list)
    differs: int = 0
    """Prompts that are not `apply_chat_template`'s own."""
    num_dialogues: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Turns whose continuation the template itself refuses."""


def check(renderer: TemplateRenderer, tokenizer: Any, counts: CampaignCounts, seed: int, hostile: bool = True) -> None:
    """One dialogue, turn by turn, each prompt bridged from the one before where that is right."""
    renderer.tool_support = COMPLETE  # bridges are right also where a run with tools would be refused
    dialogues = Dialogues(seed, hostile)
    tools, messages = dialogues.tools(), dialogues.opening()
    counts.num_dialogues += 1
    conversation: Conversation | None = None
    for meant, answers in dialogues.turns():
        try:
            if conversation is None:
                conversation = Conversation.open(renderer, messages, tools)
                given = renderer._wrapped(list(renderer.message_support.folded(messages, tools).messages), tools)
                theirs = tokenizer.apply_chat_template(
                    [with_arguments(m, as_text=renderer._arguments_as_text) for m in given],
                    tools=renderer._given(tools),
                    add_generation_prompt=True,
                    return_dict=False,
                )
                counts.differs += not _hostile(messages, tools) and conversation.prompt_ids.tolist() != theirs
            completion = _sampled(renderer, messages, meant, answers, tools)
            reply, calls, new = _read(renderer, conversation.prompt_ids, completion, meant, answers)
            renderer.write_ids([*messages, reply, *new], tools, True)
        except EnvironmentFault:
            counts.refused["+".join(sorted({message["role"] for message in answers}))] += 1
            return
        kind = "+".join(sorted({message["role"] for message in new}))
        counts.tried[kind] += 1
        messages += [reply, *new]
        if completion is None:
            counts.broken["not sampled so"] += 1
            conversation = None
            continue
        conversation = conversation.answered(completion, None, reply, calls)
        following = conversation.bridged(new, tools)
        if isinstance(following, BreakReason):
            counts.broken[str(following)] += 1
        else:
            counts.bridged[kind] += 1
            if not _right(renderer, conversation, following, tools, new):
                counts.wrong.append((seed, kind, len(conversation.messages)))
        conversation = None if isinstance(following, BreakReason) else following


def _sampled(
    renderer: TemplateRenderer, messages: Sequence[Any], reply: Any, new: Sequence[Any], tools: Any
) -> np.ndarray | None:
    """A turn as the template itself writes it after these messages; None if it keeps none of its prompts."""
    start, alone = _text(renderer, messages, tools, True), _text(renderer, [*messages, reply], tools, False)
    turn = _turn(renderer, start, alone)
    if turn is None:
        turn = _turn(renderer, start, _text(renderer, [*messages, reply, *new], tools, True))
    return None if turn is None else np.asarray(renderer.tokenizer.encode("".join(turn)), dtype=np.int32)


def _read(
    renderer: TemplateRenderer, prompt: np.ndarray, completion: np.ndarray | None, meant: Any, answers: list[Any]
) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """What a rollout goes on with: the message that is read from a turn, its calls, and what answers it."""
    if completion is None:
        return meant, [], answers
    parsed = renderer.parse_response(completion, prompt)
    read: dict[str, Any] = dict(parsed.message())
    calls, ids = read.get("tool_calls", []), [call["id"] for call in meant.get("tool_calls", [])]
    if len(calls) != len(ids):
        return {**read, "tool_calls": []} if calls else read, [], [{"role": "user", "content": "hm?"}]
    if calls:
        read["tool_calls"] = [{**call, "id": name} for call, name in zip(calls, ids, strict=True)]
    readable = [call for call in parsed.tool_calls if call.status == "ok"]
    return read, [dataclasses.replace(call, id=name) for call, name in zip(readable, ids, strict=True)], answers


def _right(
    renderer: TemplateRenderer, conversation: Conversation, following: Conversation, tools: Any, new: list[Any]
) -> bool:
    """Whether a bridge goes on with what the template writes, given a stand-in for the turn after the whole history,
    and whether that begins with what it writes for the prompt."""
    said = conversation.said
    assert said is not None
    start = _text(renderer, conversation.messages, tools, True)
    thought = "hm" if start.rstrip().endswith("<think>") else None
    turn = stand_in([(call.name, call.id) for call in said.calls], thought)
    whole = _text(renderer, [*conversation.messages, turn, *new], tools, True)
    before = [*conversation.prompt_ids.tolist(), *said.completion_ids.tolist()]
    if following.prompt_ids[: len(before)].tolist() != before or not whole.startswith(start):
        return False
    rest = whole[whole.rindex(MARK) :] if MARK in whole[len(start) :] else whole[len(start) :]
    stops = [renderer.decode(np.asarray([i])) for i in renderer.stop_token_ids]
    rest = rest[re.search("|".join(map(re.escape, filter(None, stops))), rest).start() :]
    ended = said.completion_ids[-1:].tolist()
    return ended + following.prompt_ids[len(before) :].tolist() == renderer.tokenizer.encode(rest)


def _turn(renderer: TemplateRenderer, before: str, whole: str) -> tuple[str, str] | None:
    """The text of the turn after a prompt, and the token that ends it; None if the prompt is not kept."""
    if not whole.startswith(before):
        return None
    rest = whole[len(before) :]
    stops = [renderer.decode(np.asarray([i])) for i in renderer.stop_token_ids]
    found = re.search("|".join(map(re.escape, stops)), rest)
    return (rest[: found.start()], found[0]) if found else None


def _text(renderer: TemplateRenderer, messages: Sequence[Any], tools: Any, prompt: bool) -> str:
    escaper = renderer.tokenizer.escaper
    shown = escaper.tools(tools)
    return renderer._render(renderer._wrapped(escaper.messages(messages), shown), renderer._given(shown), prompt)


def _hostile(messages: Sequence[Any], tools: Any) -> bool:
    return bool(SPECIAL.search(json.dumps([messages, tools], ensure_ascii=False)))
