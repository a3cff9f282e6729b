"""Locks a folder for one process per role. The operating system releases the lock when the process ends."""

from __future__ import annotations

import fcntl
import os
import re
import time
from pathlib import Path

from verbatim.core.disk import open_regular
from verbatim.core.errors import UsageError
from verbatim.core.machine_faults import naming

ANOTHER_FOLDER = "choose another folder with --run-dir FOLDER (in Python run_dir=FOLDER)"


class FolderLock:
    """Holds a lock file in a folder. The file contains this process's id, so that other processes can show it in an
    error.

    Args:
        folder: An existing folder.
        name: Name of the lock file, one per role.
        patience: Seconds to wait for another process to release the lock.

    Raises:
        UsageError: another process holds the lock, or the file cannot be opened.
    """

    def __init__(self, folder: Path, name: str, *, patience: float = 0.0) -> None:
        self.path = folder / name
        self._open()
        until = time.monotonic() + patience
        while not self._acquire():
            if self._was_removed():  # its holder removed the file before releasing the lock, so lock a new file
                self._file.close()
                self._open()
            elif time.monotonic() >= until:
                self._file.seek(0)
                holder = self._file.read(100).strip() or "unknown"
                self._file.close()
                raise UsageError(
                    f"{folder} is in use by process {holder}; wait for it to end, stop it, or {ANOTHER_FOLDER}"
                ) from None
            else:
                time.sleep(0.05)  # flock has no timeout, so poll
        with naming(self.path):
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n")
            self._file.flush()

    def _open(self) -> None:
        try:
            self._file = self.path.open("a+", encoding="ascii", errors="backslashreplace")
        except OSError as error:
            raise UsageError(
                f"{self.path} cannot be opened: {error.strerror}; remove it, or {ANOTHER_FOLDER}"
            ) from None

    def _acquire(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return not self._was_removed()

    def _was_removed(self) -> bool:
        """True if the path no longer leads to the open file, so that other processes would lock a different file."""
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except OSError:
            return True

    def remove(self) -> None:
        """Remove the file while it is locked. A process that waits for the lock then creates a new file."""
        self.path.unlink(missing_ok=True)

    def release(self) -> None:
        """Release the lock. The file stays unless `remove` was called."""
        self._file.close()


def is_lock_file(path: Path) -> bool:
    """True if a file looks like a lock file: it is empty, or contains a process id and nothing else."""
    try:
        with open_regular(path) as file:
            return re.fullmatch(rb"(\d{1,10}\n)?", file.read(16)) is not None
    except OSError:
        return False


def is_locked(path: Path) -> bool:
    """True if a process holds this lock file. Does not change the file."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
