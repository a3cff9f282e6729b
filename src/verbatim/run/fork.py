"""Begins a run at a checkpoint of another run: with the model, optimizer, examples, logs and step of that run, and with
some keys changed.

```
runs/a/checkpoints/step_000040     ->  runs/b/checkpoints/step_000040       its files, and the new configuration
runs/a/metrics.jsonl, ...          ->  runs/b/metrics.jsonl, ...            their content up to step 40
runs/a/trajectories/, evaluations/ ->  runs/b/trajectories/, evaluations/   the files up to step 40
runs/a/model, warm_start           ->  runs/b/model, warm_start             the initial model
runs/a/precision.json              ->  runs/b/precision.json                how the dtypes were chosen
                                       runs/b/forked_from.json
```

From then on the fork is an ordinary run that is resumed. Files that are never modified are hard-linked if the file
system supports it; others are copied.
"""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from verbatim.config import dump_config, load_config
from verbatim.config.schema import RunConfig
from verbatim.core.disk import link_or_copy, refuse_link, sync, sync_tree, write_file, write_private
from verbatim.core.errors import CheckpointError, UsageError
from verbatim.core.imports import search_beside
from verbatim.core.texts import first_of
from verbatim.environments.resolve import examples_of
from verbatim.logs.checkpoints import (
    CONFIG,
    Checkpoint,
    CheckpointStore,
    Origin,
    RunFolder,
    find_checkpoint,
    find_damage,
    read_loop_state,
    read_origin,
    write_origin,
)
from verbatim.logs.checkpoints.hold import Held
from verbatim.logs.checkpoints.origin import FORKING, ORIGIN
from verbatim.logs.checkpoints.ownership import remove_from
from verbatim.logs.checkpoints.run_folder import PRECISION
from verbatim.logs.checkpoints.stored_config import changed_keys
from verbatim.logs.monitors.trajectory_log import EVALUATIONS, TRAJECTORIES
from verbatim.logs.outcomes.files import own_files_in
from verbatim.rollouts import derive_seed
from verbatim.run.build import make_progress
from verbatim.run.environments import Environments
from verbatim.run.fork_state import LOOP_FILES, write_changed_state
from verbatim.run.precision import read_choices, write_choices
from verbatim.run.tables import component_tables

FRESH = ("optimizer", "examples")
"""What a fork may reset: the optimizer's moments; the examples' order, their pools and the groups in flight."""
_BEGINNINGS = ("model", "warm_start")
"""Folders of a run with the model from which the run started; a fork copies these folders."""
_FIXED = {
    "model.": "the weights and their tokenizer come from the checkpoint",
    "warm_start.": "it ran before step 0, and its effect is in the weights",
    "trainer.lora.": "the checkpoint's adapters, or its weights, have this shape",
}
"""Keys that a fork cannot change, with the reason."""
_MAY_CHANGE = ("trainer.lora.merge_final",)
"""Exceptions to `_FIXED`: these keys do not affect training."""
_LOGS = ("alarms.jsonl", "metrics.jsonl")
"""The logs in JSON lines, of which the fork keeps only the part up to the checkpoint."""
_FORKED = {
    *_BEGINNINGS,
    TRAJECTORIES,
    EVALUATIONS,
    ORIGIN,
    PRECISION,
    *_LOGS,
    "checkpoints",
}
"""Everything that a fork may put into its folder; only these names are removed after a crash."""
_MOST_NAMED = 5
"""Maximum number of names that an error message lists."""


@dataclass(frozen=True, kw_only=True)
class Fork:
    """Where a new run begins."""

    run: Path
    """The folder of the run that is forked."""
    checkpoint: Checkpoint
    fresh: tuple[str, ...] = ()
    """The parts of `FRESH` that are reset."""

    @property
    def config_file(self) -> Path:
        """The configuration under which the checkpoint was written."""
        return self.checkpoint.folder / CONFIG

    @property
    def toml(self) -> str:
        """The text of `config_file`."""
        try:
            return self.config_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self.config_file} cannot be read: {error}") from error

    @property
    def tables(self) -> dict[str, Any]:
        """The parsed tables of `config_file`."""
        try:
            return tomllib.loads(self.toml)
        except ValueError as error:
            raise CheckpointError(f"{self.config_file} is not TOML: {error}") from error


def find_fork(text: str, fresh: Iterable[str] = ()) -> Fork:
    """The fork that RUN or RUN@STEP names; STEP is a step number, "best", or "latest" (the default).

    Raises:
        UsageError: the run or the checkpoint does not exist, or a name in `fresh` is unknown.
    """
    name, at, which = text.rpartition("@")
    if not at or Path(text).is_dir():  # a folder's name may contain @
        name, which = text, "latest"
    run = Path(name).expanduser()
    if not run.is_dir():
        raise UsageError(
            f"--fork {text}: there is no folder {run}; expected a run folder, followed by @STEP, "
            "@best, or nothing for its latest checkpoint: --fork runs/NAME/latest@40"
        )
    unknown = [part for part in fresh if part not in FRESH]
    if unknown:
        raise UsageError(f"--fresh {unknown[0]}: expected {' or '.join(FRESH)}")
    return Fork(run=run.resolve(), checkpoint=find_checkpoint(run.resolve(), which), fresh=tuple(dict.fromkeys(fresh)))


