"""An agent that finds a number with a tool, on OpenAI's SDK. It reads one game per line, and prints a line for each."""

import asyncio
import json
import sys

from openai import AsyncOpenAI, DefaultAioHttpClient, OpenAIError

NUMBER = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
TOOLS = [{"type": "function", "function": {"name": "guess", "parameters": NUMBER}}]
SYSTEM, TASK = "You play a game.", "Find the number from 1 to 15 in 4 guesses."


async def play(client: AsyncOpenAI, secret: int) -> float:
    messages: list = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]
    for _ in range(4):
        answer = await client.chat.completions.create(model="any", messages=messages, tools=TOOLS)
        messages.append(answer.choices[0].message)
        call = messages[-1].tool_calls[0]
        number = json.loads(call.function.arguments)["number"]
        if number == secret:
            return 1.0
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "higher" if number < secret else "lower"})
    return 0.0


async def main() -> None:
    async def answer(order: dict) -> None:
        client = clients.with_options(base_url=order["base_url"], api_key=order["api_key"])
        try:
            reward = await play(client, order["example"]["secret"])
        except (OpenAIError, ValueError, TypeError, KeyError):  # the model made no call, or one without a number
            reward = 0.0
        print(json.dumps({"id": order["id"], "reward": reward}), flush=True)

    clients = AsyncOpenAI(base_url="http://x", api_key="-", http_client=DefaultAioHttpClient())  # shared by all games
    async with asyncio.TaskGroup() as games:
        while line := await asyncio.to_thread(sys.stdin.readline):
            games.create_task(answer(json.loads(line)))


asyncio.run(main())
