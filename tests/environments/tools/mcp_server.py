"""A real MCP server: over stdio, or over HTTP on the port it is given."""

import asyncio
import os
import sys
import threading
import time
from pathlib import Path

from mcp.server import MCPServer
from mcp.server.mcpserver import Image

server = MCPServer("tests", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers.

    Both are whole.
    """
    return a + b


@server.tool()
def pid() -> int:
    return os.getpid()


@server.tool()
def lines() -> list[str]:
    return ["one", "two"]


@server.tool()
def picture():  # without a type, from which mcp 2.0 would derive a schema that it has not got for images
    return ["a cat:", Image(data=b"cat", format="png")]


@server.tool()
def refuse(reason: str) -> str:
    from mcp.server.mcpserver.exceptions import ToolError

    raise ToolError(reason)


@server.tool()
def long(length: int) -> str:
    return "x" * length


@server.tool()
async def wait(end: str, log: str = os.devnull) -> str:
    """For a file."""
    await asyncio.to_thread(Path(log).touch)
    while not Path(end).exists():  # noqa: ASYNC110, ASYNC240
        await asyncio.sleep(0.01)
    return "waited"


@server.tool()
def die(log: str = os.devnull) -> str:
    """Writes a line, so that calls can be counted."""
    with open(log, "a") as file:
        file.write("dies\n")
    os._exit(3)


@server.tool()
def die_later(log: str) -> str:
    """Once there is this file."""

    def die():
        while not Path(log).exists():
            time.sleep(0.01)
        os._exit(3)

    threading.Thread(target=die, daemon=True).start()
    return "later"


@server.tool()
def exchange_tools() -> str:
    """Puts one tool in another's place."""

    def subtract(a: int, b: int) -> int:
        return a - b

    server.add_tool(subtract)
    server.remove_tool("add")
    return "done"


def serve(port: int) -> None:
    import uvicorn

    uvicorn.run(server.streamable_http_app(host="127.0.0.1"), host="127.0.0.1", port=port, log_level="critical")


if __name__ == "__main__":
    if sys.argv[1:]:
        serve(int(sys.argv[1]))
    else:
        server.run()
