"""Defines what `verbatim env check` reports: findings, notes, and what each player earned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = {
    "examples": "examples are missing, repeated or unreadable",
    "demonstrations": "demonstrations are unusable, or show other tools than episodes offer",
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
"""Every kind of finding, with what it means."""


@dataclass(frozen=True, kw_only=True)
class CheckFinding:
    """One thing that is wrong with an environment."""

    kind: str
    """One of `KINDS`."""
    found: str
    """What was observed, with the example and the place."""
    expected: str
    """What a sound environment does instead."""
    change: str
    """What to change."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS


@dataclass(frozen=True, kw_only=True)
class Earned:
    """What one kind of player earned."""

    episodes: int
    """Episodes that ended without an error."""
    mean_reward: float | None
    """Mean of their rewards; None without any reward."""
    success: float
    """Share of successes."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a check."""

    environment: str
    """Id or import path."""
    num_examples: Mapping[str, int]
    """Number of examples by split."""
    findings: tuple[CheckFinding, ...]
    """What is wrong."""
    notes: tuple[str, ...] = ()
    """What may be on purpose."""
    players: Mapping[str, Earned] = field(default_factory=dict)
    """What each kind of player earned, by name."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "environment": self.environment,
            "clean": self.is_clean,
            "num_examples": dict(self.num_examples),
            "findings": [asdict(finding) for finding in self.findings],
            "notes": list(self.notes),
            "players": {name: asdict(earned) for name, earned in self.players.items()},
        }
