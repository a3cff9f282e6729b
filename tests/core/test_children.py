"""Children lead a group of their own, and end with what they have started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from verbatim.core import children
from waiting import wait_until

pytestmark = pytest.mark.realtime

FOR_EVER = "exec sleep 1000"


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pid_in(file: Path) -> int:
    wait_until(lambda: file.exists() and file.read_text().endswith("\n"))
    return int(file.read_text())


def test_a_program_is_run_to_its_end():
    done = children.run_program(
        ["bash", "-c", "cat; echo $WORD in $PWD >&2; exit 3"],
        given=b"\xffgiven",
        environment={"WORD": "said", "PATH": os.environ["PATH"]},
        folder="/",
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, b"\xffgiven", b"said in /\n")
    assert children.text_of(done.stdout) == "\N{REPLACEMENT CHARACTER}given"
    assert children.run_program(["cat"]).stdout == b""  # nothing is read from the terminal


@pytest.mark.parametrize("raised", [subprocess.TimeoutExpired("bash", 5), KeyboardInterrupt()])
def test_a_program_that_is_not_waited_for_any_longer_ends_with_all_that_it_has_started(
    tmp_path: Path, monkeypatch, raised: BaseException
):
    started = []

    def no_longer(process: subprocess.Popen[bytes], given: bytes | None, timeout: float) -> None:
        started.append((process, pid_in(tmp_path / "pid")))
        assert timeout == 5.0
        raise raised

    monkeypatch.setattr(subprocess.Popen, "communicate", no_longer)
    script = f"sleep 1000 & echo $! > {tmp_path / 'pid'}; wait"
    with pytest.raises(type(raised)):
        children.run_program(["bash", "-c", script], timeout=5.0)
    ((process, other),) = started
    assert process.returncode == -signal.SIGKILL
    wait_until(lambda: not is_alive(other))


def test_a_program_that_takes_too_long_is_told():
    with pytest.raises(subprocess.TimeoutExpired):
        children.run_program(["bash", "-c", FOR_EVER], timeout=0.01)


def test_a_child_that_does_not_end_is_killed_with_its_group(tmp_path: Path):
    script = f"sleep 1000 & echo $! > {tmp_path / 'pid'}; wait"
    process = children.start(["bash", "-c", script])
    other = pid_in(tmp_path / "pid")
    assert os.getpgid(other) == os.getpgid(process.pid) == process.pid != os.getpgid(0)
    children.end(process, patience=0.0)
    assert children.how_it_ended(process.returncode) == "was ended by SIGKILL"
    wait_until(lambda: not is_alive(other))
    children.end(process, patience=0.0)  # it has ended


def test_a_child_that_ends_by_itself_is_waited_for():
    process = children.start(["bash", "-c", "exit 4"])
    children.end(process, patience=1000.0)
    assert children.how_it_ended(process.returncode) == "ended with status 4"


async def test_a_start_that_is_cancelled_leaves_no_process(monkeypatch):
    started = []
    create = asyncio.get_running_loop().subprocess_exec

    async def recorded(*command, **how):
        started.append(await create(*command, **how))
        return started[0]

    monkeypatch.setattr(asyncio.get_running_loop(), "subprocess_exec", recorded)
    task = asyncio.create_task(children.start_async(["bash", "-c", FOR_EVER], stdout=asyncio.subprocess.PIPE))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    ((transport, _),) = started
    assert transport.get_returncode() == -signal.SIGKILL


async def test_a_start_that_is_cancelled_and_fails_is_cancelled():
    task = asyncio.create_task(children.start_async(["/nowhere/no-such-program"]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_killed_child_is_not_waited_for_longer_than_it_lives(tmp_path: Path):
    """A process in a session of its own outlives it, and holds its pipes."""
    pipe = asyncio.subprocess.PIPE
    script = f"setsid bash -c 'echo $$ > {tmp_path / 'pid'}; exec sleep 1000' & {FOR_EVER}"
    process = await children.start_async(["bash", "-c", script], stdin=pipe, stdout=pipe, stderr=pipe)
    other = await asyncio.to_thread(pid_in, tmp_path / "pid")
    try:
        assert process.stdin is not None
        process.stdin.write(bytes(1 << 20))  # what nothing reads
        children.kill_group(process.pid)
        await children.gone(process)
        assert process.returncode == -signal.SIGKILL
    finally:
        children.kill_group(os.getpgid(other))


async def test_a_child_inherits_the_files_that_it_is_given_and_no_other():
    (here, there), (other, another) = os.pipe(), os.pipe()
    for descriptor in (there, another):
        os.set_inheritable(descriptor, True)
    script = f"echo to the pipe >&{there}; echo to the other 2>/dev/null >&{another} || echo closed >&{there}"
    process = await children.start_async(["bash", "-c", script], descriptors=[there])
    await process.wait()
    os.close(there)
    with os.fdopen(here) as written:
        assert written.read() == "to the pipe\nclosed\n"
    os.close(other)
    os.close(another)


@pytest.mark.slow
def test_a_child_does_not_outlive_its_parent(tmp_path: Path):
    lasting = (
        "import os, sys, time; from verbatim.core.children import end_with_parent; end_with_parent(int(sys.argv[1])); "
        f"open({str(tmp_path / 'pid')!r}, 'w').write(f'{{os.getpid()}}\\n'); time.sleep(1000)"
    )
    parent = children.start(
        [
            sys.executable,
            "-c",
            "import os, subprocess, sys, time; "
            "subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())]); time.sleep(1000)",
            lasting,
        ]
    )
    child = pid_in(tmp_path / "pid")
    assert is_alive(child)
    os.kill(parent.pid, signal.SIGKILL)  # not its group
    wait_until(lambda: not is_alive(child))
    parent.wait()


@pytest.mark.slow
def test_a_child_whose_parent_has_ended_before_it_looks_ends_at_once():
    command = "import sys; from verbatim.core.children import end_with_parent; end_with_parent(1 << 30); sys.exit(5)"
    assert children.run_program([sys.executable, "-c", command]).returncode == 1


def test_what_children_print_is_for_their_owner_and_stays(tmp_path: Path):
    log = tmp_path / "logs" / "worker.log"
    for text in (b"first ", b"second"):
        with children.open_log(log) as file:
            file.write(text)
    assert log.read_bytes() == b"first second"
    assert log.stat().st_mode & 0o777 == 0o600