def load_forked(fork: Fork, overrides: Sequence[str]) -> RunConfig:
    """The forked run's configuration at the checkpoint, with overrides applied and without its run folder.

    Raises:
        ConfigError: as for `load_config`.
    """
    search_beside(fork.run / CONFIG)  # where modules named in the configuration are found
    return load_config(fork.config_file, ["--run-dir", "null", *overrides], component_tables())


def check_fork(fork: Fork, config: RunConfig) -> Origin:
    """Refuse changed keys with which this checkpoint cannot be continued.

    Returns:
        The contents of `forked_from.json`.

    Raises:
        UsageError: a key cannot be changed; the message says which, and what to type.
        CheckpointError: the checkpoint is damaged.
    """
    run, step = fork.run, fork.checkpoint.step
    changes = changed_keys(config, fork.toml)
    fixed = [
        f"{change}: {why}"
        for change in changes
        for prefix, why in _FIXED.items()
        if change.startswith(prefix) and not change.startswith(_MAY_CHANGE)
    ]
    if fixed:
        raise UsageError(
            f"a fork of {run} at step {step} cannot change:\n  " + "\n  ".join(fixed) + "\nLeave "
            f"{'it' if len(fixed) == 1 else 'them'} out. A new run can begin with the weights alone: "
            f"model.name = {json.dumps(str(fork.checkpoint.weights))}"
        )
    if config.run_dir is not None and config.run_dir.resolve() == run:
        raise UsageError(
            f"--run-dir {config.run_dir} is the run that is forked; name another folder, or leave --fork "
            "out and add --resume"
        )
    if config.max_steps <= step:
        raise UsageError(
            f"max_steps = {config.max_steps}, but the checkpoint is that of step {step}: nothing would be "
            f"trained; type for example --max-steps {step + 100}"
        )
    progress = make_progress(config)
    progress.load_state_dict(read_loop_state(fork.checkpoint.folder)["evaluations"])
    if progress.early_stopping is not None and progress.stop_reason is not None:
        raise UsageError(
            f"the run {run} ended early at step {step}: {progress.stop_reason}; nothing would be trained. "
            "Fork an earlier checkpoint, such as @best, or increase the patience: --orchestrator.eval.early-"
            f"stopping.patience {len(progress.early_stopping.since) + 3}"
        )
    return Origin(run=str(run), step=step, fresh=fork.fresh, changes=tuple(changes), forked_from=read_origin(run))


def check_held_examples(fork: Fork, environments: Environments) -> None:
    """Refuse environments that lack the example of a group in flight: a resumed run plays the groups in flight first.

    Raises:
        UsageError: examples are missing; the message lists them.
    """
    if "examples" in fork.fresh:
        return
    there = {
        label: {example.id for example in examples_of(environment, label, "train")}
        for label, environment in environments.by_label.items()
    }
    held = read_loop_state(fork.checkpoint.folder)["dispatcher"]["held"]
    gone = [
        f"{group['env']}/{group['example_id']}"
        for group in held
        if group["example_id"] not in there.get(group["env"], ())
    ]
    if gone:
        raise UsageError(
            f"{len(gone)} groups in flight at step {fork.checkpoint.step} play examples that this run's environments "
            f"do not have: {first_of(gone, _MOST_NAMED)}; add `--fresh examples`: it resets these groups, the order of "
            "the examples and the difficulty pools"
        )


def open_fork(
    fork: Fork,
    origin: Origin,
    config: RunConfig,
    environments: Environments,
    console: Console,
    held: Held | None = None,
) -> RunFolder:
    """Create the folder of a new run that begins at the checkpoint.

    Raises:
        UsageError: as for `check_held_examples` and `begin_fork`, or the folder holds a run.
    """
    check_held_examples(fork, environments)
    console.print(f"fork        of {origin.run} after step {origin.step}", soft_wrap=True)
    for part in origin.fresh:
        console.print(f"fork        fresh {part}")
    for change in origin.changes or ("no key is changed",):
        console.print(f"fork        {change}", soft_wrap=True)
    return RunFolder.create(
        config,
        name=str(config.name),
        now=datetime.now(),
        beginning=lambda path: begin_fork(fork, origin, config, path),
        held=held,
    )


