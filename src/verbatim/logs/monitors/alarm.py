"""Defines alarms, and the protocol of detectors, which raise them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from verbatim.core.trajectories import TrajectoryOutcome

State = Literal["raised", "cleared"]


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Says that a problem of a run was detected, or that a problem detected earlier is over."""

    name: str
    """Name of the alarm, such as `entropy_collapse`."""
    step: int
    """Number of steps done when the problem was detected; 0 before the first step."""
    state: State
    """"raised", or "cleared" if the problem that was raised for this name and environment is over."""
    message: str
    """One sentence that says what was observed, with the numbers."""
    cause: str
    """The most common cause."""
    advice: str
    """The configuration key to change, and how, such as `lower trainer.optim.lr (now 3e-4)`."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """Metrics that show the problem, by name."""
    env: str | None = None
    """The environment with the problem; None for the whole run."""
    trajectory_ids: tuple[str, ...] = ()
    """Trajectories that show the problem."""

    @property
    def metric(self) -> str:
        """Name of the alarm's metric in services. It includes the environment, so that two environments have two
        metrics.

        >>> Alarm(name="stale", step=3, state="raised", message="", cause="", advice="", env="game").metric
        'alarm/stale/game'
        """
        return f"alarm/{self.name}" + (f"/{self.env}" if self.env is not None else "")

    @property
    def text(self) -> str:
        """Message, environment, cause and advice as one paragraph.

        >>> Alarm(name="stale", step=3, state="raised", message="Rollouts are 9 steps old.", cause="slow episodes",
        ...       advice="lower orchestrator.max_async_level", env="game").text
        'Rollouts are 9 steps old. Environment: game. Cause: slow episodes. To do: lower orchestrator.max_async_level.'
        """
        if self.state == "cleared":
            return f"No longer: {self.message}"
        named = {"Environment: ": self.env, "Cause: ": self.cause, "To do: ": self.advice}
        found = [self.message, *(f"{name}{value}" for name, value in named.items() if value)]
        return " ".join(part if part.endswith((".", "!", "?")) else f"{part}." for part in found)


class Detector(Protocol):
    """Raises alarms. The run calls its detectors after each step and each evaluation, on the same thread as the
    monitors, and passes the alarms to the monitors' `on_alarm`. If a detector raises an exception, the exception is
    logged, and the run continues without the detector."""

    def on_step(
        self, step: int, metrics: Mapping[str, float], outcomes: Sequence[TrajectoryOutcome]
    ) -> Iterable[Alarm]:
        """The alarms of a step. Takes the arguments of `Monitor.on_step` and of `Monitor.on_trajectories`."""

    def on_eval(self, step: int, env: str, metrics: Mapping[str, float]) -> Iterable[Alarm]:
        """The alarms of an evaluation. Takes the same arguments as `Monitor.on_eval`."""

    def state_dict(self) -> dict[str, Any]:
        """The state of the detector, as plain JSON values. It is stored in each checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state returned by `state_dict`. Not called if the checkpoint has no state of this detector."""
