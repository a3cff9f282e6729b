"""Holds the folder of a run for one process of a role: before the run is checked, so that a second command on the same
folder is refused at once, and given up where the checks fail."""

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
"""The one link in a run's folder, to the weights of the best evaluation's checkpoint, and its name while it is made."""
ORCHESTRATOR, TRAINER = "orchestrator", "trainer"
"""The processes of a run: each has its lock, `orchestrator.lock`, and its log, `logs/orchestrator.log`."""
LOCKS = (f"{ORCHESTRATOR}.lock", f"{TRAINER}.lock")
_ATTEMPTS = 20
_LEAVING = 10.0
"""Seconds in which a process of a killed run notices that the other has ended, and ends."""


@dataclass(eq=False, kw_only=True)
class Held:
    """A folder that is locked for this process, and that nothing was written into but what proves so."""

    path: Path
    lock: FolderLock
    made: tuple[Path, ...] = ()
    """Folders that were not there before, the innermost first."""
    is_new: bool = False
    """Whether it is no longer a run's when it is given up."""
    _is_taken: bool = False

    def take(self) -> FolderLock:
        """The lock, which is the caller's from now on."""
        self._is_taken = True
        return self.lock

    def give_up(self) -> None:
        """Release the folder, unless its lock was taken; a new one is as it was before."""
        if self._is_taken:
            return
        if self.is_new:
            unclaim(self.path)
            self.lock.remove()
        self.lock.release()
        for folder in self.made if self.is_new else ():
            try:
                folder.rmdir()
            except OSError:  # somebody put something into it
                return


def lock_of(path: Path, role: str) -> FolderLock:
    """The lock of a role in a run's folder.

    Raises:
        UsageError: another process holds it.
    """
    return FolderLock(path, f"{role}.lock", patience=_LEAVING if role == TRAINER else 0.0)


def hold_new(path: Path, role: str = ORCHESTRATOR) -> Held:
    """Hold the folder of a new run, which is empty or not there.

    Raises:
        UsageError: it holds a run, or something that no run made; it is in use, or cannot be written to.
    """
    for _ in range(_ATTEMPTS):
        try:
            return _hold_new(path, role)
        except UsageError as error:  # a process that has made the folder may give it up, and remove it, meanwhile
            if not isinstance(error.__context__, FileNotFoundError):
                raise
    return _hold_new(path, role)


def _hold_new(path: Path, role: str) -> Held:
    _refuse_a_run(path)
    made = tuple(folder for folder in (path, *path.parents) if not folder.exists())
    is_new = not is_claimed(path)
    claim(path, but=[name for name in LOCKS if is_lock_file(path / name)])  # of a process that gives it up
    held = Held(path=path, lock=lock_of(path, role), made=made, is_new=is_new)
    try:  # another process may have begun a run, or given the folder up, until it was locked
        _refuse_a_run(path)
        held.is_new |= not is_claimed(path)
        claim(path, but=(held.lock.path.name,))
    except BaseException:
        held.lock.release()
        raise
    return held


def hold_old(path: Path, role: str) -> Held:
    """Hold the folder of a run that goes on.

    Raises:
        UsageError: nothing proves that it is a run's; something in it is a link, through which the run would write and
            remove what is elsewhere; it is in use, or cannot be written to.
    """
    require_ours(path)
    for name in sorted(NAMES - {BEST, TEMPORARY_BEST}):
        refuse_link(path / name)
    return Held(path=path, lock=lock_of(path, role))


def hold_shared(path: Path, role: str) -> Held:
    """Hold the folder of a new run whose processes are started one by one, for one of them.

    Raises:
        UsageError: as `claim`; another process of this role holds it.
    """
    claim(path)
    return Held(path=path, lock=lock_of(path, role))


def folder_to_resume(config: RunConfig, name: str, resume: Path | None, root: Path = RUNS) -> Path:
    """The folder of a run to continue: the given one, `config.run_dir`, or the latest of this name.

    Raises:
        UsageError: no such run.
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
    """The explicit folder of a run whose processes are started one by one.

    Raises:
        UsageError: there is none.
    """
    if config.run_dir is None:
        raise UsageError(
            f"both processes of a run meet in its folder; give it: --run-dir FOLDER, the same for "
            f"`verbatim {ORCHESTRATOR}` and `verbatim {TRAINER}`"
        )
    return config.run_dir


@contextlib.contextmanager
def holding(config: RunConfig, role: str, *, resume: bool | Path, joins: bool = False) -> Iterator[Held | None]:
    """Context manager: the folder of the run, held while the block checks whether the run can start; given up at its
    end, unless a `RunFolder` was made of it. None for a new run without `run_dir`, whose folder is its own.

    Args:
        config: With its name.
        role: The process.
        resume, joins: As for `RunFolder.open`.

    Raises:
        UsageError: as `RunFolder.open`, but for what the configuration is compared with.
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
    """Whether a run was started in this folder."""
    return (path / CONFIG).is_file() or any((path / "checkpoints").glob("step_*"))


def refusal_of_a_run(path: Path) -> UsageError:
    """What a new run is told that finds another one."""
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
