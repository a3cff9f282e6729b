"""Follows a file of JSON lines to which another process appends, and which a resumed run may truncate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verbatim.core.disk import open_regular

_COMPARED = 2**16
"""`was_rewritten` compares at most this many bytes: the end of the last line that was read. The bytes differ if the
file was truncated and has grown again."""


class FollowedLines:
    """Reads the lines that were added to a file since it was last read.

    Example: of `{"a": 1}\\n{"b"`, only the first line is returned. The second line is returned once its end has been
    written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = 0
        """Number of bytes read so far, which is always the end of a line."""
        self._inode, self._last, self._start = -1, b"", 0

    def was_rewritten(self) -> bool:
        """True if the file no longer contains the lines that were read. The caller must then call `restart`."""
        if not self.end:
            return False
        try:
            with open_regular(self.path) as file:
                if self.path.stat().st_ino != self._inode:
                    return True
                file.seek(self._start)
                if file.read(len(self._last)) != self._last:
                    return True
                file.seek(self.end - 1)
                return file.read(1) != b"\n"
        except OSError:
            return True

    def restart(self) -> None:
        """Start again from the beginning of the file."""
        self.end, self._inode, self._last, self._start = 0, -1, b"", 0

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the pair (offset in bytes, line) of each complete line that has not been read yet.

        Raises:
            OSError: the file cannot be read. A missing file counts as empty.
        """
        try:
            file = open_regular(self.path)
        except FileNotFoundError:
            return
        with file:
            self._inode = self.path.stat().st_ino
            file.seek(self.end)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._start, self._last = self.end, line[:_COMPARED]
                self.end += len(line)
                yield self._start, line
