"""Adapts the model families of the PyPI package `renderers` to our protocol: guarded, and exact."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from renderers.base import create_renderer as create_family
from renderers.configs import config_from_name

from verbatim.errors import EnvironmentFault, ModelError
from verbatim.renderers.base import ParsedResponse, Schemas
from verbatim.renderers.guard import GuardedTokenizer
from verbatim.renderers.remembered import Readings, Remembered
from verbatim.renderers.responses import read_completion
from verbatim.renderers.stable_text import settled
from verbatim.renderers.tool_support import ToolSupport, probe
from verbatim.types import Int32, Message

_REMEMBERED = 64
"""Conversations whose ids are cached; all episodes of a group begin with the same one."""

_REMEMBERED_BRIDGES, _SHORT = 4096, 256
"""Bridges whose ids are remembered, and the most ids that one may add: where episodes are short and examples few, the
same turn comes again and again."""

_NOT_KNOWN: Int32 = np.empty(0, dtype=np.int32)

_BRIDGED_ROLES = frozenset({"tool", "user"})
"""Some families render a later system message in a bridge but not in a history: those are never bridged."""

_REFUSALS = (ValueError, TypeError, KeyError)
"""The exceptions by which families refuse messages."""

_OPENING = {"role": "user", "content": "x"}


class PackageRenderer:
    """One family ("qwen3", ...) for one tokenizer.

    Raises:
        ModelError: the tokenizer lacks the family's tokens.
    """

    thread_safe = True
    """Several threads may use it at once."""

    def __init__(self, tokenizer: Any, name: str = "qwen3") -> None:
        self.name = name
        self._tokenizer = tokenizer if isinstance(tokenizer, GuardedTokenizer) else GuardedTokenizer(tokenizer)
        config = config_from_name(name)
        try:
            self._family = create_family(self._tokenizer, config)
        except (ImportError, AssertionError, *_REFUSALS) as error:
            raise ModelError(f'the tokenizer does not fit renderer "{name}": {error}; use renderer = "auto" or '
                             '"template"') from error  # fmt: skip
        self.stop_token_ids: tuple[int, ...] = tuple(self._family.get_stop_token_ids())
        self._lasting = self._without_retention(config)
        self._control = frozenset(self._tokenizer.control_tokens.values())
        think = [self._tokenizer.control_tokens.get(tag) for tag in ("<think>", "</think>")]
        self._think_ids = frozenset(i for i in think if i is not None)
        self._rendered: Remembered[str, Int32] = Remembered(_REMEMBERED)
        self._bridged: Remembered[bytes, Int32 | None] = Remembered(_REMEMBERED_BRIDGES)
        self._readings = Readings(_REMEMBERED_BRIDGES)

    def render_ids(
        self, messages: Sequence[Message], tools: Schemas = None, add_generation_prompt: bool = True
    ) -> Int32:
        """The ids of a whole conversation: int32 [L], read-only, since the episodes of a group share them.

        Raises:
            EnvironmentFault: the family refuses these messages (two calls at once, for example), or they hold more
                than text.
            ModelError: the family would leave out the tools.
        """
        if tools or any(message.get("tool_calls") or message.get("role") == "tool" for message in messages):
            self.tool_support.refuse(messages, tools, f'renderer "{self.name}"')
        return self.write_ids(messages, tools, add_generation_prompt)

    @cached_property
    def tool_support(self) -> ToolSupport:
        """Which parts of tools the family writes."""
        return probe(lambda messages, tools: self.decode(self.write_ids(messages, tools, True)), reads=True)  # type: ignore[arg-type]

    def write_ids(self, messages: Sequence[Message], tools: Schemas, add_generation_prompt: bool) -> Int32:
        """As `render_ids`, even if the family leaves out a part of the messages."""
        key = repr((messages, tools, add_generation_prompt))
        ids = self._rendered.get(key)
        if ids is None:
            guard = self._tokenizer.guard
            marked = guard.messages(messages)
            try:
                values = self._family.render_ids(
                    marked, tools=guard.tools(tools), add_generation_prompt=add_generation_prompt
                )
            except _REFUSALS as error:
                roles = ", ".join(str(message.get("role")) for message in messages)
                raise EnvironmentFault(
                    f'renderer "{self.name}" refuses these messages ({type(error).__name__}: {error}); their roles are '
                    f"{roles}; change the environment's messages"
                ) from error
            ids = np.asarray(values, dtype=np.int32)
            ids.flags.writeable = False
            self._rendered.add(key, ids)
        return ids

    def parse_response(
        self, completion_ids: Int32, prompt_ids: Int32 | None = None, tools: Schemas = None
    ) -> ParsedResponse:
        """Read a completion; never raises on what a model may sample.

        With the schemas of the `tools`, arguments have the types that they declare; some formats do not tell the
        number 5 from the text "5".
        """
        ids = completion_ids.tolist()
        stop = next((i for i, token in enumerate(ids) if token in self.stop_token_ids), len(ids))
        prompt = None if prompt_ids is None else prompt_ids.tolist()
        parsed = read_completion(self._family, self._tokenizer, ids[:stop], prompt, tools)
        self._readings.add(prompt_ids, completion_ids, tools, parsed)
        return parsed

    def stable_text(self, completion_ids: Int32, prompt_ids: Int32 | None = None) -> tuple[str, str]:
        """Thinking and content with which every completion that begins with these ids is read.

        Each family has marks of its own, so less is returned than could be: nothing from the first control token or
        "<" on that is no mark of thinking, nothing of what might be a call without marks, and nothing of an answer that
        begins with white space, which some families keep or leave out depending on what follows.
        """
        ids = completion_ids[: self._end_of_plain(completion_ids.tolist())]
        parsed = self.parse_response(ids, prompt_ids)
        reasoning, content = parsed.reasoning_content, parsed.content
        if not content or parsed.tool_calls or self._takes_text_back:
            return ("", "") if reasoning is None or reasoning[:1].isspace() else (settled(reasoning, "<"), "")
        if content[:1].isspace() or content.startswith(("{", "[")):
            content = ""
        return reasoning or "", settled(content, "<")

    def _end_of_plain(self, ids: list[int]) -> int:
        """The place of the first control token that does not open or close the thinking."""
        seen = set[int]()
        for place, token in enumerate(ids):
            if token in self._control and (token not in self._think_ids or token in seen):
                return place
            seen.add(token)
        return len(ids)

    @cached_property
    def _takes_text_back(self) -> bool:
        """Whether something that may follow makes a text no content: a mark that closes thinking which none has opened,
        or the end of a header."""
        alpha, beta, close = (self._tokenizer.encode(text) for text in ("zqalpha", "zqbeta", "</think>"))
        later = [close, *([token] for token in self._control.difference(self.stop_token_ids))]
        read = (self.parse_response(np.array([*alpha, *ids, *beta], dtype=np.int32)) for ids in later)
        return not all(parsed.content.startswith("zqalpha") for parsed in read)

    def bridge_to_next_turn(
        self, prev_prompt_ids: Int32, prev_completion_ids: Int32, new_messages: Sequence[Message], tools: Schemas = None
    ) -> Int32 | None:
        """The previous turn's ids verbatim, plus the new messages and the generation prompt; or None.

        Refused wherever the family would write this turn differently as history: a dropped thought, empty think tags
        that come or go, another close of the turn. A family that drops the thinking of all earlier turns when the
        user speaks is bridged there only if nothing has been thought.
        """
        if not new_messages or any(message.get("role") not in _BRIDGED_ROLES for message in new_messages):
            return None
        turn = hashlib.blake2b(repr((len(prev_prompt_ids), new_messages, tools)).encode("utf-8", "surrogatepass"))
        turn.update(prev_prompt_ids.astype(np.int32, copy=False).tobytes())
        turn.update(prev_completion_ids.astype(np.int32, copy=False).tobytes())
        key = turn.digest()
        added = self._bridged.get(key, _NOT_KNOWN)
        if added is _NOT_KNOWN:
            added = self._added(prev_prompt_ids, prev_completion_ids, new_messages, tools)
            if added is None or len(added) <= _SHORT:
                self._bridged.add(key, added)
        if added is None:
            return None
        return np.concatenate([prev_prompt_ids, prev_completion_ids, added], dtype=np.int32)

    def _added(
        self, prev_prompt_ids: Int32, prev_completion_ids: Int32, new_messages: Sequence[Message], tools: Schemas
    ) -> Int32 | None:
        """The ids that a bridge adds to the previous turn's; None where it is refused."""
        guard = self._tokenizer.guard
        prompt, completion = prev_prompt_ids.tolist(), prev_completion_ids.tolist()
        before = [*prompt, *completion]
        new, schemas = guard.messages(new_messages), guard.tools(tools)
        try:
            rendered = self._family.bridge_to_next_turn(prompt, completion, new, tools=schemas)
            if rendered is None and self._lasting and len(self._think_ids) == 2 and self._think_ids.isdisjoint(before):
                rendered = self._lasting.bridge_to_next_turn(prompt, completion, new, tools=schemas)
            if rendered is None or rendered.token_ids[: len(before)] != before:
                return None
            parsed = self._readings.of(prev_prompt_ids, prev_completion_ids, tools)
            if parsed is None:
                parsed = self.parse_response(prev_completion_ids, prev_prompt_ids, tools)
            added = list(rendered.token_ids[len(before) :])
            return np.asarray(added, dtype=np.int32) if self._stays(parsed, completion, added, new) else None
        except _REFUSALS:
            return None

    def decode(self, ids: Int32 | Sequence[int]) -> str:
        """Text for people, special tokens included."""
        return self._tokenizer.decode(ids)

    def _without_retention(self, config: Any) -> Any:
        """The family configured to bridge over user messages, used only without thinking; None if it cannot."""
        try:
            return create_family(self._tokenizer, type(config)(thinking_retention="all"))
        except (NotImplementedError, ValueError):
            return None

    def _stays(
        self, parsed: ParsedResponse, completion: list[int], added: list[int], new: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Whether the family, given this turn as history, keeps the generation prompt and every control token of it.

        Text between them may differ (JSON is spaced in many ways), and an attempted call that cannot be read is not
        in a message at all: beside one, only think tags are compared. These are counted in the text, since some
        families have no tokens for them.
        """
        (message,) = self._tokenizer.guard.messages([parsed.message()])
        opening, opened = self._opened
        history = self._family.render_ids([_OPENING, message, *new], add_generation_prompt=True)
        sampled = [*opening, *completion, *added]
        written, said = self.decode(history), self.decode(sampled)
        if not written.startswith(opened):
            return False
        if any(written.count(tag) != said.count(tag) for tag in ("<think>", "</think>")):
            return False
        return any(call.status != "ok" for call in parsed.tool_calls) or self._controls(history) == self._controls(
            sampled
        )

    @cached_property
    def _opened(self) -> tuple[list[int], str]:
        """One question and the generation prompt, as ids and as text."""
        ids = list(self._family.render_ids([_OPENING], add_generation_prompt=True))
        return ids, self.decode(ids)

    def _controls(self, ids: Sequence[int]) -> Counter[int]:
        return Counter(i for i in ids if i in self._control)
