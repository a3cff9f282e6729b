"""Manages a run folder: its path, its files, its lock and its stored configuration.

```
runs/guess_number/latest -> 20260131-142501
runs/guess_number/20260131-142501/
    config.toml  precision.json  metrics.jsonl  alarms.jsonl  learning_curve.png
    trajectories/  evaluations/  checkpoints/  weights/  exchange/  logs/
    and at the end: summary.json  summary.txt  final/
```
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from verbatim.config import dump_config
from verbatim.config.schema import RunConfig
from verbatim.core.disk import keep_aside, make_private, rename, sync, write_file, write_private
from verbatim.core.errors import CheckpointError, UsageError
from verbatim.core.imports import MODULE_FOLDERS, folders_beside
from verbatim.core.machine_faults import naming
from verbatim.logs.checkpoints.hold import (
    BEST,
    LATEST,
    ORCHESTRATOR,
    RUNS,
    TEMPORARY_BEST,
    TRAINER,
    Held,
    folder_to_join,
    folder_to_resume,
    hold_new,
    hold_old,
    hold_shared,
    lock_of,
    refusal_of_a_run,
)
from verbatim.logs.checkpoints.json_files import write_record
from verbatim.logs.checkpoints.lock import FolderLock, is_locked
from verbatim.logs.checkpoints.origin import FORKING
from verbatim.logs.checkpoints.ownership import (
    NAMES,
    OF_A_BEGINNING,
    claim,
    remove_from,
    remove_run,
    require_writable,
)
from verbatim.logs.checkpoints.store import WEIGHTS, CheckpointStore
from verbatim.logs.checkpoints.stored_config import (
    CONFIG,
    changed_keys,
    changed_since,
    damage_of_stored,
    newest_copy,
    stored_tables,
)

logger = logging.getLogger(__name__)

PRECISION = "precision.json"
"""File with the dtype that `dtype = "auto"` selected, and the reason."""
_LEFT = {
    ORCHESTRATOR: (
        ".trainer_state",
        "states",
        ".final.partial",
        ".summary.json.tmp",
        ".learning_curve.png.tmp",
        ".metrics.jsonl.tmp",
        ".alarms.jsonl.tmp",
        ".module_folders.json.tmp",
        ".precision.json.tmp",
        TEMPORARY_BEST,
    ),
    TRAINER: (".model.partial", ".warm_start.partial"),
}
"""Files that a killed process may leave incomplete, by role. They are removed only by the next process of the same
role, because the other process of the run may be writing its own files."""


class RunFolder:
    """A run folder, locked for one role until `close`. Use `open`, `create`, `resume` or `join` to get one."""

    def __init__(self, path: Path, role: str, lock: FolderLock | None = None) -> None:
        self.path = path
        self.weights = path / "weights"
        """Folder of the published weights."""
        self.exchange = path / "exchange"
        """Folder in which orchestrator and trainer exchange files."""
        self.checkpoints = path / "checkpoints"
        """Folder of the run's `CheckpointStore`."""
        self.metrics = path / "metrics.jsonl"
        """File of the metrics, with one line per step."""
        self.alarms = path / "alarms.jsonl"
        """File of the alarms, with one line each time an alarm is raised or cleared."""
        self.trajectories = path / "trajectories"
        """Folder of the trajectories with the outcomes of their tokens, one Parquet file per step."""
        self.evaluations = path / "evaluations"
        """Folder of the evaluation episodes, with one Parquet file per evaluation, named after the last step before the
        evaluation."""
        self.learning_curve = path / "learning_curve.png"
        self.summary = path / "summary.json"
        """Final results."""
        self.summary_text = path / "summary.txt"
        """File of the final results as printed, with the learning curve and one episode each from before and after
        training."""
        self.final = path / "final"
        """Folder of the trained model, in the Hugging Face format."""
        self.best = path / BEST
        """A symbolic link to the weights of the best evaluation's checkpoint."""
        self._lock = lock or lock_of(path, role)
        self._role = role
        self.toml = ""
        """The stored configuration as TOML."""
        self._new = self._stamped = False
        self._beginning: tuple[str, ...] = ()
        self.is_withdrawn = False
        """True once `withdraw` has removed the run, so that there is nothing to resume."""

    @classmethod
    def open(
        cls, config: RunConfig, role: str, *, resume: bool | Path, joins: bool, held: Held | None = None
    ) -> RunFolder:
        """Resume, join or create a run.

        Args:
            config: The run's configuration, with its name.
            role: This process's role, `ORCHESTRATOR` or `TRAINER`.
            resume: False for a new run; True to resume the latest run of this name; or the folder of the run to resume.
            joins: True if the other process of a new run is started separately.
            held: The folder, if `holding` already holds it.

        Raises:
            UsageError: as for `create`, `resume` and `join`.
        """
        name = str(config.name)
        if resume:
            folder = None if resume is True else resume
            return cls.resume(config, name=name, folder=folder, role=role, held=held)
        if joins:
            return cls.join(config, role=role, held=held)
        return cls.create(config, name=name, now=datetime.now(), held=held)

    @classmethod
    def create(
        cls,
        config: RunConfig,
        *,
        name: str,
        now: datetime,
        root: Path = RUNS,
        beginning: Callable[[Path], Sequence[str]] | None = None,
        held: Held | None = None,
    ) -> RunFolder:
        """Create the folder of a new run: `config.run_dir`, or else `root/name/{time stamp}`.

        Args:
            config: The run's configuration. It is stored last, because a folder counts as a run once it has a
                configuration.
            name: Name of the folder in `root`.
            now: The time to use in the time stamp.
            root: The folder of all runs.
            beginning: Called with the folder; writes its initial files (for a fork: the checkpoint) and returns their
                names.
            held: As for `open`.

        Raises:
            UsageError: `run_dir` already contains a run or other files, or cannot be written to.
        """
        if config.run_dir is not None:
            held = held or hold_new(config.run_dir)
            path, was_there = held.path, held.path not in held.made
        else:
            path, was_there = _make_stamped(root / name, now), False

        def begin(found: RunFolder) -> None:
            try:
                found._beginning = tuple(beginning(path)) if beginning is not None else ()
                found._store(dump_config(config))
            except BaseException:
                if not was_there:
                    remove_run(path)
                raise

        folder = cls._open(path, ORCHESTRATOR, begin, held)
        folder._new, folder._stamped = True, config.run_dir is None
        # Modules of the configuration may have been imported from folders next to its TOML file, outside of the run
        # folder.
        if folders := folders_beside():
            write_record(path / MODULE_FOLDERS, {"folders": folders})
        return folder

    @classmethod
    def resume(
        cls,
        config: RunConfig,
        *,
        name: str,
        folder: Path | None = None,
        root: Path = RUNS,
        role: str = ORCHESTRATOR,
        held: Held | None = None,
    ) -> RunFolder:
        """Open the folder of a run to resume: `folder`, or else `config.run_dir`, or else the latest run of this name.

        Changes to the configuration are logged and stored.

        Raises:
            UsageError: there is no such run, it is in use, it cannot be written to, or its stored configuration is
                damaged and no checkpoint has a copy.
            CheckpointError: the configuration has a different model, or a `max_steps` below the number of finished
                steps.
        """
        held = held or hold_old(folder_to_resume(config, name, folder, root), role)
        return cls._open(held.path, role, lambda found: found._compare_config(config), held)

    @classmethod
    def join(cls, config: RunConfig, *, role: str, held: Held | None = None) -> RunFolder:
        """Open `config.run_dir` for a run whose processes are started separately. The first of these processes creates
        the folder.

        Raises:
            UsageError: `run_dir` is not set, the run has checkpoints already, or the other process has a different
                configuration.
        """
        held = held or hold_shared(folder_to_join(config), role)
        return cls._open(held.path, role, lambda found: found._agree_on_config(config), held)

    @classmethod
    def _open(cls, path: Path, role: str, begin: Callable[[RunFolder], None], held: Held | None = None) -> RunFolder:
        """Lock the folder, and let `begin` prepare it. The lock is released if `begin` fails."""
        found = cls(path, role, None if held is None else held.take())
        try:
            found.remove_left_overs(role)
            begin(found)
        except BaseException:
            found.close()
            raise
        return found

    @staticmethod
    def stored_tables(config: RunConfig, resume: bool | Path, root: Path = RUNS) -> Mapping[str, Any] | None:
        """The stored configuration of a run to resume, as TOML tables, or its copy in the newest checkpoint; None if
        there is no such run, so that `resume` will fail.

        Args:
            config: The given configuration, with its name.
            resume: True for the latest run of this name, or the folder of a run.
            root: The folder of all runs.
        """
        path = resume if isinstance(resume, Path) else config.run_dir or root / str(config.name) / LATEST
        return stored_tables(path)

    def log(self, role: str) -> Path:
        """Create the log file of a role and its folder if they are missing, and return the file's path. Only the file's
        owner can read the file."""
        folder = self.path / "logs"
        folder.mkdir(exist_ok=True)
        make_private(folder / f"{role}.log")
        return folder / f"{role}.log"

    def link_latest(self) -> None:
        """Point `latest` to this run. Called once the run can be resumed, because a run that fails earlier must not
        hide the previous run."""
        if self._stamped:
            link_latest(self.path)

    def link_best(self, step: int | None) -> None:
        """Point `best` to the weights of this step's checkpoint; None removes the link. A failure is only logged,
        because the link is merely a convenience."""
        temporary = self.path / TEMPORARY_BEST
        try:
            if step is None:
                if self.best.is_symlink():
                    self.best.unlink()
                return
            target = f"{self.checkpoints.name}/step_{step:06d}/{WEIGHTS}"
            if self.best.is_symlink() and os.readlink(self.best) == target:
                return
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(target)
            rename(temporary, self.best)
        except OSError as error:
            logger.warning("%s could not be linked to the best checkpoint: %s", self.best, error.strerror or error)

    def withdraw(self) -> None:
        """Remove a new run that failed to start. A run whose warm start has finished is not removed, because the run
        can be resumed from the end of its warm start.

        A time-stamped folder is deleted. In a folder that the user named, the logs are kept.
        """
        if not self._new or ((self.path / "warm_start").exists() and not self._beginning):
            return
        self.is_withdrawn = True
        if self._stamped:
            remove_run(self.path)
        else:
            remove_from(self.path, sorted(NAMES - OF_A_BEGINNING))

    def remove_left_overs(self, role: str) -> None:
        """Remove incomplete files that a killed process of this role left behind."""
        remove_from(self.path, (*_LEFT[role], _temporary_config(role)))

    def close(self) -> None:
        """Release the folder."""
        self._lock.release()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _store(self, toml: str) -> None:
        # The temporary name depends on the role, because both processes of a run may write the file at once.
        write_file(self.path / CONFIG, toml.encode(), temporary=self.path / _temporary_config(self._role), private=True)
        self.toml = toml

    def _agree_on_config(self, config: RunConfig) -> None:
        """Store the configuration, or check that the other process stored the same configuration."""
        if self.checkpoints.is_dir() and any(self.checkpoints.glob("step_*")):
            raise refusal_of_a_run(self.path)
        self.toml = dump_config(config)
        temporary = self.path / _temporary_config(self._role)
        try:
            # A hard link fails if the file exists, whereas a rename would replace the other process's configuration.
            with naming(self.path / CONFIG):
                write_private(temporary, self.toml.encode())
            sync(temporary)
            os.link(temporary, self.path / CONFIG)
            sync(self.path)
        except FileExistsError:
            self.agree(config, self._stored())
        finally:
            temporary.unlink(missing_ok=True)  # the stored file is another hard link to it

    def agree(self, config: RunConfig, other: str) -> None:
        """Refuse a configuration that differs from the configuration that the run's other process has stored.

        Raises:
            UsageError: the configurations differ; the message lists the keys.
        """
        if changes := changed_keys(config, other):
            self._store(other)
            raise UsageError(
                f"the other process of the run in {self.path} has a different configuration; stored -> "
                f"given: {'; '.join(changes)}. Give both the same file and options, or choose another "
                "folder with --run-dir FOLDER"
            ) from None

    def _stored(self) -> str:
        """The stored configuration as TOML. A damaged file is restored from the newest checkpoint that has a copy."""
        path = self.path / CONFIG
        damage = damage_of_stored(path)
        if damage is None:
            return path.read_text(encoding="utf-8")
        copy = newest_copy(self.path)
        if copy is None:
            raise UsageError(
                f"{path}, the run's stored configuration, is damaged: {damage}. Write it "
                f"again from the file that the run was started with:  verbatim config FILE > {path}; "
                "or start a new run"
            )
        aside = f", and the damaged one is kept as {keep_aside(path)}" if path.exists() else ""
        logger.warning("%s is damaged: %s; it is restored from %s%s", path, damage, copy, aside)
        self._store(copy.read_text(encoding="utf-8"))
        return self.toml

    def _compare_config(self, config: RunConfig) -> None:
        """Store the configuration of a resumed run, if the run can be resumed with it."""
        stored = self._stored()
        changes = changed_keys(config, stored)
        if of_model := [change for change in changes if change.startswith("model.")]:
            raise CheckpointError(
                f"the run in {self.path} trained a different model ({'; '.join(of_model)}); change [model] back, "
                "or start a new run without --resume (in Python: without resume)"
            )
        done = max(CheckpointStore(self.checkpoints, read_only=True).steps(), default=0)
        if done > config.max_steps:
            raise CheckpointError(
                f"the run in {self.path} has done {done} steps, and max_steps = {config.max_steps}; "
                f"expected at least {done}, or a new run"
            )
        (self.path / FORKING).unlink(missing_ok=True)  # left by a fork that was killed after copying its checkpoint
        for change in changes:
            logger.warning("the configuration changed since this run started: %s", change)
        if (copy := newest_copy(self.path)) is not None and (other := changed_since(copy, stored)):
            logger.warning(
                "%s was edited or damaged, or the run was resumed with other keys and has had no checkpoint since; "
                "the file differs from %s: %s",
                self.path / CONFIG,
                copy,
                "; ".join(other),
            )
        self._store(dump_config(config))


