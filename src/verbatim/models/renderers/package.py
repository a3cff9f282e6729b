"""Adapts the model families of the PyPI package `renderers` to our protocol, with escaping and exact continuation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from renderers.base import create_renderer as create_family
from renderers.configs import config_from_name

from verbatim.core.errors import EnvironmentFault, ModelError
from verbatim.core.types import Int32, Message, ToolCall
from verbatim.models.renderers.bounded_cache import BoundedCache
from verbatim.models.renderers.bridge import ContinuingRenderer
from verbatim.models.renderers.call_ids import CallIds, find_call_ids
from verbatim.models.renderers.conversation import Conversation
from verbatim.models.renderers.derived_syntax import derive
from verbatim.models.renderers.probe_messages import ASK
from verbatim.models.renderers.renderer import ParsedResponse, Schemas
from verbatim.models.renderers.responses import read_completion
from verbatim.models.renderers.stable_text import settled
from verbatim.models.renderers.stop_ids import turn_ends
from verbatim.models.renderers.thoughts import find_thoughts
from verbatim.models.renderers.tool_support import ToolSupport, name_of_tool, probe
from verbatim.models.renderers.tool_syntax import ToolSyntax

_REMEMBERED = 64
"""Number of conversations whose ids are cached. The cache is useful because all episodes of a group start with the same
conversation."""

_REMEMBERED_BRIDGES, _SHORT = 4096, 256
"""Number of cached bridges, and the maximum number of ids in a cached bridge. If episodes are short and examples few,
the same turn recurs many times."""

_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that families raise, on purpose or by accident (`"properties": null`), for messages and schemas that they
do not accept."""

_DECLARE_IN_JSON = ("kimi-k2.5",)
"""Families whose own notation for tools cannot express some schemas: `oneOf`, `allOf`, `not`, `const`, a missing type,
or a `$ref` to anything but `#` and `#/$defs`. In that case the model's published tokenizer declares all tools in JSON,
and so do we."""


