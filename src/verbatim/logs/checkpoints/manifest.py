"""Seals a folder with a `manifest.json` that lists the size and SHA-256 of every file in the folder.

```
{"format": 1, "files": {"weights/model.safetensors": {"size": 81920, "sha256": "..."}}, ...further keys}
```
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verbatim.core.disk import sha256, sync_tree
from verbatim.core.errors import CheckpointError, FormatError
from verbatim.core.machine_faults import describe
from verbatim.logs.checkpoints.json_files import read_record, write_record

MANIFEST = "manifest.json"
_OF_THE_READER = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Error numbers (`errno`) that mean a problem of the reading process (permissions, open files, memory), not damage."""


def write_manifest(folder: Path, more: Mapping[str, Any] | None = None) -> None:
    """Write the manifest and sync the folder's content. The caller must sync the parent folder after it has renamed
    this folder.

    Args:
        folder: A folder that is complete except for the manifest.
        more: Additional keys of the manifest.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    entries = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256(path)} for path in files
    }
    sync_tree(folder)  # first, because the manifest must not be on disk before the listed files
    write_record(folder / MANIFEST, {**(more or {}), "files": entries})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a sealed folder.

    Raises:
        CheckpointError: the manifest is missing or unreadable, or a different version of Verbatim wrote it.
    """
    return read_record(folder / MANIFEST)


def listed_files(folder: Path) -> set[str]:
    """Relative paths of the files that Verbatim wrote into a sealed folder: the manifest and all files that it lists.
    Empty if the manifest cannot be read."""
    try:
        return {MANIFEST, *read_manifest(folder)["files"]}
    except (CheckpointError, KeyError, TypeError):
        return set()


def find_damage(folder: Path) -> str | None:
    """Describe the first missing or changed file of a sealed folder; None if all files are intact.

    Raises:
        CheckpointError: the files cannot be checked, for lack of permission, memory or file descriptors.
        FormatError: a different version of Verbatim sealed the folder.
    """
    try:
        manifest = read_manifest(folder)
        files = [(name, entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()]
        for name, size, expected in files:
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes, expected {size}"
            if sha256(path) != expected:
                return f"{name} has a different SHA-256 than when it was written"
    except (CheckpointError, OSError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(error, FormatError) and error.number is not None:  # intact, but of another version
            raise
        if isinstance(cause, OSError) and cause.errno in _OF_THE_READER:
            raise CheckpointError(f"{folder} cannot be read: {describe(cause)}") from cause
        if isinstance(error, OSError):
            return f"{error.filename or folder} cannot be read: {error.strerror or error}"
        return str(error)
    except (KeyError, TypeError, AttributeError):
        return f"{MANIFEST} was not written by Verbatim"
    return None


def was_changed(path: Path) -> bool:
    """True if a file of a sealed folder differs from its entry in the manifest; False if there is no entry."""
    try:
        return bool(read_manifest(path.parent)["files"][path.name]["sha256"] != sha256(path))
    except (CheckpointError, OSError, KeyError, TypeError):
        return False
