"""A trajectory's breaks with their classes and costs, and their sums over a file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from verbatim.doctor.classes import BreakClass
from verbatim.doctor.difference import Difference
from verbatim.doctor.evidence import classify
from verbatim.doctor.logs import LoggedTrajectory
from verbatim.doctor.samples import find_samples
from verbatim.doctor.text import TokenText
from verbatim.doctor.windows import Row, side_by_side


@dataclass(frozen=True, kw_only=True)
class TemplateLine:
    """A line of a chat template."""

    number: int
    """Counted from 1."""
    text: str
    """What stands there."""


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One break, explained."""

    trajectory: str
    """The trajectory's name in the log."""
    line: int
    """The line of the log that it begins on."""
    turn: int
    """The turn whose prompt does not extend what was recorded."""
    agent: str
    """Who spoke."""
    against: int
    """The turn that it was expected to extend."""
    position: int
    """The first token of the prompt that differs: as many are the same."""
    kind: BreakClass
    """The class."""
    found: str
    """What tells the class, in words."""
    rows: tuple[Row, ...]
    """The two sequences around the position, side by side."""
    template_line: TemplateLine | None
    """The line of the chat template that does it, where there is one."""
    repeated: int
    """Tokens of history that rows compute again because of it."""
    repeated_in_tree: int
    """Those of them that a prefix tree computes again too: they come after the first difference."""
    share: float
    """`repeated` as a part of what rows compute of the trajectory."""


@dataclass(kw_only=True)
class Sums:
    """Breaks of one class."""

    breaks: int = 0
    """How many."""
    repeated: int = 0
    """Their `Diagnosis.repeated`."""
    repeated_in_tree: int = 0
    """Their `Diagnosis.repeated_in_tree`."""


@dataclass(kw_only=True)
class Summary:
    """A whole file."""

    trajectories: int = 0
    """How many were read."""
    turns: int = 0
    """Of all of them."""
    samples: int = 0
    """Training samples that `interleaved` makes of them."""
    row_tokens: int = 0
    """Tokens that are computed where each sample is a row."""
    tree_tokens: int = 0
    """Tokens that are computed where the samples of a trajectory share what they have in common."""
    classes: dict[BreakClass, Sums] = field(default_factory=dict)
    """What was found of each class."""

    @property
    def checked(self) -> bool:
        """Whether there was anything to look at: a turn that sampled something, with its ids."""
        return self.samples > 0

    @property
    def breaks(self) -> int:
        """All that were found."""
        return sum(sums.breaks for sums in self.classes.values())

    @property
    def by_design(self) -> int:
        """Those in which nothing is wrong."""
        return sum(sums.breaks for kind, sums in self.classes.items() if kind.by_design)

    @property
    def repeated(self) -> int:
        """Tokens that rows compute again because of breaks."""
        return sum(sums.repeated for sums in self.classes.values())

    def share(self, tokens: int) -> float:
        """A count as a part of what rows compute of the file."""
        return tokens / self.row_tokens if self.row_tokens else 0.0


class Doctor:
    """Examines trajectory after trajectory; keeps sums only.

    Args:
        text: Reads ids; without it some classes cannot be told.
        template_line: Gives the line of the chat template that is behind a class, if there is one.
    """

    def __init__(
        self,
        text: TokenText | None = None,
        template_line: Callable[[BreakClass], TemplateLine | None] = lambda kind: None,
    ) -> None:
        self.summary = Summary()
        self._text = text
        self._template_line = template_line

    def examine(self, logged: LoggedTrajectory) -> list[Diagnosis]:
        """The breaks of one trajectory, in order.

        Raises:
            UsageError: it holds ids that the tokenizer does not have.
        """
        turns = logged.trajectory.turns
        found = find_samples(turns)
        if self._text is not None:
            self._text.refuse_unknown(max((int(turns[s[-1]].path.ids().max()) for s in found.samples), default=0))
        summary = self.summary
        summary.trajectories += 1
        summary.turns += len(turns)
        summary.samples += len(found.samples)
        summary.row_tokens += found.row_tokens
        summary.tree_tokens += found.tree_tokens
        diagnoses = []
        for opening in found.openings:
            difference = Difference(turns, opening, self._text, logged.tools)
            diagnosis = self._diagnose(logged, difference, found.row_tokens)
            diagnoses.append(diagnosis)
            sums = summary.classes.setdefault(diagnosis.kind, Sums())
            sums.breaks += 1
            sums.repeated += diagnosis.repeated
            sums.repeated_in_tree += diagnosis.repeated_in_tree
        return diagnoses

    def _diagnose(self, logged: LoggedTrajectory, difference: Difference, row_tokens: int) -> Diagnosis:
        kind, found = classify(difference)
        # Another conversation has no history here; what it shares is all that is computed twice.
        repeated = difference.at if kind.by_design else difference.alignment.history_end
        opening = difference.opening
        return Diagnosis(
            trajectory=logged.trajectory.trajectory_id, line=logged.line, turn=opening.turn,
            agent=difference.turns[opening.turn].agent, against=opening.against[-1], position=difference.at, kind=kind,
            found=found, rows=side_by_side(difference), template_line=self._template_line(kind), repeated=repeated,
            repeated_in_tree=repeated - difference.at, share=repeated / row_tokens,
        )  # fmt: skip
