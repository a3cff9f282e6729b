"""Defines the report of `verbatim env check`: findings, notes, and the rewards of each player."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = {
    "examples": "examples are missing, repeated or unreadable",
    "demonstrations": "demonstrations are unusable, or show different tools from those that episodes offer",
    "raises": "the environment raises",
    "no_turns": "an episode ends before the model is asked",
    "tool_raises": "a tool raises on valid arguments",
    "blocks": "code blocks the event loop",
    "reward": "a reward is not a finite number",
    "score_constant": "the score is always the same",
    "score_unreached": "the score of a success is never reached",
    "endless": "an episode does not end",
    "shared_state": "episodes share state",
    "nondeterministic": "the same seed gives different episodes",
    "too_long": "a prompt or a tool's answer is too long",
    "no_description": "a tool has no description",
}
"""Every kind of finding, with its meaning."""


@dataclass(frozen=True, kw_only=True)
class CheckFinding:
    """One fault of an environment."""

    kind: str
    """One of `KINDS`."""
    found: str
    """The observation, including the example and the place in the episode or code."""
    expected: str
    """The behaviour of a correct environment."""
    change: str
    """The change that fixes the fault."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS


@dataclass(frozen=True, kw_only=True)
class Earned:
    """The rewards and successes of one kind of player."""

    episodes: int
    """Number of the player's episodes that ended without an error."""
    mean_reward: float | None
    """Mean reward of these episodes; None if no episode has a reward."""
    success: float
    """Share of these episodes that were successful."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a check."""

    environment: str
    """The id or import path of the environment."""
    num_examples: Mapping[str, int]
    """Number of examples by split."""
    findings: tuple[CheckFinding, ...]
    """The faults."""
    notes: tuple[str, ...] = ()
    """Observations that may be intended and are therefore not findings."""
    players: Mapping[str, Earned] = field(default_factory=dict)
    """The rewards of each kind of player, by name."""

    @property
    def is_clean(self) -> bool:
        """True if there are no findings."""
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            "environment": self.environment,
            "clean": self.is_clean,
            "num_examples": dict(self.num_examples),
            "findings": [asdict(finding) for finding in self.findings],
            "notes": list(self.notes),
            "players": {name: asdict(earned) for name, earned in self.players.items()},
        }
