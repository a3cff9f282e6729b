"""Stores checkpoints as folders that are complete and can be verified.

```
checkpoints/
    step_000025/            manifest.json (size and SHA-256 of every file, lengths of the logs), and the run's files
    step_000050/
    .writing-step_000075/   being written; renamed when it is complete and on disk
    step_000060.damaged-1/  was damaged, so that the run was resumed from an earlier checkpoint
    step_000070.kept-1/     was not removed, because it contains files that its manifest does not list
```
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verbatim.core.disk import (
    files_below,
    keep_aside,
    link_or_copy,
    make_folder,
    remove_folder,
    rename,
    sync,
    sync_tree,
)
from verbatim.core.errors import CheckpointError, CheckpointNotWritten
from verbatim.core.machine_faults import describe
from verbatim.logs.checkpoints.json_files import write_record
from verbatim.logs.checkpoints.manifest import MANIFEST, find_damage, listed_files, read_manifest, write_manifest

logger = logging.getLogger(__name__)

WEIGHTS = "weights"
"""Name of the folder with the weights in a checkpoint."""
BEST = "best"
"""Key in the manifest for the best evaluation so far, a table with its `step`."""
LOGS = "logs"
"""Key in the manifest for the lengths of the logs at the checkpoint. A resumed run truncates the logs to these
lengths."""
_WRITING, _REPLACED, _DELETING = ".writing-", ".replaced-", ".deleting-"
"""Prefixes of folders that are not checkpoints, because they are being written, replaced or deleted. See `_clean`."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint."""

    step: int
    """Number of steps that the run had finished when the checkpoint was written."""
    folder: Path
    """The checkpoint's folder."""

    @property
    def weights(self) -> Path:
        """The folder of the weights: a Hugging Face model, or a `peft` adapter."""
        return self.folder / WEIGHTS


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        folder: The folder of all checkpoints; created if missing.
        keep_last: Number of newest checkpoints to keep.
        keep_every: If given, checkpoints whose step is a multiple of this are kept too.
        held: Steps whose checkpoints are not removed for now, because they are being uploaded.
        read_only: True to leave incomplete checkpoints in place, because another process may be writing them.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 2,
        keep_every: int | None = None,
        held: Container[int] = (),
        read_only: bool = False,
    ) -> None:
        assert keep_last >= 1
        self.folder = folder
        self.keep_last = keep_last
        self.keep_every = keep_every
        self._held = held
        if not read_only:
            make_folder(folder)
            _clean(folder)

    @contextmanager
    def writing(
        self, step: int, logs: Mapping[str, Any] | None = None, best: Mapping[str, Any] | None = None
    ) -> Iterator[Path]:
        """Yield a folder that becomes the checkpoint of this step when the block ends without an error. From then on
        the checkpoint survives a power failure.

        An existing checkpoint of the same step is replaced. If the block raises, the folder is removed.

        Args:
            step: Number of finished steps.
            logs: Length of each log by name, as plain JSON values for the manifest.
            best: The best evaluation so far, with its `step`, as plain JSON values. That step's checkpoint is kept.

        Raises:
            CheckpointNotWritten: a write failed (disk full, no permission); the message has the path and the reason.
        """
        name = f"step_{step:06d}"
        temporary = self.folder / f"{_WRITING}{name}"
        final = self.folder / name
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            yield temporary
            write_manifest(
                temporary, {"step": step, LOGS: dict(logs or {}), **({BEST: dict(best)} if best is not None else {})}
            )
            _put_in_place(temporary, final)
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if isinstance(error, OSError):
                raise self.refused(step, error) from error
            raise
        # Last, because old checkpoints are removed only when the new one is in place.
        self._retire({step, best["step"]} if best is not None else {step})

    def adopt(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint of another run, by hard links if the file system supports them. This is safe because the
        files of a checkpoint are never modified in place."""
        name = f"step_{checkpoint.step:06d}"
        temporary = self.folder / f"{_WRITING}{name}"
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(checkpoint.folder, temporary, copy_function=link_or_copy)
        sync_tree(temporary)
        _put_in_place(temporary, self.folder / name)

    def refused(self, step: int, error: Exception) -> CheckpointNotWritten:
        """The error for a checkpoint that could not be written. The lines of `error` after its first line are put at
        the end of the message."""
        why, _, quoted = describe(error, self.folder).partition("\n")
        return CheckpointNotWritten(
            f"checkpoint {self.folder / f'step_{step:06d}'} could not be written: {why}; the "
            f"checkpoints before it are untouched{quoted and chr(10)}{quoted}"
        )

    def steps(self) -> list[int]:
        """Steps of all checkpoints, including damaged checkpoints, oldest first."""
        if not self.folder.is_dir():
            return []
        matches = (re.fullmatch(r"step_(\d+)", path.name) for path in self.folder.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def latest(self) -> Checkpoint | None:
        """The newest undamaged checkpoint; None if the run has no checkpoints.

        If a checkpoint is damaged, a warning names the damaged file, and the previous checkpoint is tried.

        Raises:
            CheckpointError: there are checkpoints, but all of them are damaged.
        """
        damages = []
        for step in reversed(self.steps()):
            folder = self.folder / f"step_{step:06d}"
            damage = find_damage(folder) or _other_step(folder, step)
            if damage is None:
                return Checkpoint(step=step, folder=folder)
            logger.warning("checkpoint %s is damaged and not used: %s", folder, damage)
            damages.append(f"{folder}: {damage}")
        if damages:
            raise CheckpointError(
                "every checkpoint of this run is damaged:\n  "
                + "\n  ".join(damages)
                + "\nPut one back from a copy, or start a new run in another folder, without --resume"
            )
        return None

    def set_aside_after(self, step: int) -> None:
        """Rename checkpoints that are newer than the checkpoint that the run resumes from, because the newer
        checkpoints are damaged and the run would otherwise replace them."""
        for newer in self.steps():
            if newer > step:
                aside = keep_aside(self.folder / f"step_{newer:06d}")
                logger.warning("the damaged checkpoint of step %d is kept aside as %s", newer, aside)

    def logs(self, step: int) -> dict[str, Any]:
        """The `logs` given to `writing`; empty if the checkpoint has none."""
        found = read_manifest(self.folder / f"step_{step:06d}").get(LOGS)
        return dict(found) if isinstance(found, dict) else {}

    def set_logs(self, step: int, logs: Mapping[str, Any]) -> None:
        """Replace the stored lengths of the logs after damaged logs were truncated further."""
        folder = self.folder / f"step_{step:06d}"
        write_record(folder / MANIFEST, {**read_manifest(folder), LOGS: dict(logs)})

    def best(self) -> dict[str, Any] | None:
        """The best evaluation that was last given to `writing` or `mark_best`; None if there was none."""
        for step in reversed(self.steps()):
            # If a manifest is damaged, use the previous manifest, which may be outdated.
            with contextlib.suppress(CheckpointError):
                found = read_manifest(self.folder / f"step_{step:06d}").get(BEST)
                return found if isinstance(found, dict) and type(found.get("step")) is int else None
        return None

    def mark_best(self, step: int, best: Mapping[str, Any]) -> None:
        """Record the best evaluation so far in an existing checkpoint."""
        folder = self.folder / f"step_{step:06d}"
        write_record(folder / MANIFEST, {**read_manifest(folder), BEST: dict(best)})

    def _retire(self, kept: Container[int]) -> None:
        steps = self.steps()
        for step in steps[: -self.keep_last]:
            if step in kept or step in self._held or (self.keep_every and step % self.keep_every == 0):
                continue
            try:
                self.remove(step)
            except OSError as error:  # not a reason to fail, because the new checkpoint is complete
                logger.warning("the old checkpoint of step %d could not be removed: %s", step, error)

    def remove(self, step: int) -> None:
        """Remove a checkpoint. If it contains files that its manifest does not list, they belong to the user, and are
        kept in `step_000025.kept-1`.

        Raises:
            OSError: the operating system refused.
        """
        folder = self.folder / f"step_{step:06d}"
        doomed = self.folder / f"{_DELETING}{folder.name}"
        if files_below(folder) <= (ours := listed_files(folder)):
            rename(folder, doomed)  # a partly deleted folder must not look like a checkpoint
            shutil.rmtree(doomed)
        else:
            remove_folder(folder, ours)


def _put_in_place(temporary: Path, final: Path) -> None:
    """Rename `temporary` to `final`. An old `final` is moved aside first, because a rename cannot replace a folder with
    files. If the process is killed in between, `_clean` moves the old `final` back."""
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    shutil.rmtree(replaced, ignore_errors=True)
    if not files_below(final) <= (ours := listed_files(final)):
        remove_folder(final, ours)
    elif final.exists():
        os.rename(final, replaced)
    try:
        os.rename(temporary, final)
    except OSError:
        if replaced.exists():
            os.rename(replaced, final)
        raise
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _clean(folder: Path) -> None:
    """Remove incomplete folders of a killed process, and restore a checkpoint that was moved aside but not yet
    replaced."""
    for path in folder.iterdir():
        if path.name.startswith(_REPLACED):
            final = folder / path.name.removeprefix(_REPLACED)
            if not final.exists():
                os.rename(path, final)
                continue
        if path.name.startswith((_WRITING, _REPLACED, _DELETING)):
            logger.warning("removed %s, which a killed process left behind", path)
            shutil.rmtree(path)


def _other_step(folder: Path, step: int) -> str | None:
    stored = read_manifest(folder).get("step")
    return None if stored == step else f"{MANIFEST} is of step {stored}"
