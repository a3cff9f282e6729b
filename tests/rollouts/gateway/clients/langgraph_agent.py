"""LangGraph's agent over langchain-openai, streamed where the example says so."""

import json
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

example = json.loads(sys.stdin.readline())


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def look(place: str) -> str:
    """Look at a place."""
    return f"rain in {place}"


model = ChatOpenAI(model="gpt-4o", streaming=example.get("stream", False))
agent = create_react_agent(model, [add, look])
result = agent.invoke({"messages": [("user", "What is 1 + 2?")]})
result = agent.invoke({"messages": [*result["messages"], ("user", "And the weather?")]})
print(float("scripted model" in result["messages"][-1].content))
