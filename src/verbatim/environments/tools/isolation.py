"""Isolates scripts with bubblewrap, with plain user namespaces, or not at all. Each process tests once which of these
ways work on this machine."""

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
"""The only environment variables that an isolated script inherits."""
WORK = "/tmp/work"
"""The working directory as seen inside the sandbox. It lies in the same file system as /tmp, so one size limit applies
to both."""

NOBODY = "65534"
"""User and group id of `nobody` on Linux."""
NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts")
INSTALL = "install bubblewrap (Debian, Ubuntu: `apt-get install bubblewrap`; Fedora: `dnf install bubblewrap`)"


@dataclass(frozen=True, kw_only=True)
class SandboxLimits:
    """Resource limits of one sandbox. All limits must be above 0."""

    timeout: float = 5.0
    """Time limit of one command, in seconds."""
    cpu_seconds: int = 10
    """CPU time limit of one process, in seconds."""
    memory_mb: int = 256
    """Memory limit in MiB of each process, and also of all processes together."""
    processes: int = 32
    """Maximum number of processes at a time. The sandbox's own shell needs two of them."""
    open_files: int = 128
    """Maximum number of open files of one process."""
    disk_mb: int = 16
    """Maximum total size in MiB of all files in the temporary directory."""
    output_bytes: int = 8192
    """Maximum number of bytes of a command's output that are shown to the model."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value <= 0:
                raise UsageError(f"sandbox: {field.name} = {value}; expected a value above 0, such as {field.default}")


def ulimits(limits: SandboxLimits, *names: str) -> str:
    """Return the bash command that sets soft and hard limits on processes. A limit above this process's own hard limit
    is lowered to that hard limit, because bash would refuse it.

    Args:
        limits: The sandbox's limits. `memory_mb` sets RLIMIT_DATA, which counts writable memory. RLIMIT_AS would also
            count address space that is only reserved, as WebAssembly and the JVM do.
        names: The fields of `limits` to set.
    """
    kinds = {  # bash's option and its value, the kernel's limit, and the option's unit in bytes or counts
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
    """Function (limits, script) that returns the command line to run a bash script under these limits. An optional
    third argument maps paths inside the sandbox to folders outside. Each folder is shown read-only at its path."""
    has_namespaces: bool = True
    """True if the script is process 1 of its own process namespace."""


def find_isolation(*, unsafe_allow: bool = False) -> Isolation:
    """Return the strongest isolation that works on this machine. With `unsafe_allow`, return the isolation "none" if no
    other works.

    Raises:
        UsageError: no isolation works; the message lists what was tried and what to install.
    """
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
    """Return (the first isolation that works, no reasons). If no isolation works, return (None, the reason why each
    isolation failed). Cached, because each attempt runs a script."""
    tried = []
    for isolation in isolations:
        problem = why_not(isolation)
        if problem is None:
            return isolation, ()
        tried.append(f"{isolation.name}: {problem}")
    return None, tuple(tried)


def why_not(isolation: Isolation) -> str | None:
    """Explain why an isolation does not work on this machine, after a trial; return None if it works."""
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
    """Return a command prefix that kills the command when its parent ends (for the kernel, that is the thread that
    started it), and that never runs it as the real root, which is exempt from the limit on processes."""
    other = ["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"] if os.geteuid() == 0 else []
    return [_program("setpriv"), *other, "--no-new-privs", "--pdeathsig", "KILL", "--"]


def _system_folders() -> list[tuple[str, str | None]]:
    """Return the system folders and files to show read-only: (path, None), or (link, target) for a symbolic link."""
    shown: list[tuple[str, str | None]] = [("/usr", None)]
    for path in map(Path, ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache")):
        if path.is_symlink():
            shown.append((str(path), os.readlink(path)))
        elif path.exists():
            shown.append((str(path), None))
    return shown


# _WORK mounts the temporary directory as a tmpfs with limits, because bubblewrap's own tmpfs has no limit on the number
# of files, and each file takes kernel memory. _SEAL then drops the capabilities that a process has in its new
# namespaces, and forbids nested user namespaces: in a nested one, the process would have the capabilities again, and
# could mount in-memory file systems of any size.
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
"""Capabilities that `_WORK` and `_SEAL` need. The last thing that `_SEAL` does is to drop these capabilities."""


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
        # Bubblewrap's file systems are in memory and have no size limit, so none of them may stay writable.
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


# Does in bash what bubblewrap does: builds a root in a tmpfs, makes all of it read-only, and switches to it. The
# arguments are triples (path inside, link target or "", path outside) up to "--", then the size in bytes and the
# script.
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
"""The isolations in order of preference."""
NO_ISOLATION = Isolation(name="none", command=_none, has_namespaces=False)
