"""Compiles this package's C files with the machine's own compiler, caches the libraries, and loads them.

Every function written in C also exists in plain torch. Without a compiler, callers use the slower torch version.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from verbatim.core.children import run_program
from verbatim.models.native.ownership import read_own, why_not_own

logger = logging.getLogger(__name__)

SWITCH = "VERBATIM_NATIVE"
"""Environment variable. The value "0" turns off compiling and the use of compiled libraries."""
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi")
_VARIANTS = (("-march=native", "-fopenmp"), ("-march=native",), ("-fopenmp",), ())
"""Compiler options, tried in this order. The OpenMP runtime is deliberately not linked: the library's OpenMP symbols
resolve to the runtime that torch has loaded, so that both share one team of threads. If the symbols do not resolve, the
library is built without threads, and a warning is logged."""
_PATIENCE = 120.0
"""Timeout of a compiler run in seconds."""
_HUNG: set[tuple[str, ...]] = set()
"""Compilers that timed out. This process does not run such a compiler again, because it would also hang with other
options."""


@dataclass(frozen=True)
class CSource:
    """A C file, read when the Python module that calls its functions is imported.

    It is compiled later, and an upgrade or a checkout may replace the file in between. The functions in the new file
    could then expect structs that differ from the structs that the already imported module passes.
    """

    name: str
    files: tuple[tuple[str, bytes], ...]
    """Names and contents: the C file itself, then this folder's headers."""

    @classmethod
    def read(cls, path: Path) -> CSource:
        """Read a C file. It may include only headers of this folder, of the compiler and of the C library."""
        files = (path, *sorted(Path(__file__).parent.glob("*.h")))
        return cls(path.name, tuple((file.name, file.read_bytes()) for file in files))


@dataclass(frozen=True, kw_only=True, eq=False)
class Build:
    """The result of compiling a C file on this machine."""

    functions: ctypes.CDLL | None = None
    """The loaded library, or None if it could not be compiled or compiling is turned off."""
    options: str = ""
    """The compiler options that worked, such as "-march=native -fopenmp"."""
    reason: str = ""
    """Why there is no library, or why the preferred options failed; "" if the preferred options worked."""
    is_off: bool = False
    """True if `SWITCH` turns compiling off."""


def library(source: CSource) -> ctypes.CDLL | None:
    """The library of a C file, compiled for this processor, or None if compiling is not possible or is turned off."""
    return build(source).functions


@cache
def build(source: CSource) -> Build:
    """Load the library of a C file, compiled for this processor; compile it if the cache does not have it.

    The user's cache folder keeps libraries by source, compiler and processor. Calls through `ctypes` release the GIL,
    and use as many threads as `torch.set_num_threads` has set for the calling thread.
    """
    import torch  # noqa: F401 - loads the OpenMP runtime that the library's symbols resolve to

    compiler, is_off = find_compiler(), os.environ.get(SWITCH) == "0"
    if is_off or compiler is None:
        reason = f"{SWITCH} = 0" if is_off else f"no C compiler was found ({', '.join(_COMPILERS)}, or what CC names)"
        logger.info("%s is not compiled: %s", source.name, reason)
        return Build(reason=reason, is_off=is_off)
    try:
        return _built(source, compiler)
    except subprocess.TimeoutExpired:
        reason = f"{' '.join(compiler)} took more than {_PATIENCE:g} s"
        logger.warning("%s is not compiled: %s", source.name, reason)
        return Build(reason=reason)


def _built(source: CSource, compiler: tuple[str, ...]) -> Build:
    """Compile and load with the first of `_VARIANTS` that works.

    Raises:
        subprocess.TimeoutExpired: the compiler hangs.
    """
    reason = ""
    for variant in _VARIANTS:
        try:
            found, options = _loaded(source, compiler, (*_FLAGS, *variant)), " ".join(variant) or "(none)"
        except subprocess.CalledProcessError as error:
            reason = error.stderr.decode(errors="replace")
        except OSError as error:
            reason = str(error)
        else:
            if reason:
                logger.warning(
                    "%s was compiled with %s and the options %s, which is slower: %.500s",
                    source.name,
                    " ".join(compiler),
                    options,
                    reason,
                )
            return Build(functions=found, options=options, reason=reason)
    logger.warning("%s could not be compiled with %s: %.500s", source.name, " ".join(compiler), reason)
    return Build(reason=f"{' '.join(compiler)} could not compile it: {reason:.500}")


def find_compiler() -> tuple[str, ...] | None:
    """The command of the C compiler: the value of `CC` (such as `ccache gcc`), or else one of the usual names."""
    for name in (os.environ.get("CC", ""), *_COMPILERS):
        try:
            words = shlex.split(name)
        except ValueError:  # CC has an unclosed quote
            continue
        if words and (path := shutil.which(words[0])) is not None:
            return path, *words[1:]
    return None


