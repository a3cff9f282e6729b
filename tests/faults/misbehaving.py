"""An environment in which one method misbehaves in one way, and one that behaves."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

from byte_renderer import call, say
from rollouts.clocks import set_forward
from verbatim import Example
from verbatim.environments.environment import Episode, Reply
from verbatim.environments.tools import FunctionTool
from verbatim.environments.tools.tool import ToolResult
from verbatim.rollouts.supervised import GRACE

HUGE = 1_000_000
WRONG = {
    "start": 7,
    "reply": "done",
    "tools": 7,
    "tool": ToolResult(content=7),
    "score": "1.0",
    "state_key": ["a", "list"],
}
"""What a method returns that is of no use, where its result is used at all."""
TOO_MUCH = {
    "reply": lambda: Reply(messages=({"role": "user", "content": "x" * HUGE},)),
    "tools": lambda: [FunctionTool(lambda: "", name=f"tool_{i}", parameters={"type": "object"}) for i in range(300)],
    "tool": lambda: "x" * HUGE,
    "score": lambda: {f"part {i}": 0.0 for i in range(100_000)},
    "state_key": lambda: "x" * HUGE,
}
NO_NUMBER = {
    "reply": lambda: Reply(done=True, reward=float("nan")),
    "tool": lambda: ToolResult(content="ok", reward=float("inf")),
    "score": lambda: 1e300,
}


class Task(Episode):
    """Calls a tool, hears an answer, says something, and earns its seed's last digit."""

    def __init__(self, seed, owner):
        self.messages = [{"role": "user", "content": "x" * HUGE if owner.does("start", "huge") else "go"}]
        self.seed, self.owner = seed, owner
        if owner.where == "run":
            self.run = self._run

    @property
    def tools(self):
        return self.owner.act("tools", (FunctionTool(self.poke),))

    async def poke(self) -> str:
        """Touch it."""
        return await self.owner.act_later("tool", f"it is {self.seed % 97}")

    async def reply(self, message):
        return await self.owner.act_later("reply", Reply(done=True))

    async def score(self, trajectory):
        return await self.owner.act_later("score", {"digit": self.seed % 10, "half": 0.5})

    def state_key(self):
        return self.owner.act("state_key", "here")

    async def close(self):
        return await self.owner.act_later("close", None)

    async def _run(self, agent):
        await agent.sample(self.messages, self.tools)
        await self.owner.act_later("run", None)


class Misbehaving:
    """`mode` is what `where` does; nothing, by default. What goes on for ever sets the clock of its event loop forward
    by `forward` seconds, past its deadline, and past what is left to it when it ignores that."""

    def __init__(self, where: str = "", mode: str = "", folder: str = "", forward: float = 0.0):
        self.where, self.mode, self.folder, self.forward = where, mode, Path(folder), forward
        self.kept = []
        self.num_examples_calls = 0

    def does(self, where, mode):
        return (self.where, self.mode) == (where, mode)

    def examples(self, split):
        self.num_examples_calls += 1
        rows = [Example(id=f"e{i}") for i in range(5)]
        return self.act("examples", rows) if split == "eval" else rows

    async def start(self, example, seed):
        return await self.act_later("start", Task(seed, self))

    def act(self, where, good):
        """What a method returns that cannot wait."""
        if self.where != where:
            return good
        match self.mode:
            case "raise":
                raise RuntimeError("no")
            case "SystemExit":
                sys.exit(0)
            case "KeyboardInterrupt":
                raise KeyboardInterrupt
            case "GeneratorExit":
                raise GeneratorExit
            case "exit":
                os._exit(0)
            case "killed":
                os.kill(os.getpid(), 9)
            case "block":
                threading.Event().wait()
            case "wrong type":
                return WRONG[where]
            case "huge":
                return self._huge(where, good)
            case "no number":
                return NO_NUMBER[where]()
            case "threads":
                self.kept += [threading.Thread(target=threading.Event().wait, daemon=True) for _ in range(5)]
                for thread in self.kept[-5:]:
                    thread.start()
            case "processes":
                program = subprocess.Popen(["sleep", "infinity"])
                (self.folder / f"left-{program.pid}").touch()
            case "files":
                self.kept += [os.open(os.devnull, os.O_RDONLY) for _ in range(5)]
        return good

    async def act_later(self, where, good):
        """What a method returns that may wait."""
        if self.where != where:
            return good
        loop = asyncio.get_running_loop()
        if self.mode in ("hang", "swallow"):
            until = loop.time() + 1000  # after which it is given up that it is given up
            if self.forward:
                set_forward(self.forward)
            if self.mode == "hang":
                await asyncio.Event().wait()
            while loop.time() < until:
                try:
                    await asyncio.sleep(until - loop.time())
                except asyncio.CancelledError:
                    if self.forward:
                        set_forward(GRACE + 1)
        await asyncio.sleep(0)
        return self.act(where, good)

    def _huge(self, where, good):
        if where in ("run", "close"):
            raise ValueError("x" * HUGE)
        return TOO_MUCH[where]() if where in TOO_MUCH else good


def pokes_then_speaks(request):
    """Calls the tool, then says something whose length is the seed's."""
    answered = 259 in request.prompt_ids.tolist()
    return say("x" * (1 + request.seed % 7)) if answered else call("poke")
