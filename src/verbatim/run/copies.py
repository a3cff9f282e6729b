"""Handles the copy of a run folder that `checkpoint.upload_to` asks for: where the copy is, and what is taken from it
to resume."""

from __future__ import annotations

from pathlib import Path

from verbatim.config.schema import RunConfig
from verbatim.core.errors import UsageError
from verbatim.logs.checkpoints import CheckpointStore, RunFolder
from verbatim.logs.checkpoints.hold import LATEST, RUNS, holds_run
from verbatim.logs.checkpoints.run_folder import link_latest
from verbatim.logs.uploads import RemoteFault, RemoteFolder, download_run, newest_run, newest_step


def copies_of_runs(config: RunConfig) -> RemoteFolder | None:
    """The folder with the copies of all runs of this name, one folder per run; None without `checkpoint.upload_to`.

    Args:
        config: The run's configuration, with its name.

    Raises:
        UsageError: the URL cannot be used.
    """
    url = config.checkpoint.upload_to
    return None if url is None else RemoteFolder(url).below(str(config.name))


def bring_back(runs: RemoteFolder | None, config: RunConfig, resume: bool | Path) -> bool | Path:
    """Download the run that is to be resumed, if this machine does not have its folder.

    Args:
        runs: The result of `copies_of_runs`.
        config: The run's configuration, with its name.
        resume: True: the latest run of this name; a path: the run in this folder; False: a new run.

    Returns:
        What to resume: the downloaded folder, or `resume`.

    Raises:
        UsageError: there is no copy to resume from, or the copy has a newer checkpoint than the folder on this machine.
    """
    if runs is None or not resume:
        return resume
    path = resume if isinstance(resume, Path) else config.run_dir or RUNS / str(config.name) / LATEST
    try:
        if holds_run(path):
            _refuse_older(path.resolve(), runs)
            return resume
        is_latest = resume is True and config.run_dir is None
        name = newest_run(runs) if is_latest else path.name
        if name is None:
            raise UsageError(f"there is no run to resume: neither {path} nor a folder in {runs.url} holds one")
        target = path.with_name(name)
        if holds_run(target):  # `latest` is missing or points elsewhere
            _refuse_older(target, runs)
        else:
            download_run(runs.below(name), target)
        if is_latest:
            link_latest(target)
    except RemoteFault as error:
        raise UsageError(f"checkpoint.upload_to cannot be read: {error}") from error
    return target


def _refuse_older(path: Path, runs: RemoteFolder) -> None:
    """Refuse a folder whose copy has a newer checkpoint: another machine went on with the run, and resuming here would
    replace its checkpoints."""
    remote = runs.below(path.name)
    there = newest_step(remote.files())
    here = max(CheckpointStore(path / "checkpoints", read_only=True).steps(), default=0)
    if there is not None and there > here:
        raise UsageError(
            f"{remote.url} holds a checkpoint of step {there}, {path} only of step {here}: another machine went on "
            f"with this run. Rename {path}, then resume to download the newer one; or leave out checkpoint.upload_to"
        )


def copy_of(runs: RemoteFolder | None, folder: RunFolder, *, resumed: bool) -> RemoteFolder | None:
    """The place of this run's copy; None without `checkpoint.upload_to`.

    Raises:
        UsageError: the run is new, but the place already holds a different run.
    """
    if runs is None:
        return None
    remote = runs.below(folder.path.name)
    remote.warn_if_untested()
    if not resumed and newest_step(remote.files()) is not None:
        folder.withdraw()
        raise UsageError(f"{remote.url} already holds a run; give the new run another --run-dir, or remove the old run")
    return remote
