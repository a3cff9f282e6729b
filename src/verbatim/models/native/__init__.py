"""Compiles C files of this package with the machine's own compiler, once, and loads them.

What is written in C here exists a second time in plain torch: without a compiler callers take that, which is slower.
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
"""Environment variable: 0: nothing is compiled, and nothing compiled is used."""
_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi")
_VARIANTS = (("-march=native", "-fopenmp"), ("-march=native",), ("-fopenmp",), ())
"""Tried in this order. OpenMP's functions are not linked: those that torch has loaded are found when the library is
loaded, so that both use one team of threads. Where they are not found, the library has no threads, and a warning says
so."""
_PATIENCE = 120.0
"""Seconds that a compiler may take."""
_HUNG: set[tuple[str, ...]] = set()
"""Compilers that took longer, and are not asked again by this process: other options would take as long."""


@dataclass(frozen=True)
class CSource:
    """A C file as it was when the module that calls its functions was imported.

    Its text may change beneath a process, by an upgrade or a checkout, before it is compiled: functions of the new text
    may read other structures than those that a module of the old one fills in.
    """

    name: str
    files: tuple[tuple[str, bytes], ...]
    """Names and contents: the file itself, then the headers of this folder."""

    @classmethod
    def read(cls, path: Path) -> CSource:
        """Read a file that includes nothing but the headers of this folder, of the compiler and of the C library."""
        files = (path, *sorted(Path(__file__).parent.glob("*.h")))
        return cls(path.name, tuple((file.name, file.read_bytes()) for file in files))


@dataclass(frozen=True, kw_only=True, eq=False)
class Build:
    """What became of a C file on this machine."""

    functions: ctypes.CDLL | None = None
    """None where it could not be compiled, or where that is switched off."""
    options: str = ""
    """What it was compiled for: "-march=native -fopenmp"."""
    reason: str = ""
    """Why there are no functions, as a sentence part; why the first options were not possible; or empty."""
    is_off: bool = False
    """Whether `SWITCH` says that nothing is to be compiled."""


def library(source: CSource) -> ctypes.CDLL | None:
    """The functions of a C file, compiled for this processor; None where that is not possible, or switched off."""
    return build(source).functions


@cache
def build(source: CSource) -> Build:
    """Compile a C file for this processor, where that was not done before, and load it.

    The result lies in the user's cache folder, by source, compiler and processor. A call through `ctypes` does not hold
    the interpreter's lock. Its threads are those of the thread that calls: `torch.set_num_threads`.
    """
    import torch  # noqa: F401 - it loads OpenMP

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
    """With the best options that are possible.

    Raises:
        subprocess.TimeoutExpired: the compiler does not end.
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
    """The C compiler, with its first arguments: that of the variable `CC`, such as `ccache gcc`, or one of the usual
    names."""
    for name in (os.environ.get("CC", ""), *_COMPILERS):
        try:
            words = shlex.split(name)
        except ValueError:  # a quotation without its end
            continue
        if words and (path := shutil.which(words[0])) is not None:
            return path, *words[1:]
    return None


def _loaded(source: CSource, compiler: tuple[str, ...], flags: tuple[str, ...]) -> ctypes.CDLL:
    """The library of a C file: the one that is there, or where that is damaged or missing a new one.

    One that was damaged, or made from something else, would give wrong numbers, or end the process; one that was put
    there would do anything. So it is a file of ours in a folder of ours, its name ends with the digest of its content,
    and the content has that of the source and the compiler.

    Raises:
        subprocess.CalledProcessError, subprocess.TimeoutExpired: the compiler failed.
        OSError: it cannot be written or loaded.
    """
    folder, name = library_folder(), _name(source, compiler, flags)
    for found in sorted(folder.glob(f"{name}-*.so")):
        try:
            content = read_own(found)
        except FileNotFoundError:  # another process removes a damaged one at the same time
            continue
        is_whole = content is not None and found.stem.removeprefix(f"{name}-") == _digest(content)
        if content is not None and is_whole and _mark(name) in content:
            return ctypes.CDLL(str(found), mode=os.RTLD_NOW)
        what = "not ours alone" if content is None else "made from something else" if is_whole else "damaged"
        logger.warning("the compiled library %s is %s, and is made anew", found, what)
        found.unlink(missing_ok=True)
    return ctypes.CDLL(str(_compiled(source, compiler, flags, folder / name)), mode=os.RTLD_NOW)


def _name(source: CSource, compiler: tuple[str, ...], flags: tuple[str, ...]) -> str:
    """How the library of a C file is named: by all that it is made from."""
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
    """What stands in a library of this name: what it was made from."""
    return f"verbatim-made-from:{name}".encode()


def _compiled(source: CSource, compiler: tuple[str, ...], flags: tuple[str, ...], target: Path) -> Path:
    """Make the library; its name is `target`, with the digest of its content behind it."""
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        for file, text in source.files:  # what is compiled is what the digest is of
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
        with shared.open("rb") as made:  # half of a library, after a power failure, would end processes by SIGBUS
            os.fsync(made.fileno())
        found = target.with_name(f"{target.name}-{_digest(shared.read_bytes())}.so")
        os.replace(shared, found)  # processes that start together each make it, and the last one stays
    return found


@cache
def library_folder() -> Path:
    """Where libraries are kept: the user's cache, or a folder of this process where that cannot be written."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verbatim" / "native"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = why_not_own(folder)
        if found is None:
            with tempfile.TemporaryFile(dir=folder):
                return folder
        logger.warning(
            "compiled libraries are not kept: %s; a program that others write there would run as you. Name "
            "another folder in XDG_CACHE_HOME, or make it yours alone",
            found,
        )
        return Path(_own_folder().name)
    except (OSError, RuntimeError):  # no home
        return Path(_own_folder().name)


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="verbatim-native-")


@cache
def compiler_version(compiler: tuple[str, ...]) -> bytes:
    """What it says of itself; a subprocess.TimeoutExpired where it does not end."""
    return _run(compiler, [*compiler, "--version"], check=False)


def _run(compiler: tuple[str, ...], command: list[str], *, check: bool = True) -> bytes:
    """What a command of a compiler writes. One that does not end is killed with all that it has started, and no other
    one of this compiler is begun.

    Raises:
        subprocess.CalledProcessError, subprocess.TimeoutExpired: it failed.
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
    """Which file a program is: another one of the same version may compute otherwise."""
    about = os.stat(path)
    return f"{os.path.realpath(path)} {about.st_size} {about.st_mtime_ns}".encode()


@cache
def _processor() -> bytes:
    """What `-march=native` depends on: a cache folder may be shared by several machines."""
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
