"""Writes files and folders that survive a power loss.

Until a file is synced, what was written to it has only reached memory. Syncing a file saves the file's content, and
syncing its folder saves the file's name. So the order is always: write under a temporary name, sync the content,
rename, sync the folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Container, Iterator
from pathlib import Path
from typing import BinaryIO

from verbatim.core.errors import UsageError
from verbatim.core.machine_faults import naming

logger = logging.getLogger(__name__)

_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""Errors that fsync raises if there is nothing to sync: on a device, or on folders of some file systems."""


def sync_descriptor(descriptor: int) -> None:
    """Wait until the content written to an open file is on disk.

    Raises:
        OSError: the file system could not write it.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, are on disk.

    Raises:
        OSError: the file system could not write them.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """`sync` everything in a folder, and the folder itself."""
    for path in folder.rglob("*"):
        if not path.is_symlink():
            sync(path)
    sync(folder)


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and sync their names. Does nothing if the folder exists."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def rename(source: Path, target: Path) -> None:
    """Rename a synced file or folder; an existing file at `target` is replaced."""
    os.replace(source, target)
    sync(target.parent)


@contextlib.contextmanager
def making(target: Path) -> Iterator[Path]:
    """Context manager for an empty folder `.{name}.partial` that replaces `target` if the block succeeds; after a power
    loss the target is either complete or missing. If the old target holds files that the new folder does not have, the
    old target is kept under another name, because a person may have put these files there."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    yield partial
    sync_tree(partial)
    remove_folder(target, ours=files_below(partial))
    rename(partial, target)


def files_below(folder: Path) -> set[str]:
    """Paths of all files and links below a folder, relative to it and with `/`; empty if the folder does not exist."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def remove_folder(folder: Path, ours: Container[str]) -> None:
    """Remove a folder that we created; if it contains files that are not in `ours`, rename it to `{name}.kept-1`
    instead.

    Args:
        folder: The folder; it need not exist.
        ours: Paths of the files that we create in the folder, relative to the folder.

    Raises:
        OSError: the file system refused.
    """
    others = sorted(name for name in files_below(folder) if name not in ours)
    if others:
        aside = keep_aside(folder, why="kept")
        logger.warning("%s is kept as %s: it contains %s, which the run did not write", folder, aside, others[0])
    elif folder.is_dir():
        shutil.rmtree(folder)


def write_file(path: Path, data: bytes, *, temporary: Path | None = None, private: bool = False) -> None:
    """Replace a file atomically: after a power loss it has either the old or the new content.

    The new content is first written under the name `temporary` in the same folder, by default `.{name}.tmp`.

    Args:
        path: The file.
        data: The file's new content.
        temporary: The temporary name.
        private: True if only the file's owner may read it, as with `write_private`.

    Raises:
        OSError: the file system refused to write; the file is unchanged.
    """
    with replacing(path, temporary=temporary) as new:
        if private:
            write_private(new, data)
        else:
            new.write_bytes(data)


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner may read (mode 0600), because it may contain keys or a process's output.

    Raises:
        OSError: the file system refused to write.
    """
    make_private(path)
    path.write_bytes(data)


def make_private(path: Path) -> None:
    """Create a file that only its owner may read (mode 0600); an existing file that this user owns gets this mode.

    Raises:
        OSError: the file cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        with contextlib.suppress(PermissionError):  # the file belongs to another user, who lets us write
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path, *, temporary: Path | None = None, lasting: bool = True) -> Iterator[Path]:
    """Context manager for a temporary path that replaces `path` if the block succeeds; like `write_file`, for content
    that is written in several steps. With `lasting=False` nothing is synced, and a power loss may lose the file.

    Raises:
        OSError: the file system refused to write; the file is unchanged.
    """
    temporary = temporary or path.with_name(f".{path.name}.tmp")
    try:
        with naming(path):
            yield temporary
            if lasting:
                sync(temporary)
        os.replace(temporary, path)
        if lasting:
            sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def open_regular(path: Path) -> BinaryIO:
    """Open a file that others may have created, for reading only: links are not followed, and pipes and devices are not
    opened.

    Raises:
        OSError: the path is not a regular file, or it cannot be read.
    """
    # O_NONBLOCK, because opening a pipe without a writer would block.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return open(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """The content of a file, opened with `open_regular`.

    Raises:
        OSError: the path is not a regular file, or it cannot be read.
    """
    with open_regular(path) as file:
        return file.read()


def sha256(path: Path) -> str:
    """The SHA-256 checksum of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_inside(folder: Path, path: Path) -> bool:
    """True if a path below a folder is a regular file that is reached without a link."""
    steps = [path, *path.parents]
    below = steps[: steps.index(folder)] if folder in steps else []
    return bool(below) and path.is_file() and not any(step.is_symlink() for step in below)


def refuse_link(path: Path) -> None:
    """Refuse a link in a run folder: the folder may come from anybody, and the link may point anywhere.

    Raises:
        UsageError: the path is a link; the message says what to do.
    """
    if path.is_symlink():
        raise UsageError(
            f"{path} is a link, which is not followed: its target is not part of the run. Replace the "
            "link with its target, or name the target itself"
        )


def temporary_beside(path: Path) -> Path:
    """An unused name in the same folder, for a file that will replace `path`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Create a hard link to a file that is never written to again, or a copy if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def keep_aside(path: Path, folder: Path | None = None, why: str = "damaged") -> Path:
    """Rename a damaged file or folder so that it is neither used nor lost; returns the new path.

    Args:
        path: The damaged file or folder.
        folder: The folder to move it to; by default the folder that it is in.
        why: The word that the new name contains.

    Example: `metrics.jsonl` becomes `metrics.jsonl.damaged-1`, and the next damaged file `metrics.jsonl.damaged-2`.
    """
    number, folder = 1, folder or path.parent
    while (aside := folder / f"{path.name}.{why}-{number}").exists():
        number += 1
    rename(path, aside)
    return aside
