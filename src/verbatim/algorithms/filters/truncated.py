"""The `truncated` filter: flags trajectories that were cut off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from verbatim.algorithms.filters.filter import Action
from verbatim.core.errors import ComponentError
from verbatim.core.types import Trajectory

Reason = Literal["length", "max_turns", "malformed", "cancelled", "api_error"]


@dataclass(frozen=True, kw_only=True)
class Truncated:
    """Flags a truncated trajectory, that is, a trajectory whose `truncated` is true (docs/rollouts.md lists the stop
    reasons).

    A dropped trajectory is not trained on, but its reward still counts in its group's baseline.

    Example: `reasons = ["length"]` flags a trajectory that reached `max_tokens`, the context length or its token
    budget, but not a trajectory that reached `max_turns`.
    """

    reasons: tuple[Reason, ...] = get_args(Reason)
    """The stop reasons to flag. If all are listed, truncated trajectories without a stop reason are flagged too."""
    action: Action = "drop"
    """What happens to flagged trajectories: "drop" or "monitor"."""

    def __post_init__(self) -> None:
        unknown = [reason for reason in self.reasons if reason not in get_args(Reason)]
        if unknown or not self.reasons:
            raise ComponentError(
                f"truncated: reasons = {list(self.reasons)}; expected some of {', '.join(get_args(Reason))}"
            )

    def __call__(self, trajectory: Trajectory) -> bool:
        """True if the trajectory was cut off for one of the reasons."""
        if trajectory.stop_reason is None:
            return trajectory.truncated and set(self.reasons) == set(get_args(Reason))
        return trajectory.truncated and trajectory.stop_reason.value in self.reasons
