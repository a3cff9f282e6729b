"""Writes down every change of a folder, and every sync, that a command makes (`struck.py` runs it), in order.

Python tells of each system call on a path before it is made (its audit events), whatever library makes it; a sync is
told of by a wrapper. At each of these moments the folder is looked at, and what has changed since is recorded. So what
native code writes between two of them (safetensors, tokenizers) is in the trace as well. A process that the command
starts tells of its own moments through a socket, and waits until the folder was looked at.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

Node = int
Op = tuple[Any, ...]
"""("add", folder, name, node, kind, target of a link), ("remove", folder, name, node),
("move", folder, name, folder, name, node), ("data", node, content), ("sync", node), ("promise", what), ("start",)."""

_TELLING = {
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "shutil.rmtree",
}


def may_write(arguments: tuple[Any, ...], root: Path) -> bool:
    """Whether this audit event "open" may change something in the folder."""
    path, _, flags = arguments
    if not isinstance(path, str | bytes | os.PathLike) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        return False
    name = os.fsdecode(path)
    return not os.path.isabs(name) or name.startswith(f"{root}/")


def number_of(status: os.stat_result) -> int:
    """The inode's number with its kind: a folder may get the number of a file that another process has just removed."""
    return status.st_ino << 4 | stat.S_IFMT(status.st_mode) >> 12


class Recorder:
    """Looks at a folder again and again."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ops: list[Op] = []
        self._lock = threading.Lock()
        self._inside = threading.local()
        self._nodes: dict[int, Node] = {}
        """The node of each thing that is there now, by `number_of`."""
        self._entries: dict[tuple[Node, str], Node] = {}
        self._seen: dict[Node, tuple[int, int]] = {}
        """Size and time of change of the content that is in the trace."""
        self._contents: dict[Node, bytes] = {}
        self._next = 1
        self._nodes[number_of(root.stat())] = 0
        self.look()
        self.ops += [("sync", node) for node in [0, *self._nodes.values()]]  # what was there before is on disk
        self.ops.append(("start",))

    # ---- what is told

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit event: something is about to happen."""
        if getattr(self._inside, "it", False):
            return
        if event in _TELLING or (event == "open" and may_write(arguments, self.root)):
            self.look()

    def sync(self, descriptor: int) -> None:
        """Instead of `os.fsync`: what the file or folder is now, it is on disk."""
        self.synced(number_of(os.fstat(descriptor)))

    def synced(self, number: int) -> None:
        """This file or folder is on disk. It is read again, whatever its time of change: another thread may have made
        the recorder read it while native code wrote it, and times are as coarse as the clock's ticks."""
        self._seen.pop(self._nodes.get(number, -1), None)
        self.look()
        node = self._nodes.get(number)
        if node is not None:
            self.ops.append(("sync", node))

    def promise(self, what: Any) -> None:
        """The run relies on everything until here from now on."""
        self.look()
        self.ops.append(("promise", what))

    # ---- what is seen

    def look(self) -> None:
        """Record what has changed."""
        with self._lock:
            self._inside.it = True
            try:
                self._compare()
            finally:
                self._inside.it = False

    def _compare(self) -> None:
        gone = {number for number, node in self._nodes.items() if node == 0}  # of the folder itself, which is not in it
        while True:
            found: dict[tuple[Node, str], int] = {}
            status: dict[int, tuple[os.stat_result, str]] = {}
            fresh: dict[int, Node] = {}
            # Other threads go on meanwhile. What they move to where the walk has been already is not gone: it is where
            # the next walk finds it.
            with contextlib.suppress(FileNotFoundError):
                self._walk(str(self.root), 0, found, status, fresh)
                missing = self._nodes.keys() - status.keys()
                if missing == gone:
                    break
                gone = missing
        before = {number: node for number, node in self._nodes.items() if number in status or node == 0}
        after = {**before, **fresh}
        entries = {key: after[number] for key, number in found.items()}
        gone = {key: node for key, node in self._entries.items() if entries.get(key) != node}
        new = {key: node for key, node in entries.items() if self._entries.get(key) != node}
        for key, node in new.items():
            number = found[key]
            source = next((k for k, n in gone.items() if n == node), None)
            if source is not None:
                del gone[source]
                self.ops.append(("move", *source, *key, node))
            else:
                kind = stat.S_IFMT(status[number][0].st_mode)
                target = os.readlink(status[number][1]) if kind == stat.S_IFLNK else None
                self.ops.append(("add", *key, node, kind, target))
        self.ops += [("remove", *key, node) for key, node in gone.items() if key not in new]
        for number, node in after.items():
            if node != 0 and stat.S_ISREG(status[number][0].st_mode):
                self._read(node, *status[number])
        self._nodes, self._entries = after, entries

    def _walk(
        self,
        path: str,
        folder: Node,
        found: dict[tuple[Node, str], int],
        status: dict[int, tuple[os.stat_result, str]],
        fresh: dict[int, Node],
    ) -> None:
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            now = os.lstat(entry.path)
            number = number_of(now)
            if number not in self._nodes and number not in fresh:
                fresh[number] = self._next
                self._next += 1
            found[folder, entry.name] = number
            status[number] = (now, entry.path)
            if stat.S_ISDIR(now.st_mode):
                self._walk(entry.path, self._nodes.get(number, fresh.get(number, -1)), found, status, fresh)

    def _read(self, node: Node, now: os.stat_result, path: str) -> None:
        version = (now.st_size, now.st_mtime_ns)
        if self._seen.get(node) != version:
            with contextlib.suppress(FileNotFoundError):  # moved meanwhile by another process: the next look reads it
                content = Path(path).read_bytes()
                if self._contents.get(node) != content:
                    self.ops.append(("data", node, content))
                self._contents[node], self._seen[node] = content, version


# ---- a process that the command starts


def listen(recorder: Recorder, address: str) -> None:
    """Look whenever another process says so, on a thread: a message is the number of what was synced, or 0."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(address)
    server.listen()

    def serve(connection: socket.socket) -> None:
        while message := connection.recv(8):
            number = int.from_bytes(message)
            if number:
                recorder.synced(number)
            else:
                recorder.look()
            connection.send(b"!")

    def accept() -> None:
        while True:
            threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()


def tell(address: str, root: str) -> None:
    """In the other process: tell of every moment."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.connect(address)
    lock = threading.Lock()

    def say(number: int) -> None:
        with lock:
            client.send(number.to_bytes(8))
            client.recv(1)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in _TELLING or (event == "open" and may_write(arguments, Path(root))):
            say(0)

    os.fsync = lambda descriptor: say(number_of(os.fstat(descriptor)))
    sys.addaudithook(hear)


def record(root: Path, trace: Path, address: str) -> Callable[[], None]:
    """From now on, of this process and of those that `tell` at the address; what writes the trace at the end."""
    from verbatim.run.run_log import RunLog

    recorder = Recorder(root)
    listen(recorder, address)
    os.fsync = recorder.sync
    write = RunLog._write_checkpoint

    def sealing(self: RunLog, step: int, *rest: Any) -> None:
        write(self, step, *rest)
        recorder.promise(step)

    def finish() -> None:
        recorder.promise("finished")
        trace.write_text(repr(recorder.ops))

    RunLog._write_checkpoint = sealing  # type: ignore[method-assign]
    sys.addaudithook(recorder.hear)
    return finish
