"""What a command inside the sandbox can see, use and leave behind: tried with every real isolation that works here."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest

from environments.tools.sandbox_output import what_sandboxes_say
from rollouts.clocks import set_forward
from verbatim.core.errors import EnvironmentFault, UsageError
from verbatim.environments.tools import sandbox as module
from verbatim.environments.tools.group_memory import MemoryWatch
from verbatim.environments.tools.isolation import (
    ISOLATIONS,
    NO_ISOLATION,
    Isolation,
    SandboxLimits,
    find_isolation,
    why_not,
)
from verbatim.environments.tools.sandbox import CommandResult, Sandbox
from waiting import HANGS, until

pytestmark = pytest.mark.realtime
Start = Callable[..., Awaitable[Sandbox]]


problem_of = functools.cache(why_not)


@pytest.fixture
def said(monkeypatch) -> bytearray:
    """What all sandboxes of a test have written so far."""
    return what_sandboxes_say(monkeypatch)


@pytest.fixture(params=ISOLATIONS, ids=lambda isolation: isolation.name)
async def start(request, monkeypatch, said) -> AsyncIterator[Start]:
    """Starts sandboxes in one isolation, and ends them. No deadline passes by itself. Of two isolations one may be
    missing on this machine."""
    if problem := problem_of(request.param):
        assert find_isolation() is not request.param
        pytest.skip(f"{request.param.name}: {problem}")
    monkeypatch.setattr(module, "START_SECONDS", HANGS)
    monkeypatch.setattr(module, "GRACE_SECONDS", HANGS)
    started = []

    async def start(files=None, isolation: Isolation = request.param, **limits) -> Sandbox:
        limits = {"timeout": HANGS, **limits}
        started.append(await Sandbox.start(SandboxLimits(**limits), files, isolation))
        return started[-1]

    yield start
    for sandbox in started:
        await sandbox.close()


async def output(sandbox: Sandbox, command: str) -> str:
    return (await sandbox.run(command)).output


def alive(word: str) -> bool:
    """Whether any process of this machine has the word in its command line."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except OSError:  # it ended meanwhile
            continue
    return any(word.encode() in line for line in lines)


async def interrupted(said: bytearray, sandbox: Sandbox, command: str) -> CommandResult:
    """The result of a command that says that it runs, and goes on for ever: then its deadline passes."""
    said.clear()
    running = asyncio.create_task(sandbox.run(command))
    await until(lambda: running.done() or b"runs\n" in said)
    set_forward()
    return await asyncio.wait_for(running, HANGS)


