"""Provides the trainer to the orchestrator: on a thread, in a child process, or in a process started separately."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import math
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeVar

from rich.console import Console

from verbatim.config.schema import RunConfig
from verbatim.core import spare
from verbatim.core.children import StartedChild, end, how_it_ended, open_log, start
from verbatim.core.ctrl_c import is_ctrl_c
from verbatim.core.errors import RunStopped, UsageError
from verbatim.core.imports import child_environment, imports_that_stay
from verbatim.logs.checkpoints import CONFIG, TRAINER, RunFolder
from verbatim.logs.checkpoints.lock import is_locked
from verbatim.logs.monitors.live import LiveView
from verbatim.models.native.cores import CoreShare, own_cores
from verbatim.models.source import find_source
from verbatim.run.environments import Environments
from verbatim.run.logs import last_lines
from verbatim.run.make_trainer import shares_cores, threads_of
from verbatim.run.trainer_main import open_trainer
from verbatim.run.weight_transfer import own_address
from verbatim.trainer.transport import TrainerLink, TrainerReady
from verbatim.trainer.transport.exchange import Exchange
from verbatim.trainer.transport.heartbeat import Heartbeat, PeerWatch
from verbatim.trainer.transport.remote_trainer import RemoteTrainer

T = TypeVar("T")

_USAGE = 2
"""Exit status of a trainer that refuses its configuration (see `verbatim.cli.exit_status`)."""
_IMPORTS = ("verbatim.trainer.worker", "verbatim.trainer.serve", "verbatim.models.build", "verbatim.run.prepare")
"""Modules that only the trainer needs. The trainer's process imports them while this process checks the run."""
_POLL = 0.02
"""Seconds between two checks of a file or process."""
_PATIENCE = 20.0
"""Seconds to wait after a run until the trainer ends by itself."""
_LITTLE_PATIENCE = 2.0
"""Seconds to wait after a failed run until the trainer ends. Its remaining work is no longer needed then."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainerSide:
    """A trainer that is ready to train."""

    ready: TrainerReady
    link: TrainerLink
    progress: Callable[[str], None]
    """Tells the trainer that this process is alive, and what it is doing."""
    wants_to_stop: Callable[[], bool]
    """True once the trainer process was asked to end."""
    cores: CoreShare | None = None
    """The cores that sampler and trainer share; None if each side has a fixed number of threads."""


@contextlib.contextmanager
def trainer_inside(
    config: RunConfig, environments: Environments, folder: RunFolder, console: Console
) -> Iterator[TrainerSide]:
    """Run the trainer on a thread of this process."""
    from verbatim.trainer.local import LocalTrainer

    if config.trainer.parallel.processes > 1:
        raise UsageError(
            f"trainer.parallel.processes = {config.trainer.parallel.processes}, but the trainer is on a "
            "thread of this process (trainer.separate_process = false, or an environment that exists "
            "only in this process); use one process"
        )
    states = folder.path / "states"
    # Clean up after an earlier process and its trainer, unless that trainer is still running.
    if not is_locked(folder.path / f"{TRAINER}.lock"):
        folder.remove_left_overs(TRAINER)
        shutil.rmtree(folder.exchange, ignore_errors=True)
    worker, ready = open_trainer(
        config, lambda: environments, folder, console, states=states, sends_from=own_address(config)
    )
    link = LocalTrainer(worker, num_threads=threads_of(config, config.trainer.num_threads))
    yield TrainerSide(ready=ready, link=link, progress=lambda doing: None, wants_to_stop=lambda: False)


def keep_trainer(config: RunConfig, told: contextlib.AbstractContextManager[None]) -> None:
    """Import what both trainer and sampler need, then keep a forked copy of this process for the trainer.

    Does nothing if this process must not be forked, or if it needs no trainer process.

    Args:
        config: The run's configuration.
        told: A context that is entered while modules are imported, which takes seconds. It must leave no thread behind,
            because threads do not survive a fork.

    Raises:
        ModelError: the model does not exist; raised before PyTorch is imported.
    """
    if not spare.is_allowed() or not config.trainer.separate_process:
        return
    kind = "qwen3"  # this is the architecture of models that a run builds
    if config.model.name is not None:
        found = Path(find_source(config.model.name)) / "config.json"
        with contextlib.suppress(
            OSError, ValueError, KeyError
        ):  # this is not a local folder, or it has a fault that a later check reports
            kind = json.loads(found.read_text(encoding="utf-8"))["model_type"]
    with told, imports_that_stay():
        for module in (f"transformers.models.{kind}.modeling_{kind}", "verbatim.models.loading"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module)
    spare.keep(_IMPORTS)


@contextlib.contextmanager
def trainer_child(
    config: RunConfig, folder: RunFolder, console: Console, meanwhile: Callable[[CoreShare | None], None]
) -> Iterator[TrainerSide]:
    """Run the trainer in a child process, which ends with this block. The child imports modules from where this process
    does, and prints where this process prints, unless the console is quiet.

    Args:
        config: The run's configuration.
        folder: The run folder.
        console: Where progress is printed.
        meanwhile: Called once while the child prepares, with the cores that both sides share; must not block.
    """
    session, log = secrets.token_hex(8), folder.log(TRAINER)
    exchange = Exchange(folder.exchange / session)
    with open_log(log) as errors:
        process = _start_trainer(folder, session, errors, quiet=console.quiet)

    def ended() -> str | None:
        status = process.poll()
        return (
            None if status is None else f"the trainer (process {process.pid}) {how_it_ended(status)}{last_lines(log)}"
        )

    patience = 0.0  # seconds to wait for the child: 0 before it is ready, or after a Ctrl-C that cancels the run
    try:
        with LiveView(console).stage("starting the trainer"):  # until the child draws its own progress bars
            while not exchange.trainer_beat.exists() and ended() is None:
                time.sleep(_POLL)
        cores = None
        if ended() is None:
            cores = CoreShare(exchange.cores, "sampler", own_cores()) if shares_cores(config) else None
            meanwhile(cores)
        ready = _wait_until_ready(exchange, config, ended, log)
        exchange.attach()
        with _side(ready, exchange, config, ended, log) as side:
            yield replace(side, cores=cores)
        patience = _PATIENCE
    except RunStopped as error:
        patience = _LITTLE_PATIENCE
        if process.poll() == _USAGE:
            raise UsageError(str(error)) from error
        raise
    except Exception:
        patience = _LITTLE_PATIENCE
        raise
    finally:
        end(process, patience)
        console.show_cursor()  # the child's progress bar may have hidden it
        exchange.remove_temporary()


def _start_trainer(folder: RunFolder, session: str, errors: IO[bytes], *, quiet: bool) -> StartedChild:
    """Start the copy kept by `keep_trainer`, or else a new interpreter."""
    where = [str(folder.path / CONFIG), "--resume", str(folder.path)]
    arguments = ["trainer", *where, "--session", session, "--parent", str(os.getpid())]
    if (kept := spare.take()) is not None:
        kept.start(arguments, quiet=quiet, errors=errors)
        return kept
    return start(
        [sys.executable, "-m", "verbatim.cli", *arguments],
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=errors,
        environment=child_environment(),
    )


@contextlib.contextmanager
def trainer_elsewhere(config: RunConfig, folder: RunFolder, console: Console) -> Iterator[TrainerSide]:
    """Use a trainer that was started separately with `verbatim trainer`, in the same run folder."""
    exchange, ready = _find_ready(config, folder, console)
    with _side(ready, exchange, config, lambda: None, folder.log(TRAINER)) as side:
        yield side


class _StartedAgain(Exception):
    """The trainer that was preparing has been replaced by a new trainer."""


def _unless_gone(look: Callable[[], T]) -> T:
    """Return `look()`. A missing file means that a new trainer has removed the old trainer's session."""
    try:
        return look()
    except FileNotFoundError:
        raise _StartedAgain from None


