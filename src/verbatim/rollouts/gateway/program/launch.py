"""Says how a program is started: its command, its environment variables, and the sandbox around it."""

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
"""The program's folder as seen from inside of a sandbox, read-only."""
PORT = 8100
"""The gateway's port inside of a sandbox, which has a network of its own with nothing else in it."""
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
"""Variables that every program gets: lines are written at once, nothing is sent elsewhere, and no proxy stands between
the program and the gateway."""

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
# Interpreters run files that they find in the home folder, to which the program could write: Python the *.pth files of
# its user packages.
_SCORE_SETTINGS = f"export HOME={FOLDER} PYTHONNOUSERSITE=1\n"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a program is started."""

    command: tuple[str, ...]
    """The command line; the first word is the program's path. `{example}` is the file that holds the example."""
    folder: Path
    """Where it runs."""
    variables: Mapping[str, str]
    """Further environment variables."""
    limits: SandboxLimits
    isolation: Isolation
    shown: Mapping[str, str]
    """Folders that are visible in the sandbox, by their paths inside."""
    score: str
    """A bash command that runs after the program and writes the reward on its last line; "" = none."""
    example_in_file: bool
    """Whether the example is in a file, not on standard input."""

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
        """Find the program, and the folders that it needs.

        Raises:
            UsageError: no such program or folder, or no sandbox that can show them.
        """
        words = tuple(shlex.split(command) if isinstance(command, str) else command)
        if not words:
            raise UsageError('program: the command is empty; expected for example ["python", "agent.py"]')
        if words[0] == "{python}":
            words = (sys.executable, *words[1:])
        place = Path(folder or ".").resolve()
        if not place.is_dir():
            raise UsageError(f"program: cwd = {folder!r} is no folder")
        found = shutil.which(words[0], path=None if "/" not in words[0] else str(place)) or (
            str(place / words[0]) if os.access(place / words[0], os.X_OK) else None
        )
        if found is None:
            raise UsageError(
                f"program: there is no program {words[0]!r}; give the path of one, as in "
                '["/usr/bin/python3", "agent.py"]'
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
                        f"program: a sandbox has a /tmp of its own and cannot show {inside}; put it "
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
        """Whether it runs in a sandbox."""
        return self.isolation.has_namespaces

    def argv(self, token: str, work: str) -> list[str]:
        """The command line of a process that says that it is ready, waits for a line, and runs the program.

        Args:
            token: Of the marks that it writes.
            work: A folder that it can write to, as seen from inside.
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
        """The command line of the scoring command, without a sandbox."""
        set_limits, folder = ulimits(self.limits, "memory_mb", "open_files"), shlex.quote(str(self.folder))
        return ["bash", "-c", f"{set_limits} && cd {folder} || exit 125\n{self.score.replace('{work}', work)}"]

    def environment(self, variables: Mapping[str, str], work: str) -> dict[str, str]:
        """All environment variables."""
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
        """A folder for one process to write to, as seen from inside, and the one to delete afterwards."""
        if self.is_inside:
            return WORK, None
        folder = tempfile.TemporaryDirectory(prefix="verbatim-program-", ignore_cleanup_errors=True)
        return folder.name, folder


def _prefixes(program: str) -> list[Path]:
    """The folders that a program outside of the system's is installed in: those of the file, and of each link on the
    way to it, so that a Python of a virtual environment finds its packages and its library. Never a folder that holds
    the user's home: then the narrower one."""
    found, path, home = [], Path(program), Path(os.environ.get("HOME") or "/").resolve()
    for _ in range(16):
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
    """Refuse a folder that the sandbox could not show."""
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
