"""Reports after which kinds of turn a renderer continues the sampled tokens, and why prompts break after the other
kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from verbatim.core.errors import EnvironmentFault, ModelError
from verbatim.core.types import Message, ToolCall
from verbatim.models.renderers.conversation import BreakReason, Conversation, History, ThinkingRetention
from verbatim.models.renderers.probe_messages import ASK, NAME, RESULT, SYSTEM, TOOL
from verbatim.models.renderers.renderer import ParsedResponse, Renderer

_CALL = ToolCall(name=NAME, arguments={"zqat": "zq"}, id=RESULT["tool_call_id"])
KINDS: Mapping[str, tuple[Sequence[ToolCall], str | None, Sequence[Message]]] = {
    "a tool's answer": ((_CALL,), None, [RESULT]),  # type: ignore[list-item]
    "a tool's answer, after a thought": ((_CALL,), "zq", [RESULT]),  # type: ignore[list-item]
    "a user's message": ((), None, [ASK]),  # type: ignore[list-item]
    "a user's message, after a thought": ((), "zq", [ASK]),  # type: ignore[list-item]
    "a system message": ((), None, [SYSTEM]),  # type: ignore[list-item]
}
"""The kinds of turn, each with (the turn's calls, the turn's thought, the messages after the turn)."""


def continuations(renderer: Renderer) -> Iterator[tuple[str, BreakReason | None]]:
    """Each kind of turn that the format writes, with the reason why the prompt breaks after it, or None."""
    nothing = np.empty(0, dtype=np.int32)
    for kind, (calls, thought, new) in KINDS.items():
        tools = [TOOL] if calls else None
        try:
            conversation = Conversation.open(renderer, [ASK], tools)  # type: ignore[list-item]
        except (EnvironmentFault, ModelError):
            continue
        parsed = ParsedResponse(content="zq", reasoning_content=thought, tool_calls=tuple(calls))
        found = conversation.answered(nothing, parsed).bridged(new, tools)
        yield kind, found if isinstance(found, BreakReason) else None


def told(renderer: Renderer, thinking_retention: ThinkingRetention, history: History) -> Iterator[str]:
    """Lines to display: the renderer with its settings, then one sentence per kind of turn."""
    yield f'renderer "{renderer.name}", thinking_retention = "{thinking_retention}", history = "{history}":'
    for kind, reason in continuations(renderer):
        outcome = "continues the sampled tokens" if reason is None else f"starts a new sample: {reason.sentence}"
        yield f"{kind} {outcome}"
