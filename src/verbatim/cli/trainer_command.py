"""`verbatim trainer FILE --run-dir FOLDER`: runs only the trainer of a run."""

from __future__ import annotations

import argparse
import contextlib
import logging
from collections.abc import Callable, Iterator

from rich.console import Console

from verbatim.cli import exit_status, rl_command
from verbatim.core.ctrl_c import ignore_presses, raise_ctrl_c, second_press_ends
from verbatim.core.plain_console import PlainConsole
from verbatim.logs.checkpoints import TRAINER, RunFolder, holding
from verbatim.run.check import check_run
from verbatim.run.logs import log_to_console, log_to_file
from verbatim.run.precision import refuse_auto, resolve_dtypes, unresolved
from verbatim.run.trainer_main import serve_trainer
from verbatim.run.trainer_ranks import follow_leader, is_led
from verbatim.trainer.transport.exchange import Exchange
from verbatim.trainer.transport.heartbeat import Heartbeat


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options shared with `verbatim rl`."""
    rl_command.add_shared_arguments(parser)
    parser.epilog = (
        "On another host, --run-dir must be a folder that both hosts share. Ctrl-C ends the run, with a checkpoint"
    )
    # `verbatim rl`, which starts this process and watches it, passes these:
    parser.add_argument("--session", help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Serve one orchestrator until the run is over."""
    supervised = args.session is not None
    if not supervised and is_led():  # this is a rank other than 0: rank 0 has the run folder and leads
        ignore_presses()  # Ctrl-C reaches all ranks; rank 0 alone handles it, and ends the run in order
        follow_leader()
        return exit_status.FINISHED
    config = rl_command.load(args).named(args.file.stem)
    if args.resume and unresolved(config) and (stored := RunFolder.stored_tables(config, args.resume)) is not None:
        config, _ = resolve_dtypes(config, stored=stored)
    refuse_auto(config, "trainer and orchestrator of this run are started separately")
    console = PlainConsole()
    with holding(config, TRAINER, resume=args.resume, joins=True) as held:
        if not supervised:  # otherwise `verbatim rl` has checked the run already
            check_run(config, starts_both=False, plays=False)
        log_to_console(console, logging.WARNING if supervised else logging.INFO)
        opened = RunFolder.open(config, TRAINER, resume=args.resume, joins=True, held=held)
    with opened as folder, log_to_file(folder.log(TRAINER)):
        stopped = serve_trainer(
            config,
            folder,
            console,
            lambda exchange, heartbeat: _asked_to_end(exchange, heartbeat, console),
            session=args.session,
            parent=args.parent,
        )
    return exit_status.INTERRUPTED if stopped else exit_status.FINISHED


@contextlib.contextmanager
def _asked_to_end(exchange: Exchange, heartbeat: Heartbeat, console: Console) -> Iterator[Callable[[], bool]]:
    """At the first Ctrl-C or SIGTERM, ask the orchestrator to end the run with a checkpoint; without an orchestrator,
    end this process. At the second Ctrl-C or SIGTERM, end this process at once."""
    asked = False

    def ask(which: str) -> None:
        nonlocal asked
        if exchange.is_attached:
            asked = True
            heartbeat.ask_to_stop()
            console.print(
                "asking the orchestrator to end the run, with a checkpoint; Ctrl-C again ends at once", style="bold"
            )

    def leave(which: str) -> None:
        if not exchange.is_attached:
            raise_ctrl_c(which)

    with second_press_ends(ask, lambda: "ended at once", leave):
        yield lambda: asked
