"""Keeps a copy of a run folder behind a URL. A separate thread brings the copy up to date after each checkpoint.

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
_NOT_COPIED = frozenset({"weights", "exchange", "states", f"{ORCHESTRATOR}.lock", f"{TRAINER}.lock"})
"""Files and folders that are not uploaded, because a resumed run creates them again."""
_STEP = re.compile(rf"{CHECKPOINTS}/step_(\d+)/")
_PAUSES = (1.0, 4.0)
"""Seconds to wait before the second and the third attempt."""

Stamp: TypeAlias = tuple[int, int, int]
"""Size in bytes, modification time in nanoseconds, and inode number of a file. If they are equal, the file has not
changed."""


class Uploads:
    """Uploads the files of a run folder that have changed, on a separate thread.

    Args:
        folder: The run folder.
        remote: The folder of the copy.
    """

    def __init__(self, folder: Path, remote: RemoteFolder) -> None:
        self.remote = remote
        self.held: set[int] = set()
        """Steps whose checkpoints must not be removed for now, because they are being uploaded."""
        self.step: int | None = None
        """The newest step whose checkpoint has been uploaded; None if there is none yet."""
        self.failure: str | None = None
        """The reason why the last attempt failed; None if it did not fail."""
        self._folder = folder
        self._sent: dict[str, Stamp] = {}
        self._due = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="verbatim-uploads", daemon=True)
        self._thread.start()

    def checkpoint_written(self) -> None:
        """Request an upload of the changed files, and return immediately. Several calls during an upload cause only one
        more upload."""
        self._due.set()

    def close(self) -> None:
        """Upload the files that have changed since the last upload, and end the thread.

        Raises:
            RunStopped: this upload failed. The copy is complete only up to an older checkpoint.
        """
        self._closing.set()
        self._due.set()
        self._thread.join()
        if self.failure is not None:
            reached = "no checkpoint" if self.step is None else f"the checkpoint of step {self.step}"
            raise RunStopped(
                f"{self.failure}. The copy in {self.remote.url} holds {reached} and lacks what came later; the run in "
                f"{self._folder} is complete. Resume the run to upload the rest"
            )

    def _work(self) -> None:
        is_last = False
        while not is_last:
            self._due.wait()
            self._due.clear()
            is_last = self._closing.is_set()  # read before `_attempt`, so that changes during it cause one more
            self._attempt()

    def _attempt(self) -> None:
        """Upload the changed files, in up to three attempts. If all attempts fail, this is logged and the run
        continues; the upload is tried again after the next checkpoint."""
        for pause in (*_PAUSES, None):
            try:
                self._upload()
                self.failure = None
            except Exception as error:  # noqa: BLE001  a failed upload must not end the run; `close` reports it
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
        """Upload a file if it has changed since its last upload."""
        path = self._folder / name
        about = path.stat()
        stamp = (about.st_size, about.st_mtime_ns, about.st_ino)
        if self._sent.get(name) != stamp:
            self.remote.put(path, name)
            self._sent[name] = stamp

    def _remove_retired(self) -> None:
        """Remove the copies of checkpoints that the run has removed since they were uploaded. The manifests are removed
        first, so that no incomplete checkpoint has a manifest."""
        gone = [name for name in self._sent if _STEP.match(name) and not (self._folder / name).exists()]
        for name in sorted(gone, key=_manifests_first):
            self.remote.remove(name)
            del self._sent[name]


def run_files(folder: Path) -> Iterator[str]:
    """The files of a run folder that belong into its copy, as relative paths, in the order in which they are
    uploaded."""
    names = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink() and _is_copied(path.relative_to(folder))
    ]
    return iter(sorted(names, key=_upload_order))


def _is_copied(path: Path) -> bool:
    """False for files that a resumed run creates again, for incomplete files, and for checkpoints that were set
    aside."""
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
        """Do nothing."""


@contextlib.contextmanager
def uploading(folder: Path, remote: RemoteFolder | None) -> Iterator[Uploads | NoUploads]:
    """Keep the copy up to date while the block runs. When the block ends, upload the remaining changes.

    Raises:
        RunStopped: the block succeeded, but the remaining changes could not be uploaded.
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
