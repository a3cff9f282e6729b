"""Locks a run folder for one process per role.

The folder is locked before the configuration is checked, so that a second command on the same folder is refused
immediately. If a check fails, the folder is released and, if the run was new, restored to its previous state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verbatim.config.schema import RunConfig
from verbatim.core.disk import refuse_link
from verbatim.core.errors import UsageError
from verbatim.logs.checkpoints.lock import ANOTHER_FOLDER, FolderLock, is_lock_file
from verbatim.logs.checkpoints.ownership import (
    NAMES,
    claim,
    is_claimed,
    refuse_what_is_not_of_a_beginning,
    require_ours,
    unclaim,
)
from verbatim.logs.checkpoints.stored_config import CONFIG

RUNS = Path("runs")
LATEST = "latest"
BEST, TEMPORARY_BEST = "best", ".best.tmp"
"""`BEST` is the only symbolic link in a run folder; it points to the weights in the checkpoint of the best evaluation.
`TEMPORARY_BEST` is the name of this link while it is being created."""
ORCHESTRATOR, TRAINER = "orchestrator", "trainer"
"""The roles of a run's processes. Each role has its own lock and log, such as `orchestrator.lock` and
`logs/orchestrator.log`."""
LOCKS = (f"{ORCHESTRATOR}.lock", f"{TRAINER}.lock")
_ATTEMPTS = 20
"""Maximum number of attempts to hold a new folder while other processes keep creating and removing it."""
_LEAVING = 10.0
"""Seconds to wait for the trainer of a killed run, which exits once it notices that its orchestrator has ended."""


@dataclass(eq=False, kw_only=True)
class Held:
    """A folder that is locked for this process. So far, only the lock file and the marker are in it."""

    path: Path
    """The folder."""
    lock: FolderLock
    """The lock of this process's role."""
    made: tuple[Path, ...] = ()
    """The folder and its parents that did not exist before, the innermost first."""
    is_new: bool = False
    """True if the folder did not belong to a run before; `give_up` then removes the marker."""
    _is_taken: bool = False

    def take(self) -> FolderLock:
        """Hand over the lock, which the caller must then release."""
        self._is_taken = True
        return self.lock

    def give_up(self) -> None:
        """Release the folder, unless `take` has handed over its lock. A new folder is restored to its previous
        state."""
        if self._is_taken:
            return
        if self.is_new:  # while still locked, because afterwards another process may begin a run here
            unclaim(self.path)
            self.lock.remove()
        self.lock.release()
        for folder in self.made if self.is_new else ():
            try:
                folder.rmdir()
            except OSError:  # not empty, because another process has written into it
                return


def lock_of(path: Path, role: str) -> FolderLock:
    """Lock a run folder for a role.

    Raises:
        UsageError: another process holds the lock.
    """
    return FolderLock(path, f"{role}.lock", patience=_LEAVING if role == TRAINER else 0.0)


def hold_new(path: Path, role: str = ORCHESTRATOR) -> Held:
    """Hold the folder of a new run. The folder must be empty or not exist.

    Raises:
        UsageError: the folder contains a run or other files, is in use, or cannot be written to.
    """
    for _ in range(_ATTEMPTS):
        try:
            return _hold_new(path, role)
        except UsageError as error:  # the process that created the folder may have given it up and removed it
            if not isinstance(error.__context__, FileNotFoundError):
                raise
    return _hold_new(path, role)


def _hold_new(path: Path, role: str) -> Held:
    _refuse_a_run(path)
    made = tuple(folder for folder in (path, *path.parents) if not folder.exists())
    is_new = not is_claimed(path)
    # A lock file in the folder is ignored here, because its process may be giving up the folder. `lock_of` below fails
    # if the process still holds the lock.
    claim(path, but=[name for name in LOCKS if is_lock_file(path / name)])
    held = Held(path=path, lock=lock_of(path, role), made=made, is_new=is_new)
    try:  # check again, as another process may have begun a run in the folder, or given it up, before it was locked
        _refuse_a_run(path)
        held.is_new |= not is_claimed(path)
        claim(path, but=(held.lock.path.name,))
    except BaseException:
        held.lock.release()
        raise
    return held


