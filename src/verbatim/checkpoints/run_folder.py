"""The folder of one run: where it is, what may be continued in it, and what is in it.

```
runs/guess_number/latest -> 20260131-142501
runs/guess_number/20260131-142501/
    config.toml  metrics.jsonl  trajectories.jsonl  learning_curve.png  checkpoints/  weights/  exchange/  logs/
```
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
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
from verbatim.config.secrets import redacted_at
from verbatim.errors import CheckpointError, UsageError

logger = logging.getLogger(__name__)

RUNS = Path("runs")
LATEST = "latest"
CONFIG = "config.toml"


ORCHESTRATOR, TRAINER = "orchestrator", "trainer"
"""The processes of a run: each has its lock, `orchestrator.lock`, and its log, `logs/orchestrator.log`."""

_LEAVING = 10.0
"""Seconds that a process of a killed run may take to notice that it is alone, and end."""


class RunFolder:
    """A run's folder, locked for one kind of process until `close`. Made by `create`, `resume` or `join`."""

    def __init__(self, path: Path, lock: FolderLock) -> None:
        self.path = path
        self._lock = lock
        self._stamped = False
        self._new = False
        self.is_withdrawn = False
        """Whether there is nothing here to go on with."""

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
        folder = cls(path, _lock(path, ORCHESTRATOR))
        folder._store(dump_config(config))
        folder._stamped = config.run_dir is None
        folder._new = True
        return folder

    @classmethod
    def resume(
        cls, config: RunConfig, *, name: str, folder: Path | None = None, root: Path = RUNS, role: str = ORCHESTRATOR
    ) -> RunFolder:
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
        found = cls(path, _lock(path, role))
        try:
            found._compare_config(config)
            found._store(dump_config(config))
        except BaseException:
            found.close()
            raise
        return found

    @classmethod
    def join(cls, config: RunConfig, *, role: str) -> RunFolder:
        """The explicit folder of a run whose processes are started one by one: the first one makes it.

        Raises:
            UsageError: no `run_dir`, a run that has checkpoints, or another configuration than the other process's.
        """
        path = config.run_dir
        if path is None:
            raise UsageError(f"both processes of a run meet in its folder; give it: --run-dir FOLDER, the same for "
                             f"`verbatim {ORCHESTRATOR}` and `verbatim {TRAINER}`")  # fmt: skip
        _make_writable(path)
        found = cls(path, _lock(path, role))
        try:
            found._agree_on_config(config)
        except BaseException:
            found.close()
            raise
        return found

    @property
    def weights(self) -> Path:
        """For published weights."""
        return self.path / "weights"

    @property
    def exchange(self) -> Path:
        """Where the two processes of the run meet."""
        return self.path / "exchange"

    def log(self, role: str) -> Path:
        """The log file of a process; its folder is made."""
        folder = self.path / "logs"
        folder.mkdir(exist_ok=True)
        return folder / f"{role}.log"

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

    def withdraw(self) -> None:
        """Leave no run behind that could never start: a new folder holds none any more, unless a warm start is done.

        A time-stamped folder goes altogether. In one that the user named the logs stay.
        """
        if not self._new or (self.path / "warm_start").exists():
            return
        self.is_withdrawn = True
        if self._stamped:
            shutil.rmtree(self.path)
        else:
            (self.path / CONFIG).unlink()

    def close(self) -> None:
        """Release the folder."""
        self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _store(self, toml: str) -> None:
        temporary = self.path / f".{CONFIG}.{os.getpid()}.tmp"  # both processes of a run may do it
        temporary.write_text(toml, encoding="utf-8")
        sync(temporary)
        os.replace(temporary, self.path / CONFIG)

    def _agree_on_config(self, config: RunConfig) -> None:
        """Store the configuration, or find that the other process stored the same one."""
        if self.checkpoints.is_dir() and any(self.checkpoints.glob("step_*")):
            raise UsageError(f"{self.path} already holds a run; add --resume to continue it, or choose another folder "
                             "with --run-dir FOLDER")  # fmt: skip
        temporary = self.path / f".{CONFIG}.{os.getpid()}"
        temporary.write_text(dump_config(config), encoding="utf-8")
        try:
            os.link(temporary, self.path / CONFIG)
        except FileExistsError:
            self.agree(config, self._stored())
        finally:
            temporary.unlink()

    def agree(self, config: RunConfig, other: str) -> None:
        """Refuse another configuration than that of the run's other process, which stays the stored one.

        Raises:
            UsageError: names every key that differs.
        """
        if changes := self._changes(config, other):
            self._store(other)
            raise UsageError(f"the other process of the run in {self.path} has another configuration; stored -> "
                             f"given: {'; '.join(changes)}. Give both the same file and options, or choose another "
                             "folder with --run-dir FOLDER") from None  # fmt: skip

    def _stored(self) -> str:
        return (self.path / CONFIG).read_text(encoding="utf-8")

    def _changes(self, config: RunConfig, toml: str) -> list[str]:
        stored = _flatten(tomllib.loads(toml))
        current = _flatten(tomllib.loads(dump_config(config)))
        return [
            f"{key}: {_shown(key, stored)} -> {_shown(key, current)}"
            for key in sorted({*stored, *current} - {"run_dir"})  # where it is says nothing about what it is
            if stored.get(key) != current.get(key)
        ]

    def _compare_config(self, config: RunConfig) -> None:
        changes = self._changes(config, self._stored())
        if of_model := [change for change in changes if change.startswith("model.")]:
            raise CheckpointError(f"the run in {self.path} trained another model ({'; '.join(of_model)}); restore "
                                  "[model], or start a new run without --resume")  # fmt: skip
        for change in changes:
            logger.warning("the configuration changed since this run started: %s", change)


def _lock(path: Path, role: str) -> FolderLock:
    return FolderLock(path, f"{role}.lock", patience=_LEAVING if role == TRAINER else 0.0)


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


def _shown(key: str, values: Mapping[str, Any]) -> str:
    """A value for people and logs: without what is secret."""
    return repr(redacted_at(key, values.get(key, "not set")))


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
