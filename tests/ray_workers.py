"""Forks Ray's workers from a process that has imported everything. A worker then takes a tenth of a second of processor
time, not six seconds.

    with warm_workers():
        ray.init()      # its actors, and those of nodes that are added, are such workers

Ray starts a worker through a Python file of its own, and this file replaces it: it asks the process that `warm_workers`
started for a fork, and ends when the worker ends. A forked worker differs from a new one as `warm.py` says of commands,
and its parent is that process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

ADDRESS = "VERBATIM_TEST_RAY_WORKERS"
"""The environment variable that tells Ray's processes the socket to ask."""
_MODULES = ("aiohttp", "psutil", "grpc", "google.protobuf.message", "yaml", "jsonschema", "requests", "setproctitle")
"""What Ray imports. Ray itself reads its variables while it is imported, so each worker imports it."""


@contextlib.contextmanager
def warm_workers() -> Iterator[int]:
    """Nodes that this process starts while the block runs fork their workers, and have the time of `slow_starts`.
    Yields the process id of the workers' parent."""
    import pytest
    from ray._private import ray_constants

    import warm

    with contextlib.ExitStack() as stack:
        address = str(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-workers-")), "socket"))
        command = [sys.executable, __file__, "serve", address]
        server = warm.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        stack.callback(server.wait)
        stack.callback(server.stdin.close)  # type: ignore[union-attr]
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        patched.setattr(ray_constants, "SETUP_WORKER_FILENAME", __file__)
        patched.setenv(ADDRESS, address)
        stack.enter_context(slow_starts())
        yield server.pid


@contextlib.contextmanager
def slow_starts() -> Iterator[None]:
    """Nodes that this process starts while the block runs may take minutes for it. Ray gives a node 30 s, and its two
    agents 15 s to say which ports they took."""
    import pytest
    from ray import _raylet
    from ray._private import services

    from ports import held_port, number_of
    from waiting import HANGS

    get_node, start_raylet = services.get_node, services.start_raylet

    def get_node_once_started(*given: Any) -> Any:
        end = time.monotonic() + HANGS
        while True:
            try:
                return get_node(*given)
            except RuntimeError:  # not yet
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def start_with_known_ports(*given: Any, **named: Any) -> Any:
        named["runtime_env_agent_port"] = number_of(stack.enter_context(held_port()))
        node = inspect.signature(start_raylet).bind(*given, **named).arguments
        # As the agent of a Ray without the dashboard does later, which has none of these ports.
        for name in ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN"):
            _raylet.persist_port(node["session_dir"], node["node_id"], getattr(_raylet, f"{name}_PORT_NAME"), -1)
        return start_raylet(*given, **named)

    with contextlib.ExitStack() as stack:
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        patched.setattr(services, "get_node", get_node_once_started)
        patched.setattr(services, "start_raylet", start_with_known_ports)
        patched.setenv("RAY_gcs_server_port_wait_time_s", f"{HANGS:.0f}")
        yield


def ask(words: list[str]) -> None:
    """Have a worker forked with this command line, and wait until it ends."""
    context, command = "{}", []
    for word in words:
        name, _, value = word.partition("=")
        if name == "--serialized-runtime-env-context":
            context = value
        elif name != "--language":
            command.append(word)
    assert not json.loads(context).get("env_vars"), context
    request = {
        "args": [sys.executable, *command],
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "fds": [0, 1, 2],
        "session": False,
        "group": os.getpgrp(),
        "ignored": [],
        "cores": sorted(os.sched_getaffinity(0)),
        "limits": [],
    }
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(os.environ[ADDRESS])
        text = json.dumps(request).encode()
        socket.send_fds(asking, [len(text).to_bytes(8, "big")], request["fds"])
        asking.sendall(text)
        asking.recv(1)  # the worker holds the other end


def serve(address: str) -> NoReturn:
    """Fork workers until stdin is closed."""
    import select

    import warm
    import warm_server

    for name in _MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(100)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # none of them waits for this process to ask how it ended
    print("ready", flush=True)
    while True:
        ready, _, _ = select.select([listening, 0], [], [])
        if 0 in ready:
            os._exit(0)
        connection, _ = listening.accept()
        with connection:
            header, fds, *_ = socket.recv_fds(connection, 8, 8)
            if len(header) < 8:
                continue
            request: dict[str, Any] = json.loads(warm.read(connection, int.from_bytes(header, "big")))
            request["received"] = fds
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setpgid(0, 0)  # Ray kills the group of a worker that has ended
                request["received"].append(connection.fileno())
                request["fds"].append(200)  # open to this worker's end
                warm_server.take_place(request)
                warm_server.end(run(request["args"]))
            for fd in fds:
                os.close(fd)


def run(args: list[str]) -> int:
    """As `python ARGS`; the exit status."""
    import warm_server

    try:
        warm_server.run(args)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:  # noqa: BLE001  Python shows it
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    ask(sys.argv[1:])
