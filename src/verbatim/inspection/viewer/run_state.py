"""Reads the state of a run from its folder: its name, its steps, and whether the run is running."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from verbatim.core.disk import is_inside, read_regular
from verbatim.core.errors import CheckpointError, UsageError
from verbatim.core.redaction import redacted
from verbatim.core.texts import cut, end_of_file
from verbatim.logs.checkpoints.hold import ORCHESTRATOR, TRAINER
from verbatim.logs.checkpoints.lock import is_locked
from verbatim.logs.checkpoints.origin import Origin, read_origin
from verbatim.logs.checkpoints.stored_config import CONFIG

_LOCKS = Path("/proc/locks")
_PARTS = (CONFIG, "metrics.jsonl", "trajectories", "evaluations")


def check_run(folder: Path, command: str = "verbatim view", parts: Sequence[str] = _PARTS) -> None:
    """Reject a folder that is not a run folder.

    Args:
        folder: The folder.
        command: The command that the user typed.
        parts: Names of files and folders. A run folder has at least one of them.

    Raises:
        UsageError: the folder is not a run folder; the message says what was found and what to type.
    """
    if any((folder / part).exists() for part in parts):
        return
    if not folder.exists():
        raise UsageError(f"there is no folder {folder}. {_near(folder.parent, command)}")
    if not folder.is_dir():
        raise UsageError(f"{folder} is a file; expected a run folder, such as runs/NAME/latest")
    names = sorted(path.name for path in folder.iterdir())
    found = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "nothing"
    raise UsageError(
        f"{folder} is not a run folder: it has none of {', '.join(parts)}; found {found}. {_near(folder, command)}"
    )


def _near(folder: Path, command: str) -> str:
    """One sentence that says what to type instead."""
    for pattern in (CONFIG, f"*/{CONFIG}", f"*/*/{CONFIG}", f"runs/*/*/{CONFIG}"):
        try:
            runs = sorted(path.parent for path in folder.glob(pattern))
        except OSError:
            continue
        if runs:
            latest = next((run for run in runs if run.name == "latest"), runs[-1])
            return f"Type {command} {latest}"
    return f"Type {command} FOLDER with a run folder, such as runs/NAME/latest"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run."""

    name: str
    state: str
    """"running", "finished", "stopped" (can be resumed), "failed" (the log ends with an error) or "unknown"."""
    max_steps: int | None


def read_state(folder: Path) -> RunState:
    """Read the current state of the run."""
    config = read_config(folder)
    name, steps = config.get("name"), config.get("max_steps")
    return RunState(
        name=name if isinstance(name, str) and name else folder.resolve().name,
        state=_state(folder),
        max_steps=steps if type(steps) is int else None,
    )


def read_config(folder: Path) -> dict[str, Any]:
    """The stored configuration as nested tables; empty if the file is missing or damaged."""
    try:
        return tomllib.loads(read_text(folder / CONFIG))
    except (OSError, ValueError, RecursionError):
        return {}


def origin_in(folder: Path, problems: list[str]) -> Origin | None:
    """The origin of a forked run; None for any other run.

    If the record of the origin is damaged, the result is None too, and a sentence is added to `problems`.
    """
    try:
        return read_origin(folder)
    except CheckpointError as error:
        problems.append(str(error))
        return None


def config_text(folder: Path) -> str:
    """The stored configuration as TOML, without secrets; only a TOML comment if the file is missing or damaged."""
    try:
        text = read_text(folder / CONFIG)
        config = tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        return f"# {CONFIG} cannot be read: {cut(str(error), 200)}\n"
    safe = redacted(config)
    return text if safe == config else tomli_w.dumps(safe)


def summary_text(folder: Path) -> str | None:
    """The summary that the run printed at its end; None if the run has not ended."""
    for name in ("summary.txt", "summary.json"):
        try:
            return read_text(folder / name, errors="replace")
        except OSError:
            continue
    return None


def read_text(path: Path, errors: str = "strict") -> str:
    """Read the text of a regular file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not UTF-8.
    """
    return read_regular(path).decode("utf-8", errors)


def _state(folder: Path) -> str:
    locks = [folder / f"{role}.lock" for role in (ORCHESTRATOR, TRAINER)]
    if any(_is_held(lock) for lock in locks):
        return "running"
    if (folder / "summary.json").is_file():
        return "finished"
    if not any(lock.is_file() for lock in locks):
        return "unknown"
    log = folder / "logs" / f"{ORCHESTRATOR}.log"
    try:
        last = end_of_file(log, most=2**16)[-40:] if is_inside(folder, log) else []
    except OSError:
        last = []
    return "failed" if any(" ERROR " in line or " CRITICAL " in line for line in last) else "stopped"


def _is_held(lock: Path) -> bool:
    """True if a process holds this lock.

    This is read from the system's list of locks, because an attempt to take the lock could interfere with a run that is
    just starting.
    """
    try:
        inode = lock.stat().st_ino
    except OSError:
        return False
    try:
        held = _LOCKS.read_text(encoding="ascii", errors="replace")
    except OSError:
        return is_locked(lock)
    return any(f":{inode} " in line and "FLOCK" in line and "->" not in line for line in held.splitlines())
