"""OpenAI's agents SDK, over the Responses (its default) or chat completions."""

import json
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api

example = json.loads(sys.stdin.readline())
set_default_openai_api(example.get("api", "responses"))


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@function_tool
def look(place: str) -> str:
    """Look at a place."""
    return f"rain in {place}"


agent = Agent(name="helper", instructions="You help.", tools=[add, look], model="gpt-4o")
result = Runner.run_sync(agent, "What is 1 + 2?")
again = Runner.run_sync(agent, [*result.to_input_list(), {"role": "user", "content": "And the weather?"}])
print(float("scripted model" in again.final_output))