@contextlib.contextmanager
def started(command: list[str], **options) -> Iterator[subprocess.Popen]:
    """A process beside the sandbox, killed at the end."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def long_sleep() -> str:
    """Seconds that no other process sleeps."""
    return f"{10**6 + secrets.randbelow(10**8)}.{secrets.randbelow(10**8)}"


# ---- a shell like any other


async def test_directory_and_variables_stay_from_command_to_command(start: Start):
    sandbox = await start()
    assert (await sandbox.run("mkdir d && cd d && x='a  b'")).output == ""
    assert await output(sandbox, 'echo "$x $PWD"') == "a  b /tmp/work/d\n"
    assert await output(sandbox, "f() { echo f$1; }; declare -A m=([k]=v)") == ""
    assert await output(sandbox, "f 1\necho ${m[k]}") == "f1\nv\n"


async def test_files_are_there_as_they_were_given(start: Start):
    files = {"a.txt": "one\ntwo\n", "d/e/f": "no newline", "-n 'q' $x": "'$(false)' \\ é中🙂\t%s\n", "empty": ""}
    sandbox = await start(files)
    for name, text in files.items():
        assert await output(sandbox, f"cat ./{name}" if " " not in name else "cat ./-*") == text
    assert await output(sandbox, "pwd; ls -1") == "/tmp/work\n-n 'q' $x\na.txt\nd\nempty\n"


async def test_a_file_that_leads_out_of_the_directory_is_refused(start: Start):
    for path in ("/etc/x", "../x", "a/../../x"):
        with pytest.raises(UsageError, match="leads out of its directory"):
            await start({path: ""})


@pytest.mark.slow
async def test_files_that_do_not_fit_are_a_fault(start: Start):
    with pytest.raises(EnvironmentFault, match=r"cannot be written.*(No space left on device|File too large)"):
        await start({"big": "x" * 2_000_000}, disk_mb=1)


async def test_errors_and_the_exit_status_are_reported(start: Start):
    sandbox = await start()
    assert await sandbox.run("echo out; echo err >&2; (exit 3)") == CommandResult(output="out\nerr\n", status=3)
    assert (await sandbox.run("false")).text == "[exit status 1]"
    assert (await sandbox.run("true")).text == ""
    assert (await sandbox.run("echo a; false")).text == "a"


async def test_a_command_reads_an_empty_input(start: Start):
    sandbox = await start()
    assert await sandbox.run("cat; read x") == CommandResult(output="", status=1)


@pytest.mark.parametrize("command", ["f() {", "echo 'a", "break", "return 3", "continue", "fi", ")", "exec 3>&- 4>&-"])
async def test_what_a_script_could_trip_over_is_an_ordinary_command(start: Start, command: str):
    sandbox = await start()
    await sandbox.run("x=kept")
    assert (await sandbox.run(command)).status is not None
    assert await output(sandbox, "echo $x") == "kept\n"


async def test_output_that_is_sent_elsewhere_does_not_take_the_answers_along(start: Start):
    sandbox = await start()
    assert await sandbox.run("exec >log 2>&1; echo hidden") == CommandResult(output="", status=0)
    assert await sandbox.run("echo hidden too; exec >/dev/null") == CommandResult(output="", status=0)


@pytest.mark.parametrize(
    "end", ["exit 4", "exec sleep 0", "kill -9 $$", "set -e; false", "kill -9 -1 2>/dev/null; kill -9 $$"]
)
async def test_a_shell_that_ends_is_followed_by_a_fresh_one_among_the_same_files(start: Start, end: str):
    sandbox = await start({"a": "kept\n"})
    await sandbox.run("x=lost; mkdir d; cd d")
    ended = await sandbox.run(f"echo last; {end}")
    assert ended.text == "last\n[the shell has ended; a fresh shell has started, files are kept]"
    assert await output(sandbox, "echo $x$PWD; cat a") == "/tmp/work\nkept\n"


# ---- what it cannot reach


async def test_there_is_no_network(start: Start):
    """Not even to this machine, whatever listens there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        sandbox = await start()
        for host in ("127.0.0.1", "8.8.8.8"):
            tried = await sandbox.run(f"exec 9<>/dev/tcp/{host}/{port} && echo connected")
            assert "connect" in tried.output
            assert "connected" not in tried.output
    assert set(re.findall(r"^ *(\w+):", await output(sandbox, "cat /proc/net/dev"), re.MULTILINE)) <= {
        "lo",
        "sit0",
        "tunl0",
        "ip6tnl0",
        "gre0",
        "gretap0",
        "erspan0",
        "ip_vti0",
        "ip6_vti0",
        "ip6gre0",
    }


async def test_files_of_the_user_and_secrets_of_the_system_are_not_there(start: Start, tmp_path: Path):
    secret = tmp_path / "secret"
    secret.write_text("treasure")
    for folder in (secret, *list(secret.parents)[:3]):
        folder.chmod(0o755)
    sandbox = await start()
    reach = f"for p in {secret} /proc/1/root{secret} /proc/1/cwd{secret} /old{secret}; do"
    assert "treasure" not in await output(sandbox, f"{reach} cat $p; ln -s $p l; cat l; rm l; done; cat /etc/shadow")
    for folder in ("/etc/shadow", "/etc/passwd", "/home", "/root", "/var", str(Path.home()), str(Path(__file__))):
        assert (await sandbox.run(f"ls -d {folder}")).status != 0, folder


