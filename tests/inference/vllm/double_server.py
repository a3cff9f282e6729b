"""The double as a process, started as vLLM is: `fake_python(folder)` is a program for `inference.vllm.python`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from inference.vllm.vllm_double import VllmDouble

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


def note(double: VllmDouble, folder: Path, name: str, version: str) -> None:
    """Write what the server has received for a version: SHA-256 of each tensor's bytes; null after a folder."""
    received = double.received and {
        key: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for key, tensor in double.received.items()
    }
    path = folder / f"{int(version):03d}-{name}.json"
    path.with_suffix(".tmp").write_text(json.dumps(received))
    path.with_suffix(".tmp").rename(path)


def strike(double: VllmDouble) -> None:
    """DOUBLE_STRIKE = "FILE": the first server that receives the fifth tensor of an update while this file is there
    takes it away, and does what it says: "die" at once, or "stop" as a process that hangs."""
    plan = Path(os.environ.get("DOUBLE_STRIKE", "/nonexistent"))

    def look(number: int) -> None:
        if number == 5:
            with contextlib.suppress(FileNotFoundError):
                taken = plan.rename(plan.with_suffix(f".{os.getpid()}"))
                os.kill(os.getpid(), signal.SIGKILL if taken.read_text() == "die" else signal.SIGSTOP)

    double.after_tensor = look


async def serve(options: argparse.Namespace) -> None:
    """Serve until the process is ended; every route that is asked is printed."""
    from aiohttp import web

    from inference.vllm.vllm_double import VllmDouble

    double = VllmDouble(Path(options.model))
    double.says_calls, double.key = True, os.environ.get("VERBATIM_KEY")
    double.fault = os.environ.get("DOUBLE_FAULT", "")
    double.facts["weight_transfer"] = json.loads(options.weight_transfer_config)["backend"]
    strike(double)
    if "DOUBLE_RECEIVED" in os.environ:
        double.on_version = partial(note, double, Path(os.environ["DOUBLE_RECEIVED"]), f"{options.port}-{os.getpid()}")
    runner = web.AppRunner(double.app(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--weight-transfer-config")
    known, others = parser.parse_known_args()
    assert ("--enable-sleep-mode" in others) == ("DOUBLE_SLEEPS" in os.environ)
    asyncio.run(serve(known))
