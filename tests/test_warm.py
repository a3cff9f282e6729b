"""A warm command behaves as a cold one: each case is run both ways, and both say and end alike."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from waiting import wait_until

pytestmark = pytest.mark.realtime

TELLS = """
import json, os, resource, signal, sys, threading
told = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "cwd": os.getcwd(), "parent": os.getppid(),
    "environment": dict(os.environ), "group": os.getpgrp() == os.getpid(), "session": os.getsid(0) == os.getpid(),
    "handlers": {n: str(signal.getsignal(n)) for n in (1, 2, 13, 15)}, "threads": threading.active_count(),
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "cmdline": open("/proc/self/cmdline").read().rstrip("\\0"),
    "streams": [(s.name, s.encoding, s.errors, s.line_buffering, s.fileno(), s.isatty()) for s in
                (sys.stdin, sys.stdout, sys.stderr)],
    "limits": [resource.getrlimit(each) for each in range(10)], "cores": sorted(os.sched_getaffinity(0)),
    "open": sorted(fd for fd in range(100) if os.path.exists(f"/proc/self/fd/{fd}")),
    "main": sorted(name for name in __import__("__main__").__dict__ if name != "__cached__"),
}
print(json.dumps(told))
"""


def both(args, **options):
    """What the same command did in a new process, and in a warm one."""
    with warm.cold("it is compared"):
        cold = subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False, **options)
    return cold, warm.run([sys.executable, *args], capture_output=True, text=True, **options)


def alike(args, **options):
    cold, forked = both(args, **options)
    assert (forked.returncode, forked.stdout, forked.stderr) == (cold.returncode, cold.stdout, cold.stderr)
    return forked


@pytest.fixture
def narrow():
    """A process of few open files and one core."""
    limits, cores = resource.getrlimit(resource.RLIMIT_NOFILE), os.sched_getaffinity(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, limits[1]))
    os.sched_setaffinity(0, {min(cores)})
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    os.sched_setaffinity(0, cores)


@pytest.mark.slow
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("session", [False, True])
def test_a_process_finds_what_a_new_one_finds(tmp_path: Path, session: bool):
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": "here:/there", "ONLY": "this"}
    (tmp_path / "tells.py").write_text(TELLS)
    for args in (["-c", TELLS, "a", "--b"], ["-u", "tells.py", "a"], [str(tmp_path / "tells.py")]):
        cold, forked = both(args, cwd=tmp_path, env=environment, start_new_session=session, stdin=subprocess.DEVNULL)
        assert json.loads(forked.stdout) == json.loads(cold.stdout)
        assert json.loads(forked.stdout)["parent"] == os.getpid()


@pytest.mark.slow
def test_a_module_finds_what_a_new_process_finds(tmp_path: Path):
    (tmp_path / "tells.py").write_text(TELLS)
    cold, forked = both(["-m", "tells", "a"], cwd=tmp_path, env=dict(os.environ))
    assert json.loads(forked.stdout) == json.loads(cold.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        "import sys; sys.exit('bye')",
        "import sys; sys.exit(7)",
        "import sys; sys.exit()",
        "import os; os._exit(9)",
        "import os; os.kill(os.getpid(), 9)",
        "import signal; signal.raise_signal(15)",
        "def fail():\n    1 / 0\n\n\nfail()",
        "x = (",
        "import os; os.close(1); print('lost')",
        "import atexit, threading\natexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (threading.main_thread().join(), print('thread'))).start()\nprint('first')",
        "class A:\n    def __del__(self):\n        print('gone')\n\n\na = A()\na.self = a",
        "import sys\nsys.excepthook = lambda kind, error, trace: print(kind, trace.tb_frame.f_code.co_filename)\n1 / 0",
        "print(input(), input())",
    ],
)
def test_a_script_says_and_ends_as_in_a_new_process(script: str):
    alike(["-c", script], input="one\ntwo\n")


@pytest.mark.slow
def test_a_file_with_a_mistake_has_the_traceback_of_a_new_process(tmp_path: Path):
    (tmp_path / "wrong.py").write_text("import os\n\nif os:\nprint(1)\n")
    (tmp_path / "fails.py").write_text("import wrong\n")
    for file in ("wrong.py", "fails.py"):
        assert "IndentationError" in alike([file], cwd=tmp_path).stderr


@pytest.mark.slow
@pytest.mark.parametrize("args", [["--version"], ["rl", "none.toml"], ["--nonsense"], ["config"]])
def test_a_command_says_and_ends_as_in_a_new_process(tmp_path: Path, args: list[str]):
    alike(["-m", "verbatim.cli", *args], cwd=tmp_path)


def test_random_numbers_are_other_ones_in_each_process():
    script = "import random, numpy; print(random.random(), numpy.random.rand())"
    first, second = (warm.run([sys.executable, "-c", script], capture_output=True, text=True) for _ in range(2))
    assert set(first.stdout.split()).isdisjoint(second.stdout.split())


def test_processes_live_side_by_side_and_hear_signals():
    script = (
        "import os, signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: os.write(1, b'heard\\n'))\n"
        "print('ready', flush=True)\nprint(sys.stdin.readline())"
    )
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        warm.Popen([sys.executable, "-c", script], **options) as one,
        warm.Popen([sys.executable, "-c", script], **options) as two,
    ):
        assert one.stdout.readline() == two.stdout.readline() == "ready\n"
        one.terminate()
        assert one.stdout.readline() == "heard\n"
        assert (one.poll(), two.poll()) == (None, None)
        assert one.communicate("end\n") == ("end\n\n", None)
        two.kill()
        assert (one.wait(), two.wait()) == (0, -signal.SIGKILL)


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        alike(["-c", "import signal; print(signal.getsignal(signal.SIGINT)); signal.raise_signal(2)"])
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_file_descriptor_is_passed_on():
    reader, writer = os.pipe()
    try:
        args = ["-c", f"import os; os.write({writer}, b'passed')"]
        assert warm.run([sys.executable, *args], pass_fds=(writer,)).returncode == 0
        assert os.read(reader, 6) == b"passed"
    finally:
        os.close(reader)
        os.close(writer)


PARENT = """
import subprocess, sys, verbatim
child = subprocess.Popen([sys.executable, "-m", "verbatim.cli", "--version"])
print(child.wait())
print("forked:", type(child).__name__, flush=True)
"""


@pytest.mark.slow
def test_what_a_command_starts_is_forked_too_and_is_its_child():
    done = warm.run([sys.executable, "-c", PARENT], capture_output=True, text=True)
    assert done.stdout.splitlines()[1:] == ["0", "forked: CommandPopen"]
    assert done.stdout.startswith("verbatim ")
    view = '"view", "--no-open", "--port", "0", "."], stdout=subprocess.DEVNULL'
    script = PARENT.replace('"--version"]', view)
    script = script.replace("child.wait()", "child.pid, flush=True); sys.stdin.readline(")
    with warm.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1] == str(parent.pid)
        os.kill(child, signal.SIGKILL)
        parent.communicate("\n")


def test_the_server_of_a_killed_process_ends():
    script = "import os; print(os.getpid(), flush=True); input()"
    with warm.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        (own,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.kill()
    wait_until(lambda: has_ended(own))


def has_ended(pid: str) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it may go while it is read
        return True


def test_asyncio_starts_commands_as_subprocess_does():
    async def version():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "verbatim.cli", "--version", stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        return out, process.returncode

    assert asyncio.run(version()) == (b"verbatim 0.1.0\n", 0)


def test_another_verbatim_is_not_taken_for_this_one(tmp_path: Path):
    (tmp_path / "verbatim").mkdir()
    (tmp_path / "verbatim" / "__init__.py").touch()
    for options in ({"cwd": tmp_path}, {"env": {**os.environ, "PYTHONPATH": str(tmp_path)}}):
        with pytest.raises(ValueError, match="is another Verbatim; start it"):
            subprocess.run([sys.executable, "-m", "verbatim.cli"], check=False, **options)


@pytest.mark.parametrize(
    ("args", "options"),
    [
        (["/bin/true"], {}),
        ([sys.executable, "-I", "-c", "1"], {}),
        ([sys.executable, "-c", "1"], {"umask": 0o77}),
        ([sys.executable, "-c", "1"], {"env": {"PYTHONHASHSEED": "3"}}),
        ([sys.executable, "none.py"], {}),
    ],
)
def test_what_python_must_know_at_its_start_is_refused(args, options):
    with pytest.raises(ValueError, match="start it by subprocess"):
        warm.Popen(args, **options)


@pytest.mark.slow
def test_a_process_that_os_fork_made_starts_new_ones():
    warm.run([sys.executable, "-c", "pass"], check=True)  # there is a server
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = subprocess.run(
                [sys.executable, "-m", "verbatim.cli", "--version"], capture_output=True, check=False
            ).returncode
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_other_programs_are_started_as_usual():
    assert subprocess.run(["/bin/true"], check=False).returncode == 0
    script = "import sys; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"False\n"


def test_a_command_that_would_start_cold_is_refused():
    with pytest.raises(ValueError, match="there is no folder /no/such/folder; start it by subprocess, in `with cold"):
        subprocess.run([sys.executable, "-m", "verbatim.cli"], cwd="/no/such/folder", check=False)
