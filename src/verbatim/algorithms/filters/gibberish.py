"""The `gibberish` filter: flags trajectories whose tokens were very unlikely under the policy that sampled them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from verbatim.algorithms.filters.filter import Action, Reads
from verbatim.core.errors import ComponentError
from verbatim.core.types import Trajectory


@dataclass(frozen=True, kw_only=True)
class Gibberish:
    """Flags a trajectory when the mean logprob of its sampled tokens is below `threshold`.

    Untrained turns and turns without logprobs do not count. If no turn counts, the trajectory is not flagged.

    Example: turns with the logprobs `[-6, -1]` and `[-8]` have the mean -5, which is below -4.
    """

    reads: ClassVar[Reads] = "logprobs"

    threshold: Annotated[float, Field(le=0)] = -4.0
    """Threshold of the mean logprob in nats; e^-4 is a probability of 0.018."""
    action: Action = "drop"
    """What happens to flagged trajectories: "drop" or "monitor"."""

    def __post_init__(self) -> None:
        if not self.threshold <= 0:
            raise ComponentError(f"gibberish: threshold = {self.threshold}; expected a logprob <= 0, for example -4.0")

    def __call__(self, trajectory: Trajectory) -> bool:
        """True if the mean logprob is below the threshold."""
        logprobs = [turn.logprobs for turn in trajectory.turns if turn.trained and turn.logprobs is not None]
        count = sum(map(len, logprobs))
        total = math.fsum(float(own.sum(dtype="float64")) for own in logprobs)
        return count > 0 and total / count < self.threshold
