"""A loop over litellm, as OpenAI's chat completions or Anthropic's Messages, streamed where the example says so."""

import json
import os
import sys

import litellm

example = json.loads(sys.stdin.readline())
model = example.get("model", "openai/gpt-4o")
base_url = os.environ["ANTHROPIC_BASE_URL" if model.startswith("anthropic/") else "OPENAI_BASE_URL"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]
messages = [{"role": "system", "content": "You help."}, {"role": "user", "content": "What is 1 + 2?"}]
while True:
    ask = {"model": model, "messages": messages, "tools": TOOLS, "api_base": base_url}
    if example.get("stream"):
        answer = litellm.stream_chunk_builder(list(litellm.completion(**ask, stream=True)), messages=messages)
    else:
        answer = litellm.completion(**ask)
    messages.append(answer.choices[0].message)
    if not messages[-1].tool_calls:
        break
    for call in messages[-1].tool_calls:
        given = json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})
print(float("scripted model" in messages[-1].content))