async def test_the_environment_is_not_handed_on(start: Start, monkeypatch):
    monkeypatch.setenv("API_KEY", "treasure")
    sandbox = await start()
    assert "treasure" not in await output(sandbox, "env; tr '\\0' '\\n' </proc/1/environ")
    names = {line.split("=")[0] for line in (await output(sandbox, "env")).splitlines()}
    assert names <= {"PATH", "LANG", "TERM", "HOME", "PWD", "OLDPWD", "SHLVL", "_"}


async def test_only_the_throw_away_directory_can_be_written(start: Start):
    sandbox = await start()
    everywhere = "find / -path /proc -prune -o -path /usr -prune -o -type d -print 2>/dev/null"
    places = await output(sandbox, f"for d in $({everywhere}); do (: >$d/x) 2>/dev/null && echo $d; done")
    assert sorted(places.split()) == ["/tmp", "/tmp/work"]
    for place in ("/", "/usr/bin", "/dev", "/dev/shm", "/etc", "/proc", "/proc/sys/kernel"):
        assert (await sandbox.run(f": >{place}/x")).status != 0, place


async def test_there_are_no_privileges_to_gain(start: Start):
    sandbox = await start()
    status = await output(sandbox, "cat /proc/self/status")
    assert re.findall(r"^Cap(?:Prm|Eff|Bnd|Amb):\t(\w+)", status, re.MULTILINE) == ["0" * 16] * 4
    assert "NoNewPrivs:\t1" in status
    for command in (
        "unshare --user --map-root-user true",
        "mount -t tmpfs x /tmp/work",
        "chroot / true",
        "echo 9 >/proc/sys/kernel/pid_max",
        "mknod d b 1 1",
    ):
        assert (await sandbox.run(command)).status != 0, command


async def test_other_processes_of_the_machine_are_neither_seen_nor_killed(start: Start):
    with started(["sleep", long_sleep()]) as other:
        sandbox, neighbour = await start(), await start()
        numbers = await output(sandbox, f"ls /proc | grep '^[0-9]'; kill -9 {other.pid}; kill -9 -1")
        assert len(re.findall(r"^\d+$", numbers, re.MULTILINE)) <= 5
        assert other.poll() is None
        assert await output(neighbour, "echo here") == "here\n"


# ---- what it cannot use up


async def test_a_command_that_takes_too_long_is_stopped_and_the_files_are_kept(start: Start, said):
    sandbox, seconds = await start({"a": "kept\n"}), long_sleep()
    stopped = await interrupted(said, sandbox, f"echo runs; sleep {seconds}")
    assert stopped == CommandResult(
        output="runs\n",
        status=None,
        notes=(f"stopped: it took more than {HANGS:g} s; a fresh shell has started, files are kept",),
    )
    assert not alive(seconds)
    assert await output(sandbox, "cat a") == "kept\n"


@pytest.mark.parametrize(
    "command",
    [
        "trap '' TERM INT HUP; echo runs; sleep 1e9",
        "echo runs; while :; do :; done",
        "mkfifo p; (trap '' TERM; echo runs; cat) <>p",
    ],
)
async def test_a_command_that_resists_is_stopped_all_the_same(start: Start, said, command: str):
    sandbox = await start()
    assert (await interrupted(said, sandbox, command)).status is None
    assert await output(sandbox, "echo again") == "again\n"


@pytest.mark.slow
async def test_processor_time_is_limited(start: Start):
    sandbox = await start(cpu_seconds=1)
    ended = await sandbox.run("while :; do :; done")
    assert ended.status in (128 + signal.SIGXCPU, 128 + signal.SIGKILL)
    assert await output(sandbox, "echo again") == "again\n"


@pytest.mark.slow
@pytest.mark.parametrize("endless", ["yes", "cat /dev/zero", "while :; do echo y; done", "yes >&2"])
async def test_endless_output_is_stopped_and_cut(start: Start, endless: str):
    sandbox = await start(output_bytes=100)
    stopped = await sandbox.run(endless)
    assert stopped.status is None
    assert len(stopped.output) == 100
    assert stopped.text.endswith(
        "\n[cut: these are the first 100 bytes]\n"
        "[stopped: it wrote more than 1 MiB; a fresh shell has started, files are kept]"
    )
    assert await output(sandbox, "echo again") == "again\n"


