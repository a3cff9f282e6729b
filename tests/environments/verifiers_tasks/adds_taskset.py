"""A taskset of verifiers that needs no network: add two numbers with a tool, which is a real MCP server."""

import verifiers.v1 as vf


class AddTools(vf.Toolset[vf.SharedToolsetConfig, vf.State]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class AddData(vf.TaskData):
    answer: str


class AddTask(vf.Task[AddData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 4)

    @vf.metric
    async def calls(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class AddsConfig(vf.TasksetConfig):
    size: int = 4
    with_tools: bool = False
    tools: vf.SharedToolsetConfig = vf.SharedToolsetConfig()


class Adds(vf.Taskset[AddTask, AddsConfig]):
    def load(self):
        for n in range(self.config.size):
            yield AddTask(AddData(prompt=f"{n} {n + 1}", answer=str(2 * n + 1)), self.config.task)

    @classmethod
    def toolsets(cls, config: AddsConfig) -> list[vf.Toolset]:
        return [AddTools(config.tools)] if config.with_tools else []


__all__ = ["Adds"]

if __name__ == "__main__":
    AddTools.run()
