"""The memory of a process and all that it has started is added up, and told once where it is too much."""

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from verbatim.environments.tools.group_memory import MemoryWatch, descendants, held_kb
from waiting import HANGS, wait_until

pytestmark = pytest.mark.realtime

FORKS = """
import os, sys
{held}
for _ in range(2):
    if os.fork() == 0:
        {child}
        os.write(1, b"x")
        os.read(0, 1)
        os._exit(0)
os.write(1, b"x")
os.read(0, 1)
"""
"""Says x once it and its two children hold what they hold, and ends with its input."""


@contextlib.contextmanager
def running(held: str = "", child: str = "pass"):
    script = FORKS.format(held=held, child=child)
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.read(1) == b"x"
        yield process.pid


HELD = "held = bytes([1]) * (64 << 20)"


def test_children_are_added_up_and_what_they_share_counts_once():
    with running(held=HELD) as shared, running(child=HELD) as alone:
        assert len(list(descendants(shared))) == 3
        assert 64 << 10 < held_kb(shared) < 100 << 10
        assert 128 << 10 < held_kb(alone) < 180 << 10


def test_memory_that_is_mapped_for_several_processes_counts():
    """The kernel's limit on data does not count it."""
    mapped = "import mmap; held = mmap.mmap(-1, 64 << 20); held.write(bytes([1]) * (64 << 20))"
    with running(held=mapped) as pid:
        assert 64 << 10 < held_kb(pid) < 110 << 10


def test_what_is_added_up_first_may_count_twice_what_is_shared_and_is_no_more_than_asked_for():
    with running(held=HELD) as pid:
        assert held_kb(pid, at_most=1 << 30) > 192 << 10
        assert held_kb(pid, at_most=150 << 10) < 100 << 10


def test_too_much_is_told_once():
    told = []
    watch = MemoryWatch(interval=HANGS)
    with running(held=HELD) as pid:
        few, many = watch.add(pid, 32, lambda: told.append("few")), watch.add(pid, 150, lambda: told.append("many"))
        watch.look()
        wait_until(lambda: told)  # the watch's own thread may have looked first, and be about to tell
        watch.look()
        assert told == ["few"]
        watch.remove(few)
        watch.remove(many)


def test_a_thread_looks_while_there_is_something_to_look_at():
    told = threading.Event()
    watch = MemoryWatch(interval=0.01)
    with running(held=HELD) as pid:
        watch.add(pid, 32, told.set)
        assert told.wait(HANGS)


def test_a_process_that_has_ended_holds_nothing(tmp_path: Path):
    assert held_kb(1, tmp_path) == 0
