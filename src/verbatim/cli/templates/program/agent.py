"""An agent that looks after plants with two tools, written with OpenAI's SDK. It needs no knowledge of Verbatim.

The program is started once. Each line of its input is one episode: it has a plant, and the base URL and API key to use.
For each such line the program prints a line with the reward. Replace the plants by your own task. What the model
answers to requests at this URL is trained.
"""

import json
import sys

from openai import OpenAI

RIGHT_CARE = {"dry": "water", "pale": "feed", "wilting": "shade", "crowded": "repot"}
TASK = f"Look after the plant. Ways to care: {', '.join(RIGHT_CARE.values())}."
WAY = {"type": "object", "properties": {"way": {"type": "string"}}, "required": ["way"]}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}},
    {"type": "function", "function": {"name": "care", "parameters": WAY}},
]


def play(client: OpenAI, state: str) -> float:
    """Play one episode. Returns 1 if the plant got the right care, else 0."""
    messages: list = [{"role": "user", "content": TASK}]
    for _ in range(4):
        answer = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        messages.append(answer.choices[0].message)
        for call in messages[-1].tool_calls or ():
            if call.function.name == "care":
                return float(json.loads(call.function.arguments).get("way") == RIGHT_CARE[state])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": state})
        if messages[-1] is answer.choices[0].message:  # no tool was called
            return 0.0
    return 0.0


def main() -> None:
    """Play one episode for each line of the input, until the input ends."""
    for line in sys.stdin:
        order = json.loads(line)
        client = OpenAI(base_url=order["base_url"], api_key=order["api_key"])
        try:
            reward = play(client, order["example"]["state"])
        except ValueError:  # the model's arguments are not JSON
            reward = 0.0
        print(json.dumps({"id": order["id"], "reward": reward}), flush=True)


if __name__ == "__main__":
    main()
