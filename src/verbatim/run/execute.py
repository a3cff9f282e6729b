"""Executes a configuration from start to end: checks, run folder, log, training, summary.

```
config -> check_run -> environments            refused before there is a folder
       -> RunFolder                            new, resumed, or joined with the trainer's process
       -> TrainingRun: trainer side -> sampler, renderer, runner -> dispatcher -> loop -> final model
       -> Outcome
```
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from verbatim.checkpoints import ORCHESTRATOR, RunFolder
from verbatim.config.schema import RunConfig
from verbatim.environments import ENVIRONMENTS
from verbatim.errors import NothingTrained, UsageError
from verbatim.machine_faults import is_machine_fault
from verbatim.monitors.base import Monitor
from verbatim.run.check import check_run
from verbatim.run.logs import log_to_file
from verbatim.run.parts import make_monitors
from verbatim.run.summary import print_summary
from verbatim.run.training_run import RunsLoop, TrainingRun


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """How a run ended that raised nothing."""

    folder: Path
    """The run folder."""
    finished: bool
    """Whether all steps were taken; False after Ctrl-C, or where the trainer was asked to end."""
    was_interrupted: bool
    """Whether Ctrl-C or SIGTERM was heard by this process."""
    summary: Mapping[str, Any]
    """The figures of `summary.json`; empty where the run has not finished."""


def execute(
    config: RunConfig,
    *,
    name: str,
    resume: bool | Path,
    console: Console,
    run_loop: RunsLoop,
    how_to_go_on: Callable[[Path], str],
    environments: Mapping[str, Any] = ENVIRONMENTS,
    monitors: Sequence[Monitor] = (),
    trainer_elsewhere: bool = False,
) -> Outcome:
    """Run the configuration to its end.

    Args:
        config: The run's configuration.
        name: The run's name, where the configuration has none.
        resume: False for a new run; True for the latest of this name, or a run folder.
        console: Is told how the run goes on.
        run_loop: Runs its event loop, and handles Ctrl-C meanwhile.
        how_to_go_on: What to type to continue the run in this folder.
        environments: What ids of environments stand for.
        monitors: Listeners beside those of the configuration.
        trainer_elsewhere: Whether the trainer is a process that is started separately.

    Raises:
        UsageError: something that can be mended; where the run could not start, there is no run folder.
        NothingTrained: the run came to its end and learned from no token.
        RunStopped: the run cannot go on.
    """
    started = time.monotonic()
    config = config.named(name)  # it may be resumed from its own file
    made = check_run(config, environments)
    services = make_monitors(config)
    with _open_folder(config, resume, trainer_elsewhere) as folder, log_to_file(folder.log(ORCHESTRATOR)):
        console.print(f"run folder  {folder.path}", soft_wrap=True)
        training = TrainingRun(config, made, services, monitors, folder, console, started=started)
        to_go_on = how_to_go_on(folder.path)
        finished = False
        try:
            finished = training.run(run_loop, to_go_on, trainer_elsewhere=trainer_elsewhere)
        except UsageError as error:
            if not training.has_begun and not is_machine_fault(error):
                folder.withdraw()
            raise
        finally:
            if not finished and not folder.is_withdrawn:
                console.print(to_go_on, soft_wrap=True, style="bold")
        if finished:
            print_summary(training.summary, str(config.name), folder, console)
        if training.nothing_trained is not None:
            raise NothingTrained(training.nothing_trained)
    return Outcome(
        folder=folder.path, finished=finished, was_interrupted=training.was_interrupted, summary=training.summary
    )


def _open_folder(config: RunConfig, resume: bool | Path, trainer_elsewhere: bool) -> RunFolder:
    name = str(config.name)
    if resume:
        return RunFolder.resume(config, name=name, folder=None if resume is True else Path(resume))
    if trainer_elsewhere:
        return RunFolder.join(config, role=ORCHESTRATOR)
    return RunFolder.create(config, name=name, now=datetime.now())
