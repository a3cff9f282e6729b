"""`verbatim rl FILE`: train a model by reinforcement learning."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.logging import RichHandler
from rich.table import Table

from verbatim.checkpoints import Checkpoint, CheckpointStore, RunFolder, read_json
from verbatim.cli.run_log import RunLog
from verbatim.cli.session import (
    Environments,
    check_environments,
    make_dispatcher,
    make_environments,
    make_loss,
    make_rules,
    make_sampler,
    make_setups,
)
from verbatim.cli.tables import component_tables
from verbatim.config import load_config
from verbatim.config.schema import RunConfig

RESUME_LATEST = "latest"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare FILE and --resume."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the run's TOML file")
    parser.add_argument(
        "--resume",
        nargs="?",
        const=RESUME_LATEST,
        metavar="FOLDER",
        help="continue a run: the latest one of this file, or the one in FOLDER",
    )


def run(args: argparse.Namespace) -> int:
    """Train. 0 when all steps were taken, 130 when Ctrl-C ended it; then it says how to go on."""
    started = time.monotonic()
    console = RichConsole(highlight=False)
    logging.basicConfig(
        level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
    )
    for noisy in ("httpx", "transformers", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    config = load_config(args.file, args.overrides, component_tables())
    environments = make_environments(config)
    check_environments(config, environments)
    make_rules(config.orchestrator, environments)
    _check_model(config)
    name = config.name or args.file.stem
    config = config.model_copy(update={"name": name})  # stored with the run, which may be resumed from its own file
    if args.resume is None:
        folder = RunFolder.create(config, name=name, now=datetime.now())
    else:
        where = None if args.resume == RESUME_LATEST else Path(args.resume)
        folder = RunFolder.resume(config, name=name, folder=where)
    with folder:
        console.print(f"run folder  {folder.path}", soft_wrap=True)
        program = Program(config, environments, folder, console, name=name, started=started)
        finished = False
        try:
            source = program.prepare()
            finished = asyncio.run(program.run(source))
        finally:
            if not finished:
                again = shlex.join(["verbatim", "rl", str(folder.path / "config.toml"), "--resume", str(folder.path)])
                console.print(f"not finished; to go on:  {again}", soft_wrap=True, style="bold")
    return 0 if finished else 130


def _check_model(config: RunConfig) -> None:
    """Refuse a model that cannot be used before a folder is made for the run."""
    if config.model.name is not None:
        from verbatim.models.loading import check_weights, load_tokenizer

        load_tokenizer(config.model.name)
        check_weights(config.model.name)


class Program:
    """One process of one run: prepares the model, then hands over to the loop."""

    def __init__(
        self,
        config: RunConfig,
        environments: Environments,
        folder: RunFolder,
        console: RichConsole,
        *,
        name: str,
        started: float,
    ) -> None:
        self._config = config
        self._environments = environments
        self._folder = folder
        self._console = console
        self._name = name
        self._started = started
        self._found: Checkpoint | None = None
        checkpoint = config.checkpoint
        self._store = CheckpointStore(
            folder.checkpoints, keep_last=checkpoint.keep_last, keep_every=checkpoint.keep_every
        )

    def prepare(self) -> Path:
        """The folder (or hub id) of the weights to begin with: a checkpoint's, or those of policy version 0.

        Runs outside the event loop, so that Ctrl-C ends it at once.
        """
        from verbatim.cli.prepare import prepare_model

        self._found = self._store.latest()
        if self._found is None:
            return prepare_model(self._config, self._environments, self._folder.path, self._console)
        self._console.print(f"going on after {self._found.step} batches, from {self._found.folder}", soft_wrap=True)
        return self._found.folder / "weights"

    async def run(self, source: Path) -> bool:
        """Whether all steps were taken."""
        from verbatim.models.loading import load_tokenizer
        from verbatim.renderers import create_renderer

        found = self._found
        state: dict[str, Any] = read_json(found.folder / "orchestrator.json") if found is not None else {}
        tokenizer = load_tokenizer(source)
        renderer = create_renderer(self._config.orchestrator.renderer.name, tokenizer)
        log = RunLog(
            self._folder,
            title=self._name,
            max_steps=self._config.max_steps,
            first_step=state.get("step", 0),
            save_trajectories=self._config.monitor.save_trajectories,
            store=self._store,
            environments={label: environment for label, (_, environment) in self._environments.eval.items()},
            earlier_seconds=state.get("seconds", 0.0),
            started=self._started,
        )
        try:
            finished = await self._train(source, tokenizer, renderer, log, found, state)
        finally:
            log.close()
        if finished:
            self._print_summary(log.summarize())
        return finished

    async def _train(
        self, source: Path, tokenizer: Any, renderer: Any, log: RunLog, found: Checkpoint | None, state: dict[str, Any]
    ) -> bool:
        from verbatim.orchestrator.loop import Orchestrator, Plan
        from verbatim.trainer.local import LocalTrainer
        from verbatim.trainer.trainer import Trainer
        from verbatim.trajectories import Ledger
        from verbatim.transport import WeightFolders

        config, orchestrator_config = self._config, self._config.orchestrator
        trainer = Trainer(
            source,
            config.trainer,
            loss=make_loss(config),
            total_optimizer_steps=config.max_steps * config.trainer.optimizer_steps_per_batch,
            tokenizer=tokenizer,
        )
        if found is not None:
            trainer.load_state(found.folder / "trainer")
        link = LocalTrainer(trainer, WeightFolders(self._folder.path / "weights"))
        sampler = make_sampler(config, source, policy_version=state.get("step", 0))
        slots = asyncio.Semaphore(orchestrator_config.max_concurrent)
        ledger = Ledger()
        setups = make_setups(orchestrator_config, self._environments.train, sampler, renderer, slots)
        evaluation = orchestrator_config.eval
        eval_setups = make_setups(orchestrator_config, self._environments.eval, sampler, renderer, slots)
        orchestrator = Orchestrator(
            plan=Plan(
                max_steps=config.max_steps,
                eval_setups=list(eval_setups.values()),
                eval_interval=evaluation.interval if evaluation else config.max_steps,
                eval_episodes=evaluation.episodes if evaluation else 0,
                eval_seed=evaluation.seed if evaluation else 0,
                checkpoint_interval=config.checkpoint.interval,
            ),
            sampler=sampler,
            trainer=link,
            dispatcher=make_dispatcher(config, self._environments, setups, ledger),
            ledger=ledger,
            rules=make_rules(orchestrator_config, self._environments),
            environments=self._environments.by_label,
            observer=log,
            checkpointer=log,
        )
        if state:
            orchestrator.load_state_dict(state)
        try:
            with _ctrl_c(orchestrator, self._console):
                finished = await orchestrator.run()
            if finished:
                await asyncio.to_thread(self._save_final, trainer)
        finally:
            await sampler.close()
            await link.close()
        return finished

    def _save_final(self, trainer: Any) -> None:
        final, partial = self._folder.path / "final", self._folder.path / ".final.partial"
        shutil.rmtree(partial, ignore_errors=True)
        trainer.save_weights(partial)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)

    def _print_summary(self, summary: dict[str, Any]) -> None:
        table = Table(show_header=False, title=f"{self._name}: what it came to", title_justify="left")
        for key, value in summary.items():
            if not isinstance(value, dict):
                table.add_row(key, f"{value:.3f}" if isinstance(value, float) else str(value))
        self._console.print(table)
        for what, path in (
            ("trained model", self._folder.path / "final"),
            ("summary", self._folder.path / "summary.json"),
            ("learning curve", self._folder.learning_curve),
        ):
            if path.exists():
                self._console.print(f"{what:<15} {path}", soft_wrap=True)


@contextlib.contextmanager
def _ctrl_c(orchestrator: Any, console: RichConsole) -> Iterator[None]:
    """The first Ctrl-C asks the loop to end with a checkpoint; the second one ends the process."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        console.print("ending after this step, with a checkpoint; Ctrl-C again ends at once", style="bold")
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)
        orchestrator.request_stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
