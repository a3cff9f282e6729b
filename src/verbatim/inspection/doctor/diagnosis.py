"""Diagnoses the breaks of trajectories: finds their classes and costs, sums them over a file, and selects the breaks to
show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from verbatim.inspection.doctor.classes import BreakClass
from verbatim.inspection.doctor.difference import Difference
from verbatim.inspection.doctor.evidence import classify
from verbatim.inspection.doctor.evidence.recorded import recorded_reason
from verbatim.inspection.doctor.logs import LoggedTrajectory
from verbatim.inspection.doctor.samples import find_samples
from verbatim.inspection.doctor.text import TokenText
from verbatim.inspection.doctor.windows import WindowRow, side_by_side

_SAYS_LITTLE = frozenset({BreakClass.UNKNOWN, BreakClass.HISTORY_REWRITTEN, BreakClass.NOT_READ_BACK})
"""Classes that say what changed but not why. The recorded reason `format_unknown` takes precedence over these classes
only."""


@dataclass(frozen=True)
class TemplateLine:
    """A line of a chat template. Numbers start at 1."""

    number: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """One break and its explanation."""

    trajectory: str
    """The trajectory's name in the log."""
    line: int
    """Number of the trajectory's first line in the log."""
    turn: int
    """The turn whose prompt does not extend the recorded tokens."""
    agent: str
    against: int
    """The turn that this turn's prompt should have extended."""
    position: int
    """Index in the prompt of the first token that differs."""
    kind: BreakClass
    found: str
    """The evidence for the class, in words."""
    rows: tuple[WindowRow, ...]
    """The recorded sequence and the prompt around `position`, side by side."""
    template_line: TemplateLine | None
    """The line of the chat template that causes the break; None if unknown."""
    repeated: int
    """Number of history tokens that are computed again because of the break, if each sample is a separate row."""
    repeated_in_tree: int
    """Number of the `repeated` tokens that are computed again even in a prefix tree: the tokens after the first
    difference."""
    share: float
    """`repeated` as a share of the trajectory's tokens, if each sample is a separate row."""


@dataclass
class Sums:
    """The number of breaks of one class, and the sums of their `repeated` and `repeated_in_tree`."""

    breaks: int = 0
    repeated: int = 0
    repeated_in_tree: int = 0


@dataclass(kw_only=True)
class Summary:
    """The sums over all trajectories of a file."""

    trajectories: int = 0
    turns: int = 0
    samples: int = 0
    """Number of training samples that the `interleaved` strategy builds from the trajectories."""
    row_tokens: int = 0
    """Number of tokens to compute if each sample is a separate row."""
    tree_tokens: int = 0
    """Number of tokens to compute in a prefix tree, where each shared prefix is computed once."""
    classes: dict[BreakClass, Sums] = field(default_factory=dict)

    @property
    def checked(self) -> bool:
        """True if any turn in the file has sampled ids."""
        return self.samples > 0

    @property
    def breaks(self) -> int:
        return sum(sums.breaks for sums in self.classes.values())

    @property
    def by_design(self) -> int:
        return sum(sums.breaks for kind, sums in self.classes.items() if kind.by_design)

    @property
    def repeated(self) -> int:
        """Number of tokens that are computed again because of breaks, if each sample is a separate row."""
        return sum(sums.repeated for sums in self.classes.values())

    def share(self, tokens: int) -> float:
        """`tokens` as a share of `row_tokens`."""
        return tokens / self.row_tokens if self.row_tokens else 0.0


@dataclass
class Doctor:
    """Examines trajectories one at a time and keeps only sums in memory."""

    text: TokenText | None = None
    """Decodes ids. If it is None, some classes cannot be recognised."""
    template_line: Callable[[BreakClass], TemplateLine | None] = lambda kind: None
    """Returns the line of the chat template that causes the breaks of a class, or None if that is unknown."""
    summary: Summary = field(default_factory=Summary)

    def examine(self, logged: LoggedTrajectory) -> list[Diagnosis]:
        """The breaks of one trajectory, in order.

        Raises:
            UsageError: an id is not in the tokenizer's vocabulary.
        """
        turns = logged.trajectory.turns
        found = find_samples(turns)
        if self.text is not None:
            self.text.refuse_unknown(max((int(turns[s[-1]].path.ids().max()) for s in found.samples), default=0))
        summary = self.summary
        summary.trajectories += 1
        summary.turns += len(turns)
        summary.samples += len(found.samples)
        summary.row_tokens += found.row_tokens
        summary.tree_tokens += found.tree_tokens
        diagnoses = []
        for opening in found.openings:
            difference = Difference(turns, opening, self.text, logged.tools)
            kind, why = _kind_of(recorded_reason(logged.trajectory.info, opening.turn), difference)
            # A new conversation repeats no history; only the prefix that it shares with the earlier sequence is
            # computed twice.
            repeated = difference.at if kind.by_design else difference.alignment.history_end
            diagnosis = Diagnosis(
                trajectory=logged.trajectory.trajectory_id,
                line=logged.line,
                turn=opening.turn,
                agent=turns[opening.turn].agent,
                against=opening.against[-1],
                position=difference.at,
                kind=kind,
                found=why,
                rows=side_by_side(difference),
                template_line=self.template_line(kind),
                repeated=repeated,
                repeated_in_tree=repeated - difference.at,
                share=repeated / found.row_tokens,
            )
            diagnoses.append(diagnosis)
            sums = summary.classes.setdefault(kind, Sums())
            sums.breaks += 1
            sums.repeated += diagnosis.repeated
            sums.repeated_in_tree += diagnosis.repeated_in_tree
        return diagnoses


class ShownBreaks:
    """Keeps the first `limit` breaks of each class and selects `limit` of them, covering as many classes as possible.

    Example: from breaks of the classes a a a b a c, it selects a b c if the limit is 3, and a a b c if the limit is 4.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: dict[BreakClass, list[tuple[int, Diagnosis]]] = {}
        self._count = 0

    def add(self, diagnosis: Diagnosis) -> None:
        same = self._kept.setdefault(diagnosis.kind, [])
        if len(same) < self._limit:
            same.append((self._count, diagnosis))
        self._count += 1

    def breaks(self) -> Iterator[Diagnosis]:
        """The selected breaks in file order. Breaks of classes that are `by_design` are selected only if there is room
        left."""
        firsts = [same[0] for same in self._kept.values() if same]
        firsts.sort(key=lambda found: (found[1].kind.by_design, found[0]))
        rest = sorted((found for same in self._kept.values() for found in same[1:]), key=lambda found: found[0])
        chosen = [*firsts, *rest][: self._limit]
        yield from (diagnosis for _, diagnosis in sorted(chosen, key=lambda found: found[0]))


def _kind_of(recorded: tuple[BreakClass, str] | None, difference: Difference) -> tuple[BreakClass, str]:
    """The class of a break, and the evidence for it.

    A recorded reason determines the class, except `format_unknown`, which says little: evidence from the ids takes
    precedence over it.
    """
    if recorded is not None and recorded[0] is not BreakClass.FORMAT_UNKNOWN:
        return recorded
    found = classify(difference)
    return recorded if recorded is not None and found[0] in _SAYS_LITTLE else found
