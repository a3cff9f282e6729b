"""Memory is bounded by a control group where one can be made, of both versions."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from verbatim.environments.tools.control_groups import MemoryGroup
from verbatim.environments.tools.group_memory import MemoryWatch
from waiting import HANGS, wait_until

FIRST = ("cgroup.procs", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control")
SECOND = ("cgroup.procs", "memory.max", "memory.swap.max", "memory.events")


def system(tmp_path, monkeypatch, version, files, group="/jobs/7"):
    """A /proc and the folders of control groups; a folder that is made has these files, as the kernel's have."""
    mount, proc = tmp_path / "sys", tmp_path / "proc"
    parent = mount / group.lstrip("/")
    parent.mkdir(parents=True)
    (parent / "cgroup.procs").touch()
    (proc / "self").mkdir(parents=True)
    (proc / str(os.getpid())).mkdir()
    line = f"4:cpu,memory:{group}\n0::/\n" if version == 1 else f"0::{group}\n"
    kind, options = ("cgroup", "rw,cpu,memory") if version == 1 else ("cgroup2", "rw")
    (proc / "self" / "cgroup").write_text(line)
    (proc / "self" / "mounts").write_text(f"proc /proc proc rw 0 0\ncgroup {mount} {kind} {options} 0 0\n")
    mkdir = Path.mkdir

    def made(self, *args, **kwargs):
        mkdir(self, *args, **kwargs)
        for name in files if self.name.startswith("verbatim-") else ():
            (self / name).touch()

    monkeypatch.setattr(Path, "mkdir", made)
    return parent, proc


@pytest.mark.parametrize(
    ("version", "files", "limit", "swap"),
    [
        (1, FIRST, "memory.limit_in_bytes", ("memory.memsw.limit_in_bytes", str(64 << 20))),
        (2, SECOND, "memory.max", ("memory.swap.max", "0")),
    ],
)
def test_a_group_has_the_limit_and_the_processes(tmp_path, monkeypatch, version, files, limit, swap):
    parent, proc = system(tmp_path, monkeypatch, version, files)
    group = MemoryGroup.make(64, proc)
    assert group.folder.parent == parent
    assert (group.folder / limit).read_text() == str(64 << 20)
    assert (group.folder / swap[0]).read_text() == swap[1]
    assert group.take([12, 13])
    assert (group.folder / "cgroup.procs").read_text() in ("1213", "13")  # the kernel takes each by itself
    assert not group.has_killed
    (group.folder / files[3]).write_text("under_oom 0\noom_kill 1\n")
    assert group.has_killed
    assert not group.remove()  # as long as something is in it
    for file in group.folder.iterdir():
        file.unlink()
    assert group.remove() and group.remove()


def test_without_a_mount_a_controller_or_permission_there_is_none(tmp_path, monkeypatch):
    _, proc = system(tmp_path, monkeypatch, 1, ("cgroup.procs",))
    assert MemoryGroup.make(64, proc / "nothing") is None
    assert MemoryGroup.make(64, proc) is None  # the folder that was made has no limit of memory
    monkeypatch.setattr(Path, "mkdir", lambda self: (_ for _ in ()).throw(PermissionError(13, "no")))
    assert MemoryGroup.make(64, proc) is None
    monkeypatch.undo()
    (proc / "self" / "mounts").write_text("proc /proc proc rw 0 0\n")
    assert MemoryGroup.make(64, proc) is None


def test_groups_that_a_killed_process_left_are_removed(tmp_path, monkeypatch):
    parent, proc = system(tmp_path, monkeypatch, 2, SECOND)
    monkeypatch.undo()
    left, own, others = (parent / name for name in ("verbatim-999999-0", f"verbatim-{os.getpid()}-0", "theirs"))
    for folder in (left, own, others):
        folder.mkdir()
    MemoryGroup.make(64, proc)
    assert [folder.exists() for folder in (left, own, others)] == [False, True, True]


GROWS = """
import os
begin, begins = os.pipe()
for _ in range(3):
    if os.fork() == 0:
        os.close(begins)
        os.read(begin, 1)
        held = bytes([1]) * (40 << 20)
        os.write(1, b"x")
        os.read(0, 1)
        os._exit(0)
os.write(1, b"-")
os.read(0, 1)
os.close(begins)
for _ in range(3):
    os.wait()
"""
"""Three children, each of which holds 40 MiB once their parent has read a byte. They see its pipe end: a byte for each
of them could be read by one that is done already."""


@pytest.mark.realtime
def test_children_that_hold_too_much_together_are_ended_by_the_kernel_or_else_told_by_a_look():
    told, watch = threading.Event(), MemoryWatch(interval=HANGS)
    with subprocess.Popen([sys.executable, "-c", GROWS], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.read(1) == b"-"
        watched = watch.add(process.pid, 64, told.set)
        process.stdin.write(b".")
        process.stdin.flush()
        if watched.group is None:
            assert process.stdout.read(3) == b"xxx"
        else:
            wait_until(lambda: watched.group.has_killed)
        watch.look()
        assert told.wait(HANGS)  # the watch's own thread may have looked first, and be about to tell
        process.stdin.close()
    watch.remove(watched)
    assert watched.group is None or not watched.group.folder.exists()
