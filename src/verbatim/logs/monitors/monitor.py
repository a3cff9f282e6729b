"""Defines the protocol of monitors, starts them, and combines several into one."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from verbatim.core.errors import UsageError
from verbatim.core.machine_faults import describe, is_machine_fault
from verbatim.core.redaction import without_secrets
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.logs.monitors.alarm import Alarm

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float]
"""Values by metric name. A value may be NaN (nothing to average) or infinite."""

Distributions = Mapping[str, Sequence[float]]
"""By name, one value for each rollout of a batch, including filtered rollouts."""
NO_DISTRIBUTIONS: Distributions = MappingProxyType({})


class Monitor(Protocol):
    """Observes a run, without influence on it. If a monitor fails, the run continues.

    A monitor has at least one of these methods and may leave out the others; a subclass inherits empty ones. The
    methods are called one at a time, and the run waits for each.
    """

    # Each method has an explicit return: mypy treats a protocol's method without a statement as abstract.

    def on_start(self, config: Mapping[str, Any]) -> None:
        """The run starts or is resumed. Called before the other methods, with the whole configuration as plain values,
        without secrets."""
        return

    def on_step(self, step: int, metrics: Metrics, distributions: Distributions = NO_DISTRIBUTIONS) -> None:
        """A step is done: its batch has been trained. Steps count from 1."""
        return

    def on_trajectories(self, step: int, outcomes: Sequence[TrajectoryOutcome]) -> None:
        """Called after `on_step` with all trajectories whose outcome was decided in this step: those of the batch, and
        those that were dropped before they reached a batch."""
        return

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        """The policy was evaluated on one environment after this step; step 0: before the first."""
        return

    def on_alarm(self, alarm: Alarm) -> None:
        """An alarm was raised or cleared, after the step or the evaluation that showed it."""
        return

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """This process of the run ends. The summary is that of `verbatim.run.ending`; `state` is "finished", "stopped"
        or "failed"."""
        return

    def close(self) -> None:
        """Release resources. The last call."""
        return


METHODS = ("on_start", "on_step", "on_trajectories", "on_eval", "on_alarm", "on_end", "close")


def fault_of(monitor: object) -> str | None:
    """A clause that explains why an object, or the instances of a class, are not monitors; None: they are.

    >>> class Typo:
    ...     def on_stepp(self, step, metrics, distributions): ...
    >>> fault_of(Typo())
    'has a method on_stepp, which is never called; expected some of on_start, on_step, on_trajectories, on_eval, \
on_alarm, on_end, close'
    """
    expected = f"expected some of {', '.join(METHODS)}"
    unknown = [name for name in dir(monitor) if name.startswith("on_") and name not in METHODS]
    if unknown:
        return f"has a method {unknown[0]}, which is never called; {expected}"
    if not any(callable(getattr(monitor, name, None)) for name in METHODS):
        return f"has none of a monitor's methods; {expected}"
    uncalled = next((name for name in METHODS if not callable(getattr(monitor, name, print))), None)
    if uncalled is not None:
        return f"has {uncalled} = {getattr(monitor, uncalled)!r}; expected a method"
    if any(inspect.iscoroutinefunction(getattr(monitor, name, None)) for name in METHODS):
        return "has an async method; expected plain functions: def on_step(self, ...)"
    return None


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Facts about a run that a monitor component gets when the run starts."""

    name: str
    """The run's name."""
    folder: Path
    """The run folder; a monitor stores there what it needs when the run is resumed."""
    config: Mapping[str, Any]
    """The whole configuration as plain values, without secrets."""
    first_step: int = 0
    """Number of steps done by earlier processes of this run."""


OpenMonitor = Callable[[RunInfo], Monitor]
"""A monitor component with its parameters set; called when the run starts."""


def open_monitors(components: Mapping[str, OpenMonitor], run: RunInfo) -> list[Monitor]:
    """Start monitors, given by the names of their tables. If one raises, or does not return a monitor, that is logged,
    and the run continues without it."""
    monitors = []
    for name, component in components.items():
        try:
            monitor = component(run)
            if (fault := fault_of(monitor)) is not None:
                raise UsageError(f"{type(monitor).__name__} {fault}")
            monitors.append(monitor)
        except Exception as error:  # noqa: BLE001  as in `Monitors._tell`; no traceback, which may quote an API key
            logger.error(
                "monitor %s could not be started, and the run goes on without it: %s: %s",
                name,
                type(error).__name__,
                without_secrets(str(error)),
            )
    return monitors


class Monitors:
    """Several monitors as one. An exception in one of them is logged with its traceback, and the run continues."""

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self.monitors = tuple(monitors)
        self.num_failures = 0

    def on_start(self, config: Mapping[str, Any]) -> None:
        self._tell("on_start", config)

    def on_step(self, step: int, metrics: Metrics, distributions: Distributions = NO_DISTRIBUTIONS) -> None:
        self._tell("on_step", step, metrics, distributions)

    def on_trajectories(self, step: int, outcomes: Sequence[TrajectoryOutcome]) -> None:
        self._tell("on_trajectories", step, outcomes)

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        self._tell("on_eval", step, env, metrics)

    def on_alarm(self, alarm: Alarm) -> None:
        self._tell("on_alarm", alarm)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._tell("on_end", summary)

    def close(self) -> None:
        self._tell("close")

    def _tell(self, method: str, *arguments: object) -> None:
        for monitor in self.monitors:
            call = getattr(monitor, method, lambda *_: None)
            try:
                if inspect.iscoroutine(answer := call(*arguments)):
                    answer.close()
                    raise TypeError(f"{answer.__qualname__} is async and has not run; expected a plain function: def")
            except Exception as error:  # a full disk or a plotting library must not cost hours of training
                self.num_failures += 1
                from_machine = is_machine_fault(error)  # such as a full disk: one line is enough, no traceback
                logger.error(
                    "monitor %s failed; the run goes on without its report%s",
                    type(monitor).__name__,
                    f": {describe(error)}" if from_machine else "",
                    exc_info=not from_machine,
                )
