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
"""Values by metric name. A value may be infinite, or NaN if there was nothing to average."""

Distributions = Mapping[str, Sequence[float]]
"""For each name, the values of all rollouts of a batch, including filtered rollouts."""
NO_DISTRIBUTIONS: Distributions = MappingProxyType({})


class Monitor(Protocol):
    """Observes a run without influencing it. If a monitor fails, the run continues.

    A monitor has at least one of these methods and may leave out the others. A subclass of `Monitor` inherits empty
    methods. The methods are called one at a time, and the run waits for each call.
    """

    # Each method has an explicit return, because mypy treats a protocol's method without a statement as abstract.

    def on_start(self, config: Mapping[str, Any]) -> None:
        """Called first, when the run starts or is resumed, with the whole configuration as plain values, without
        secrets."""
        return

    def on_step(self, step: int, metrics: Metrics, distributions: Distributions = NO_DISTRIBUTIONS) -> None:
        """Called when a step is done, that is, its batch has been trained. Steps are counted from 1."""
        return

    def on_trajectories(self, step: int, outcomes: Sequence[TrajectoryOutcome]) -> None:
        """Called after `on_step` with all trajectories whose outcome was decided in this step: the trajectories of the
        batch, and trajectories that were dropped before they reached a batch."""
        return

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        """Called when the policy has been evaluated on one environment after this step. Step 0 means before the first
        step."""
        return

    def on_alarm(self, alarm: Alarm) -> None:
        """Called when an alarm is raised or cleared, after the step or evaluation that caused this."""
        return

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Called when this process of the run ends. `verbatim.run.ending` makes the summary. The summary's `state` is
        "finished", "stopped" or "failed"."""
        return

    def close(self) -> None:
        """Release resources. Called last."""
        return


METHODS = ("on_start", "on_step", "on_trajectories", "on_eval", "on_alarm", "on_end", "close")


def fault_of(monitor: object) -> str | None:
    """A clause that explains why an object, or the instances of a class, are not monitors; None if they are monitors.

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
    """Facts about a run, which a monitor component receives when the run starts."""

    name: str
    """The run's name."""
    folder: Path
    """The run folder, where a monitor may store the data that it needs when the run is resumed."""
    config: Mapping[str, Any]
    """The whole configuration as plain values, without secrets."""
    first_step: int = 0
    """Number of steps done by earlier processes of this run."""


OpenMonitor = Callable[[RunInfo], Monitor]
"""A monitor component whose parameters are set. It is called with a `RunInfo` when the run starts, and returns a
monitor."""


def open_monitors(components: Mapping[str, OpenMonitor], run: RunInfo) -> list[Monitor]:
    """Start the monitors, given as components by the names of their configuration tables. If a component raises, or
    does not return a monitor, this is logged and the run continues without it."""
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
    """Combines several monitors into one. An exception in a monitor is logged with its traceback, and the run
    continues."""

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
                # For a machine fault, such as a full disk, one line without a traceback is enough.
                from_machine = is_machine_fault(error)
                logger.error(
                    "monitor %s failed; the run goes on without its report%s",
                    type(monitor).__name__,
                    f": {describe(error)}" if from_machine else "",
                    exc_info=not from_machine,
                )
