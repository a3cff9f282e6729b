"""Outcomes for tests of monitors."""

from __future__ import annotations

from verbatim import Trajectory, Turn
from verbatim.core.trajectories import TrajectoryOutcome

HOSTILE = "<script>alert(1)</script> [x](javascript:alert(1)) \x1b[31mred"


def outcome(
    name: str, reward: float | None, *, text: str = "hello", reason: str | None = None, **fields: object
) -> TrajectoryOutcome:
    """Of one trajectory with a turn of three sampled tokens."""
    turn = Turn(prompt_ids=[1, 2], completion_ids=[3, 4, 5])
    messages = ({"role": "user", "content": "go"}, {"role": "assistant", "content": text})
    trajectory = Trajectory(
        example_id="x", trajectory_id=name, env="game", reward=reward, turns=(turn,), messages=messages, **fields
    )  # type: ignore[arg-type]
    if reason is not None:
        return TrajectoryOutcome.of_dropped(trajectory, reason)
    return TrajectoryOutcome(trajectory=trajectory, turns=("trained",))
