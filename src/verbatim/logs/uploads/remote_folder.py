"""Uses fsspec to read and write files in a folder behind a URL."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verbatim.core.errors import UsageError
from verbatim.core.imports import refuse_without
from verbatim.core.machine_faults import is_out_of_memory

logger = logging.getLogger(__name__)

TESTED = frozenset({"s3", "file"})
"""URL schemes that the tests cover."""
_NO_FOLDERS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss"})
"""Schemes of object stores. There, a folder is only a common prefix of names and must not be created, because s3fs
would create a bucket."""
_PROBE = ".verbatim-probe"
_BLOCK = 2**22
"""Number of bytes to read at a time."""


class RemoteFault(OSError):
    """Raised if a file behind a URL could not be read or written. `strerror` has the reason."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(None, reason, url)

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class RemoteFolder:
    """A folder behind a URL. Every file is written completely or not at all, and is read back after it was written.

    Args:
        url: A URL that fsspec can read, for example `s3://bucket/runs/demo` or `file:///mnt/share/runs`.

    Raises:
        UsageError: the URL has no scheme or an unknown scheme, or the package for its scheme is not installed.
    """

    def __init__(self, url: str) -> None:
        refuse_without("fsspec", extra="train", what=f"checkpoint.upload_to = {url!r}")
        import fsspec

        self.url = url.rstrip("/")
        scheme, separator, _ = url.partition("://")
        if not separator:
            raise UsageError(
                f"checkpoint.upload_to = {url!r} is not a URL; expected for example s3://bucket/runs or "
                f"file://{Path(url).absolute()}"
            )
        if scheme == "s3":
            refuse_without("s3fs", extra="s3", what=f"checkpoint.upload_to = {url!r}")
        options = {"auto_mkdir": True} if scheme == "file" else {}
        try:
            # Listings are not cached, because another process may write into the folder. The file system object is not
            # shared, because an open transaction changes its state.
            self._fs, path = fsspec.url_to_fs(self.url, use_listings_cache=False, skip_instance_cache=True, **options)
        except (ValueError, ImportError) as error:
            raise UsageError(f"checkpoint.upload_to = {url!r} cannot be used: {error}") from error
        self._path = path.rstrip("/")
        self._has_folders = scheme not in _NO_FOLDERS

    def below(self, *names: str) -> RemoteFolder:
        """The folder inside this folder that has this relative path."""
        return RemoteFolder("/".join((self.url, *names)))

    def warn_if_untested(self) -> None:
        """Log a warning if the tests do not cover the URL's scheme."""
        scheme = self.url.partition("://")[0]
        if scheme not in TESTED:
            logger.warning("uploads to %s:// are not tested; tested are %s", scheme, ", ".join(sorted(TESTED)))

    def check_writable(self) -> None:
        """Write a small file and remove it.

        Raises:
            UsageError: the file could not be written or removed; the message has the reason.
        """
        try:
            with self._naming(_PROBE):
                self._write(_PROBE, iter((b"verbatim",)))
                self._fs.rm_file(self._full(_PROBE))
        except RemoteFault as error:
            raise UsageError(
                f"checkpoint.upload_to = {self.url!r} cannot be written: {error.strerror}; name an existing bucket or "
                "folder, and give its access keys in environment variables (for s3: AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY, and AWS_ENDPOINT_URL for a server other than Amazon's)"
            ) from error

    def files(self) -> dict[str, int]:
        """The size in bytes of each file below this folder, by relative path; empty if this folder does not exist."""
        with self._naming(""):
            try:
                found: dict[str, dict[str, Any]] = self._fs.find(self._path, detail=True)
            except FileNotFoundError:
                return {}
            start = len(self._path) + 1
            return {path[start:]: int(entry["size"]) for path, entry in found.items() if entry["type"] == "file"}

    def folders(self) -> list[str]:
        """The sorted names of the folders that are directly in this folder; empty if this folder does not exist."""
        with self._naming(""):
            try:
                found = self._fs.ls(self._path, detail=True)
            except FileNotFoundError:
                return []
            return sorted(
                entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory"
            )

    def put(self, local: Path, name: str) -> None:
        """Upload a file, read it back, and compare the content.

        Args:
            local: The file. If it grows during the upload, some of the appended content may be missing from the copy.
            name: The path of the uploaded file relative to this folder.

        Raises:
            FileNotFoundError: the file `local` does not exist.
            RemoteFault: the file could not be written, or the content that was read back is different.
        """
        sent = hashlib.sha256()
        with local.open("rb") as source, self._naming(name):
            self._write(name, _blocks(source, sent))
            kept = hashlib.sha256()
            with self._fs.open(self._full(name), "rb") as stored:
                for _ in _blocks(stored, kept):
                    pass
        if kept.digest() != sent.digest():
            raise RemoteFault(f"{self.url}/{name}", "what was uploaded reads back differently")

    def get(self, name: str, local: Path, size: int) -> None:
        """Download a file to a new path. The caller has to sync the new file to the disk.

        Raises:
            RemoteFault: the file could not be read, or has a different size.
        """
        with local.open("wb") as target, self._naming(name), self._fs.open(self._full(name), "rb") as stored:
            shutil.copyfileobj(stored, target, _BLOCK)
        if local.stat().st_size != size:
            raise RemoteFault(f"{self.url}/{name}", f"{local.stat().st_size} bytes were read, expected {size}")

    def remove(self, name: str) -> None:
        """Remove a file. If the file does not exist, nothing happens.

        Raises:
            RemoteFault: the file could not be removed.
        """
        with self._naming(name), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._full(name))

    def _full(self, name: str) -> str:
        return f"{self._path}/{name}"

    def _write(self, name: str, blocks: Iterator[bytes]) -> None:
        full = self._full(name)
        if self._has_folders:
            self._fs.makedirs(full.rpartition("/")[0], exist_ok=True)
        # In a transaction, the new file gets its name only when it is complete, so that a killed upload leaves the old
        # file.
        with self._fs.transaction, self._fs.open(full, "wb") as target:
            for block in blocks:
                target.write(block)

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Convert errors of fsspec, and of the packages that it uses, to `RemoteFault`s that name the URL."""
        try:
            yield
        except Exception as error:  # s3fs and botocore raise exceptions of many types
            if is_out_of_memory(error):
                raise
            raise RemoteFault(f"{self.url}/{name}".rstrip("/"), f"{type(error).__name__}: {error}") from error


def _blocks(file: Any, digest: Any) -> Iterator[bytes]:
    """Yield the blocks of an open file, and update the digest with each block."""
    while block := file.read(_BLOCK):
        digest.update(block)
        yield block
