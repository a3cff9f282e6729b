"""Isolates scripts: by bubblewrap, by plain user namespaces (tested once), or not at all."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from verbatim.core.children import run_program, text_of
from verbatim.core.errors import UsageError

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG": "C.UTF-8", "TERM": "dumb"}
"""All variables that an isolated script inherits."""
WORK = "/tmp/work"
"""The temporary directory as seen from inside; it and /tmp above it share one file system."""

NOBODY = "65534"
NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts")
INSTALL = "install bubblewrap (Debian, Ubuntu: `apt-get install bubblewrap`; Fedora: `dnf install bubblewrap`)"


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Resource limits of one sandbox, all above 0."""

    timeout: float = 5.0
    """Seconds for one command."""
    cpu_seconds: int = 10
    """CPU seconds of one process."""
    memory_mb: int = 256
    """MiB of data that one process may have, and that all of them may hold together."""
    processes: int = 32
    """Processes at a time; the sandbox's own shell needs two."""
    open_files: int = 128
    """Open files of one process."""
    disk_mb: int = 16
    """MiB of all files in the temporary directory together."""
    output_bytes: int = 8192
    """Bytes shown of one command's output."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value <= 0:
                raise UsageError(f"sandbox: {field.name} = {value}; expected more than 0, as in {field.default}")


def ulimits(limits: SandboxLimits, *names: str) -> str:
    """The bash command that sets limits of processes, for good. One that is above what this process may set is lowered
    to that: a system that allows 1,024 open files has sandboxes with as many.

    Args:
        limits: Of the sandbox. `memory_mb` is the kernel's RLIMIT_DATA, memory that can be written to; address space
            that is only reserved, as by WebAssembly and the JVM, is free.
        names: Those that are set, of `limits`.
    """
    kinds = {  # the option, its value, the kernel's limit, and bytes of one unit
        "cpu_seconds": ("-t", limits.cpu_seconds, resource.RLIMIT_CPU, 1),
        "memory_mb": ("-d", limits.memory_mb << 10, resource.RLIMIT_DATA, 1024),
        "disk_mb": ("-f", limits.disk_mb << 10, resource.RLIMIT_FSIZE, 1024),
        "open_files": ("-n", limits.open_files, resource.RLIMIT_NOFILE, 1),
        "processes": ("-u", limits.processes, resource.RLIMIT_NPROC, 1),
    }
    words = ["ulimit -c 0 && ulimit"]
    for option, value, kind, unit in (kinds[name] for name in names):
        _, most = resource.getrlimit(kind)
        words += [option, str(value if most == resource.RLIM_INFINITY else min(value, most // unit))]
    return " ".join(words)


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """A way to isolate a script."""

    name: str
    """"bubblewrap", "unshare" or "none"."""
    command: Callable[..., list[str]]
    """(limits, script) -> the command line that runs a bash script under these limits. A third argument maps further
    folders that are visible, read-only, by their paths inside to those outside."""
    has_namespaces: bool = True
    """Whether the script is process 1 of a process namespace of its own."""


def find_isolation(*, unsafe_allow: bool = False) -> Isolation:
    """The strongest isolation that works on this machine; with `unsafe_allow`, no isolation if none works. Otherwise a
    UsageError says what was tried and what to install."""
    found, tried = _try_all(ISOLATIONS)
    if found is not None:
        return found
    if unsafe_allow:
        return NO_ISOLATION
    raise UsageError(
        f"a sandbox needs Linux with bubblewrap or user namespaces, and none works here ({'; '.join(tried)}); "
        f"{INSTALL}, allow user namespaces, or set unsafe_allow = true, which runs the model's commands as you, with "
        "your files and your network"
    )


@cache
def _try_all(isolations: tuple[Isolation, ...]) -> tuple[Isolation | None, tuple[str, ...]]:
    tried = []
    for isolation in isolations:
        problem = why_not(isolation)
        if problem is None:
            return isolation, ()
        tried.append(f"{isolation.name}: {problem}")
    return None, tuple(tried)


def why_not(isolation: Isolation) -> str | None:
    """Why an isolation does not work here, found by running it; None: it works."""
    try:
        command = isolation.command(SandboxLimits(), f"cd /proc/self/ns && readlink {' '.join(NAMESPACES)}")
        done = run_program(command, environment=ENVIRONMENT, folder="/", timeout=30)
        own = [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES]
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode:
        return " ".join(text_of(done.stderr).split())[:200] or f"exit status {done.returncode}"
    inside = text_of(done.stdout).split()
    shared = [name for name, here, there in zip(NAMESPACES, own, inside, strict=True) if here == there]
    return f"it shares the {', '.join(shared)} namespace" if shared else None


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise FileNotFoundError(f"there is no {name}")
    return path


def _as_nobody() -> list[str]:
    """Command prefix: killed with its parent (for the kernel, the thread that started it), and never run as the real
    root, to whom the limit on processes does not apply."""
    other = ["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"] if os.geteuid() == 0 else []
    return [_program("setpriv"), *other, "--no-new-privs", "--pdeathsig", "KILL", "--"]


def _system_folders() -> list[tuple[str, str | None]]:
    """System folders and files that are visible, read-only: (path, None), or (link, target)."""
    shown: list[tuple[str, str | None]] = [("/usr", None)]
    for path in map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")):
        if path.is_symlink():
            shown.append((str(path), os.readlink(path)))
        elif path.exists():
            shown.append((str(path), None))
    return shown


# Mounts the temporary directory, then drops privileges: a process in new namespaces holds capabilities over them; a
# nested user namespace would give them back, and with them in-memory file systems of any size. Bubblewrap's own file
# systems have no limit on the number of files, each of which takes kernel memory.
_WORK = """
mount -t tmpfs -o size={size},nr_inodes=10k,mode=755,nosuid,nodev work {at}
mkdir {at}/work
"""
_SEAL = """
echo 0 >/proc/sys/user/max_user_namespaces
cd $HOME
exec setpriv --bounding-set=-all --inh-caps=-all --ambient-caps=-all --securebits=+noroot,+noroot_locked \\
  --no-new-privs bash -c "{script}"
