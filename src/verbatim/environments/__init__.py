"""Environments: examples, tools and rewards, in messages only.

In: an example, and the model's messages. Out: the environment's messages, tool results, a score. Read first:
`environment.py`, the protocol, and `guess_number.py`, a small implementation. Imports `core`, `config`, `models`.
"""

from verbatim.environments.environment import (
    Agent,
    AgentScores,
    Demonstrates,
    Demonstration,
    Environment,
    Episode,
    Reply,
    Score,
    tool_call,
    tool_exchange,
)
from verbatim.environments.gymnasium_style import GymnasiumStyle
from verbatim.environments.single_turn import SingleTurn
from verbatim.environments.tool_class import ToolClass
from verbatim.environments.tools import FunctionTool, McpTools, Tool, ToolFailed, ToolManager, ToolResult

ENVIRONMENTS = {
    "alphabet_sort": "verbatim.environments.alphabet_sort:AlphabetSort",
    "alphabet_sort_tags": "verbatim.environments.alphabet_sort_tags:AlphabetSortTags",
    "calculator": "verbatim.environments.calculator:Calculator",
    "delegate": "verbatim.environments.delegate:Delegate",
    "guess_number": "verbatim.environments.guess_number:GuessNumber",
    "judged": "verbatim.rollouts.judges:Judged",
    "program": "verbatim.rollouts.gateway.program.environment:Program",
    "reasoning_gym": "verbatim.environments.reasoning_gym:ReasoningGym",
    "single_turn": "verbatim.environments.single_turn:SingleTurn",
    "terminal": "verbatim.environments.terminal:Terminal",
    "textarena": "verbatim.rollouts.games.environment:TextArena",
    "verifiers": "verbatim.rollouts.gateway.verifiers.environment:VerifiersEnvironment",
}
"""The import path of each bundled environment."""

EXTRAS = {
    "reasoning_gym": ("reasoning_gym", "environments"),
    "textarena": ("textarena", "environments"),
    "verifiers": ("verifiers", "verifiers"),
}
"""For an environment that needs a package: its module, and the extra (`pip install 'verbatim-rl[EXTRA]'`) that installs
it."""

__all__ = [
    "ENVIRONMENTS",
    "EXTRAS",
    "Agent",
    "AgentScores",
    "Demonstrates",
    "Demonstration",
    "Environment",
    "Episode",
    "FunctionTool",
    "GymnasiumStyle",
    "McpTools",
    "Reply",
    "Score",
    "SingleTurn",
    "Tool",
    "ToolClass",
    "ToolFailed",
    "ToolManager",
    "ToolResult",
    "tool_call",
    "tool_exchange",
]
