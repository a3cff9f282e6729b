"""Keeps a copy of a run folder behind a URL: brought up to date after each checkpoint, on a thread of its own.

```
logs, trajectories, config.toml, model/, ...    first, so that they are never shorter than an uploaded manifest says
checkpoints/step_000050/*                       then
checkpoints/step_000050/manifest.json           last: a checkpoint without it does not count
checkpoints/step_000025/*                       removed, if this process uploaded it and the run has removed it
```
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Container, Iterator
from pathlib import Path
from typing import TypeAlias

from verbatim.core.errors import RunStopped
from verbatim.logs.checkpoints.hold import ORCHESTRATOR, TRAINER
from verbatim.logs.checkpoints.manifest import MANIFEST
from verbatim.logs.uploads.remote_folder import RemoteFault, RemoteFolder

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
_NOT_COPIED = frozenset({"weights", "exchange", f"{ORCHESTRATOR}.lock", f"{TRAINER}.lock"})
"""What a resume makes again."""
_STEP = re.compile(rf"{CHECKPOINTS}/step_(\d+)/")
_PAUSES = (1.0, 4.0)
"""Seconds before the second and the third attempt."""

Stamp: TypeAlias = tuple[int, int, int]
"""Size, modification time in ns and inode of a file, which tell whether it has changed."""


class Uploads:
    """Uploads what has changed in a run folder.

    Args:
        folder: The run folder.
        remote: Where its copy is.
    """

    def __init__(self, folder: Path, remote: RemoteFolder) -> None:
        self.remote = remote
        self.held: set[int] = set()
        """Steps whose checkpoints must not be removed now, because they are being uploaded."""
        self.step: int | None = None
        """The newest step whose checkpoint is uploaded; None: none is."""
        self.failure: str | None = None
        """Why the last attempt failed; None: it did not."""
        self._folder = folder
        self._sent: dict[str, Stamp] = {}
        self._due = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="verbatim-uploads", daemon=True)
        self._thread.start()

    def checkpoint_written(self) -> None:
        """Bring the copy up to date soon. While one upload runs, several calls cause one more."""
        self._due.set()

    def close(self) -> None:
        """Upload what is left, and end the thread.

        Raises:
            RunStopped: that failed; the copy is complete up to an older checkpoint.
        """
        self._closing.set()
        self._due.set()
        self._thread.join()
        if self.failure is not None:
            reached = "no checkpoint" if self.step is None else f"the checkpoint of step {self.step}"
            raise RunStopped(
                f"{self.failure}. The copy in {self.remote.url} holds {reached} and lacks what came later; the run in "
                f"{self._folder} is complete. Resume it to upload the rest"
            )

    def _work(self) -> None:
        is_last = False
        while not is_last:
            self._due.wait()
            self._due.clear()
            is_last = self._closing.is_set()  # read before the attempt: what is due after it is uploaded too
            self._attempt()

    def _attempt(self) -> None:
        """Upload what has changed, in up to three attempts. A failure is logged, and the run goes on: the next
        checkpoint tries again."""
        for pause in (*_PAUSES, None):
            try:
                self._upload()
                self.failure = None
            except Exception as error:  # noqa: BLE001  the copy must not cost the run; `close` raises the last one
                self.failure = f"the upload failed: {error if isinstance(error, RemoteFault) else repr(error)}"
                if pause is not None:
                    self._closing.wait(pause)
            else:
                return
        logger.warning("%s; it is tried again after the next checkpoint", self.failure)

    def _upload(self) -> None:
        names = list(run_files(self._folder))
        steps = sorted({int(match[1]) for name in names if (match := _STEP.match(name))})
        self.held.update(steps[-1:])
        try:
            missing: set[str] = set()  # folders of checkpoints that the run has removed meanwhile
            for name in names:
                in_step = _STEP.match(name)
                if in_step and in_step[0] in missing:
                    continue
                try:
                    self._put(name)
                except FileNotFoundError:
                    if in_step:
                        missing.add(in_step[0])
                    continue
                if in_step and name == f"{in_step[0]}{MANIFEST}":
                    self.step = max(self.step or 0, int(in_step[1]))
            self._remove_retired()
        finally:
            self.held.clear()

    def _put(self, name: str) -> None:
        """Upload a file if it has changed since it was uploaded."""
        path = self._folder / name
        about = path.stat()
        stamp = (about.st_size, about.st_mtime_ns, about.st_ino)
        if self._sent.get(name) != stamp:
            self.remote.put(path, name)
            self._sent[name] = stamp

    def _remove_retired(self) -> None:
        """Remove the copies of checkpoints that the run has removed since they were uploaded: the manifests first, so
        that no incomplete checkpoint has one."""
        gone = [name for name in self._sent if _STEP.match(name) and not (self._folder / name).exists()]
        for name in sorted(gone, key=_manifests_first):
            self.remote.remove(name)
            del self._sent[name]


def run_files(folder: Path) -> Iterator[str]:
    """The files of a run folder that its copy holds, as relative paths, in the order in which they are uploaded."""
    names = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and _is_copied(path.relative_to(folder))
    ]
    return iter(sorted(names, key=_upload_order))


def _is_copied(path: Path) -> bool:
    """False for what a resume makes again, incomplete files, and checkpoints that were set aside."""
    if path.parts[0] in _NOT_COPIED or any(part.startswith(".") for part in path.parts):
        return False
    return path.parts[0] != CHECKPOINTS or _STEP.match(path.as_posix()) is not None


def _upload_order(name: str) -> tuple[int, bool, str]:
    in_step = _STEP.match(name)
    if in_step is None:
        return (-1, False, name)
    return (int(in_step[1]), name == f"{in_step[0]}{MANIFEST}", name)


def _manifests_first(name: str) -> tuple[bool, str]:
    return (not name.endswith(f"/{MANIFEST}"), name)


class NoUploads:
    """Stands in for `Uploads` in a run without `checkpoint.upload_to`."""

    held: Container[int] = ()

    def checkpoint_written(self) -> None:
        """Nothing to do."""


@contextlib.contextmanager
def uploading(folder: Path, remote: RemoteFolder | None) -> Iterator[Uploads | NoUploads]:
    """Keep the copy up to date while the block runs; when it ends, upload what is left.

    Raises:
        RunStopped: the block succeeded, and the rest could not be uploaded.
    """
    if remote is None:
        yield NoUploads()
        return
    uploads = Uploads(folder, remote)
    try:
        yield uploads
    except BaseException:
        try:
            uploads.close()
        except RunStopped as error:
            logger.error("%s", error)
        raise
    uploads.close()
