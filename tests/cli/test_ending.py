"""What ends the process: one Ctrl-C asks, two end it at once, and nothing that a user's code left holds it."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

import warm
from verbatim.cli import main as shell
from verbatim.core.ctrl_c import CtrlC, two_presses
from verbatim.rollouts.main_loop import run_main
from waiting import HANGS

STUBBORN = """
    import asyncio, os, re, signal, time
    from verbatim.core.ctrl_c import two_presses
    from verbatim.rollouts.main_loop import run_main

    set_handler = signal.signal

    def set_and_tell(number, handler):
        def handle(*given):
            handler(*given)
            os.write(1, b"handled\\n")

        return set_handler(number, handle if callable(handler) else handler)

    async def main():
        print("ready", flush=True)
        while True:
            try:
                {wait}
            except BaseException:
                pass

    def first(loop):
        os.write(1, b"told\\n")
        return False

    signal.signal = set_and_tell
    run_main(main(), two_presses(first, farewell=lambda: "goodbye"))
"""
ENDING = """
    import sys, threading, time
    from verbatim.cli import ending, main as shell
    ending.PATIENCE = 0.2
    threading.Thread(target=time.sleep, args=(600,), name="grader").start()
    shell.main = lambda: {main}
    shell.program()
"""


def started(script, popen=warm.Popen):
    return popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


THREADS = """
    import threading
    from verbatim.cli import main as shell

    class Owner:
        def __del__(self):
            raise {error}

    def fail():
        raise {error}

    def main():
        Owner()
        thread = threading.Thread(target=fail, name="watcher")
        thread.start()
        thread.join()
        return 0

    shell.main = main
    shell.program()
"""


@pytest.mark.slow
@pytest.mark.realtime
def test_memory_that_runs_out_in_a_thread_or_a_destructor_is_one_line_each():
    with started(THREADS.format(error="MemoryError")) as process:
        _, err = process.communicate(timeout=HANGS)
    destructor, thread = err.splitlines()
    assert "__del__" in destructor and ": out of memory, in __del__ (<string>:" in destructor
    assert thread.startswith("thread watcher ended: out of memory, in fail (<string>:")
    assert process.returncode == 0
    with started(THREADS.format(error="ValueError('no')")) as process:
        _, err = process.communicate(timeout=HANGS)
    assert err.count("Traceback") == 2


@pytest.mark.realtime
@pytest.mark.parametrize("wait", ["await asyncio.sleep(1e6)", "time.sleep(1e6)", "re.match('(a+)+b', 'a' * 60)"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_process_at_once_whatever_the_code_does(wait, number):
    with started(STUBBORN.format(wait=wait)) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        missing = {"handled\n", "told\n"}  # by the handler, and by the thread, which `re` does not let work
        while missing - ({"told\n"} if wait.startswith("re.") else set()):
            missing.remove(process.stdout.readline())
        assert process.poll() is None
        process.send_signal(number)
        _, err = process.communicate(timeout=HANGS)  # by itself it never ends
    assert process.returncode == 130
    assert err.endswith("goodbye\n")


@pytest.mark.realtime
@pytest.mark.parametrize(("main", "status"), [("3", 3), ("1 / 0", 1)])
def test_a_thread_that_was_left_behind_does_not_hold_the_process(main, status):
    with started(ENDING.format(main=main)) as process:
        _, err = process.communicate(timeout=HANGS)
    assert process.returncode == status
    assert "threads started by an environment or a tool are still running (1): grader" in err
    assert err.count("Traceback") == (status == 1)


@pytest.mark.realtime
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_command_is_done_does_not_change_its_status(number):
    script = (
        ENDING.format(main=3)
        .replace("PATIENCE = 0.2", "PATIENCE = 600")
        .replace(
            "    shell.program()\n",
            """
    leave = shell.end_without_stragglers
    shell.end_without_stragglers = lambda status: (leave(status), print("done", flush=True))
    shell.program()
""",
        )
    )
    with started(script) as process:
        assert process.stdout.readline() == "done\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=HANGS)
    assert (process.returncode, err) == (3, "")


@pytest.mark.realtime
def test_a_signal_while_python_takes_itself_down_does_not_change_the_status_either():
    """What a module holds is let go of after all handlers are gone."""
    script = """
        import os
        from verbatim.cli import main as shell

        class Held:
            def __del__(self, read=os.read, say=os.write):
                say(1, b"down\\n")
                read(0, 1)

        held = Held()
        shell.main = lambda: 3
        shell.program()
    """
    with warm.cold("a warm process is not taken down"), started(script, subprocess.Popen) as process:
        assert process.stdout.readline() == "down\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        process.communicate("x", timeout=HANGS)
    assert process.returncode == 3


BUSY = """
    import sys, time
    from verbatim.cli import main as shell

    def main():
        try:
            print("ready", flush=True)
            time.sleep(600)
        finally:
            print("cleaned", flush=True)
            {then}

    shell.COMMANDS = {{"do": ("verbatim.cli.config_command", "does it")}}
    shell.parse = lambda arguments: type("Args", (), {{"run": staticmethod(lambda args: main())}})
    shell.program()
