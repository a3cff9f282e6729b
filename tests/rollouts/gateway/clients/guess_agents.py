"""An agent on an SDK plays guess-the-number, a game a line: the argument is openai_agents, pydantic_ai or langgraph."""

import asyncio
import json
import sys

SYSTEM, TASK = "You play a game.", "Find the number from 1 to 15 in 4 guesses."


class Game:
    """The tool, and whether it has heard the number."""

    def __init__(self, secret: int) -> None:
        self.secret, self.found = secret, False

    def guess(self, number: int) -> str:
        if number == self.secret:
            self.found = True
            raise LookupError("the game is over")
        return "higher" if number < self.secret else "lower"


async def openai_agents(game: Game, base_url: str, key: str) -> None:
    from agents import Agent, OpenAIResponsesModel, Runner, function_tool
    from openai import AsyncOpenAI

    guess = function_tool(game.guess, failure_error_function=None)
    model = OpenAIResponsesModel("any", AsyncOpenAI(base_url=base_url, api_key=key))
    await Runner.run(Agent(name="player", instructions=SYSTEM, tools=[guess], model=model), TASK, max_turns=4)


async def pydantic_ai(game: Game, base_url: str, key: str) -> None:
    from pydantic_ai import Agent, UsageLimits
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("any", provider=OpenAIProvider(base_url=base_url, api_key=key))
    agent = Agent(model, instructions=SYSTEM, tools=[game.guess])
    await agent.run(TASK, usage_limits=UsageLimits(request_limit=4))


async def langgraph(game: Game, base_url: str, key: str) -> None:
    from langchain_core.tools import StructuredTool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import ToolNode, create_react_agent

    guess = StructuredTool.from_function(game.guess, name="guess", description="Guess the number.")
    model = ChatOpenAI(model="any", base_url=base_url, api_key=key)
    agent = create_react_agent(model, ToolNode([guess], handle_tool_errors=False), prompt=SYSTEM)
    await agent.ainvoke({"messages": [("user", TASK)]}, {"recursion_limit": 8})


async def play(order: dict) -> None:
    game = Game(order["example"]["secret"])
    try:
        await globals()[sys.argv[1]](game, order["base_url"], order["api_key"])
    except Exception as error:  # noqa: BLE001  the end of the game or of its turns, or a call that an SDK does not take
        print(f"{type(error).__name__}: {error}"[:300], file=sys.stderr)
    print(json.dumps({"id": order["id"], "reward": float(game.found)}), flush=True)


async def main() -> None:
    async with asyncio.TaskGroup() as games:
        while line := await asyncio.to_thread(sys.stdin.readline):
            games.create_task(play(json.loads(line)))


asyncio.run(main())
