"""Connects the run folders of two hosts: offers what a trainer may need, and fetches it."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from verbatim.config import dump_config
from verbatim.config.schema import RunConfig
from verbatim.core.disk import make_folder, remove_folder, rename, sync_tree, write_file
from verbatim.core.errors import RunStopped, UsageError
from verbatim.core.machine_faults import describe
from verbatim.core.texts import shown
from verbatim.logs.checkpoints import CONFIG, ORCHESTRATOR, TRAINER, CheckpointStore, RunFolder, find_damage
from verbatim.logs.checkpoints.lock import ANOTHER_FOLDER, is_locked
from verbatim.logs.checkpoints.seal import MANIFEST, listed_files, read_manifest
from verbatim.rollouts.main_loop import run_main
from verbatim.run.parts import needs_first_model
from verbatim.trainer.transport.mirror.link import Link
from verbatim.trainer.transport.mirror.protocol import PROTOCOL, RUN, Files, is_file_name, mark_of
from verbatim.trainer.transport.mirror.server import Listen, MirrorServer, serve_mirror

logger = logging.getLogger(__name__)

_MODELS = ("model", "warm_start")
"""What a run may begin with."""
_OFFERED = re.compile(r"checkpoints/step_\d{6,12}|model|warm_start")


@contextlib.contextmanager
def serve_run(config: RunConfig, folder: RunFolder, where: Listen) -> Iterator[MirrorServer]:
    """Serve the orchestrator's run folder to the trainer's host while the block lasts.

    Raises:
        UsageError: the extra `serve` is not installed; as `serve_mirror`.
    """
    try:
        from verbatim.trainer.transport.mirror.app import MirrorApp
    except ImportError as error:
        raise UsageError(f"--listen needs {error.name}: pip install 'verbatim-rl[serve]'") from None
    app = MirrorApp(
        folder.path.resolve(),
        config=dump_config(config),
        offers=_offers(config, folder),
        keep=config.orchestrator.max_async_level + 2,
        key=where.key,
    )
    with serve_mirror(app, where) as server:
        yield server


def _offers(config: RunConfig, folder: RunFolder) -> dict[str, Files]:
    newest = CheckpointStore(folder.checkpoints, read_only=True).latest()
    found = {} if newest is None else {f"checkpoints/{newest.folder.name}": _sealed_files(newest.folder)}
    if found and not needs_first_model(config):
        return found
    whole = [name for name in _MODELS if (folder.path / name).is_dir() and find_damage(folder.path / name) is None]
    return found | {name: _sealed_files(folder.path / name) for name in whole}


def _sealed_files(folder: Path) -> Files:
    """The files of a sealed folder that is whole, its manifest too."""
    listed = {name: (entry["size"], entry["sha256"]) for name, entry in read_manifest(folder)["files"].items()}
    return {**listed, MANIFEST: mark_of(folder / MANIFEST)}


def trainer_folder(config: RunConfig, folder: Path | None) -> RunFolder:
    """The folder of a trainer whose host does not share the run's: what it needs of the run is fetched into it.

    Args:
        config: With its name.
        folder: The folder; None is `config.run_dir`.

    Raises:
        UsageError: no folder, one that an orchestrator works or worked in, or one that cannot be written to.
    """
    path = folder or config.run_dir
    if path is None:
        raise UsageError("the trainer needs a folder of its own on this host: --run-dir FOLDER")
    if (path / "metrics.jsonl").exists() or is_locked(path / f"{ORCHESTRATOR}.lock"):
        raise UsageError(
            f"{path} is the folder of an orchestrator; with --connect the trainer needs a folder of its "
            "own: --run-dir FOLDER"
        )
    try:
        make_folder(path)
    except OSError as error:
        raise UsageError(f"the folder {path} cannot be written to: {describe(error)}; {ANOTHER_FOLDER}") from error
    found = RunFolder(path, TRAINER)
    found.remove_left_overs(TRAINER)
    return found


def fetch_run(link: Link, config: RunConfig, folder: RunFolder, console: Console) -> str | None:
    """Agree with the orchestrator's host on the configuration, and fetch what a trainer needs of the run.

    Waits for that host without a limit; once it has answered, it has to go on answering.

    Returns:
        The checkpoint that the run goes on from, as "checkpoints/step_000050"; None at its start.

    Raises:
        UsageError: the key, the configuration or the version of Verbatim differs, or this folder is of another run.
        RunStopped: there is no room on the disk, a file arrives damaged again and again, or nothing comes from that
            host for `orchestrator.heartbeat_timeout`.
    """
    console.print(f"the orchestrator's host: {link.url}", soft_wrap=True)
    return run_main(_fetch_run(link, config, folder, console))


async def _fetch_run(link: Link, config: RunConfig, folder: RunFolder, console: Console) -> str | None:
    async with link:
        reply = await link.insist("POST", RUN, {"protocol": PROTOCOL})
        if reply.get("protocol") != PROTOCOL:
            raise UsageError(
                f"{link.url} speaks version {shown(reply.get('protocol'))} of this protocol, expected "
                f"{PROTOCOL}; install the same version of Verbatim on both hosts"
            )
        folder.agree(config, reply["config"])
        write_file(folder.path / CONFIG, dump_config(config).encode(), private=True)
        offers = {
            name: {file: (size, sha) for file, (size, sha) in files.items()} for name, files in reply["offers"].items()
        }
        for name, files in offers.items():
            if not _OFFERED.fullmatch(name) or not all(map(is_file_name, files)):
                raise UsageError(f"{link.url} offers {shown(name)}, which is no folder that a trainer needs")
        checkpoint = next((name for name in offers if name.startswith("checkpoints/")), None)
        _refuse_other_runs(folder, checkpoint, link.url)
        with link.patient_for(config.orchestrator.heartbeat_timeout):
            for name, files in offers.items():
                await _fetch_folder(link, folder.path, name, files, console)
    store = CheckpointStore(folder.checkpoints, read_only=True)
    for step in store.steps():
        if f"checkpoints/step_{step:06d}" != checkpoint:  # copies, of which the orchestrator's host has newer ones
            store.remove(step)
    for left in folder.checkpoints.glob(".fetching-*"):  # of a checkpoint that an earlier process did not get whole
        shutil.rmtree(left)
    return checkpoint


def _refuse_other_runs(folder: RunFolder, checkpoint: str | None, url: str) -> None:
    theirs = 0 if checkpoint is None else int(checkpoint.rpartition("_")[2])
    mine = max(CheckpointStore(folder.checkpoints, read_only=True).steps(), default=0)
    if mine > theirs:
        raise UsageError(
            f"{folder.path} holds a checkpoint of step {mine}, and the run at {url} goes on after step "
            f"{theirs}: it is another run. Give this trainer another folder: --run-dir FOLDER"
        )


async def _fetch_folder(link: Link, run: Path, name: str, files: Files, console: Console) -> None:
    """Fetch a sealed folder, unless it is here."""
    target = run / name
    if target.exists():
        listed = {file: mark for file, mark in files.items() if file != MANIFEST}
        if find_damage(target) is None:
            if {file: mark for file, mark in _sealed_files(target).items() if file != MANIFEST} == listed:
                return
            raise UsageError(
                f"{target} differs from that of the run at {link.url}: it is of another run. Give this "
                "trainer another folder, --run-dir FOLDER"
            )
        remove_folder(target, ours=listed_files(target))  # a copy
    partial = target.with_name(f".fetching-{target.name}")
    size = sum(size for size, _ in files.values())
    console.print(f"fetching {name}, {size / 2**20:,.1f} MiB", soft_wrap=True)
    make_folder(partial)
    there = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file())
    free = shutil.disk_usage(partial).free
    if size - there > free:
        raise RunStopped(
            f"{name} needs {size - there:,} bytes, and {free:,} are free in {run}; make room, or give "
            "this trainer another folder, --run-dir FOLDER"
        )
    for file, (file_size, sha256) in files.items():
        if (partial / file).exists():  # an earlier process has fetched it
            continue
        (partial / file).parent.mkdir(parents=True, exist_ok=True)
        await link.download(f"{RUN}/files", partial / file, file_size, sha256, file=f"{name}/{file}")
    damage = find_damage(partial)
    if damage is not None:
        shutil.rmtree(partial)
        raise RunStopped(f"{name} of the run at {link.url} arrived damaged: {damage}; start this trainer again")
    sync_tree(partial)
    rename(partial, target)
