"""Brings a run folder back from its copy behind a URL, so that a machine without the folder can resume the run."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

from verbatim.core.disk import make_private, making
from verbatim.core.errors import UsageError
from verbatim.logs.checkpoints import CONFIG
from verbatim.logs.checkpoints.manifest import MANIFEST
from verbatim.logs.uploads.remote_folder import RemoteFolder
from verbatim.logs.uploads.uploads import CHECKPOINTS

logger = logging.getLogger(__name__)

_MANIFEST = re.compile(rf"{CHECKPOINTS}/step_(\d+)/{re.escape(MANIFEST)}")


def newest_step(files: Mapping[str, int]) -> int | None:
    """The newest step whose checkpoint is in a copy; None if the copy has no checkpoint.

    Args:
        files: Sizes of the copy's files, by relative path.
    """
    return max((int(match[1]) for name in files if (match := _MANIFEST.fullmatch(name))), default=None)


def newest_run(runs: RemoteFolder) -> str | None:
    """The name of the newest run (by its time stamp) whose copy has a checkpoint; None if there is no such run."""
    for name in reversed(runs.folders()):
        if newest_step(runs.below(name).files()) is not None:
            return name
    return None


def download_run(remote: RemoteFolder, target: Path) -> int:
    """Download a run folder. The folder gets its final name only when the download is complete.

    Args:
        remote: The run's copy.
        target: The folder to create; it must not exist yet.

    Returns:
        The newest step whose checkpoint was downloaded. The checkpoint's files are verified when the run is resumed.

    Raises:
        UsageError: the copy has no checkpoint.
        RemoteFault: a file could not be read.
    """
    files = remote.files()
    step = newest_step(files)
    if step is None or CONFIG not in files:
        raise UsageError(f"there is no run to resume in {remote.url}: it holds no complete checkpoint")
    target.parent.mkdir(parents=True, exist_ok=True)
    with making(target) as partial:
        for name, size in files.items():
            path = partial / name
            if not path.resolve().is_relative_to(partial.resolve()):
                raise UsageError(f"{remote.url} has a file named {name!r}, which would lie outside the run folder")
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.name == CONFIG or name.startswith("logs/"):
                make_private(path)
            remote.get(name, path, size)
    logger.info("downloaded %d files of the run from %s, up to step %d", len(files), remote.url, step)
    return step
