"""Raises the error for a trajectory that breaks in a run with `on_break = "error"`."""

from __future__ import annotations

from collections.abc import Sequence

from verbatim.core.errors import RunStopped
from verbatim.core.records.turn import Turn
from verbatim.core.token_tree import Int32
from verbatim.core.trajectories.openings import spoken_before
from verbatim.core.trajectories.record import TrajectoryRecord

SHOWN = 8
"""Ids that are shown on either side of the first difference."""


def refuse_breaks(
    trajectory: TrajectoryRecord, kept: Sequence[tuple[int, Turn]], runs: Sequence[Sequence[int]]
) -> None:
    """Stop at the first break.

    Args:
        trajectory: The trajectory of the turns.
        kept: Index and turn of those that are in the samples.
        runs: Places in `kept`, sample by sample.

    Raises:
        RunStopped: names trajectory, turn and position, and shows the ids there.
    """
    for first in spoken_before((run[0] for run in runs), [turn for _, turn in kept]):
        raise RunStopped(
            f"trajectory {trajectory.trajectory_id!r}: {explain_break(*kept[first], kept[:first])}. The run has "
            'on_break = "error"; with "split" the turn would start a training sample of its own'
        )


def explain_break(index: int, turn: Turn, earlier: Sequence[tuple[int, Turn]]) -> str:
    """Where a turn's prompt leaves the closest of the earlier ones, and the ids on both sides.

    Example: `turn 1 (main) does not extend turn 0: of its 3 prompt ids the first 1 are the same; at position 1 it has
    [9, 7], turn 0 has [2]`.
    """
    length = turn.num_prompt_tokens
    closest, before = max(earlier, key=lambda pair: (min(length, turn.path.shared_with(pair[1].path)), pair[0]))
    shared = min(length, turn.path.shared_with(before.path))
    ours, theirs = turn.prompt_ids, before.path.ids()
    return (
        f"turn {index} ({turn.agent}) does not extend turn {closest}: of its {length} prompt ids the first {shared} "
        f"are the same; at position {shared} it has {_window(ours, shared)}, turn {closest} has "
        f"{_window(theirs, shared)}"
    )


def _window(ids: Int32, start: int) -> str:
    shown = ids[start : start + SHOWN].tolist()
    if not shown:
        return "ended"
    return f"[{', '.join(map(str, shown))}{', ...' if start + SHOWN < len(ids) else ''}]"