async def test_long_output_is_cut_and_the_shell_goes_on(start: Start):
    sandbox = await start(output_bytes=10)
    assert (await sandbox.run("x=1; seq 100000")).text == "1\n2\n3\n4\n5\n[cut: these are the first 10 bytes]"
    assert await output(sandbox, "echo $x") == "1\n"
    assert await output(sandbox, "printf 0123456789") == "0123456789"


async def test_what_is_no_text_becomes_replacement_characters(start: Start):
    sandbox = await start()
    assert await output(sandbox, r"printf '\377\0a'") == "\ufffd\0a"


async def test_the_directory_has_a_size(start: Start):
    sandbox = await start(disk_mb=2)
    assert re.search("File too large|No space left", await output(sandbox, "yes | head -c 10G >big"))
    assert int(await output(sandbox, "du -sk /tmp | cut -f1")) <= 2 << 10
    await sandbox.run("rm big; for i in 1 2 3 4 5 6; do yes | head -c 1M >$i; done; yes | head -c 5M >/tmp/x")
    assert int(await output(sandbox, "du -sk /tmp | cut -f1")) <= 2 << 10
    assert await output(sandbox, "rm *; echo kept >a; cat a") == "kept\n"


async def test_memory_is_limited(start: Start, monkeypatch):
    """Tests the limit of each process; the watch that adds up all processes is off."""
    monkeypatch.setattr(module, "WATCH", MemoryWatch(interval=HANGS))
    sandbox = await start(memory_mb=64)
    assert "0" in (await sandbox.run("head -c 200M /dev/zero | tail -c 200M | wc -c")).output.split()
    assert "cannot modify limit" in await output(sandbox, "ulimit -d 1000000")


HOLDS = "exec python3 -c 'import time; held = bytes([1]) * (40 << 20); print(1, flush=True); time.sleep(1000000)'"
"""Holds 40 MiB until it is ended."""


@pytest.mark.slow
async def test_processes_are_stopped_that_hold_too_much_together(start: Start):
    sandbox = await start(memory_mb=100)
    result = await sandbox.run(f"{HOLDS} & {HOLDS} & {HOLDS} & wait")
    (note,) = result.notes
    assert note == "stopped: its processes held more than 100 MiB together; a fresh shell has started, files are kept"
    assert (await sandbox.run("echo kept")).text == "kept"
    result = await sandbox.run(f"{HOLDS} & {HOLDS} & {HOLDS} & wait")
    assert "held more than 100 MiB together" in result.text, "a fresh shell is looked at too"


@pytest.mark.slow
async def test_without_isolation_they_are_stopped_too(start: Start):
    sandbox = await start(memory_mb=100, isolation=NO_ISOLATION)
    for _ in range(2):
        result = await sandbox.run(f"{HOLDS} & {HOLDS} & {HOLDS} & wait")
        assert "held more than 100 MiB together" in result.text


async def test_what_a_command_left_is_stopped_and_the_next_one_is_told(start: Start, monkeypatch):
    watch, told = MemoryWatch(interval=HANGS), threading.Event()
    add = watch.add

    def watched(leader: int, memory_mb: int, on_too_much: Callable[[], None], **limits):
        return add(leader, memory_mb, lambda: (on_too_much(), told.set()), **limits)

    monkeypatch.setattr(watch, "add", watched)
    monkeypatch.setattr(module, "WATCH", watch)
    sandbox = await start(memory_mb=100)
    await sandbox.run(f"({HOLDS} & {HOLDS} & {HOLDS} &) >/dev/null")
    await until(lambda: (watch.look(), told.is_set())[1])  # not checked while the command runs
    await asyncio.sleep(0)  # the loop has begun to stop them
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task.get_name() == "sandbox-memory"))
    assert (await sandbox.run("echo on")).text.startswith("on\n[stopped: its processes held more than 100 MiB together")
    assert (await sandbox.run("echo on")).text == "on"


