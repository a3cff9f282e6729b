"""Decides which tools each conversation of a call is offered, and what runs them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from verbatim.errors import UsageError
from verbatim.rollouts.base import Opening
from verbatim.tools import Tool, ToolArgumentsError, ToolManager, ToolResult

logger = logging.getLogger(__name__)

Managers = ToolManager | Sequence[ToolManager | None] | None
"""One for all conversations, or a list with one for each; None runs nothing: a call is answered with an error."""


def offered_tools(openings: Sequence[Opening], given: Managers) -> list[ToolManager]:
    """For each conversation its own schemas, run by the manager's tools of these names; or else the manager's own.

    A schema that no tool of the manager runs is offered all the same; a call of it is answered with an error.

    Raises:
        UsageError: not as many tool managers as conversations, or a conversation that describes two tools of one name.
    """
    managers = [given] * len(openings) if given is None or isinstance(given, ToolManager) else list(given)
    if len(managers) != len(openings):
        raise UsageError(f"tool_manager holds {len(managers)} tool managers for {len(openings)} trajectories; give one "
                         "for each, or a single one for all")  # fmt: skip
    pairs = list(zip(openings, managers, strict=True))
    idle = sum(bool(opening.tools) and manager is None for opening, manager in pairs)
    if idle:
        logger.warning(
            "%d of %d conversations describe tools that nothing runs; a model that calls one is told so: pass "
            "tool_manager=ToolManager([...])", idle, len(openings),
        )  # fmt: skip
    return [_shown(opening, ToolManager() if manager is None else manager) for opening, manager in pairs]


def _shown(opening: Opening, manager: ToolManager) -> ToolManager:
    return ToolManager(_Shown(schema, manager) for schema in opening.tools) if opening.tools else manager


class _Shown:
    """A tool whose schema comes with the conversation and whose function comes from the manager."""

    def __init__(self, schema: Mapping[str, Any], manager: ToolManager) -> None:
        self.name: str = schema["function"]["name"]
        self.schema = schema
        self._tool: Tool | None = manager.get(self.name)

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolResult:
        if self._tool is None:
            raise ToolArgumentsError("it is described, but nothing runs it here. Answer without it.")
        return await self._tool(arguments)
