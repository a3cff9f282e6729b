"""Executes a configuration from start to end: checks, run folder, log, training, summary.

```
config -> holding                              locks the run folder, so that no second command continues the same run
       -> check_run -> environments            a run that is refused here leaves no folder
       -> RunFolder                            new, resumed, or shared with the trainer's process
       -> TrainingRun: trainer side -> sampler, renderer, runner -> dispatcher -> loop -> final model
```
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from verbatim.config.schema import RunConfig
from verbatim.core.errors import NothingTrained, StoppedByAlarm, UsageError
from verbatim.core.machine_faults import is_machine_fault
from verbatim.environments import ENVIRONMENTS
from verbatim.logs.checkpoints import ORCHESTRATOR, RunFolder, holding
from verbatim.logs.monitors.live import LiveView
from verbatim.logs.monitors.monitor import Monitor
from verbatim.logs.uploads import uploading
from verbatim.run.alarms import make_watch, sentence
from verbatim.run.build import make_monitors
from verbatim.run.check import check_run
from verbatim.run.cluster import connected, machine_of
from verbatim.run.copies import bring_back, copies_of_runs, copy_of
from verbatim.run.expected_time import announce
from verbatim.run.fork import Fork, check_fork, open_fork
from verbatim.run.logs import log_to_file
from verbatim.run.precision import PrecisionChoice, refuse_auto, resolve_dtypes, tell, unresolved
from verbatim.run.report import report
from verbatim.run.rollouts import ask_servers_of, inference_settings
from verbatim.run.training_run import RunLoop, TrainingRun


def execute(
    config: RunConfig,
    *,
    name: str,
    resume: bool | Path,
    console: Console,
    run_loop: RunLoop,
    how_to_go_on: Callable[[Path], str],
    environments: Mapping[str, Any] = ENVIRONMENTS,
    monitors: Sequence[Monitor] = (),
    trainer_elsewhere: bool = False,
    fork: Fork | None = None,
) -> TrainingRun:
    """Run the configuration to its end, and return how it ended.

    Args:
        config: The run's configuration.
        name: The run's name if the configuration has none.
        resume: False for a new run; True for the latest run of this name, or a run folder.
        console: Where progress is printed.
        run_loop: Runs the event loop, and handles Ctrl-C meanwhile.
        how_to_go_on: Returns what to type to continue the run in this folder.
        environments: The environments by id.
        monitors: Monitors in addition to those of the configuration.
        trainer_elsewhere: True if the trainer is a process that is started separately.
        fork: The checkpoint of another run at which to begin; requires `resume=False`.

    Raises:
        UsageError: the user can correct the mistake; if the run could not start, there is no run folder.
        NothingTrained: the run finished without training on a single token.
        StoppedByAlarm: an alarm ended the run early.
        RunStopped: the run cannot continue.
    """
    if trainer_elsewhere and config.cluster is not None and config.cluster.places("trainer"):
        raise UsageError(
            "[cluster] places the trainer's ranks, but this command waits for a trainer that is started separately; "
            'type verbatim rl, or set cluster.roles = ["sampler"]'
        )
    with connected(config) as placed:
        return _execute(
            config,
            name,
            resume,
            console,
            run_loop,
            how_to_go_on,
            environments,
            monitors,
            trainer_elsewhere=trainer_elsewhere,
            fork=fork,
            placed=placed,
        )


def _execute(
    config: RunConfig,
    name: str,
    resume: bool | Path,
    console: Console,
    run_loop: RunLoop,
    how_to_go_on: Callable[[Path], str],
    environments: Mapping[str, Any],
    monitors: Sequence[Monitor],
    *,
    trainer_elsewhere: bool,
    fork: Fork | None,
    placed: Sequence[str],
) -> TrainingRun:
    """Same as `execute`, while this process is connected to the run's cluster, if it has one. `placed` describes the
    placement."""
    started = time.monotonic()
    config = config.named(name)  # stored with the run: a resume may read the stored file, whose name is not the run's
    runs = copies_of_runs(config)
    resume = bring_back(runs, config, resume)
    config, choices = _as_stored(config, resume, fork, trainer_elsewhere)
    origin = check_fork(fork, config) if fork is not None else None
    with holding(config, ORCHESTRATOR, resume=resume, joins=trainer_elsewhere) as held:
        with LiveView(console).stage("checking"):  # this is shown early: importing what a run needs takes seconds
            made = check_run(config, environments, starts_both=not trainer_elsewhere)
        services, watch = make_monitors(config), make_watch(config)
        config, measured = resolve_dtypes(config, machine=machine_of(config))
        _ask_servers(config)
        if runs is not None:
            runs.check_writable()
        opened = (
            open_fork(fork, origin, config, made, console, held)
            if fork is not None and origin is not None
            else (RunFolder.open(config, ORCHESTRATOR, resume=resume, joins=trainer_elsewhere, held=held))
        )
    with (
        opened as folder,
        log_to_file(folder.log(ORCHESTRATOR)),
        uploading(folder.path, copy_of(runs, folder, resumed=bool(resume))) as uploads,
    ):
        for line in (f"run folder  {folder.path}", *placed):
            console.print(line, soft_wrap=True)
        tell([*choices, *measured], console, folder.path)
        if not resume and not trainer_elsewhere:
            announce(config, made, console)
        training = TrainingRun(
            config=config,
            environments=made,
            services=services,
            monitors=monitors,
            watch=watch,
            folder=folder,
            console=console,
            uploads=uploads,
            started=started,
        )
        to_go_on = how_to_go_on(folder.path)
        try:
            training.run(run_loop, to_go_on, trainer_elsewhere=trainer_elsewhere)
        except UsageError as error:
            # Nothing was trained and the user can correct the mistake, so no folder is left. After a machine fault
            # (a full disk, say) the folder stays: the same command may succeed later.
            if not training.has_begun and not is_machine_fault(error):
                folder.withdraw()
            raise
        finally:
            if not training.finished and not folder.is_withdrawn:
                console.print(to_go_on, soft_wrap=True, style="bold")
        _tell_of_the_end(training)
    return training


def _as_stored(
    config: RunConfig, resume: bool | Path, fork: Fork | None, trainer_elsewhere: bool
) -> tuple[RunConfig, list[PrecisionChoice]]:
    """Replace "auto" dtypes of a resumed run or a fork by those that the original run used.

    Raises:
        UsageError: trainer and orchestrator are started separately, so neither may choose a dtype.
    """
    if not unresolved(config):
        return config, []
    stored: Mapping[str, Any] | None = fork.tables if fork is not None else None
    if resume:
        stored = RunFolder.stored_tables(config, resume)
    choices: list[PrecisionChoice] = []
    if stored is not None:
        config, choices = resolve_dtypes(config, stored=stored, machine=machine_of(config))
    if trainer_elsewhere:
        refuse_auto(config, "trainer and orchestrator of this run are started separately")
    return config, choices


def _ask_servers(config: RunConfig) -> None:
    """Query the servers that the configuration names, if any, and refuse servers that this run cannot use."""
    if getattr(inference_settings(config), "urls", ()):
        with ThreadPoolExecutor(1) as apart:  # in a notebook this thread already has a running event loop
            apart.submit(asyncio.run, ask_servers_of(config)).result()


def _tell_of_the_end(training: TrainingRun) -> None:
    """Report a finished run; raise an error if it trained nothing or was stopped by an alarm.

    Raises:
        NothingTrained, StoppedByAlarm: as for `execute`.
    """
    if training.finished:
        evaluated = {label: environment for label, (_, environment) in training.environments.eval.items()}
        report(training.summary, str(training.config.name), training.folder, evaluated, training.console)
    if training.nothing_trained is not None:
        raise NothingTrained(training.nothing_trained)
    if training.alarm is not None and not training.finished:
        raise StoppedByAlarm(sentence(training.alarm))
