"""`verbatim trainer FILE --run-dir FOLDER`: the trainer of a run, in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from verbatim.checkpoints import ORCHESTRATOR, TRAINER, RunFolder, load_stored_config
from verbatim.cli import exit_status
from verbatim.cli.interrupts import second_press_ends
from verbatim.cli.orchestrator_command import add_trajectory_strategy, with_trajectory_strategy
from verbatim.config import dump_config, load_config
from verbatim.config.schema import RunConfig
from verbatim.errors import RunStopped
from verbatim.plain_console import PlainConsole
from verbatim.run.check import check_run
from verbatim.run.environments import Environments, make_environments
from verbatim.run.logs import last_lines, log_to_console, log_to_file
from verbatim.run.tables import component_tables
from verbatim.transport import TrainerReady
from verbatim.transport.exchange import Exchange
from verbatim.transport.files import publish_bytes
from verbatim.transport.heartbeat import Heartbeat, PeerWatch
from verbatim.user_code import raise_ctrl_c

if TYPE_CHECKING:
    from verbatim.trainer.worker import TrainerWorker


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare FILE, --resume and --trajectory-strategy."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the run's TOML file")
    parser.add_argument("--resume", nargs="?", const="", metavar="FOLDER", help="continue the run in FOLDER")
    add_trajectory_strategy(parser)
    # `verbatim rl` starts this process, and watches it:
    parser.add_argument("--session", help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Serve one orchestrator, until it says that the run is over."""
    config = load_stored_config(
        args.file, lambda file: load_config(file, with_trajectory_strategy(args), component_tables())
    )
    config = config.model_copy(update={"name": config.name or args.file.stem})
    console = PlainConsole()
    supervised = args.session is not None
    if not supervised:  # `verbatim rl` has checked it before it started this process
        check_run(config)
    log_to_console(console, logging.WARNING if supervised else logging.INFO)
    if args.resume is None:
        folder = RunFolder.join(config, role=TRAINER)
    else:
        where = Path(args.resume) if args.resume else None
        folder = RunFolder.resume(config, name=str(config.name), folder=where, role=TRAINER)
    with folder, log_to_file(folder.log(TRAINER)):
        exchange = Exchange.open(folder.exchange, args.session)
        publish_bytes(exchange.config, dump_config(config).encode())
        on_beat = _end_with(args.parent) if supervised else None
        with Heartbeat(exchange.trainer_beat, on_beat=on_beat) as heartbeat:
            stopped = _serve(config, folder, exchange, heartbeat, console, supervised=supervised)
    return exit_status.INTERRUPTED if stopped else exit_status.FINISHED


def _serve(
    config: RunConfig, folder: RunFolder, exchange: Exchange, heartbeat: Heartbeat, console: Console, *,
    supervised: bool,
) -> bool:  # fmt: skip
    """Whether Ctrl-C or SIGTERM ended it."""
    from verbatim.run.trainer_setup import open_trainer, threads_of
    from verbatim.trainer.local import set_num_threads
    from verbatim.trainer.serve import serve

    def environments() -> Environments:
        return make_environments(config)

    worker, ready = open_trainer(config, environments, folder, console, states=exchange.states)
    set_num_threads(threads_of(config, config.trainer.num_threads))
    exchange.ready(ready)
    with _asked_to_end(exchange, heartbeat, console) as stopped:
        if supervised:
            serve(worker, exchange, heartbeat, look=lambda: None)
        else:
            _serve_by_itself(worker, ready, config, folder, exchange, heartbeat, console)
    return stopped()


def _serve_by_itself(
    worker: TrainerWorker, ready: TrainerReady, config: RunConfig, folder: RunFolder, exchange: Exchange,
    heartbeat: Heartbeat, console: Console,
) -> None:  # fmt: skip
    from verbatim.monitors.console import format_number
    from verbatim.trainer.serve import serve

    def show(version: int, metrics: dict[str, float]) -> None:
        names = (("loss", "loss"), ("grad norm", "grad_norm"), ("tok/s", "tokens_per_second"),
                 ("idle s", "time/trainer_idle"))  # fmt: skip
        shown = "  ".join(f"{label} {format_number(metrics[key])}" for label, key in names if key in metrics)
        console.print(f"step {version}/{config.max_steps}  {shown}", soft_wrap=True)

    console.print(f"ready after step {ready.version}; the other process:  verbatim orchestrator FILE "
                  f"--run-dir {folder.path}", soft_wrap=True)  # fmt: skip
    serve(worker, exchange, heartbeat, look=_look(exchange, config, folder), on_step=show)


def _end_with(parent: int) -> Callable[[], None]:
    """Ends this process when the one that started it is gone: what it holds is of no use to anybody then.

    Called on the heartbeat's thread, so that it happens in the middle of a step too.
    """

    def look() -> None:
        if os.getppid() != parent:
            os._exit(exit_status.STOPPED)

    return look


def _look(exchange: Exchange, config: RunConfig, folder: RunFolder) -> Callable[[], None]:
    """Raises when the orchestrator that was there is gone; waits for one that was not there yet."""
    watch: PeerWatch | None = None

    def look() -> None:
        nonlocal watch
        if watch is None:
            if exchange.orchestrator_beat.exists():
                watch = PeerWatch(
                    exchange.orchestrator_beat, name="the orchestrator",
                    heartbeat_timeout=config.orchestrator.heartbeat_timeout,
                    stall_timeout=config.orchestrator.stall_timeout,
                )  # fmt: skip
            return
        fault = watch.fault()
        if fault is not None:
            raise RunStopped(f"{fault}{last_lines(folder.log(ORCHESTRATOR))}")

    return look


@contextlib.contextmanager
def _asked_to_end(exchange: Exchange, heartbeat: Heartbeat, console: Console) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C or SIGTERM asks the orchestrator to end the run with a checkpoint, or ends this process where
    there is none yet; the second one ends this process at once."""
    asked = False

    def ask(which: str) -> None:
        nonlocal asked
        if exchange.is_attached:
            asked = True
            heartbeat.ask_to_stop()
            console.print("asking the orchestrator to end the run, with a checkpoint; Ctrl-C again ends at once",
                          style="bold")  # fmt: skip

    def leave(which: str) -> None:
        if not exchange.is_attached:
            raise_ctrl_c(which)

    with second_press_ends(ask, lambda: "ended at once", leave):
        yield lambda: asked