async def test_memory_that_is_only_reserved_is_free(start: Start):
    """WebAssembly, in which Node parses HTTP, and the JVM reserve far more than they use."""
    sandbox = await start(memory_mb=100)
    reserve = "from mmap import *; print(len(mmap(-1, 1 << 36, flags=MAP_PRIVATE | MAP_ANONYMOUS, prot=0)) >> 30)"
    assert (await sandbox.run(f"python3 -c '{reserve}'")).text == "64"


async def test_a_fork_bomb_stays_within_the_limit_and_is_survived(start: Start, said):
    sandbox = await start(processes=20)
    await sandbox.run("bomb() { bomb | bomb & }; bomb")
    # All stand still meanwhile: the list of processes is read one by one, and others would take the place of the dead.
    results = [await sandbox.run("kill -STOP -1; echo /proc/[0-9]*; kill -CONT -1; true") for _ in range(3)]
    counts = [len(re.findall(r"/proc/\d+", result.output)) for result in results if result.status == 0]
    assert counts
    assert max(counts) <= 20
    result = await interrupted(said, sandbox, "echo runs; while :; do :; done")
    assert result.status is None  # and the bomb is ended with it
    async with asyncio.timeout(HANGS):
        # The dead are buried one by one.
        while len(left := (await output(sandbox, "echo /proc/[0-9]*")).split()) > 2:  # noqa: ASYNC110  (no event of ours)
            await asyncio.sleep(0.01)
    assert left[0] == "/proc/1"
    assert len(left) == 2  # the init and the shell


# ---- what it cannot leave behind


@pytest.mark.parametrize(
    "behind", ["sleep {} &", "(setsid sleep {} &)", "trap '' TERM HUP; nohup sleep {} >&- & disown"]
)
async def test_a_background_process_holds_no_command_up_and_ends_with_the_sandbox(start: Start, behind: str):
    sandbox = await start()
    seconds = long_sleep()
    assert (await sandbox.run(behind.format(seconds))).status == 0
    await until(lambda: alive(seconds))
    assert await output(sandbox, "echo next") == "next\n"
    await sandbox.close()
    assert not alive(seconds)


async def test_nothing_of_one_sandbox_is_in_the_next(start: Start):
    first = await start()
    await first.run("echo x >/tmp/work/a; echo x >/tmp/b; export x=1")
    await first.close()
    assert await output(await start(), "ls -A /tmp /tmp/work; echo $x") == "/tmp:\nwork\n\n/tmp/work:\n\n"


async def test_a_closed_sandbox_runs_nothing_and_closes_again(start: Start):
    sandbox = await start()
    await sandbox.close()
    await sandbox.close()
    with pytest.raises(EnvironmentFault, match="has ended"):
        await sandbox.run("true")


async def test_a_cancelled_command_takes_everything_along(start: Start):
    sandbox = await start()
    seconds = long_sleep()
    running = asyncio.create_task(sandbox.run(f"sleep {seconds}"))
    await until(lambda: alive(seconds))
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: not alive(seconds))
    with pytest.raises(EnvironmentFault, match="has ended"):
        await sandbox.run("true")


async def test_a_cancelled_start_leaves_nothing(start: Start):
    for num_steps in range(1, 12):
        starting = asyncio.create_task(start())
        for _ in range(num_steps):
            await asyncio.sleep(0)
        starting.cancel()
        done, _ = await asyncio.wait({starting}, timeout=HANGS)
        assert done, f"cancelled after {num_steps} steps, it hangs"
        if not starting.cancelled():  # on a busy machine, so many steps may take as long as a whole start
            await starting.result().close()
    # A process that was killed together with its parent may still have to die.
    await until(lambda: not any("ready %s" in line for line in children(os.getpid())))


