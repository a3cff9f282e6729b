"""A copy of a command's process: it becomes a child, and never outlives the one that made it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from waiting import HANGS, wait_until

pytestmark = pytest.mark.realtime

PROGRAM = """
import json, os, sys, time
from pathlib import Path
from verbatim.core import spare

def child(arguments):
    print("out", flush=True)
    print("error", file=sys.stderr, flush=True)
    Path("seen.json").write_text(json.dumps({
        "arguments": arguments, "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0),
        "folder": os.getcwd(), "input": sys.stdin.read() if sys.stdin else "",
        "comm": Path("/proc/self/comm").read_text().strip()}))
    if "wait" in arguments:
        time.sleep(1000)
    while not Path("polled").exists():
        time.sleep(0.005)
    sys.exit(7)

spare.allow()
print(spare.is_allowed(), flush=True)
try:
    spare.keep()
    kept = spare.take()
    print(kept.pid, flush=True)
    PARENT
except spare.Become as order:
    child(order.arguments)
"""
STARTS = """
    with open("errors", "ab") as errors:
        kept.start(["trainer", "a b"WAIT], quiet=QUIET, errors=errors)
    first = kept.poll()
    Path("polled").touch()
    print(first, kept.wait(), kept.poll(), spare.take(), flush=True)
"""


def run(folder: Path, parent: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM.replace("    PARENT", parent.strip("\n"))],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # it may go while it is read
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux only")
@pytest.mark.parametrize("quiet", [True, False])
def test_a_copy_becomes_the_command_that_it_is_told_to_be(tmp_path: Path, quiet: bool):
    process = run(tmp_path, STARTS.replace("QUIET", str(quiet)).replace("WAIT", ""))
    said, _ = process.communicate("for the parent", timeout=HANGS)
    lines = said.splitlines()
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert lines[0] == "True"
    assert seen == {
        "arguments": ["trainer", "a b"],
        "pid": int(lines[1]),
        "parent": process.pid,
        "session": int(lines[1]),  # Ctrl-C in the terminal is for the parent
        "folder": str(tmp_path),
        "input": "",
        "comm": "verbatim-traine",
    }
    assert ("out" in lines, (tmp_path / "errors").read_text()) == (not quiet, "error\n")
    assert lines[-1] == "None 7 7 None"  # still running, its status twice, and no second copy


@pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux only")
def test_what_only_the_copy_needs_is_imported_by_the_copy_alone(tmp_path: Path):
    (tmp_path / "heavy.py").write_text("import os\nwith open('imported', 'a') as file: file.write(f'{os.getpid()} ')\n")
    program = PROGRAM.replace("spare.keep()", "spare.keep(['there_is_none', 'heavy'])")
    program = program.replace("    PARENT", STARTS.replace("QUIET", "False").replace("WAIT", "").strip("\n"))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, timeout=HANGS, check=True, capture_output=True, text=True)
    assert (tmp_path / "imported").read_text().split() == done.stdout.splitlines()[1:2]


@pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux only")
def test_a_command_whose_streams_are_closed_has_a_copy_too(tmp_path: Path):
    program = PROGRAM.replace("    PARENT", STARTS.replace("QUIET", "True").replace("WAIT", "").strip("\n"))
    command = ["bash", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, program]
    assert subprocess.run(command, cwd=tmp_path, timeout=HANGS, check=False).returncode == 0
    assert json.loads((tmp_path / "seen.json").read_text())["arguments"] == ["trainer", "a b"]


@pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux only")
def test_the_status_of_a_copy_that_is_killed_is_its_signal(tmp_path: Path):
    killed = (
        STARTS.replace("QUIET", "True")
        .replace("WAIT", ', "wait"')
        .replace("    first = kept.poll()", "    os.kill(kept.pid, 9)\n    first = None")
    )
    said, _ = run(tmp_path, killed).communicate(timeout=HANGS)
    assert said.splitlines()[-1] == "None -9 -9 None"


@pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux only")
@pytest.mark.parametrize("number", [None, signal.SIGKILL])
@pytest.mark.parametrize("is_started", [False, True])
def test_a_copy_does_not_outlive_the_one_that_made_it(tmp_path: Path, is_started: bool, number: int | None):
    begun = STARTS.replace("QUIET", "True").replace("WAIT", ', "wait"').partition("    first")[0] if is_started else ""
    process = run(tmp_path, f"{begun}    print('ready', flush=True)\n    sys.stdin.read()")
    assert process.stdout is not None
    copy = int([process.stdout.readline() for _ in range(3)][1])
    assert is_running(copy)
    if is_started:
        wait_until(lambda: (tmp_path / "seen.json").exists())
    if number is None:
        process.communicate(timeout=HANGS)
    else:
        os.kill(process.pid, number)
        process.communicate()
    wait_until(lambda: not is_running(copy))
