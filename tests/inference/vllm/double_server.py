"""The double as a process, started as vLLM is: `fake_python(folder)` is a program for `inference.vllm.python`.

python double_server.py OPTIONS         a server
python double_server.py --warm SOCKET   forks servers for the program `double_client.py`, until standard input ends:
                                        each is there at once, not after the imports of torch and transformers
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import functools
import hashlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from inference.vllm.vllm_double import VllmDouble

TESTS = Path(__file__).parents[2]


def fake_python(folder: Path, *, warm: bool = False) -> Path:
    """A program in this folder that says that it has vLLM for CUDA, and runs the double in its place.

    Args:
        folder: Where it is written.
        warm: Whether the double is forked from a process that has imported everything, and lives as long as the program
            does that asked for it.
    """
    program = folder / "python"
    paths = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    command = f'"{sys.executable}" "{__file__}"'
    if warm:
        command = f'"{sys.executable}" -I -S "{Path(__file__).with_name("double_client.py")}" "{_host()}"'
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then exit 0; fi\nshift 2\nexport PYTHONPATH="{paths}"\nexec {command} "$@"\n'
    )
    program.chmod(0o755)
    return program


@functools.cache
def _host() -> Path:
    """The socket of a host that ends with this process."""
    folder = tempfile.mkdtemp(prefix="doubles-")
    path = Path(folder, "socket")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])}
    host = subprocess.Popen(
        [sys.executable, __file__, "--warm", str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    )
    assert host.stdin is not None and host.stdout is not None
    atexit.register(_end, host)
    assert host.stdout.readline() == b"listening\n"
    return path


def _end(host: subprocess.Popen[bytes]) -> None:
    assert host.stdin is not None and host.stdout is not None
    host.stdin.close()
    host.wait()
    host.stdout.close()


def become_a_server(path: str) -> dict[str, list[str]]:
    """Serve until standard input ends, and remove the folder of the socket. Only the children come back from here, with
    what they were asked for."""
    for name in ("aiohttp.web", "transformers.models.qwen3.modeling_qwen3", "inference.vllm.vllm_double"):
        importlib.import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no one waits for them
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        print("listening", flush=True)
        while True:
            ready, _, _ = select.select([listener, 0], [], [])
            if 0 in ready:
                Path(path).unlink()
                Path(path).parent.rmdir()
                os._exit(0)
            asking, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                return _become(asking)
            asking.close()


def _become(asking: socket.socket) -> dict[str, list[str]]:
    text, fds, *_ = socket.recv_fds(asking, 8, 2)
    for fd, number in zip(fds, (1, 2), strict=True):
        os.dup2(fd, number)
    request = json.loads(asking.recv(int.from_bytes(text, "big"), socket.MSG_WAITALL))
    os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])

    def end_with_the_other_side() -> None:
        asking.recv(1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_the_other_side, daemon=True).start()
    return request


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
    if options.return_sampling_mask and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1":
        raise ValueError("sampling distribution replay requires Model Runner V2")
    double.facts["returns_kept_sets"] = options.return_sampling_mask
    double.facts["weight_transfer"] = json.loads(options.weight_transfer_config)["backend"]
    strike(double)
    if "DOUBLE_RECEIVED" in os.environ:
        double.on_version = partial(note, double, Path(os.environ["DOUBLE_RECEIVED"]), f"{options.port}-{os.getpid()}")
    runner = web.AppRunner(double.app(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, options.host, options.port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[0] == "--warm":
        arguments = become_a_server(arguments[1])["arguments"]
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--weight-transfer-config")
    parser.add_argument("--return-sampling-mask", action="store_true")
    known, others = parser.parse_known_args(arguments)
    assert ("--enable-sleep-mode" in others) == ("DOUBLE_SLEEPS" in os.environ)
    asyncio.run(serve(known))