def _find_ready(config: RunConfig, folder: RunFolder, console: Console) -> tuple[Exchange, TrainerReady]:
    """The session of a trainer that is ready. If the trainer is restarted meanwhile, follow it to its new session."""
    while True:
        exchange = _find_session(folder, console)

        def gone(mine: Exchange = exchange) -> None:
            current = Exchange.current(folder.exchange)
            if current is not None and current.folder != mine.folder:
                raise _StartedAgain

        try:
            folder.agree(config, _unless_gone(partial(exchange.config.read_text, encoding="utf-8")))
            ready = _wait_until_ready(exchange, config, gone, folder.log(TRAINER))
            is_ours = _unless_gone(exchange.attach)
        except _StartedAgain:
            console.print("the trainer was started again", soft_wrap=True)
            continue
        if not is_ours:
            raise RunStopped(
                f"the trainer of {folder.path} serves another orchestrator; end that trainer, and start it again"
            )
        return exchange, ready


@contextlib.contextmanager
def _side(
    ready: TrainerReady, exchange: Exchange, config: RunConfig, ended: Callable[[], str | None], log: Path
) -> Iterator[TrainerSide]:
    """The trainer's side of the exchange, with this process's heartbeat while the block runs."""
    watch = _watch(exchange, config, config.orchestrator.stall_timeout)

    def wants_to_stop() -> bool:
        watch.fault()  # this updates the watch, in case nothing else is waiting for the trainer
        return watch.wants_to_stop

    with Heartbeat(exchange.orchestrator_beat) as heartbeat:
        yield TrainerSide(
            ready=ready,
            link=RemoteTrainer(exchange, fault=lambda: _fault(watch, ended, log)),
            progress=heartbeat.progress,
            wants_to_stop=wants_to_stop,
        )