"""


@pytest.mark.realtime
def test_sigterm_ends_a_command_that_is_not_at_work_yet_as_ctrl_c_does():
    with started(BUSY.format(then="pass")) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=HANGS)
    assert (process.returncode, out, err) == (130, "cleaned\n", "interrupted: SIGTERM\n")


@pytest.mark.realtime
def test_the_second_sigterm_does_not_wait_for_what_the_first_one_started():
    with started(BUSY.format(then="time.sleep(600)")) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "cleaned\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=HANGS)
    assert process.returncode == 130


@pytest.mark.realtime
def test_output_that_cannot_be_written_is_no_success():
    script = textwrap.dedent(ENDING.format(main='print("a figure") or 0')).replace(", args=(600,)", ", args=(0,)")
    script = script.replace("PATIENCE = 0.2", "PATIENCE = 600")  # the thread ends by itself, however late
    with open("/dev/full", "w") as full:
        done = warm.run(
            [sys.executable, "-c", script],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )
    assert (done.returncode, done.stderr) == (1, "stopped: No space left on device (standard output)\n")


def test_a_background_task_that_exits_does_not_end_the_main_one(caplog):
    async def leave(error):
        raise error

    async def main():
        stray = [asyncio.create_task(leave(error)) for error in (SystemExit(0), KeyboardInterrupt())]
        await asyncio.wait(stray)
        return len(stray)

    assert run_main(main()) == 2
    assert [record.message for record in caplog.records if record.name == "verbatim.rollouts.main_loop"] == [
        "a background task of an environment or a tool raised SystemExit: 0; the run goes on",
        "a background task of an environment or a tool raised KeyboardInterrupt; the run goes on",
    ]


@pytest.mark.realtime
def test_a_background_task_that_ignores_its_cancellation_is_not_waited_for(monkeypatch, caplog):
    monkeypatch.setattr("verbatim.rollouts.main_loop.PATIENCE", 0.1)
    gc.collect()  # asyncio would say here what became of tasks of earlier tests
    caplog.clear()

    async def stubborn():
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    async def main():
        asyncio.create_task(stubborn(), name="stubborn")  # noqa: RUF006
        asyncio.get_running_loop().run_in_executor(None, blocks)
        while not begun.is_set():  # noqa: ASYNC110 - else it may never run
            await asyncio.sleep(0)

    def blocks():
        begun.set()
        waited.append(has_ended.wait(HANGS))
        told.set()

    begun, has_ended, told, waited = threading.Event(), threading.Event(), threading.Event(), []
    run_main(main())
    has_ended.set()
    assert told.wait(HANGS)
    assert waited == [True]  # the thread too still ran
    gc.collect()  # asyncio would say of the task that it is destroyed
    assert caplog.messages == ["the task stubborn ignored its cancellation and was abandoned"]


def test_ctrl_c_cancels_and_is_a_keyboard_interrupt_in_the_end():
    cleaned = []

    async def main():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            cleaned.append(True)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run_main(main())
    assert cleaned == [True]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_module_that_exits_is_no_success(monkeypatch, capsys):
    def leave(args):
        sys.exit(0)

    monkeypatch.setattr(shell, "parse", lambda arguments: type("Args", (), {"run": staticmethod(leave)}))
    assert shell.main(["rl"]) == 1
    assert "called sys.exit(0)" in capsys.readouterr().err


def full():
    raise MemoryError


@pytest.mark.parametrize("presses", [CtrlC().handled_here, two_presses()], ids=["a function", "a command"])
def test_memory_that_runs_out_in_a_callback_ends_what_would_wait_for_it(presses):
    async def main():
        arrived = asyncio.Event()
        asyncio.get_running_loop().call_soon(full)  # and the event is never set
        await asyncio.wait_for(arrived.wait(), HANGS)

    with pytest.raises(MemoryError):
        run_main(main(), presses, ends_without_memory=True)


def test_a_server_goes_on_after_it_and_other_faults_of_callbacks_are_logged(caplog):
    async def main(callback):
        called = asyncio.Event()
        asyncio.get_running_loop().call_soon(callback)
        asyncio.get_running_loop().call_soon(called.set)
        await called.wait()
        return "went on"

    assert run_main(main(full)) == "went on"
    assert run_main(main(lambda: 1 / 0), ends_without_memory=True) == "went on"
    assert ["MemoryError" in caplog.text, "ZeroDivisionError" in caplog.text] == [True, True]