def children(pid: int) -> list[str]:
    """The command lines of a process's children, without those that end meanwhile."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(" ".join(child.cmdline()))
    return found


async def test_it_ends_with_the_interpreter_even_when_that_is_killed(start: Start):
    sandbox, seconds = await start(), long_sleep()
    script = (
        "import asyncio\n"
        "from verbatim.environments.tools.isolation import ISOLATIONS, SandboxLimits\n"
        "from verbatim.environments.tools.sandbox import Sandbox\n"
        "async def main():\n"
        f"    (isolation,) = [i for i in ISOLATIONS if i.name == {sandbox.isolation.name!r}]\n"
        f"    sandbox = await Sandbox.start(SandboxLimits(timeout={HANGS}), isolation=isolation)\n"
        "    print('started', flush=True)\n"
        f"    await sandbox.run('trap true HUP TERM PIPE; setsid sleep {seconds} & wait')\n"
        "asyncio.run(main())\n"
    )
    with started([sys.executable, "-c", script], stdout=subprocess.PIPE) as python:
        assert python.stdout.readline() == b"started\n"
        await until(lambda: alive(f"sleep\0{seconds}"))
    await until(lambda: not alive(f"sleep\0{seconds}"))


async def test_a_command_that_forges_an_answer_deceives_only_itself(start: Start):
    forge = r"""t=$(grep -aom1 'sandbox-[0-9a-f]\{16\}' /proc/1/cmdline); printf "\0$t 1 0\0"; sleep 1e9"""
    sandbox = await start()
    assert await sandbox.run(forge) == CommandResult(output="", status=0)
    next_one = asyncio.create_task(sandbox.run("true"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not next_one.done()  # the shell still runs the one before
    set_forward()
    assert (await asyncio.wait_for(next_one, HANGS)).status is None
    assert await output(sandbox, "echo again") == "again\n"


# ---- many at one time


async def test_sandboxes_run_side_by_side_and_commands_of_one_in_turn(start: Start, said):
    sandboxes = await asyncio.gather(*(start({"n": f"{n}\n"}) for n in range(8)))
    running = [asyncio.create_task(sandbox.run("echo runs; sleep 1e9")) for sandbox in sandboxes]
    await until(lambda: said.count(b"runs\n") == 8)
    set_forward()
    assert {result.status for result in await asyncio.gather(*running)} == {None}
    assert await asyncio.gather(*(output(sandbox, "cat n") for sandbox in sandboxes)) == [f"{n}\n" for n in range(8)]
    in_turn = await asyncio.gather(*(output(sandboxes[0], f"x={n}; sleep 0; echo $x") for n in range(3)))
    assert in_turn == ["0\n", "1\n", "2\n"]


# ---- with nothing around it, where the user insists


async def test_without_isolation_the_directory_is_removed_and_limits_of_time_and_output_hold(start: Start, said):
    sandbox = await start({"a": "kept\n"}, NO_ISOLATION)
    folder = (await output(sandbox, "pwd")).strip()
    assert folder
    assert os.listdir(folder) == ["a"]
    seconds = long_sleep()
    assert (await interrupted(said, sandbox, f"echo runs; sleep {seconds}")).status is None
    assert not alive(seconds)
    assert (await sandbox.run("yes")).status is None
    assert await output(sandbox, "cat a") == "kept\n"
    await sandbox.close()
    with pytest.raises(FileNotFoundError):
        os.listdir(folder)


async def test_a_forged_mark_of_thousands_of_digits_costs_that_command_alone(start: Start):
    sandbox = await start()
    forged = "t=$(grep -ao 'sandbox-[0-9a-f]*' /proc/1/cmdline | head -n 1); printf '\\0%s 1 %05000d\\0' $t 7; echo end"
    assert "end\n" in await output(sandbox, forged)
    assert await output(sandbox, "echo again") == "again\n"


async def test_files_are_limited_in_number(start: Start):
    sandbox = await start()
    made = await sandbox.run("for i in $(seq 10500); do : >f$i || break; done; ls | wc -l")
    assert "No space left on device" in made.output
    assert 9_000 < int(made.output.split()[-1]) <= 10_240