def _fault(watch: PeerWatch, ended: Callable[[], str | None], log: Path) -> str | None:
    """What is wrong with the trainer, or None if nothing is wrong."""
    if (gone := ended()) is not None:
        return gone
    seen = watch.fault()
    return None if seen is None else f"{seen}{last_lines(log)}"


def _watch(exchange: Exchange, config: RunConfig, stall_timeout: float) -> PeerWatch:
    return PeerWatch(
        exchange.trainer_beat,
        name="the trainer",
        heartbeat_timeout=config.orchestrator.heartbeat_timeout,
        stall_timeout=stall_timeout,
    )


def _wait_until_ready(
    exchange: Exchange, config: RunConfig, ended: Callable[[], str | None], log: Path
) -> TrainerReady:
    """Wait until the trainer is ready, without a time limit: a warm start may take hours."""
    watch = _watch(exchange, config, math.inf)
    while (ready := exchange.read_ready()) is None:
        if (fault := _fault(watch, ended, log)) is not None:
            raise RunStopped(fault)
        time.sleep(_POLL)
    return ready


def _find_session(folder: RunFolder, console: Console) -> Exchange:
    """The session of a running trainer. A stale session's heartbeat does not count up while this function waits."""
    first: dict[Path, int] = {}
    told = False
    while True:
        exchange = Exchange.current(folder.exchange)
        beats = exchange.beats() if exchange is not None else None
        if exchange is not None and beats is not None and beats > first.setdefault(exchange.folder, beats):
            return exchange
        if not told:
            told = True
            console.print(
                f"waiting for the trainer; start it with:  verbatim trainer FILE --run-dir {folder.path}",
                soft_wrap=True,
            )
        time.sleep(_POLL)


async def while_telling(side: TrainerSide, orchestrator: Any, work: Coroutine[Any, Any, bool]) -> bool:
    """Run the work and return its result, while reporting progress to the trainer.

    Raises:
        BaseException: whatever the work or the reporting raises. If the reporting fails, the run must end, because a
            trainer that hears nothing would conclude that this process is stuck.
    """
    exits: list[BaseException] = []

    async def held() -> bool:
        """Keep exits inside this task: asyncio re-raises a SystemExit of a task from the event loop itself, where it
        would be mistaken for a SystemExit of an environment."""
        try:
            return await work
        except (SystemExit, KeyboardInterrupt) as error:
            if is_ctrl_c(error):
                raise
            exits.append(error)
            return False

    working, telling = asyncio.create_task(held()), asyncio.create_task(_tell_progress(side, orchestrator))
    try:
        await asyncio.wait({working, telling}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            telling.result()
        if exits:
            raise exits[0]
        return working.result()
    finally:
        for task in (working, telling):
            task.cancel()
        await asyncio.gather(working, telling, return_exceptions=True)


async def _tell_progress(side: TrainerSide, orchestrator: Any) -> None:
    """Report to the trainer that the event loop is running, and learn from the trainer whether the run was asked to
    end."""
    while True:
        side.progress(f"at work, after {orchestrator.step} steps")
        if side.wants_to_stop():
            orchestrator.request_stop()
        await asyncio.sleep(0.5)
