"""Tools that a model can call: built from typed functions, and run so that no failure ends an episode."""

from verbatim.environments.tools.function_tool import FunctionTool
from verbatim.environments.tools.manager import ToolManager, ToolOutcome
from verbatim.environments.tools.mcp import McpTools
from verbatim.environments.tools.tool import Tool, ToolArgumentsError, ToolFailed, ToolResult

__all__ = [
    "FunctionTool",
    "McpTools",
    "Tool",
    "ToolArgumentsError",
    "ToolFailed",
    "ToolManager",
    "ToolOutcome",
    "ToolResult",
]
