"""pydantic-ai's agent over chat completions or Responses."""

import json
import sys

from pydantic_ai import Agent

example = json.loads(sys.stdin.readline())
agent = Agent(example.get("model", "openai-chat:gpt-4o"), instructions="You help.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


result = agent.run_sync("What is 1 + 2?")
again = agent.run_sync("And now?", message_history=result.all_messages())
print(float("scripted model" in again.output))