def link_latest(run: Path) -> None:
    """Point `latest`, next to a run folder, to that run. If `latest` is a file or folder and not a link, it is left
    alone, with a warning."""
    link = run.with_name(LATEST)
    if link.exists() and not link.is_symlink():
        logger.warning("%s is not a link that Verbatim made, and is left alone; the run is in %s", link, run)
        return
    if link.is_symlink() and os.readlink(link) == run.name:
        sync(link.parent)  # a killed process may have created the link without syncing it
        return
    temporary = run.with_name(f".{LATEST}-{run.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(run.name)
    rename(temporary, link)


def _temporary_config(role: str) -> str:
    return f".{CONFIG}.{role}.tmp"


def _make_stamped(parent: Path, now: datetime) -> Path:
    """Create `parent/{time stamp}` for this process alone. If it exists, the suffix `-2`, `-3`, ... is added."""
    require_writable(parent)
    for left in parent.glob(f".{LATEST}-*"):  # the temporary links that `link_latest` leaves if its process is killed
        name = left.name.removeprefix(f".{LATEST}-")
        if left.is_symlink() and os.readlink(left) == name and not is_locked(parent / name / f"{ORCHESTRATOR}.lock"):
            left.unlink(missing_ok=True)
    stamp = now.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        path = parent / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        sync(parent)
        claim(path)
        return path
    raise AssertionError("itertools.count ended")
