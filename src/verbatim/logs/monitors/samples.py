"""Selects a few trajectories of a step and converts them to table rows for services."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from verbatim.core.redaction import without_secrets
from verbatim.core.texts import printable
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.logs.monitors.conversation import conversation_text

LONGEST = 10_000
"""Maximum number of characters of the conversation in a row."""


@dataclass(frozen=True, kw_only=True)
class SampleRow:
    """One trajectory, as shown by services."""

    step: int
    env: str
    example_id: str
    trajectory_id: str
    reward: float | None
    advantage: float | None
    """The trajectory's advantage; None if each turn has its own advantage, or if no advantage was computed."""
    outcome: str
    """"trained", the reason why no token was trained, or the outcomes of the tokens with their counts."""
    stop_reason: str
    turns: int
    sampled_tokens: int
    conversation: str
    """The messages as text, without secrets and with escaped control characters."""


COLUMNS = tuple(f.name for f in fields(SampleRow))


def sample_rows(step: int, outcomes: Sequence[TrajectoryOutcome], *, count: int, interval: int) -> list[SampleRow]:
    """The rows of a step's table; empty if the step has no table.

    Args:
        step: The step. Step 1 and each multiple of `interval` have a table.
        outcomes: The step's trajectories.
        count: Number of rows in a table; 0 for no tables.
        interval: Number of steps between two tables.
    """
    if count == 0 or not (step == 1 or step % interval == 0):
        return []
    return [sample_row(step, outcome) for outcome in chosen(outcomes, count)]


def chosen(outcomes: Iterable[TrajectoryOutcome], count: int) -> list[TrajectoryOutcome]:
    """Sort trajectories by reward, with the highest reward first and trajectories without a reward last. Select
    trajectories at even distances in this order.

    Equal rewards are ordered by trajectory id, so that the same step always gives the same rows.
    """
    ordered = sorted(
        outcomes,
        key=lambda outcome: (
            outcome.trajectory.reward is None,
            -(outcome.trajectory.reward or 0.0),
            outcome.trajectory.trajectory_id,
        ),
    )
    with_reward = [outcome for outcome in ordered if outcome.trajectory.reward is not None]
    found = with_reward if len(with_reward) >= count else ordered
    if len(found) <= count:
        return found
    if count == 1:
        return found[:1]
    return [found[round(index * (len(found) - 1) / (count - 1))] for index in range(count)]


def sample_row(step: int, outcome: TrajectoryOutcome) -> SampleRow:
    """The row of one trajectory."""
    trajectory = outcome.trajectory
    stopped = "error" if trajectory.error is not None else str(getattr(trajectory.stop_reason, "value", "") or "")
    return SampleRow(
        step=step,
        env=trajectory.env,
        example_id=str(trajectory.example_id),
        trajectory_id=trajectory.trajectory_id,
        reward=trajectory.reward,
        advantage=trajectory.advantage,
        outcome=outcome.reason or _outcome_of_turns(outcome),
        stop_reason=stopped,
        turns=len(trajectory.turns),
        sampled_tokens=trajectory.num_sampled_tokens,
        conversation=printable(without_secrets(conversation_text(trajectory.messages, LONGEST))),
    )


def _outcome_of_turns(outcome: TrajectoryOutcome) -> str:
    """The outcome that all tokens share, such as `trained`, or else each outcome with its number of tokens, such as
    `trained 12, over_length 3`."""
    counts = outcome.num_tokens
    if len(counts) <= 1:
        return next(iter(counts), "trained")
    return ", ".join(f"{name} {count}" for name, count in counts.items())
