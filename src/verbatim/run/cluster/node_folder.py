"""The folder of a run on one node, which the run's actors on that node share."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from verbatim.core.errors import UsageError

_HELD, _LOCK = ".held", ".lock"
"""Names of the file that every actor of the run holds with a shared lock, and of the file that is locked for one
change."""


class NodeFolder:
    """A temporary folder, which is removed when its last actor leaves. A folder whose actors were killed is removed by
    the next run on this node.

    Args:
        run: A name that no other run has.
        node: The node's id; in tests several nodes share one disk.

    Raises:
        UsageError: the parent of these folders is not this user's own folder.
    """

    def __init__(self, run: str, node: str) -> None:
        base = Path(tempfile.gettempdir()).resolve() / f"verbatim-cluster-{os.getuid()}"
        base.mkdir(mode=0o700, exist_ok=True)
        _refuse_foreign(base)
        self.path = base / f"{run}-{node[:12]}"
        """The folder."""
        with _locked(base):  # until this actor holds the folder, another run must not find it unheld
            for other in base.iterdir():
                if other.is_dir() and other != self.path:
                    _remove_if_unheld(other)
            self.path.mkdir(exist_ok=True)
            self._held = (self.path / _HELD).open("a")
            fcntl.flock(self._held, fcntl.LOCK_SH)

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """While the block runs, no other actor on this node changes the folder."""
        return _locked(self.path)

    def leave(self) -> None:
        """Let go of the folder. The last actor removes it."""
        self._held.close()
        with _locked(self.path.parent):
            _remove_if_unheld(self.path)


def _refuse_foreign(base: Path) -> None:
    """Refuse a link or another user's folder, because folders in it are removed."""
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise UsageError(f"{base} is not a folder of this user (found uid {found.st_uid}); remove it, or set TMPDIR")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / _LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_if_unheld(folder: Path) -> None:
    try:
        with (folder / _HELD).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:
        return  # another run's actors are alive
    except FileNotFoundError:
        return  # no actor has made this folder, or it is gone
