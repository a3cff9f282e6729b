"""`verbatim trainer FILE --run-dir FOLDER`: the trainer of a run, in a process of its own."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console

from verbatim.checkpoints import ORCHESTRATOR, TRAINER, RunFolder, load_stored_config
from verbatim.cli import exit_status
from verbatim.cli.check import check_run
from verbatim.cli.logs import last_lines, log_to_console, log_to_file
from verbatim.cli.orchestrator_command import add_trajectory_strategy, with_trajectory_strategy
from verbatim.cli.session import Environments, make_environments
from verbatim.cli.tables import component_tables
from verbatim.config import dump_config
from verbatim.config.schema import RunConfig
from verbatim.errors import RunStopped
from verbatim.plain_console import PlainConsole
from verbatim.transport.exchange import Exchange
from verbatim.transport.files import publish_bytes
from verbatim.transport.presence import Heartbeat, PeerWatch


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
    config = load_stored_config(args.file, with_trajectory_strategy(args), component_tables())
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
    return exit_status.INTERRUPTED if stopped else 0


def _serve(
    config: RunConfig, folder: RunFolder, exchange: Exchange, heartbeat: Heartbeat, console: Console, *,
    supervised: bool,
) -> bool:  # fmt: skip
    """Whether Ctrl-C ended it."""
    from verbatim.cli.trainer_setup import open_trainer, threads_of
    from verbatim.monitors.console import format_number
    from verbatim.trainer.local import set_num_threads
    from verbatim.trainer.serve import serve

    def environments() -> Environments:
        return make_environments(config)

    worker, ready = open_trainer(config, environments, folder, console, states=exchange.states)
    set_num_threads(threads_of(config, config.trainer.num_threads))
    exchange.ready(ready)
    if supervised:
        serve(worker, exchange, heartbeat, look=lambda: None)
        return False

    def show(version: int, metrics: dict[str, float]) -> None:
        names = (("loss", "loss"), ("grad norm", "grad_norm"), ("tok/s", "tokens_per_second"),
                 ("idle s", "time/trainer_idle"))  # fmt: skip
        shown = "  ".join(f"{label} {format_number(metrics[key])}" for label, key in names if key in metrics)
        console.print(f"batch {version}/{config.max_steps}  {shown}", soft_wrap=True)

    console.print(f"ready after {ready.version} batches; the other process:  verbatim orchestrator FILE "
                  f"--run-dir {folder.path}", soft_wrap=True)  # fmt: skip
    with _ctrl_c(exchange, heartbeat, console) as stopped:
        serve(worker, exchange, heartbeat, look=_look(exchange, config, folder), on_step=show)
    return stopped()


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
def _ctrl_c(exchange: Exchange, heartbeat: Heartbeat, console: Console) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C asks the orchestrator, if there is one, to end the run with a checkpoint; the second one ends
    this process."""
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if not exchange.is_attached:
            raise KeyboardInterrupt
        asked = True
        heartbeat.ask_to_stop()
        console.print("asking the orchestrator to end the run, with a checkpoint; Ctrl-C again ends at once",
                      style="bold")  # fmt: skip
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
