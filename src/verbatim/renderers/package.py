"""The model families of the PyPI package `renderers` behind our protocol: guarded, exact, and never raising on samples."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from renderers import create_renderer as create_family
from renderers.configs import config_from_name

from verbatim.errors import ModelError
from verbatim.renderers.base import ParsedResponse
from verbatim.renderers.guard import GuardedTokenizer
from verbatim.types import Int32, Message, ParseStatus, ToolCall

MAX_DEPTH = 64
"""Of the arguments' nesting; deeper ones would overflow the stack of whatever reads them next."""

_log = logging.getLogger(__name__)


class PackageRenderer:
    """One family ("qwen3", ...) for one tokenizer.

    Raises:
        ModelError: the tokenizer lacks the family's tokens.
    """

    def __init__(self, tokenizer: Any, name: str = "qwen3") -> None:
        self.name = name
        self._tokenizer = tokenizer if isinstance(tokenizer, GuardedTokenizer) else GuardedTokenizer(tokenizer)
        config = config_from_name(name)
        try:
            self._family = create_family(self._tokenizer, config)
            # Bridges over a user message too; used only where that is proven to be the same (see `bridge_to_next_turn`).
            self._lasting = create_family(self._tokenizer, type(config)(thinking_retention="all"))
        except (AssertionError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f'the tokenizer does not fit renderer "{name}": {error}; use renderer = "auto" or '
                             '"template"') from error  # fmt: skip
        self.stop_token_ids: tuple[int, ...] = tuple(self._family.get_stop_token_ids())
        think = self._tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
        self._think_ids = frozenset(i for i in think if i is not None and i != self._tokenizer.unk_token_id)
        self._plain_turns_last = len(self._think_ids) == 2 and self._probe_plain_turns()

    def render_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> Int32:
        """The ids of a whole conversation: int32 [L]."""
        guard = self._tokenizer.guard
        ids = self._family.render_ids(
            guard.messages(messages), tools=guard.tools(tools), add_generation_prompt=add_generation_prompt
        )
        return np.asarray(ids, dtype=np.int32)

    def parse_response(self, completion_ids: Int32, prompt_ids: Int32 | None = None) -> ParsedResponse:
        """Read a completion; never raises on what a model may sample."""
        return read_response(self._family, self._tokenizer, completion_ids, prompt_ids, self.stop_token_ids)

    def bridge_to_next_turn(
        self,
        prev_prompt_ids: Int32,
        prev_completion_ids: Int32,
        new_messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Int32 | None:
        """The previous turn's ids verbatim, plus the new messages and the generation prompt; or None.

        A family that drops the thinking of earlier turns when the user speaks refuses there. Where nothing has been
        thought there is nothing to drop, and history stays as it was sampled.
        """
        guard = self._tokenizer.guard
        before = [*prev_prompt_ids.tolist(), *prev_completion_ids.tolist()]
        arguments = (prev_prompt_ids.tolist(), prev_completion_ids.tolist(), guard.messages(new_messages))
        rendered = self._family.bridge_to_next_turn(*arguments, tools=guard.tools(tools))
        if rendered is None and self._plain_turns_last and self._think_ids.isdisjoint(before):
            rendered = self._lasting.bridge_to_next_turn(*arguments, tools=guard.tools(tools))
        if rendered is None or rendered.token_ids[: len(before)] != before:
            return None
        return np.asarray(rendered.token_ids, dtype=np.int32)

    def decode(self, ids: Int32) -> str:
        """Text for people, special tokens included."""
        return self._tokenizer.decode(ids)

    def _probe_plain_turns(self) -> bool:
        """Whether a turn without thinking stays as it was sampled when the user speaks again."""
        user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        prompt = self._family.render_ids([user], add_generation_prompt=True)
        whole = self._family.render_ids([user, answer, user], add_generation_prompt=True)
        for stop in self.stop_token_ids:
            completion = [*self._tokenizer.encode("b"), stop]
            bridged = self._lasting.bridge_to_next_turn(prompt, completion, [user])
            if bridged is not None and bridged.token_ids == whole:
                return True
        return False


def read_response(
    family: Any,
    tokenizer: GuardedTokenizer,
    completion_ids: Int32,
    prompt_ids: Int32 | None,
    stop_token_ids: Sequence[int],
) -> ParsedResponse:
    """A completion as the package's parser reads it, checked call by call."""
    ids = completion_ids.tolist()
    stop = next((i for i, token in enumerate(ids) if token in stop_token_ids), len(ids))
    try:
        parsed = family.parse_response(ids[:stop], prompt_ids=None if prompt_ids is None else prompt_ids.tolist())
    except Exception as error:  # noqa: BLE001  models sample what no parser foresaw (100,000 brackets): that call is unreadable
        _log.debug("unreadable completion: %s: %s", type(error).__name__, error)
        text = tokenizer.decode(ids[:stop])
        return ParsedResponse(content="", tool_calls=(unreadable(text, "invalid_json"),))
    return ParsedResponse(
        content=parsed.content,
        reasoning_content=parsed.reasoning_content,
        tool_calls=tuple(
            check_call(call.name, call.arguments, ParseStatusOf[str(call.status.value)], call.raw)
            for call in parsed.tool_calls
        ),
    )


ParseStatusOf: Mapping[str, ParseStatus] = {
    "ok": "ok",
    "invalid_json": "invalid_json",
    "unclosed_block": "unclosed_block",
    "missing_name": "missing_name",
    "malformed_structure": "malformed_structure",
    "unknown_tool": "unknown_tool",
}


def check_call(name: object, arguments: object, status: ParseStatus, raw: str) -> ToolCall:
    """A call as a record: "ok" only with a name that is text and arguments that are a plain JSON object.

    JSON that Python reads but others do not (NaN, half a surrogate pair, bottomless nesting) is not JSON here: it
    would break whatever writes it down later.
    """
    if status == "ok" and not (isinstance(name, str) and name and isinstance(arguments, dict)):
        status = "malformed_structure"
    if status == "ok" and not (is_json(arguments) and is_json(name)):
        status = "invalid_json"
    return ToolCall(
        name=name if isinstance(name, str) and is_json(name) else None,
        arguments=arguments if status == "ok" and isinstance(arguments, dict) else None,
        status=status,
        raw=raw,
    )


def unreadable(raw: str, status: ParseStatus) -> ToolCall:
    """An attempt of which nothing could be read."""
    return ToolCall(name=None, arguments=None, status=status, raw=raw)


def is_json(value: object) -> bool:
    """Whether a value can be written as JSON text in UTF-8 and be nested less than `MAX_DEPTH` deep."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        if not level:
            return True
        if any(not _is_json_scalar(item) for item in level):
            return False
        deeper: list[object] = []
        for item in level:
            if isinstance(item, dict):
                deeper += [*item.keys(), *item.values()]
            elif isinstance(item, list):
                deeper += item
        level = deeper
    return False


def _is_json_scalar(item: object) -> bool:
    if isinstance(item, str):
        return not any("\ud800" <= c <= "\udfff" for c in item)
    return not isinstance(item, float) or math.isfinite(item)


def parse_hermes_call(text: str) -> ToolCall:
    """The JSON between `<tool_call>` and `</tool_call>`, for tokenizers that have no such tokens."""
    raw = text.strip()
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return unreadable(raw, "invalid_json")
    if not isinstance(value, dict):
        return unreadable(raw, "malformed_structure")
    if not value.get("name"):
        return unreadable(raw, "missing_name")
    return check_call(value["name"], value.get("arguments", {}), "ok", raw)
