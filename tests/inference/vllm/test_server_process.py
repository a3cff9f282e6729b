"""A server that a run starts ends with the run, with all that it started, whatever state either of them is in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

from ports import held_port, number_of
from verbatim.core.errors import SamplerFault
from verbatim.inference.vllm.process import ServerProcess
from waiting import HANGS, until, wait_until

pytestmark = pytest.mark.realtime

# A server with a worker of its own session, which writes down both process ids.
SERVER = """
import http.server, os, subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e9)"], start_new_session=True)
open(sys.argv[2], "w").write(f"{os.getpid()} {worker.pid}")

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server(tmp_path: Path, code: str = SERVER, **settings: Any) -> ServerProcess:
    held = held_port()
    port = number_of(held)
    command = [sys.executable, "-c", code, str(port), str(tmp_path / "pids")]
    process = ServerProcess("replica 0", command, dict(os.environ), port=port, log=log_of(tmp_path), **settings)
    weakref.finalize(process, held.close)  # the port is this server's for as long as the test has it
    return process


def log_of(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "replica_0.log"


def pids(tmp_path: Path) -> list[int]:
    return [int(pid) for pid in (tmp_path / "pids").read_text().split()]


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def is_there(pid: int) -> bool:
    """Whether it runs, or has ended and was not reaped."""
    return Path(f"/proc/{pid}").exists()


@pytest.mark.slow
async def test_a_server_ends_with_all_that_it_started(tmp_path):
    process = server(tmp_path)
    await process.start(HANGS)
    found = pids(tmp_path)
    assert all(map(is_running, found)) and not process.has_ended
    await process.stop()
    assert process.has_ended and not any(map(is_running, found))
    await process.stop()  # again changes nothing


# A worker whose first thread has ended: the system shows it as a zombie, while it and its own child go on.
HALF_ENDED = """
import ctypes, subprocess, sys, threading, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1e9)"], start_new_session=True)
threading.Thread(target=time.sleep, args=(1e9,)).start()
open(sys.argv[1], "w").write(str(child.pid))
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.slow
async def test_what_a_worker_started_that_is_about_to_end_is_killed_too(tmp_path):
    """As an engine that was told to end and waits for its threads on a busy machine."""
    note = tmp_path / "child"
    code = SERVER.replace('"import time; time.sleep(1e9)"', f"{HALF_ENDED!r}, {str(note)!r}")
    process = server(tmp_path, code)
    await process.start(HANGS)
    _, worker = pids(tmp_path)
    await until(lambda: not is_running(worker))
    child = int(await asyncio.to_thread(note.read_text))
    assert is_running(child) and is_there(worker)
    await process.stop()
    assert not is_running(child) and not is_there(worker)


@pytest.mark.slow
async def test_what_a_killed_server_leaves_behind_is_killed(tmp_path):
    process = server(tmp_path)
    await process.start(HANGS)
    main, worker = pids(tmp_path)
    os.kill(main, signal.SIGKILL)
    await process.ended()
    assert not is_running(main) and not is_running(worker)
    assert process.has_ended and process.how_it_ended() == "signal 9"


@pytest.mark.slow
async def test_a_frozen_server_is_ended(tmp_path):
    process = server(tmp_path, patience=0.2)
    await process.start(HANGS)
    found = pids(tmp_path)
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    await process.stop()
    assert not any(map(is_running, found))


@pytest.mark.slow
async def test_a_server_that_ends_at_once_is_told_with_the_end_of_its_log(tmp_path):
    process = server(tmp_path, "import sys; print('no module named vllm\\x1b[2J'); sys.exit(3)")
    with pytest.raises(SamplerFault, match=r"(?s)ended before it answered \(status 3\).*no module named vllm") as e:
        await process.start(HANGS)
    assert "\x1b" not in str(e.value)


@pytest.mark.slow
async def test_the_first_error_of_a_long_log_is_told(tmp_path):
    code = """
print("(Worker) WARNING [system.py:1] Found a ulimit. This can cause errors like `OSError: too many files`")
print("(Worker) ERROR [core.py:1] ValueError: the device is gone")
for n in range(40):
    print("  File line", n)
print("RuntimeError: see root cause above")
raise SystemExit(1)
"""
    (tmp_path / "logs").mkdir()
    log_of(tmp_path).write_text("OSError: of an earlier start\n" * 30)
    with pytest.raises(SamplerFault) as e:
        await server(tmp_path, code).start(HANGS)
    said = str(e.value)
    assert "ulimit" not in said and "ValueError: the device is gone" in said and "see root cause above" in said
    assert "earlier start" not in said and "File line 1\n" not in said


@pytest.mark.slow
async def test_a_server_that_never_answers_is_ended_at_the_deadline(tmp_path):
    """A clock that goes on only once the server has written something."""

    def clock() -> float:
        return 1000.0 if log_of(tmp_path).exists() and "loading" in log_of(tmp_path).read_text() else 0.0

    process = server(tmp_path, "import time; print('loading', flush=True); time.sleep(1e9)", clock=clock)
    with pytest.raises(SamplerFault, match=r"(?s)does not answer at http://127.0.0.1:\d+ after 999 s.*loading"):
        await process.start(999)
    assert process.has_ended


@pytest.mark.slow
def test_a_killed_run_leaves_no_server_behind(tmp_path):
    run = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from inference.vllm.test_server_process import HANGS, server

async def main():
    await server(Path({str(tmp_path)!r})).start(HANGS)
    print("up", flush=True)
    await asyncio.sleep(1e9)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", run], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"up\n"
        found = pids(tmp_path)
        child.kill()
    wait_until(lambda: not any(map(is_running, found)))
