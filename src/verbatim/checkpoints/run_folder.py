"""The folder of one run: where it is, what may be continued in it, and what is in it.

```
runs/guess_number/latest -> 20260131-142501
runs/guess_number/20260131-142501/
    config.toml  metrics.jsonl  trajectories.jsonl  learning_curve.png  checkpoints/  lock
```
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import tomllib
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from verbatim.checkpoints.json_files import sync
from verbatim.checkpoints.lock import FolderLock
from verbatim.config import dump_config
from verbatim.config.schema import RunConfig
from verbatim.errors import CheckpointError, UsageError

logger = logging.getLogger(__name__)

RUNS = Path("runs")
LATEST = "latest"
CONFIG = "config.toml"


class RunFolder:
    """A run's folder, locked for this process until `close`. Made by `create` or `resume`."""

    def __init__(self, path: Path, lock: FolderLock) -> None:
        self.path = path
        self._lock = lock
        self._stamped = False

    @classmethod
    def create(cls, config: RunConfig, *, name: str, now: datetime, root: Path = RUNS) -> RunFolder:
        """A folder for a new run: `config.run_dir`, or else `root/name/{time stamp}`.

        Raises:
            UsageError: `run_dir` already holds a run, or the folder cannot be written to.
        """
        if config.run_dir is not None:
            path = config.run_dir
            if holds_run(path):
                raise UsageError(f"{path} already holds a run; add --resume to continue it, or choose another folder "
                                 "with --run-dir FOLDER")  # fmt: skip
            _make_writable(path)
        else:
            path = _make_stamped(root / name, now)
        folder = cls(path, FolderLock(path))
        folder._write_config(config)
        folder._stamped = config.run_dir is None
        return folder

    @classmethod
    def resume(cls, config: RunConfig, *, name: str, folder: Path | None = None, root: Path = RUNS) -> RunFolder:
        """The folder of a run to continue: the given one, `config.run_dir`, or the latest of this name.

        What changed in the configuration since is logged, and stored.

        Raises:
            UsageError: no such run, it is in use, or it cannot be written to.
            CheckpointError: the configuration's model is another one.
        """
        path = folder or config.run_dir or root / name / LATEST
        if not holds_run(path):
            raise UsageError(f"there is no run to resume in {path}; found {_runs_near(path)}. Give its folder, "
                             "--resume FOLDER, or leave --resume out to start a new run")  # fmt: skip
        path = path.resolve() if path.is_symlink() else path
        _make_writable(path)
        found = cls(path, FolderLock(path))
        try:
            found._compare_config(config)
            found._write_config(config)
        except BaseException:
            found.close()
            raise
        return found

    @property
    def checkpoints(self) -> Path:
        """For a `CheckpointStore`."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """For a `MetricsLog`."""
        return self.path / "metrics.jsonl"

    @property
    def trajectories(self) -> Path:
        """For a `TrajectoryLog`."""
        return self.path / "trajectories.jsonl"

    @property
    def learning_curve(self) -> Path:
        """For a `LearningCurve`."""
        return self.path / "learning_curve.png"

    def link_latest(self) -> None:
        """Point `latest` here, once there is something to continue: a run that fails before hides no other one."""
        if self._stamped:
            _link_latest(self.path)

    def close(self) -> None:
        """Release the folder."""
        self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write_config(self, config: RunConfig) -> None:
        temporary = self.path / f".{CONFIG}.tmp"
        temporary.write_text(dump_config(config), encoding="utf-8")
        sync(temporary)
        os.replace(temporary, self.path / CONFIG)

    def _compare_config(self, config: RunConfig) -> None:
        stored = _flatten(tomllib.loads((self.path / CONFIG).read_text(encoding="utf-8")))
        current = _flatten(tomllib.loads(dump_config(config)))
        changes = [
            f"{key}: {stored.get(key, 'not set')!r} -> {current.get(key, 'not set')!r}"
            for key in sorted({*stored, *current})
            if stored.get(key) != current.get(key)
        ]
        if of_model := [change for change in changes if change.startswith("model.")]:
            raise CheckpointError(f"the run in {self.path} trained another model ({'; '.join(of_model)}); restore "
                                  "[model], or start a new run without --resume")  # fmt: skip
        for change in changes:
            logger.warning("the configuration changed since this run started: %s", change)


def holds_run(path: Path) -> bool:
    """Whether a run was started in this folder."""
    return (path / CONFIG).is_file()


def _make_writable(path: Path) -> None:
    """Make the folder and prove that it can be written to, before hours of work depend on it."""
    probe = path / f".probe-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(bytes(1 << 16))  # an empty file can be written to a full disk
        probe.unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            probe.unlink()
        raise UsageError(f"the run folder {path} cannot be written to: {error.strerror} ({error.filename or path}); "
                         "choose another one with --run-dir FOLDER") from None  # fmt: skip


def _make_stamped(parent: Path, now: datetime) -> Path:
    """`parent/{time stamp}`, made by this process and no other; `-2`, `-3`, ... within the same second."""
    _make_writable(parent)
    stamp = now.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        path = parent / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("itertools.count ended")


def _link_latest(path: Path) -> None:
    temporary = path.with_name(f".{LATEST}-{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(path.name)
    os.replace(temporary, path.with_name(LATEST))


def _runs_near(path: Path) -> str:
    runs = sorted(p.parent for p in path.parent.glob(f"*/{CONFIG}") if not p.parent.is_symlink())
    return ", ".join(map(str, runs[-3:])) or f"none in {path.parent}"


def _flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    return dict(_leaves(table, prefix))


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and any(isinstance(inner, Mapping) for inner in value):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{name}.{index}")
    else:
        yield name, value