"""
_MOUNTING = ("CAP_SYS_ADMIN", "CAP_SYS_RESOURCE", "CAP_SETPCAP")


def _bubblewrap(limits: SandboxLimits, script: str, shown: Mapping[str, str] | None = None) -> list[str]:
    system = [
        word
        for path, target in _system_folders()
        for word in (("--ro-bind", path, path) if target is None else ("--symlink", target, path))
    ]
    for inside, outside in (shown or {}).items():
        system += ["--ro-bind", outside, inside]
    return [
        *_as_nobody(),
        _program("bwrap"),
        "--unshare-all",
        "--unshare-user",
        "--uid",
        "0",
        "--gid",
        "0",
        "--hostname",
        "terminal",
        "--die-with-parent",
        "--as-pid-1",
        "--cap-drop",
        "ALL",
        *(word for name in _MOUNTING for word in ("--cap-add", name)),
        *system,
        "--proc",
        "/proc",
        "--dev",
        "/dev",
        "--dir",
        "/tmp",
        # Bubblewrap's file systems lie in memory, without a size limit, so none of them stays writable.
        "--remount-ro",
        "/dev",
        "--remount-ro",
        "/",
        "--chdir",
        "/",
        "--setenv",
        "HOME",
        WORK,
        "--",
        "bash",
        "-c",
        f"set -e\n{_WORK.format(at='/tmp', size='$1')}{_SEAL.format(script='$2')}",
        "bash",
        str(limits.disk_mb << 20),
        script,
    ]


# The same as bubblewrap, by hand.
_UNSHARE = """
set -e
new=/tmp
mount -t tmpfs -o size=64k,nr_inodes=1k,mode=755,nosuid,nodev sandbox $new
cd $new
while [[ $1 != -- ]]; do
  mkdir -p "./${1%/*}"
  if [[ $2 ]]; then ln -s "$2" ".$1"; else
    if [[ -d $3 ]]; then mkdir -p ".$1"; else : >".$1"; fi
    mount --rbind "$3" ".$1"
  fi
  shift 3
done
while read -r _ _ _ _ point _; do
  [[ $point != $new/* ]] || mount -o remount,bind,ro,nosuid,nodev "$point"
done </proc/self/mountinfo
mkdir dev proc tmp old
for device in null zero full random urandom; do : >dev/$device; mount --bind /dev/$device dev/$device; done
ln -s /proc/self/fd dev/fd
mount -t proc -o nosuid,nodev,noexec proc proc
@work
pivot_root . old
umount -l /old
mount -o remount,bind,ro,nosuid,nodev /
hostname terminal
@seal
""".replace("@work", _WORK.format(at="tmp", size="$2")).replace("@seal", _SEAL.format(script="$3"))


def _unshare(limits: SandboxLimits, script: str, shown: Mapping[str, str] | None = None) -> list[str]:
    system = [word for path, target in _system_folders() for word in (path, target or "", path)]
    system += [word for inside, outside in (shown or {}).items() for word in (inside, "", outside)]
    return [
        *_as_nobody(),
        _program("unshare"),
        "--user",
        "--map-root-user",
        "--mount",
        "--pid",
        "--net",
        "--ipc",
        "--uts",
        "--fork",
        "--kill-child",
        "env",
        f"HOME={WORK}",
        "bash",
        "-c",
        _UNSHARE,
        "bash",
        *system,
        "--",
        str(limits.disk_mb << 20),
        script,
    ]


def _none(limits: SandboxLimits, script: str, shown: Mapping[str, str] | None = None) -> list[str]:
    return [_program("bash"), "-c", script]


ISOLATIONS = (Isolation(name="bubblewrap", command=_bubblewrap), Isolation(name="unshare", command=_unshare))
"""In order of preference."""
NO_ISOLATION = Isolation(name="none", command=_none, has_namespaces=False)
