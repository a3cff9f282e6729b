"""One process per folder: a lock that the system releases when the process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from verbatim.errors import UsageError


class FolderLock:
    """Holds `lock` in a folder, with the id of this process in it for people to read.

    Raises:
        UsageError: another process holds it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lock"
        self._file = self.path.open("a+", encoding="ascii")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise UsageError(f"{folder} is in use by process {holder}; wait for it to end, stop it, or choose another "
                             "folder with --run-dir FOLDER") from None  # fmt: skip
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def release(self) -> None:
        """Let others in. The file stays: removing it would let two processes lock two files of one name."""
        self._file.close()
