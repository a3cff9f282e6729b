"""Defines `verbatim.run` and `verbatim.train`: `verbatim rl` for scripts, notebooks and tests."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from verbatim.config import load_config, make_config
from verbatim.config.schema import RunConfig
from verbatim.core.errors import ComponentError, ConfigError, NothingTrained, RunStopped, UsageError
from verbatim.core.plain_console import PlainConsole
from verbatim.core.texts import shown
from verbatim.logs.checkpoints import CONFIG, load_stored_config
from verbatim.logs.monitors.monitor import METHODS, Monitor, fault_of
from verbatim.rollouts.main_loop import run_in_program
from verbatim.run.execute import execute
from verbatim.run.fork import Fork, find_fork
from verbatim.run.given_environments import environment_tables, keep_here, makers
from verbatim.run.logs import log_for_a_while
from verbatim.run.recipes import run_file
from verbatim.run.result import RunResult, read_result
from verbatim.run.tables import component_tables

Config = str | Path | Mapping[str, Any] | RunConfig
"""A TOML file, or its tables as a mapping or as a loaded configuration."""

_ONE_RUN = threading.Lock()
"""Held during a run. A process can do only one run at a time, because torch's default dtype and device, random states
and log handlers are global."""


def run(
    config: Config,
    *,
    resume: bool | str | Path = False,
    fork: str | Path | None = None,
    fresh: Sequence[str] = (),
    environments: Mapping[str, Any] | None = None,
    monitors: Sequence[Monitor] = (),
    quiet: bool = False,
    **settings: Any,
) -> RunResult:
    """Run a configuration to its end, as `verbatim rl` does.

    If an event loop is already running (a notebook), the run gets its own loop on its own thread. The first Ctrl-C
    ends the run after the current step, with a checkpoint; the second cancels it.

    Args:
        config: A TOML file, or the same tables in Python: `{"model": {"name": "..."}, "orchestrator": {...}}`.
        resume: Continue a run: True for the latest run of this name, or a run folder.
        fork: Begin a new run at a checkpoint of another run: "RUN" or "RUN@STEP", as for `--fork` on the command line.
        fresh: Parts of the checkpoint to reset: "optimizer", "examples".
        environments: Additional environments by id: classes, functions or instances.
        monitors: Objects with some of the methods of `verbatim.logs.monitors.Monitor`.
        quiet: True to print no progress. Warnings are still logged.
        settings: Tables and keys that override the tables and keys of `config`: `max_steps=20, trainer={"optim": {"lr":
            1e-4}}`.

    Raises:
        ConfigError: the configuration has a mistake; the message is the same as on the command line.
        UsageError: a model, environment, component or run folder cannot be used, or another run is active in this
            process.
        NothingTrained: the run finished without training on a single token.
        RunStopped: the run cannot continue, or its trainer process received a request to end it.
        KeyboardInterrupt: Ctrl-C was pressed. The message has the call that continues the run, as in every exception
            after the first step.
    """
    if (fork is not None and resume) or (fresh and fork is None):
        raise ConfigError(
            "verbatim.run(): fork= begins a new run, resume= continues one, and fresh= is for fork=; "
            "give fork, or resume"
        )
    begin = find_fork(str(fork), fresh) if fork is not None else None
    return _run(
        "verbatim.run",
        config,
        settings,
        resume=resume,
        environments={} if environments is None else environments,
        monitors=monitors,
        quiet=quiet,
        fork=begin,
    )


def train(
    *,
    model: str | Path | Mapping[str, Any],
    environment: Any,
    max_steps: int | None = None,
    resume: bool | str | Path = False,
    monitors: Sequence[Monitor] = (),
    quiet: bool = False,
    **settings: Any,
) -> RunResult:
    """Train a model on an environment: `verbatim.run` with a configuration built from the arguments.

    Args:
        model: A folder or hub id of a causal language model, or the table [model].
        environment: An id, an import path, a class, an instance, or a table of [[orchestrator.train.env]] with one of
            these as its `id`; or a list of them. With an instance, or a class that cannot be imported by name, the
            environment and the trainer run in this process.
        max_steps: Number of steps; 100 by default.
        resume: Same as for `run`.
        monitors: Same as for `run`.
        quiet: Same as for `run`.
        settings: Further tables and keys: `orchestrator={"batch_size": 64}, seed=1`.

    Raises:
        ConfigError: as for `run`.
    """
    where = "verbatim.train()"
    if isinstance(model, str | os.PathLike):
        model = {"name": model}
    elif not isinstance(model, Mapping):
        raise ConfigError(
            f"{where}: model: found {shown(model, 80)} ({type(model).__name__}), expected a folder or "
            "hub id; save a model that is in memory, and give the folder: "
            "model.save_pretrained(folder), tokenizer.save_pretrained(folder)"
        )
    tables, objects = environment_tables(environment, where)
    if _has_environments(settings):
        raise ConfigError(f"{where}: environment and orchestrator.train.env are the same; give one of them")
    config = {"model": model, "max_steps": max_steps, "orchestrator.train.env": tables}
    return _run("verbatim.train", config, settings, resume=resume, environments=objects, monitors=monitors, quiet=quiet)


def _has_environments(settings: Mapping[str, Any]) -> bool:
    orchestrator = settings.get("orchestrator")
    return any(key.startswith("orchestrator.train") for key in settings) or (
        isinstance(orchestrator, Mapping) and "train" in orchestrator
    )


def _run(
    caller: str,
    config: Config,
    settings: Mapping[str, Any],
    *,
    resume: bool | str | Path,
    environments: Mapping[str, Any],
    monitors: Sequence[Monitor],
    quiet: bool,
    fork: Fork | None = None,
) -> RunResult:
    """Load the configuration, run it in this process, and read its result."""
    if "callbacks" in settings:
        raise ConfigError(f"{caller}(): callbacks are called monitors here: monitors=[my_monitor]")
    _check_arguments(resume, environments, monitors, caller)
    console = PlainConsole(quiet=quiet)
    shown_log = PlainConsole(stderr=True) if quiet else console  # quiet: warnings go to stderr, progress nowhere
    with _only_run(caller), log_for_a_while(shown_log, logging.WARNING if quiet else logging.INFO):
        table = makers(environments)
        loaded = keep_here(_load(caller, config, settings, table), environments, f"{caller}()")
        folder: list[Path] = []

        def how_to_go_on(path: Path) -> str:
            folder[:] = [path.resolve()]
            objects = ", ".join(f"{name!r}: ..." for name in environments)
            given = f", environments={{{objects}}}" if objects else ""
            return f"not finished; to continue:  verbatim.run({str(path / CONFIG)!r}, resume={str(path)!r}{given})"

        try:
            training = execute(
                loaded,
                name=_name(config, loaded),
                resume=resume if isinstance(resume, bool) else Path(resume),
                console=console,
                run_loop=lambda work, ask, _: run_in_program(work, ask),
                how_to_go_on=how_to_go_on,
                environments=table,
                monitors=monitors,
                fork=fork,
            )
        except SystemExit as error:  # from user code; it would end the interpreter, or the notebook's kernel, silently
            raise RunStopped(f"a module, an environment or a plug-in called sys.exit({shown(error.code)})") from error
        except NothingTrained:
            raise  # this has no note on how to continue: more steps of the same run would not help
        except BaseException as error:
            if folder and (folder[0] / CONFIG).exists():  # a run that never began has removed its folder
                error.add_note(how_to_go_on(folder[0]))
            raise
    path = training.folder.path.resolve()
    if not training.finished:
        if training.was_interrupted:
            raise KeyboardInterrupt(how_to_go_on(path))
        raise RunStopped(f"the trainer's process was asked to end the run; {how_to_go_on(path)}")
    again = functools.partial(
        run, path / CONFIG, resume=path, environments=environments, monitors=monitors, quiet=quiet
    )
    return read_result(path, training.summary, again)


def _load(caller: str, config: Config, settings: Mapping[str, Any], environments: Mapping[str, Any]) -> RunConfig:
    """The configuration, from a file, from tables or from a loaded configuration, with the settings applied."""
    tables = component_tables(environments)
    if isinstance(config, str | os.PathLike):
        return load_stored_config(
            run_file(config), lambda file: load_config(file, tables=tables, settings=settings, caller=caller)
        )
    if isinstance(config, RunConfig):
        config = config.model_dump(exclude_unset=True)
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"{caller}(): found {shown(config, 80)} ({type(config).__name__}), expected the path of a "
            'TOML file, or its tables: {"model": {"name": "..."}, "orchestrator": {...}}'
        )
    return make_config(config, settings, tables=tables, caller=caller)


def _name(config: Config, loaded: RunConfig) -> str:
    """The run's default name: the stem of the file, or the label of the first environment."""
    if isinstance(config, str | os.PathLike):
        return run_file(config).stem
    return loaded.orchestrator.train.env[0].label.replace("/", "-")


