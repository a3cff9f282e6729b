"""Kills a process, signals to it, or makes one of its calls fail, at the n-th event of a kind in one folder.
Installed by `struck`.

Events are what Python code does to files (by audit hooks and by files that report their own writes), what the libraries
in Rust save, and calls of functions, for memory that runs out. A strike is plain JSON:

    {"role": "trainer", "do": "kill", "at": 17, "ops": null, "where": "/tmp/.../run", "note": "/tmp/.../note"}
"""

from __future__ import annotations

import builtins
import errno
import inspect
import io
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

CHANGES = ("open", "write", "fsync", "rename", "remove", "mkdir", "rmdir", "link", "truncate", "copy", "save")
"""Events that change the folder, or wait for the disk."""
READS = ("read", "list")
FULL_DISK = ("open", "write", "fsync", "rename", "mkdir", "link", "copy", "save")
"""Events that need room."""

TORCH_FULL = (
    "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
)


_RESUMED = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class Strikes:
    """Counts the events of this process and does what was ordered at one of them.

    Args:
        order: The JSON above. `do` is "count" (append each event to the note), "kill", "error" (with `errno`; with
            `lasts`, from the n-th on), "memory", "torch" or "signal" (with `modules`, whose functions are counted;
            the last one with `signal`, a name, which the process sends itself).
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self.do, self.at, self.where = order["do"], order.get("at", 0), os.path.realpath(order["where"])
        self.ops = frozenset(order.get("ops") or CHANGES)
        self.errno, self.lasts = order.get("errno", 0), order.get("lasts", False)
        self.modules, self.signal = tuple(order.get("modules", ())), order.get("signal", "")
        self.note = os.open(order["note"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.numbers = itertools.count(1)
        self.done = False

    def install(self) -> None:
        """From now on."""
        if self.modules:
            threading.setprofile(self.profile)
            sys.setprofile(self.profile)
            return
        self._watch_files()
        self._watch_libraries()
        sys.addaudithook(self.audit)

    # ---- events

    def inside(self, path: Any, folder: int = -1) -> str | None:
        """The absolute path, where it is in the folder."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        elif folder not in (-1, None):
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(path))
        path = os.path.abspath(os.fsdecode(path))
        return path if path == self.where or path.startswith(self.where + os.sep) else None

    def event(
        self,
        op: str,
        path: Any,
        folder: int = -1,
        *,
        torn: Callable[[], object] = lambda: None,
        fail: Callable[[OSError], BaseException] = lambda error: error,
        named: bool = True,
    ) -> None:
        """Something is about to happen; `torn` does a part of it, `fail` makes the exception of the failed call."""
        if op not in self.ops or (found := self.inside(path, folder)) is None:
            return
        number = next(self.numbers)
        if self.do == "count":
            self.write(f"{number} {op} {found}\n")
        elif number == self.at or (self.lasts and number > self.at):
            self.strike(number, op, found, torn, fail, named)

    def strike(
        self,
        number: int,
        op: str,
        path: str,
        torn: Callable[[], object],
        fail: Callable[[OSError], BaseException],
        named: bool,
    ) -> None:
        if not self.done:
            self.write(f"{number} {op} {path}\n")
        self.done = True
        torn()
        if self.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()
        error = OSError(self.errno, os.strerror(self.errno), *([path] if named else []))
        raise fail(error)

    def write(self, text: str) -> None:
        os.write(self.note, text.encode(errors="replace"))

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        match event:
            case "open":
                path, _, flags = args
                if isinstance(path, str | bytes | os.PathLike):
                    writes = (flags or 0) & (os.O_WRONLY | os.O_RDWR)
                    self.event("open" if writes else "read", os.fspath(path))
            case "os.rename":
                self.event("rename", args[0], args[2])
            case "os.link" | "os.symlink":
                self.event("link", args[1])
            case "os.remove" | "os.rmdir":
                self.event(event[3:], args[0], args[1])
            case "os.mkdir":
                self.event("mkdir", args[0], args[2])
            case "os.truncate":
                self.event("truncate", args[0])
            case "os.listdir" | "os.scandir":
                self.event("list", "." if args[0] is None else args[0])

    # ---- what no audit event tells

    def _watch_files(self) -> None:
        strikes, opened, fsync, sendfile = self, io.open, os.fsync, os.sendfile

        class Told(io.FileIO):
            def write(self, data: Any) -> int:
                data = bytes(data)
                strikes.event(
                    "write", self.name, torn=lambda: io.FileIO.write(self, data[: len(data) // 2]), named=False
                )
                return super().write(data)

            def truncate(self, size: int | None = None) -> int:
                strikes.event("truncate", self.name, named=False)
                return super().truncate(size)

        def opening(
            file: Any,
            mode: str = "r",
            buffering: int = -1,
            encoding: Any = None,
            errors: Any = None,
            newline: Any = None,
            closefd: bool = True,
            opener: Any = None,
        ) -> Any:
            if not set(mode) & set("wax+") or isinstance(file, int) or strikes.inside(file) is None:
                return opened(file, mode, buffering, encoding, errors, newline, closefd, opener)
            raw = Told(os.fspath(file), mode.replace("b", "").replace("t", ""), closefd, opener)
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            if "b" in mode:
                return buffered
            text = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
            text.mode = mode
            return text

        def syncing(descriptor: int) -> None:
            strikes.event("fsync", descriptor, named=False)
            fsync(descriptor)

        def sending(out: int, source: int, offset: Any, count: int) -> int:
            strikes.event("copy", out, torn=lambda: sendfile(out, source, offset, 100))
            return sendfile(out, source, offset, count)

        builtins.open = io.open = opening
        os.fsync, os.sendfile = syncing, sending

    def _watch_libraries(self) -> None:
        import safetensors.torch
        from safetensors import SafetensorError
        from transformers.tokenization_utils_tokenizers import TokenizersBackend

        strikes, serialize, save = self, safetensors.torch.serialize_file, TokenizersBackend._save_pretrained

        def serializing(tensors: Any, filename: Any, metadata: Any = None) -> None:
            def torn() -> None:
                serialize(tensors, filename, metadata=metadata)
                os.truncate(filename, os.path.getsize(filename) // 2)

            strikes.event(
                "save",
                filename,
                torn=torn,
                fail=lambda error: SafetensorError(
                    f"Error while serializing: I/O error: {error.strerror} (os error {error.errno})"
                ),
            )
            serialize(tensors, filename, metadata=metadata)

        def saving(tokenizer: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            strikes.event(
                "save",
                os.path.join(save_directory, "tokenizer.json"),
                fail=lambda error: Exception(f"{error.strerror} (os error {error.errno})"),
            )
            return save(tokenizer, save_directory, *args, **kwargs)

        safetensors.torch.serialize_file = serializing
        TokenizersBackend._save_pretrained = saving

    # ---- memory

    def profile(self, frame: Any, event: str, arg: Any) -> None:
        """Raises in place of the n-th call of a function of the modules, or of torch's own from there."""
        if event != ("call" if self.do != "torch" else "c_call") or self.done:
            return
        name = frame.f_globals.get("__name__") or ""
        if not name.startswith(self.modules):
            return
        if self.do == "torch":
            of = type(getattr(arg, "__self__", None))
            if not f"{getattr(arg, '__module__', '')} {of.__module__}".count("torch"):
                return
        code = frame.f_code
        if self.do == "memory" and code.co_flags & _RESUMED:
            return  # no memory is needed to go on with a coroutine, and it cannot fail there
        number, called = next(self.numbers), arg.__name__ if self.do == "torch" else code.co_name
        if self.at == 0:  # "count"
            self.write(f"{number} {called} {name}\n")
        elif number == self.at:
            self.done = True
            self.write(f"{number} {called} {name}\n")
            if self.do == "signal":
                os.kill(os.getpid(), getattr(signal, self.signal))
                return
            raise MemoryError if self.do == "memory" else RuntimeError(TORCH_FULL)


def error_number(name: str) -> int:
    """Of "ENOSPC", for example."""
    return int(getattr(errno, name))