def begin_fork(fork: Fork, origin: Origin, config: RunConfig, path: Path) -> list[str]:
    """Put everything that the fork begins with into the new run folder. The checkpoint comes last: without a
    checkpoint, the folder does not count as a run.

    Returns:
        The names of the files and folders created.

    Raises:
        UsageError: the folder already contains something with one of these names, the forked run has a symbolic link in
            the place of one of them, or the checkpoint was removed meanwhile.
    """
    source = CheckpointStore(fork.run / "checkpoints", read_only=True)
    logs = source.logs(fork.checkpoint.step)
    files = {name: _size(logs.get(name)) for name in _LOGS if (fork.run / name).is_file()}
    parts = [name for name in _BEGINNINGS if (fork.run / name).is_dir()]
    folders = [name for name in (TRAJECTORIES, EVALUATIONS) if name == TRAJECTORIES or (fork.run / name).is_dir()]
    for name in (*files, *folders, *parts):
        refuse_link(fork.run / name)
    choices = read_choices(fork.run, config)
    names = [*files, *folders, *parts, ORIGIN, "checkpoints", *([PRECISION] if choices else [])]
    _make_room(path, names)
    try:
        # FORKING lists what this function creates, so that the next attempt can clean up after a killed process.
        write_file(path / FORKING, "".join(f"{name}\n" for name in names).encode())
        for name, size in files.items():
            shutil.copyfile(fork.run / name, path / name)
            if size is not None:
                os.truncate(path / name, size)
            sync(path / name)
        for name in folders:
            _link_outcomes(fork, logs.get(name), path / name)
        for name in parts:
            shutil.copytree(fork.run / name, path / name, copy_function=link_or_copy, symlinks=True)
            sync_tree(path / name)
        if choices:
            write_choices(path, choices)
        write_origin(path, origin)
        _write_checkpoints(fork, origin, config, path, source, logs)
    except BaseException as error:
        remove_from(path, [*names, FORKING])
        if isinstance(error, FileNotFoundError) and fork.checkpoint.step not in source.steps():
            raise UsageError(
                f"the checkpoint of step {fork.checkpoint.step} was removed while it was copied: "
                f"{fork.run} is still active; fork a newer one"
            ) from error
        raise
    (path / FORKING).unlink()
    sync(path)
    return names


def _write_checkpoints(
    fork: Fork, origin: Origin, config: RunConfig, path: Path, source: CheckpointStore, logs: Mapping[str, Any]
) -> None:
    """Write the checkpoint from which the fork resumes, and the best checkpoint."""
    store = CheckpointStore(path / "checkpoints")
    step = fork.checkpoint.step
    best = read_loop_state(fork.checkpoint.folder)["evaluations"]["best"]
    if config.checkpoint.keep_best is None:
        best = None
    other: Checkpoint | None = None
    # keep_best compares later evaluations with the best checkpoint, so this one is copied too; if it is damaged, it is
    # forgotten.
    if best is not None and best["step"] != step:
        other = Checkpoint(step=best["step"], folder=source.folder / f"step_{best['step']:06d}")
        if find_damage(other.folder) is not None:
            best = other = None
    with store.writing(step, logs, best) as temporary:
        for part in fork.checkpoint.folder.iterdir():
            if part.is_dir():
                shutil.copytree(part, temporary / part.name, copy_function=link_or_copy)
            elif part.name not in ("manifest.json", CONFIG, *LOOP_FILES):
                link_or_copy(part, temporary / part.name)
        write_private(temporary / CONFIG, dump_config(config).encode())
        write_changed_state(
            fork.checkpoint.folder, temporary, origin, seed=derive_seed(config.seed, "schedule"), moved=(fork.run, path)
        )
    if other is not None:
        store.adopt(other)


def _size(mark: Any) -> int | None:
    """Number of bytes of a log to copy; None to copy the whole log, which the resume then truncates."""
    size = mark.get("size") if isinstance(mark, Mapping) else None
    return size if type(size) is int else None


def _link_outcomes(fork: Fork, marks: Any, target: Path) -> None:
    """Link or copy the files that the checkpoint lists."""
    target.mkdir()
    for step, file in own_files_in(fork.run / target.name).items():
        if isinstance(marks, Mapping) and str(step) in marks:
            link_or_copy(file, target / file.name)
    sync_tree(target)


def _make_room(path: Path, names: Sequence[str]) -> None:
    """Remove the remains of a fork that was killed. Refuse to continue if anything else is in the way."""
    marker = path / FORKING
    if marker.is_file():
        left = marker.read_text(errors="replace").splitlines()
        if strange := [name for name in left if name not in _FORKED]:
            raise UsageError(
                f"{marker} lists {first_of(list(map(repr, strange)), _MOST_NAMED)}, which no fork writes; nothing was "
                "removed. Name an empty folder with --run-dir FOLDER"
            )
        remove_from(path, left)
    there = [name for name in names if (path / name).exists() or (path / name).is_symlink()]
    if there:
        raise UsageError(
            f"{path} has {first_of(there, _MOST_NAMED)} already; name an empty folder with --run-dir FOLDER"
        )
