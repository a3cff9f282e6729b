"""The model families of the PyPI package `renderers`, behind our protocol: guarded, and exact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from renderers.base import create_renderer as create_family
from renderers.configs import config_from_name

from verbatim.errors import ModelError
from verbatim.renderers.base import ParsedResponse
from verbatim.renderers.guard import GuardedTokenizer
from verbatim.renderers.responses import read_response
from verbatim.types import Int32, Message

_REMEMBERED = 64
"""Conversations whose ids are kept: all episodes of a group begin with the same one."""


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
        except (AssertionError, ImportError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f'the tokenizer does not fit renderer "{name}": {error}; use renderer = "auto" or '
                             '"template"') from error  # fmt: skip
        self.stop_token_ids: tuple[int, ...] = tuple(self._family.get_stop_token_ids())
        self._lasting = self._without_retention(config)
        think = self._tokenizer.convert_tokens_to_ids(["<think>", "</think>"])
        self._rendered: dict[str, Int32] = {}
        self._think_ids = frozenset(i for i in think if i is not None and i != self._tokenizer.unk_token_id)
        self._plain_turns_last = self._probe_plain_turns()

    def render_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> Int32:
        """The ids of a whole conversation: int32 [L]; not to be written to, the episodes of a group share them."""
        key = repr((messages, tools, add_generation_prompt))
        ids = self._rendered.get(key)
        if ids is None:
            guard = self._tokenizer.guard
            ids = np.asarray(
                self._family.render_ids(
                    guard.messages(messages), tools=guard.tools(tools), add_generation_prompt=add_generation_prompt
                ),
                dtype=np.int32,
            )
            ids.flags.writeable = False
            self._rendered[key] = ids
            while len(self._rendered) > _REMEMBERED:
                del self._rendered[next(iter(self._rendered))]
        return ids

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

    def _without_retention(self, config: Any) -> Any:
        """The family, bridging over user messages too: used only where nothing has been thought. None: it cannot."""
        try:
            return create_family(self._tokenizer, type(config)(thinking_retention="all"))
        except (NotImplementedError, ValueError):
            return None

    def _probe_plain_turns(self) -> bool:
        """Whether a turn without thinking stays as it was sampled when the user speaks again."""
        if self._lasting is None or len(self._think_ids) != 2:
            return False
        user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
        prompt = self._family.render_ids([user], add_generation_prompt=True)
        whole = self._family.render_ids([user, answer, user], add_generation_prompt=True)
        for stop in self.stop_token_ids:
            completion = [*self._tokenizer.encode("b"), stop]
            bridged = self._lasting.bridge_to_next_turn(prompt, completion, [user])
            if bridged is not None and bridged.token_ids == whole:
                return True
        return False