def hold_old(path: Path, role: str) -> Held:
    """Hold the folder of a run to resume.

    Raises:
        UsageError: the folder has no valid marker of a run, contains a link (through which the run would write or
            remove files elsewhere), is in use, or cannot be written to.
    """
    require_ours(path)
    for name in sorted(NAMES - {BEST, TEMPORARY_BEST}):
        refuse_link(path / name)
    return Held(path=path, lock=lock_of(path, role))


def hold_shared(path: Path, role: str) -> Held:
    """Hold the folder of a new run for one process of the run, if its processes are started separately.

    Raises:
        UsageError: as for `claim`, or another process of this role holds the folder.
    """
    claim(path)
    return Held(path=path, lock=lock_of(path, role))


def folder_to_resume(config: RunConfig, name: str, resume: Path | None, root: Path = RUNS) -> Path:
    """The folder of a run to resume: `resume`, or else `config.run_dir`, or else the latest run of this name.

    Raises:
        UsageError: there is no run in the folder.
    """
    path = resume or config.run_dir or root / name / LATEST
    if not holds_run(path):
        raise UsageError(
            f"there is no run to resume in {path}; found {_runs_near(path)}. Give its folder, "
            "--resume FOLDER (in Python resume=FOLDER), or leave resume out to start a new "
            "run"
        )
    return path.resolve() if path.is_symlink() else path


def folder_to_join(config: RunConfig) -> Path:
    """Return `config.run_dir`, which a run needs if its processes are started separately.

    Raises:
        UsageError: `run_dir` is not set.
    """
    if config.run_dir is None:
        raise UsageError(
            f"both processes of a run use its folder; give it: --run-dir FOLDER, the same for "
            f"`verbatim {ORCHESTRATOR}` and `verbatim {TRAINER}`"
        )
    return config.run_dir


@contextlib.contextmanager
def holding(config: RunConfig, role: str, *, resume: bool | Path, joins: bool = False) -> Iterator[Held | None]:
    """Hold the run folder while the block checks whether the run can start. At the end of the block the folder is given
    up, unless a `RunFolder` has taken it. Yields None for a new run without `run_dir`, whose folder is created later,
    with a name that no other process uses.

    Args:
        config: The run's configuration, with its name.
        role: This process's role.
        resume, joins: As for `RunFolder.open`.

    Raises:
        UsageError: as for `RunFolder.open`, except that the configurations are not compared.
    """
    held: Held | None = None
    if resume:
        held = hold_old(folder_to_resume(config, str(config.name), None if resume is True else resume), role)
    elif joins:
        held = hold_shared(folder_to_join(config), role)
    elif config.run_dir is not None:
        held = hold_new(config.run_dir, role)
    try:
        yield held
    finally:
        if held is not None:
            held.give_up()


def holds_run(path: Path) -> bool:
    """True if a run was started in this folder."""
    return (path / CONFIG).is_file() or any((path / "checkpoints").glob("step_*"))


def refusal_of_a_run(path: Path) -> UsageError:
    """Make the error to raise if a new run is started in a folder that already contains a run."""
    return UsageError(
        f"{path} already holds a run; add --resume (in Python resume=True) to continue it, or {ANOTHER_FOLDER}"
    )


def _refuse_a_run(path: Path) -> None:
    if holds_run(path):
        raise refusal_of_a_run(path)
    refuse_what_is_not_of_a_beginning(path)


def _runs_near(path: Path) -> str:
    runs = sorted(p.parent for p in path.parent.glob(f"*/{CONFIG}") if not p.parent.is_symlink())
    where = "the current folder" if path.parent == Path() else path.parent
    return ", ".join(map(str, runs[-3:])) or f"none in {where}"
