"""Defines the monitor protocol; combines several monitors into one."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from verbatim.config.secrets import without_secrets
from verbatim.machine_faults import describe, is_machine_fault

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float]
"""Name to value. A value may be NaN (nothing to average) or infinite."""

Distributions = Mapping[str, Sequence[float]]
"""Name to one value for each rollout of a batch, filtered ones included."""
NO_DISTRIBUTIONS: Distributions = MappingProxyType({})


class Monitor(Protocol):
    """Listens to a run. It never decides anything, and the run goes on without it."""

    def on_step(self, step: int, metrics: Metrics, distributions: Distributions = NO_DISTRIBUTIONS) -> None:
        """A step is done, the batch trained; the first is step 1."""

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        """The policy was evaluated on one environment after this step; 0 is before the first."""

    def close(self) -> None:
        """The run is over."""


METHODS = ("on_step", "on_eval", "close")


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a monitor from `MONITORS` is told before the run starts."""

    name: str
    folder: Path
    """The run folder; a monitor keeps there what a resumed run needs."""
    config: Mapping[str, Any]
    """The whole configuration as plain values, without secrets."""
    first_step: int = 0
    """Steps that earlier processes of this run did."""


OpenMonitor = Callable[[RunInfo], Monitor]
"""A monitor with its knobs set, as the configuration names it."""


def open_monitors(components: Mapping[str, OpenMonitor], run: RunInfo) -> list[Monitor]:
    """Start them, by the name of their table. One that raises is reported, and the run goes on without it."""
    monitors = []
    for name, component in components.items():
        try:
            monitors.append(component(run))
        except Exception as error:  # noqa: BLE001  as below; without a traceback, which may quote a key
            logger.error("monitor %s could not be started, and the run goes on without it: %s: %s", name,
                         type(error).__name__, without_secrets(str(error)))  # fmt: skip
    return monitors


class Monitors:
    """Several monitors as one. One that raises is reported, with its traceback, and the run goes on."""

    def __init__(self, monitors: Sequence[Monitor]) -> None:
        self.monitors = tuple(monitors)
        self.num_failures = 0

    def on_step(self, step: int, metrics: Metrics, distributions: Distributions = NO_DISTRIBUTIONS) -> None:
        for monitor in self.monitors:
            self._guard(monitor, functools.partial(monitor.on_step, step, metrics, distributions))

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        for monitor in self.monitors:
            self._guard(monitor, functools.partial(monitor.on_eval, step, env, metrics))

    def close(self) -> None:
        for monitor in self.monitors:
            self._guard(monitor, monitor.close)

    def _guard(self, monitor: Monitor, call: Callable[[], object]) -> None:
        try:
            if inspect.iscoroutine(answer := call()):
                answer.close()
                raise TypeError(f"{answer.__qualname__} is async and has not run; expected a plain function: def")
        except Exception as error:  # a full disk or a plotting library must not cost hours of training
            self.num_failures += 1
            told = is_machine_fault(error)
            logger.error("monitor %s failed; the run goes on without what it would have shown%s",
                         type(monitor).__name__, f": {describe(error)}" if told else "",
                         exc_info=not told)  # fmt: skip
