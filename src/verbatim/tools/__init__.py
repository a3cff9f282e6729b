"""Tools: what a model can call, made from typed functions and run without ever losing an episode."""

from verbatim.tools.base import Tool, ToolArgumentsError, ToolResult
from verbatim.tools.function_tool import FunctionTool
from verbatim.tools.manager import ToolManager, ToolOutcome

__all__ = ["FunctionTool", "Tool", "ToolArgumentsError", "ToolManager", "ToolOutcome", "ToolResult"]
