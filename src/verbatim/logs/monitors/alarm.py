"""Defines an alarm, and what raises alarms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from verbatim.core.trajectories import TrajectoryOutcome

State = Literal["raised", "cleared"]


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Something is wrong with a run, or no longer wrong."""

    name: str
    """Of the kind, such as `entropy_collapse`."""
    step: int
    """Steps done when it was noticed; 0 is before the first."""
    state: State
    """"cleared": what was raised under this name, for this environment, is over."""
    message: str
    """One sentence: what is seen, with its numbers."""
    cause: str
    """What most often causes it."""
    advice: str
    """The key to change, and to what: `lower trainer.optim.lr (now 3e-4)`."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """Metrics that show it, by name."""
    env: str | None = None
    """The environment that it is about; None: the run."""
    trajectory_ids: tuple[str, ...] = ()
    """Trajectories that show it."""

    @property
    def metric(self) -> str:
        """What services call it: one that is raised for two environments is two metrics.

        >>> Alarm(name="stale", step=3, state="raised", message="", cause="", advice="", env="game").metric
        'alarm/stale/game'
        """
        return f"alarm/{self.name}" + (f"/{self.env}" if self.env is not None else "")

    @property
    def text(self) -> str:
        """All of it as one paragraph, for people.

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
    """Raises alarms. The run calls it after each step and each evaluation, on the thread and in the order of the
    monitors, and passes what it returns to their `on_alarm`. One that raises an exception is reported, and the run goes
    on without it."""

    def on_step(
        self, step: int, metrics: Mapping[str, float], outcomes: Sequence[TrajectoryOutcome]
    ) -> Iterable[Alarm]:
        """What this step shows. Metrics and outcomes are those of `Monitor.on_step` and `Monitor.on_trajectories`."""

    def on_eval(self, step: int, env: str, metrics: Mapping[str, float]) -> Iterable[Alarm]:
        """What this evaluation shows; metrics are those of `Monitor.on_eval`."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on watching, as plain JSON values: stored in each checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`. Not called for a checkpoint that has none."""
