"""Defines simulated episodes: an environment whose tool takes some time, and a renderer that only produces the right
lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cluster_workload import CALLS, FILL, Script, Workload, stand_in
from cluster_world import World
from verbatim.core.types import Example, Ids, Int32, Message, ToolCall
from verbatim.environments.environment import Episode
from verbatim.environments.tools.tool import ToolResult
from verbatim.models.renderers.renderer import ParsedResponse


class SimulatedTool:
    """A tool that answers after the time that the episode's script says."""

    name = "work"
    schema: Mapping[str, Any] = {
        "type": "function",
        "function": {"name": "work", "description": "Work.", "parameters": {"type": "object", "properties": {}}},
    }

    def __init__(self, world: World, script: Script) -> None:
        self._world, self._script = world, script

    async def __call__(self, arguments: Mapping[str, Any]) -> ToolResult:
        try:
            await self._world.loop.sleep(self._script.tool_seconds)
        finally:
            self._script.go_on()
        return ToolResult(content="done")


class Errand(Episode):
    """An episode with one simulated tool."""

    messages = ({"role": "user", "content": "run the errand"},)

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._seed = world, seed
        self._script = world.scripts[seed] = Script(world.tables, seed)
        self.tools = (SimulatedTool(world, self._script),)

    async def score(self, trajectory: Any) -> float:
        if self._script.fails:
            raise RuntimeError("the errand could not be scored")
        return float(self._seed % 2)

    async def close(self) -> None:
        del self._world.scripts[self._seed]
        self._world.episodes += 1


class Errands:
    """The environment of the simulated episodes."""

    def __init__(self, world: World, num_examples: int = 4096) -> None:
        self._world = world
        self._examples = [Example(id=f"e{index}") for index in range(num_examples)]

    def examples(self, split: str) -> Sequence[Example]:
        return self._examples

    async def start(self, example: Example, seed: int) -> Errand:
        with self._world.loop.uncharged:
            return Errand(self._world, seed)


class StandInRenderer:
    """Renders prompts of the right lengths without content. The cost of rendering is measured elsewhere."""

    name = "stand-in"
    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, work: Workload) -> None:
        self._opening = np.full(stand_in(work.opening), FILL, dtype=np.int32)
        self._answer = np.full(stand_in(work.answer), FILL, dtype=np.int32)

    def render_ids(self, messages: Sequence[Message], tools: Any = None, add_generation_prompt: bool = True) -> Int32:
        return self._opening

    def parse_response(self, completion_ids: Ids, prompt_ids: Ids | None = None, tools: Any = None) -> ParsedResponse:
        calls = (ToolCall(name="work", arguments={}, status="ok", raw=""),) if completion_ids[-1] == CALLS else ()
        return ParsedResponse(content="", tool_calls=calls)

    def bridge_to_next_turn(self, prompt: Int32, completion: Int32, messages: Any, tools: Any = None) -> Int32 | None:
        return np.concatenate([prompt, completion, self._answer])

    def decode(self, ids: Ids) -> str:
        return ""
