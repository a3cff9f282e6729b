"""Builds the kernel with the machine's C compiler, once for each source, compiler and processor, and loads it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

FOLDER_VARIABLE = "VERBATIM_KERNELS"
SOURCE = Path(__file__).with_name("kernel.c")
_FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC", "-pthread")
_NATIVE = ("-march=native", "-mcpu=native")
"""Flags for this very processor: the first that the compiler knows."""
_BUILD_SECONDS = 120.0


class NoKernelError(Exception):
    """The kernel cannot be built or loaded here; says why."""


def kernels_folder() -> Path:
    """Where built kernels are kept: $VERBATIM_KERNELS, or verbatim/kernels in the user's cache ($XDG_CACHE_HOME,
    ~/.cache)."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "verbatim" / "kernels"


@functools.cache
def load_kernel() -> ctypes.CDLL:
    """The kernel's functions; the first call on a machine takes a few seconds of a compiler.

    Raises:
        NoKernelError: there is no C compiler, it fails, or what it built cannot be loaded.
    """
    compiler = find_compiler()
    built = kernels_folder() / f"{_key(compiler)}.so"
    try:
        if not built.is_file():
            build(compiler, built)
        library = ctypes.CDLL(str(built))
    except OSError as error:
        raise NoKernelError(f"the kernel cannot be kept or loaded: {error}") from error
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        ("forward", None, (pointer, pointer, pointer)), ("workspace", number, (pointer, number, number)),
        ("copy_page", None, (pointer, pointer, number, number)), ("logits", None, (pointer,)),
        ("draw", None, (pointer,)), ("pool", pointer, (number,)), ("end_pool", None, (pointer,)),
    ):  # fmt: skip
        function = getattr(library, f"verbatim_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def find_compiler() -> tuple[str, ...]:
    """The command of a C compiler: $CC, or the first of cc, gcc and clang.

    Raises:
        NoKernelError: there is none.
    """
    named = shlex.split(os.environ.get("CC", ""))
    for command in ([named] if named else [["cc"], ["gcc"], ["clang"]]):
        found = shutil.which(command[0])
        if found is not None:
            return (found, *command[1:])
    raise NoKernelError(f"there is no C compiler ({named[0] if named else 'cc, gcc or clang'}) on this machine")


def build(compiler: tuple[str, ...], target: Path) -> None:
    """Compile the kernel into a file, which appears whole or not at all.

    Raises:
        NoKernelError: the compiler fails; holds its last lines.
        OSError: the file cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    said = ""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as folder:
        made = Path(folder) / target.name
        for native in _NATIVE:
            command = [*compiler, *_FLAGS, native, "-o", str(made), str(SOURCE), "-lm"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
            except subprocess.TimeoutExpired:
                raise NoKernelError(f"{compiler[0]} did not end within {_BUILD_SECONDS:.0f} seconds") from None
            if done.returncode == 0:
                made.replace(target)
                return
            said = said or done.stderr
    raise NoKernelError(f"{compiler[0]} cannot build the kernel: {' '.join(said.split())[-300:]}")


def _key(compiler: tuple[str, ...]) -> str:
    """What decides the machine code: a home folder may be shared by machines of several kinds."""
    parts = [SOURCE.read_bytes(), " ".join((*compiler, *_FLAGS)).encode(), platform.machine().encode(), _processor()]
    parts.append(str(Path(compiler[0]).resolve().stat().st_mtime_ns).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> bytes:
    """The instruction sets of the processor, where the system names them; else its name."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return platform.processor().encode()
    return b"".join(sorted({line for line in lines if line.startswith((b"flags", b"Features", b"model name"))}))
