"""Builds what starts a program: the command line, environment variables and sandbox."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verbatim.core.errors import UsageError
from verbatim.environments.tools.isolation import (
    ENVIRONMENT,
    NO_ISOLATION,
    WORK,
    Isolation,
    SandboxLimits,
    find_isolation,
    ulimits,
)

FOLDER = "/program"
"""The path of the program's folder inside a sandbox, where it is read-only."""
PORT = 8100
"""The gateway's port inside a sandbox. It can be fixed, because the sandbox has its own network namespace, in which no
other server runs."""
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
QUIET = {
    "PYTHONUNBUFFERED": "1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "DO_NOT_TRACK": "1",
    "LITELLM_TELEMETRY": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "NO_PROXY": "127.0.0.1,localhost",
    "no_proxy": "127.0.0.1,localhost",
}
"""Environment variables that every program gets. They make its output unbuffered, and turn off telemetry and any proxy
between the program and the gateway."""

# File descriptor 3 is the real standard input. Only the `read` commands and the program use it; the scoring command
# must not. The exit status 125 means that the wrapper itself failed. In a sandbox, `kill -- -1` kills all other
# processes before the "done" mark is written, so that no output of the program can follow the mark.
_SCRIPT = """
exec 3<&0 </dev/null
{ulimits} || exit 125
printf '\\0{token} ready\\0'
IFS= read -r go <&3 || exit 125
cd {folder} || exit 125
{example}
{command} <&3 3<&-
status=$?
exec 3<&-
{end_others}
printf '\\0{token} done %s\\0' $status
{score}
exit 0
"""
# The scoring command must not run code that the program has planted. Interpreters run files from the home folder
# (Python runs *.pth files of user packages, for example), and the program can write to its own home folder.
_SCORE_SETTINGS = f"export HOME={FOLDER} PYTHONNOUSERSITE=1\n"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The settings with which a program is started."""

    command: tuple[str, ...]
    """The command line. The first word is the program's path; `{example}` stands for the path of the example's file."""
    folder: Path
    """The working directory."""
    variables: Mapping[str, str]
    """Additional environment variables."""
    limits: SandboxLimits
    isolation: Isolation
    shown: Mapping[str, str]
    """Folders that the sandbox shows: path outside, keyed by path inside."""
    score: str
    """A bash command that runs after the program and prints the reward on its last line; "" if there is none."""
    example_in_file: bool
    """True to pass the example in a file, False to pass it on standard input."""

    @classmethod
    def of(
        cls,
        command: str | Sequence[str],
        *,
        folder: str | None,
        variables: Mapping[str, str],
        limits: SandboxLimits,
        sandbox: bool,
        unsafe_allow: bool,
        visible: Sequence[str],
        score: str,
        example_in_file: bool,
    ) -> Launch:
        """Find the program and the folders that it needs, and return the settings.

        Raises:
            UsageError: the program or a folder does not exist, or no sandbox can show it.
        """
        words = tuple(shlex.split(command) if isinstance(command, str) else command)
        if not words:
            raise UsageError('program: the command is empty; expected for example ["python", "agent.py"]')
        if words[0] == "{python}":
            words = (sys.executable, *words[1:])
        place = Path(folder or ".").resolve()
        if not place.is_dir():
            raise UsageError(f"program: cwd = {folder!r} is not a folder")
        found = shutil.which(words[0], path=None if "/" not in words[0] else str(place)) or (
            str(place / words[0]) if os.access(place / words[0], os.X_OK) else None
        )
        if found is None:
            raise UsageError(
                f'program: there is no program {words[0]!r}; give its path, as in ["/usr/bin/python3", "agent.py"]'
            )
        isolation = find_isolation(unsafe_allow=unsafe_allow) if sandbox else NO_ISOLATION
        shown: dict[str, str] = {}
        if isolation.has_namespaces:
            shown = {
                FOLDER: str(place),
                **{str(path): str(path) for path in _prefixes(found)},
                **{str(Path(path).resolve()): str(Path(path).resolve()) for path in visible},
            }
            for inside, outside in shown.items():
                if Path(inside).is_relative_to("/tmp"):
                    raise UsageError(
                        f"program: a sandbox has its own /tmp and cannot show {inside}; put it "
                        "elsewhere, or set sandbox = false"
                    )
                _check_visible(Path(outside))
        return cls(
            command=(found, *words[1:]),
            folder=place,
            variables=dict(variables),
            limits=limits,
            isolation=isolation,
            shown=shown,
            score=score,
            example_in_file=example_in_file,
        )

    @property
    def is_inside(self) -> bool:
        """True if the program runs in a sandbox."""
        return self.isolation.has_namespaces

    def argv(self, token: str, work: str) -> list[str]:
        """Return the command line of a process that prints a mark when it is ready, waits for a line, and then runs the
        program.

        Args:
            token: Random text that is part of the marks.
            work: Path of a writable folder, as seen inside the sandbox.
        """
        example = f"{work}/example.json"
        read = f'IFS= read -r line <&3 && printf "%s\\n" "$line" >{shlex.quote(example)}'
        command = " ".join(shlex.quote(word.replace("{example}", example)) for word in self.command)
        limits = self.limits
        script = _SCRIPT.format(
            token=token,
            ulimits=ulimits(
                limits, "memory_mb", "open_files", *(("cpu_seconds", "disk_mb", "processes") if self.is_inside else ())
            ),
            folder=shlex.quote(FOLDER if self.is_inside else str(self.folder)),
            example=read if self.example_in_file else "",
            command=command,
            end_others="kill -s KILL -- -1 2>/dev/null" if self.is_inside else "",
            score=_SCORE_SETTINGS + self.score.replace("{work}", work) if self.is_inside and self.score else "",
        )
        return self.isolation.command(limits, script, self.shown)

    def score_argv(self, work: str) -> list[str]:
        """Return the command line that runs the scoring command of a program without a sandbox."""
        set_limits, folder = ulimits(self.limits, "memory_mb", "open_files"), shlex.quote(str(self.folder))
        return ["bash", "-c", f"{set_limits} && cd {folder} || exit 125\n{self.score.replace('{work}', work)}"]

    def environment(self, variables: Mapping[str, str], work: str) -> dict[str, str]:
        """Return all environment variables of the program."""
        own = {"PATH": f"{Path(self.command[0]).parent}:{ENVIRONMENT['PATH']}"} if self.is_inside else {}
        base = {**ENVIRONMENT, **own} if self.is_inside else dict(os.environ)
        return {
            **base,
            **QUIET,
            **self.variables,
            **variables,
            "VERBATIM_WORK_DIR": work,
            "VERBATIM_EXAMPLE": f"{work}/example.json",
        }

    def work_folder(self) -> tuple[str, tempfile.TemporaryDirectory[str] | None]:
        """Return (path, folder): the path of a writable folder for one process, as seen inside the sandbox; and the
        temporary folder to delete after the process, or None if the process runs in a sandbox."""
        if self.is_inside:
            return WORK, None
        folder = tempfile.TemporaryDirectory(prefix="verbatim-program-", ignore_cleanup_errors=True)
        return folder.name, folder


def _prefixes(program: str) -> list[Path]:
    """Return the installation folders of a program that is not in a system folder. These are the folders that hold the
    file and each symbolic link on the way to the file, so that the Python of a virtual environment finds its packages
    and its library. A folder that contains the user's home is never returned; a folder below it, or the path of the
    file or link itself, is returned instead."""
    found, path, home = [], Path(program), Path(os.environ.get("HOME") or "/").resolve()
    for _ in range(16):  # more than any real chain of links, and an end if they form a loop
        path = path.parent.resolve() / path.name
        prefix = path.parent.parent if path.parent.name == "bin" else path.parent
        if not str(path).startswith(tuple(f"{folder}/" for folder in _SYSTEM)):
            narrower = (folder for folder in (prefix, path.parent) if not home.is_relative_to(folder))
            found.append(next(narrower, path))
        if not path.is_symlink():
            break
        target = Path(os.readlink(path))
        path = target if target.is_absolute() else path.parent / target
    return list(dict.fromkeys(found))


def _check_visible(path: Path) -> None:
    """Refuse a folder that the sandbox cannot show."""
    if not path.exists():
        raise UsageError(f"program: there is no folder {path}")
    if os.geteuid() != 0:
        return
    closed = next((p for p in (path, *path.parents) if not p.stat().st_mode & 0o001), None)
    if closed is not None:
        raise UsageError(
            f"program: the sandbox runs as an ordinary user, who cannot enter {closed}, and so cannot read {path}; "
            f"install the program where all users can read it, `chmod o+x {closed}`, or set sandbox = false, which "
            "runs it as you, with your files and your network"
        )
