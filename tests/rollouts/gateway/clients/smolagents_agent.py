"""smolagents' tool-calling agent, whose work ends with the tool `final_answer`."""

import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool

sys.stdin.readline()


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


base_url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
model = OpenAIServerModel(model_id="gpt-4o", api_base=base_url, api_key=key)
agent = ToolCallingAgent(tools=[add], model=model, max_steps=4, verbosity_level=0)
print("answer:", agent.run("What is 1 + 2?"))
print(1.0)
