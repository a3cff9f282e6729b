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
    """Flags a trajectory that did not come to its own end: `truncated` is true, as docs/rollouts.md has it for each of
    the stop reasons.

    It stays in its group's baseline: what was cut off says how good the others are, and is not learned from itself.

    Example: `reasons = ["length"]` flags a trajectory that hit `max_tokens`, the context or its token budget, and not
    one that hit `max_turns`.
    """

    reasons: tuple[Reason, ...] = get_args(Reason)
    """The stop reasons that count. With all of them a truncated trajectory without a stop reason counts too."""
    action: Action = "drop"
    """"drop" or "monitor"."""

    def __post_init__(self) -> None:
        unknown = [reason for reason in self.reasons if reason not in get_args(Reason)]
        if unknown or not self.reasons:
            raise ComponentError(
                f"truncated: reasons = {list(self.reasons)}; expected some of {', '.join(get_args(Reason))}"
            )

    def __call__(self, trajectory: Trajectory) -> bool:
        """Whether it was cut off."""
        if trajectory.stop_reason is None:
            return trajectory.truncated and set(self.reasons) == set(get_args(Reason))
        return trajectory.truncated and trajectory.stop_reason.value in self.reasons
