"""Follows a file of JSON lines that another process appends to, and that a resumed run may cut back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verbatim.core.disk import open_regular

_COMPARED = 2**16
"""Bytes of the last line that are compared: a file that was cut back and grew again differs there."""


class FollowedLines:
    """The lines of a file from where they were last read.

    Example: of `{"a": 1}\\n{"b"` the first line is given; `{"b"` is when its end has been written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.end = 0
        """Bytes that were read: whole lines."""
        self._inode, self._last, self._start = -1, b"", 0

    def was_rewritten(self) -> bool:
        """Whether what was read is no longer what the file holds: then `restart`."""
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
        """Read from the beginning again."""
        self.end, self._inode, self._last, self._start = 0, -1, b"", 0

    def new_lines(self) -> Iterator[tuple[int, bytes]]:
        """Place in bytes and line of each whole line behind those that were read.

        Raises:
            OSError: the file cannot be read; a file that is not there has no lines.
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