def _loaded(source: CSource, compiler: tuple[str, ...], flags: tuple[str, ...]) -> ctypes.CDLL:
    """The library of a C file, from the cache, or compiled if the cached library is missing or damaged.

    A library that is damaged or built from a different source would compute wrong numbers or crash the process; a
    library planted by another user could run anything. So a cached library is loaded only if the file and its folder
    belong to this user, the file name ends with the digest of its content, and the content names the source and
    compiler that it was built from.

    Raises:
        subprocess.CalledProcessError, subprocess.TimeoutExpired: the compiler failed.
        OSError: the library cannot be written or loaded.
    """
    folder, name = library_folder(), _name(source, compiler, flags)
    for found in sorted(folder.glob(f"{name}-*.so")):
        try:
            content = read_own(found)
        except FileNotFoundError:  # another process has just removed the library because it was damaged
            continue
        is_whole = content is not None and found.stem.removeprefix(f"{name}-") == _digest(content)
        if content is not None and is_whole and _mark(name) in content:
            return ctypes.CDLL(str(found), mode=os.RTLD_NOW)
        what = "not yours alone" if content is None else "built from another source" if is_whole else "damaged"
        logger.warning("the compiled library %s is %s; compiling it again", found, what)
        found.unlink(missing_ok=True)
    return ctypes.CDLL(str(_compiled(source, compiler, flags, folder / name)), mode=os.RTLD_NOW)


def _name(source: CSource, compiler: tuple[str, ...], flags: tuple[str, ...]) -> str:
    """The file name of a C file's library. It contains a digest of everything that the compiled code depends on."""
    texts = [part for name, text in source.files for part in (name.encode(), text)]
    parts = [
        *texts,
        " ".join(compiler).encode(),
        *(flag.encode() for flag in flags),
        compiler_version(compiler),
        _program(compiler[0]),
        _processor(),
        " ".join(platform.libc_ver()).encode(),
    ]
    return f"{Path(source.name).stem}-{_digest(b''.join(hashlib.sha256(part).digest() for part in parts))}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


def _mark(name: str) -> bytes:
    """The bytes that a library of this name contains, so that a renamed library is detected."""
    return f"verbatim-made-from:{name}".encode()


def _compiled(source: CSource, compiler: tuple[str, ...], flags: tuple[str, ...], target: Path) -> Path:
    """Compile the library into a file whose name is `target`, followed by the digest of its content."""
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        for file, text in source.files:  # compile the text that was hashed; the file on disk may have changed since
            (Path(name) / file).write_bytes(text)
        made_from, shared = Path(name) / "verbatim-made-from.c", Path(name) / "x.so"
        made_from.write_text(f'const char verbatim_made_from[] = "{_mark(target.name).decode()}";\n', encoding="ascii")
        files = {Path(name) / source.name: Path(name) / "x.o", made_from: Path(name) / "y.o"}
        for command in (
            *([*compiler, *flags, "-c", str(file), "-o", str(made)] for file, made in files.items()),
            [*compiler, "-shared", *map(str, files.values()), "-o", str(shared), "-lm"],
        ):
            _run(compiler, command)
        shared.chmod(0o700)
        with shared.open("rb") as made:  # a library truncated by a power failure would kill processes with SIGBUS
            os.fsync(made.fileno())
        found = target.with_name(f"{target.name}-{_digest(shared.read_bytes())}.so")
        os.replace(shared, found)  # atomic: processes that start together each compile it, and the last one wins
    return found


@cache
def library_folder() -> Path:
    """The folder of compiled libraries: in the user's cache, or temporary if the cache is unsafe or not writable."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verbatim" / "native"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = why_not_own(folder)
        if found is None:
            with tempfile.TemporaryFile(dir=folder):
                return folder
        logger.warning(
            "compiled libraries are not cached: %s, so others could put code there that would run as you. Make that "
            "folder writable for you alone, or set XDG_CACHE_HOME to another folder",
            found,
        )
        return Path(_own_folder().name)
    except (OSError, RuntimeError):  # not writable, or no home directory
        return Path(_own_folder().name)


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="verbatim-native-")


@cache
def compiler_version(compiler: tuple[str, ...]) -> bytes:
    """The output of `--version`. Raises subprocess.TimeoutExpired if the compiler hangs."""
    return _run(compiler, [*compiler, "--version"], check=False)


def _run(compiler: tuple[str, ...], command: list[str], *, check: bool = True) -> bytes:
    """The output of a compiler command. A hanging command is killed with its children, and its compiler is not run
    again.

    Raises:
        subprocess.CalledProcessError, subprocess.TimeoutExpired: the command failed or hung.
    """
    if compiler in _HUNG:
        raise subprocess.TimeoutExpired(command, _PATIENCE)
    try:
        done = run_program(command, timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        _HUNG.add(compiler)
        raise
    if check:
        done.check_returncode()
    return done.stdout


@cache
def _program(path: str) -> bytes:
    """What identifies a program's file. The version is not enough: two builds of one version may generate different
    code."""
    about = os.stat(path)
    return f"{os.path.realpath(path)} {about.st_size} {about.st_mtime_ns}".encode()


@cache
def _processor() -> bytes:
    """What `-march=native` depends on. This text is part of the library's name, because machines may share a cache
    folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}".encode()
    named = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    return "".join(
        value
        for name, value in sorted(named.items())
        if name.strip() in ("model name", "flags", "Features", "CPU part")
    ).encode()


__all__ = ["SWITCH", "Build", "CSource", "build", "compiler_version", "find_compiler", "library", "library_folder"]
