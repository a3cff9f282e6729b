"""The double as a process, started as vLLM is: `fake_python(folder)` is a program for `inference.vllm.python`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]


def fake_python(folder: Path) -> Path:
    """A program in this folder that says that it has vLLM for CUDA, and runs the double in its place."""
    program = folder / "python"
    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then exit 0; fi\nshift 2\nexport PYTHONPATH="{paths}"\n'
        f'exec "{sys.executable}" "{__file__}" "$@"\n'
    )
    program.chmod(0o755)
    return program


async def serve(options: argparse.Namespace) -> None:
    """Serve until the process is ended; every route that is asked is printed."""
    from aiohttp import web

    from inference.vllm.vllm_double import VllmDouble

    double = VllmDouble(Path(options.model))
    double.says_calls, double.key = True, os.environ.get("VERBATIM_KEY")
    double.fault = os.environ.get("DOUBLE_FAULT", "")
    runner = web.AppRunner(double.app(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    known, others = parser.parse_known_args()
    assert ("--enable-sleep-mode" in others) == ("DOUBLE_SLEEPS" in os.environ)
    asyncio.run(serve(known))
