"""Runs verifiers' chat loop in this process, because verifiers' own harness `null` would first install a program from
the network.

The model takes a turn, then the task's MCP tools that it called are run, and this repeats. The first turn without a
call is the last turn. Every request goes through verifiers' interception server, as with any other harness.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

from verbatim.inference.chat.answer import read_arguments

CONTEXT_LENGTH = "context_length"
"""The stop condition of a conversation that no longer fits into the model's context."""
_OVERLONG = "maximum context length"


class VerbatimChatConfig(HarnessConfig):  # type: ignore[misc]
    """The settings of verifiers' harnesses, with the id of this harness as the default."""

    id: str = "verbatim-chat"


class VerbatimChat(Harness[VerbatimChatConfig]):  # type: ignore[misc]
    """A harness that runs the chat loop in this process (see the module's docstring)."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        """Play the task to its end. If a request to the model server fails, `stderr` of the result has the server's
        error."""
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with contextlib.AsyncExitStack() as stack:
            # Requests stay on this machine, so no proxy is used. There is no timeout, because the rollout has its own.
            client = await stack.enter_async_context(
                httpx.AsyncClient(
                    base_url=endpoint, headers={"Authorization": f"Bearer {secret}"}, timeout=None, trust_env=False
                )
            )
            tools, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                body = {"model": ctx.model, "messages": messages, **({"tools": tools} if tools else {})}
                answer = await client.post("chat/completions", json=body)
                if answer.status_code != 200:
                    return _refused(trace, answer)
                message = answer.json()["choices"][0]["message"]
                messages.append(message)
                calls = message.get("tool_calls") or []
                if not calls:
                    return ProgramResult(exit_code=0, stdout="", stderr="")
                for call in calls:
                    messages.append(await _run(call, dispatch, connections))


async def _run(call: dict[str, Any], dispatch: dict[str, Any], connections: dict[str, Any]) -> dict[str, Any]:
    name, given = call["function"]["name"], call["function"]["arguments"]
    arguments, status = read_arguments(given)
    if status != "ok":
        content: Any = f"error: the arguments are not a JSON object: {given[:200]}"
    elif name not in dispatch:
        content = f"error: there is no tool {name!r}; there are {', '.join(dispatch) or 'none'}"
    else:
        content = await call_mcp(connections, dispatch, name, arguments or {})
    return {
        "role": "tool",
        "tool_call_id": call["id"],
        "name": name,
        "content": content if isinstance(content, str) else json.dumps(content),
    }


def _refused(trace: Trace, answer: httpx.Response) -> ProgramResult:
    """Return the result for a refused request. If the context was full, the trace ends normally; any other refusal is a
    failure."""
    if answer.status_code == 400 and _OVERLONG in answer.text:
        trace.stop(CONTEXT_LENGTH)
    return ProgramResult(exit_code=1, stdout="", stderr=f"status {answer.status_code}: {answer.text[:500]}")


__all__ = ["VerbatimChat", "VerbatimChatConfig"]
