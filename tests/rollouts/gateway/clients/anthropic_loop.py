"""A loop over Anthropic's SDK, streamed where the example says so."""

import json
import sys

import anthropic

example = json.loads(sys.stdin.readline())
client = anthropic.Anthropic()
TOOLS = [
    {
        "name": "add",
        "description": "Add.",
        "input_schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    }
]
messages = [{"role": "user", "content": "What is 1 + 2?"}]
while True:
    ask = {"model": "claude-sonnet-4-5", "max_tokens": 500, "system": "You help.", "tools": TOOLS, "messages": messages}
    if example.get("stream"):
        with client.messages.stream(**ask) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**ask)
    messages.append({"role": "assistant", "content": answer.content})
    if answer.stop_reason != "tool_use":
        break
    messages.append(
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": block.id, "content": str(block.input["a"] + block.input["b"])}
                for block in answer.content
                if block.type == "tool_use"
            ],
        }
    )
print(float("scripted model" in answer.content[-1].text))
