"""Sends folders to other nodes of a Ray cluster through its object store."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from verbatim.logs.checkpoints.manifest import MANIFEST
from verbatim.models.source import ADAPTER_CONFIG

PART = 64 * 2**20
"""Maximum number of bytes of one object, so that a node can write one part while it fetches the next."""


@dataclass(frozen=True, kw_only=True)
class ShippedFolder:
    """A folder in the object store."""

    root: str
    """The run's folder on the sending node."""
    name: str
    """The folder's path relative to `root`: "weights/v000012"."""
    files: Mapping[str, tuple[Any, ...]]
    """References to the parts of each file, by its path relative to the folder."""
    digest: str
    """The sha256 of all paths and contents."""
    num_bytes: int
    """Total size of the files."""


def ship(ray: Any, root: Path, name: str, *, leave_out: Collection[str] = ()) -> ShippedFolder:
    """Put a folder into the object store. Each byte is copied once.

    Args:
        ray: The package, connected.
        root: The run's folder on this node.
        name: The folder's path relative to `root`.
        leave_out: Names of entries of the folder that are not sent.

    Raises:
        OSError: a file cannot be read.
    """
    folder = root / name
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    paths = sorted(
        path for path in folder.rglob("*") if path.is_file() and path.relative_to(folder).parts[0] not in leave_out
    )
    digest, files, total = hashlib.sha256(), {}, 0
    for path in paths:
        relative, size = path.relative_to(folder).as_posix(), path.stat().st_size
        digest.update(json.dumps([relative, size]).encode())
        parts = []
        content = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
        for start in range(0, size, PART):
            part = content[start : start + PART]
            digest.update(part.data)
            parts.append(ray.put(np.asarray(part)))
        files[relative] = tuple(parts)
        total += size
    return ShippedFolder(root=str(root), name=name, files=files, digest=digest.hexdigest(), num_bytes=total)


def write(ray: Any, shipped: ShippedFolder, folder: Path, root: Path) -> None:
    """Write the files of a shipped folder into an existing folder.

    Args:
        ray: The package, connected.
        shipped: The folder in the object store.
        folder: Where to write.
        root: The run's folder on this node. An adapter names its base model by path: a path in the sender's run folder
            becomes the same path in this one.

    Raises:
        OSError: the system refused to write.
        ray.exceptions.ObjectLostError: the node that held the only copy is gone.
    """
    for relative, parts in shipped.files.items():
        path = folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        if parts:
            ray.wait(list(parts), num_returns=len(parts), timeout=0)  # this starts fetching all parts
        with path.open("wb") as file:
            for part in parts:
                file.write(ray.get(part))
        if path.name == ADAPTER_CONFIG and MANIFEST not in shipped.files:  # a manifest seals the files as they are
            _move_base(path, shipped.root, root)


def bring(ray: Any, shipped: ShippedFolder, root: Path) -> Path:
    """Write a shipped folder to its place below this node's `root`, unless it is there already. The caller holds the
    node's lock. Returns the folder. Errors as for `write`."""
    folder = root / shipped.name
    note = folder.with_name(f".{folder.name}.digest")
    if folder.is_dir() and (str(root) == shipped.root or (note.exists() and note.read_text() == shipped.digest)):
        return folder
    partial = folder.with_name(f".{folder.name}.partial")
    for old in (partial, folder):
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    write(ray, shipped, partial, root)
    note.write_text(shipped.digest)
    os.rename(partial, folder)
    return folder


def _move_base(path: Path, sender: str, root: Path) -> None:
    about = json.loads(path.read_text(encoding="utf-8"))
    base = Path(str(about.get("base_model_name_or_path")))
    if base.is_relative_to(sender):
        about["base_model_name_or_path"] = str(root / base.relative_to(sender))
        path.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