@contextlib.contextmanager
def _only_run(caller: str) -> Iterator[None]:
    """Refuse a second run in this process while the block lasts."""
    if not _ONE_RUN.acquire(blocking=False):
        raise UsageError(
            f"{caller}(): another run is active in this process; start this one after it, or in "
            "another process (multiprocessing, another script, `verbatim rl`)"
        )
    try:
        yield
    finally:
        _ONE_RUN.release()


def _check_arguments(resume: object, environments: object, monitors: Sequence[Monitor], caller: str) -> None:
    """Refuse arguments of the wrong type before anything is loaded."""
    if not isinstance(resume, bool | str | os.PathLike):
        raise ConfigError(
            f"{caller}(): resume: found {shown(resume, 80)} ({type(resume).__name__}), expected True for "
            "the latest run of this name, or a run folder"
        )
    if not isinstance(environments, Mapping) or not all(isinstance(name, str) and name for name in environments):
        raise ConfigError(
            f"{caller}(): environments: found {shown(environments, 80)}, expected a mapping from "
            'ids to environments: {"words": Words()}'
        )

    if not isinstance(monitors, list | tuple):
        raise ComponentError(
            f"{caller}(): monitors: found {shown(monitors, 80)} ({type(monitors).__name__}), "
            "expected a list: monitors=[my_monitor]"
        )
    for number, monitor in enumerate(monitors):
        where = f"{caller}(): monitors[{number}] is {shown(monitor, 80)}"
        if isinstance(monitor, type):
            raise ComponentError(
                f"{where}, a class; expected an object with some of the methods {', '.join(METHODS)}: "
                f"monitors=[{monitor.__name__}()]"
            )
        if (fault := fault_of(monitor)) is not None:
            raise ComponentError(f"{where}, which {fault}")
