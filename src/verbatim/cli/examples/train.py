"""Example of `verbatim.train`: trains a new, small model on your own environment. Takes under a minute, and needs no
network."""

import random

import verbatim
from verbatim import Example
from verbatim.environments import Demonstration, Episode, FunctionTool, ToolResult, tool_exchange

RIGHT = {"lost": "refund", "late": "wait", "damaged": "replace", "delivered": "close"}


class Case(Episode):
    """A customer asks for a parcel. The agent looks up what happened to the parcel, and then acts."""

    def __init__(self, status):
        self.status, self.right = status, False
        self.messages = [{"role": "user", "content": "Where is my parcel?"}]
        self.tools = [FunctionTool(self.track), FunctionTool(self.act)]

    def track(self) -> str:
        """Look up the parcel."""
        return self.status

    def act(self, action: str) -> ToolResult:
        """Do something about it, which closes the case."""
        self.right = action == RIGHT[self.status]
        return ToolResult(content="done", done=True)

    async def score(self, trajectory):
        return float(self.right)


class ParcelDesk:
    def examples(self, split):
        return [Example(id=status, payload={"status": status}) for status in RIGHT]

    async def start(self, example, seed):
        return Case(example.payload["status"])

    def demonstrations(self, count, seed):
        """Return demonstrations. They show how to call the tools, but not which action is right."""
        rng, shown = random.Random(seed), []
        for status in rng.choices(list(RIGHT), k=count):
            case = Case(status)
            messages = [*case.messages, *tool_exchange("track", {}, status, call_id="call_0")]
            messages += tool_exchange("act", {"action": rng.choice(list(RIGHT.values()))}, "done", call_id="call_1")
            shown.append(Demonstration(messages=messages, tools=[tool.schema for tool in case.tools]))
        return shown


if __name__ == "__main__":
    result = verbatim.train(
        model={"build": {"hidden_size": 64, "num_layers": 2, "vocab_size": 512}},
        environment=ParcelDesk(),
        max_steps=5,
        warm_start={"steps": 120, "batch_size": 8, "conversations": 400, "optim": {"lr": 3e-3}},
        orchestrator={"batch_size": 32, "group_size": 8, "seq_len": 512, "sampling": {"max_tokens": 32}},
        trainer={"optim": {"lr": 6e-4, "max_grad_norm": 0.1}},
    )
    rewards = result.metrics["reward/mean"]
    print(f"reward from {rewards[0]:.2f} to {rewards[-1]:.2f}; the model is in {result.model_path}")