class PackageRenderer(ContinuingRenderer):
    """One family ("qwen3", ...) for one tokenizer.

    Prompts continue by the rule in `bridge`; the family's own bridge provides the ids after a turn.

    Raises:
        ModelError: the tokenizer lacks the family's tokens.
    """

    thread_safe = True
    """Several threads may use one renderer at the same time."""

    def __init__(self, tokenizer: Any, name: str = "qwen3", **kept: Any) -> None:
        super().__init__(tokenizer, name, **kept)
        config = config_from_name(name)
        try:
            self._family = create_family(self.tokenizer, config)
        except (ImportError, *_REFUSALS) as error:
            raise ModelError(
                f'the tokenizer does not fit renderer "{name}": {error}; use renderer = "auto" or "template"'
            ) from error
        own = self._family.get_stop_token_ids()
        self.stop_token_ids: tuple[int, ...] = turn_ends(own, self.tokenizer, name)
        self._own_stop_ids = frozenset(own)
        self._keeping = self._keeping_thoughts(config)
        self._thoughts = find_thoughts(self._family, self.tokenizer)
        self._rendered: BoundedCache[str, Int32] = BoundedCache(_REMEMBERED)
        self._bridged: BoundedCache[bytes, list[int]] = BoundedCache(_REMEMBERED_BRIDGES)

    @cached_property
    def tool_support(self) -> ToolSupport:
        """The parts of tool use (schemas, calls, answers) that the family's format writes."""
        return probe(self.written, reads=True)

    @cached_property
    def _syntax(self) -> ToolSyntax | None:
        """The syntax in which the family writes calls, or None if it is not a known syntax."""
        return derive(self.written, self.end_texts, marks=self._sampled.control_tokens)

    def _read_calls(self, ids: Sequence[int], tools: Sequence[Any]) -> tuple[str, Sequence[ToolCall]] | None:
        """Parse the calls in `ids`, which are the sampled ids from the first call on. This is a `ReadCalls`
        function."""
        if self._syntax is None:
            return None
        behind, found = self._syntax.read(self._sampled.of(ids), tools)
        return (self._sampled.without_control(behind).strip(), found) if found else None

    @cached_property
    def _call_ids(self) -> CallIds:
        def render(messages: Sequence[Any], tools: Any, add_generation_prompt: bool) -> str:
            try:
                ids = self._family_ids(messages, tools, add_generation_prompt)
            except _REFUSALS as error:
                raise EnvironmentFault(str(error)) from error
            return self.decode(ids)

        return find_call_ids(render)

    def write_ids(self, messages: Sequence[Message], tools: Schemas, add_generation_prompt: bool) -> Int32:
        """Like `render_ids`, but does not refuse messages of which the family leaves out a part.

        The array is read-only, because the episodes of a group share it.
        """
        if not messages:
            raise EnvironmentFault(
                f'renderer "{self.name}" cannot write a conversation without messages; expected at least one'
            )
        key = repr((messages, tools, add_generation_prompt))  # messages are dicts, which cannot be keys themselves
        ids = self._rendered.get(key)
        if ids is None:
            escaper = self.tokenizer.escaper
            marked = escaper.messages(self._call_ids.rewritten(messages))
            try:
                values = self._family_ids(marked, escaper.tools(tools), add_generation_prompt)
            except _REFUSALS as error:
                raise self._refusal(error, messages, tools) from error
            ids = np.asarray(values, dtype=np.int32)
            ids.flags.writeable = False  # a write to the shared array would corrupt other episodes
            self._rendered.add(key, ids)
        return ids

    def _family_ids(self, marked: Any, tools: Any, add_generation_prompt: bool) -> list[int]:
        """The ids that the family writes for escaped messages and schemas."""
        try:
            ids = self._family.render_ids(marked, tools=tools, add_generation_prompt=add_generation_prompt)
        except _REFUSALS:
            if not tools or self.name not in _DECLARE_IN_JSON:
                raise
            text = json.dumps(tools, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
            declared = {"role": "tool_declare", "content": text}
            ids = self._family.render_ids([declared, *marked], add_generation_prompt=add_generation_prompt)
        return list(ids)

    def _refusal(self, error: Exception, messages: Sequence[Message], tools: Schemas) -> EnvironmentFault:
        """The error for messages or tools that the family refuses. It names the tool if a single tool is the cause."""
        said = f"{type(error).__name__}: {error}"
        refused = next((tool for tool in tools or () if not self._writes(tool)), None)
        if refused is not None:
            return EnvironmentFault(
                f'renderer "{self.name}" refuses the schema of the tool {name_of_tool(refused)!r} ({said}); write its '
                'parameters in plainer JSON Schema: {"type": "object", "properties": {NAME: {"type": ...}}}'
            )
        roles = ", ".join(str(message.get("role")) for message in messages)
        given = "messages, or the tools" if tools else "messages"
        return EnvironmentFault(
            f'renderer "{self.name}" refuses these {given} ({said}); their roles are {roles}; change the '
            f"environment's {given}"
        )

    def _writes(self, tool: Any) -> bool:
        """True if the family accepts a tool's schema."""
        escaper = self.tokenizer.escaper
        try:
            self._family_ids(escaper.messages([ASK]), escaper.tools([tool]), True)  # type: ignore[list-item]
        except _REFUSALS:
            return False
        return True

    def parse_response(
        self, completion_ids: Int32, prompt_ids: Int32 | None = None, tools: Schemas = None
    ) -> ParsedResponse:
        """Parse a completion. Never raises on anything that a model may sample.

        With `tools`, arguments get the types that the schemas declare, because some formats write the number 5 and the
        string "5" the same way.
        """
        ids = completion_ids.tolist()
        turn = ids[: self._end_of_turn(ids)]
        prompt = None if prompt_ids is None else prompt_ids.tolist()

        def read(part: Sequence[int]) -> ParsedResponse:
            return read_completion(self._family, self.tokenizer, part, prompt, tools, self._read_calls)

        return read(turn) if self._thoughts is None else self._thoughts.read(read, turn, prompt)

    def stable_text(self, completion_ids: Int32, prompt_ids: Int32 | None = None) -> tuple[str, str]:
        """The part of an unfinished completion that further tokens cannot change, as (thinking, content).

        Each family has its own marks, so this is conservative. It omits everything from the first control token or "<"
        on (except the marks around thinking), and text that might be a call without marks. It also omits an answer that
        begins with white space, because some families keep or drop that white space depending on what follows.
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
        """The index of the first control token that neither opens nor closes the thinking."""
        seen = set[int]()
        for place, token in enumerate(ids):
            if token in self._control_ids and (token not in self._thought_ids or token in seen):
                return place
            seen.add(token)
        return len(ids)

    @cached_property
    def _takes_text_back(self) -> bool:
        """True if later tokens can turn earlier content into something else.

        Examples are a mark that closes thinking although no mark opened it, and the end of a header.
        """
        alpha, beta, close = (self.tokenizer.encode(text) for text in ("zqalpha", "zqbeta", "</think>"))
        later = [close, *([token] for token in self._control_ids.difference(self.stop_token_ids))]
        read = (self.parse_response(np.array([*alpha, *ids, *beta], dtype=np.int32)) for ids in later)
        return not all(parsed.content.startswith("zqalpha") for parsed in read)

    def _behind(self, conversation: Conversation, body: Int32, new_messages: Sequence[Message]) -> list[int] | None:
        assert conversation.said is not None
        _, new_messages = self._call_ids.continuing(conversation.messages, conversation.said, new_messages)
        turn = hashlib.blake2b(repr((len(conversation.prompt_ids), new_messages)).encode("utf-8", "surrogatepass"))
        turn.update(conversation.prompt_ids.astype(np.int32, copy=False).tobytes())
        turn.update(body.astype(np.int32, copy=False).tobytes())
        key = turn.digest()
        found = self._bridged.get(key)
        if found is None:
            found = self._behind_by_family(
                [*conversation.prompt_ids.tolist(), *body.tolist()], len(body), new_messages, conversation.tools
            )
            if len(found) <= _SHORT:  # long tool answers rarely recur, and would fill the cache
                self._bridged.add(key, found)
        # The family closes a thought if it believes that one is open. Our own parse decides whether a thought is open.
        closes = found[:1] == [self.tokenizer.control_tokens.get("</think>")]
        return found[1:] if closes and not conversation.said.parsed.thought_open else found

    def _behind_by_family(
        self, before: list[int], num_sampled: int, new_messages: Sequence[Message], tools: Schemas
    ) -> list[int]:
        """The ids that the family's bridge adds to an unfinished turn; empty if it refuses or changes earlier ids.

        The family is configured to keep all thoughts, because `bridge` has already decided that they may stay.
        """
        escaper = self.tokenizer.escaper
        num_prompt = len(before) - num_sampled
        try:
            rendered = self._keeping.bridge_to_next_turn(
                before[:num_prompt], before[num_prompt:], escaper.messages(new_messages), tools=escaper.tools(tools)
            )
        except _REFUSALS:
            return []
        if rendered is None or rendered.token_ids[: len(before)] != before:
            return []
        added = list(rendered.token_ids[len(before) :])
        close = 1 if added[:1] == [self.tokenizer.control_tokens.get("</think>")] else 0
        # In a format without a close, the family adds EOS as a close, although it does not write EOS after earlier
        # turns.
        is_doubled = len(added) > close + 1 and self._own_stop_ids.issuperset(added[close : close + 2])
        return [*added[:close], *added[close + 1 :]] if is_doubled else added

    def _keeping_thoughts(self, config: Any) -> Any:
        """The family, configured to keep thoughts before a new user message; unchanged if it has no such setting."""
        try:
            return create_family(self.tokenizer, type(config)(thinking_retention="all"))
        except (NotImplementedError, ValueError):
            return self._family
