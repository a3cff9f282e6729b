"""Says why turns of one trajectory break the extension property, in the doctor's words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verbatim.core.errors import UsageError, VerbatimError
from verbatim.core.texts import counted
from verbatim.core.trajectories.openings import breaks
from verbatim.core.types import Trajectory
from verbatim.inspection.doctor import BreakClass, Diagnosis, Doctor, LoggedTrajectory
from verbatim.inspection.doctor.diagnosis import TemplateLine
from verbatim.inspection.doctor.text import TokenText
from verbatim.inspection.viewer.tokenizer import RunTokenizer

_LONGEST = 300_000
"""Tokens of breaking prompts up to which they are compared here: more would keep a reader waiting."""


class BreakReader:
    """Explains the breaks of a run's trajectories.

    Args:
        tokenizer: The run's; without it most causes cannot be told.
    """

    def __init__(self, tokenizer: RunTokenizer | None) -> None:
        self._text = None if tokenizer is None else TokenText(tokenizer)
        self._lines: Any = None

    def explain(self, trajectory: Trajectory) -> dict[int, dict[str, Any]]:
        """For each turn that breaks: `{"reason": class, "words": [line, ...]}`."""
        turns = trajectory.turns
        breaking = breaks(turns)
        if not breaking:
            return {}
        tokens = sum(turns[place].num_prompt_tokens for place in breaking)
        if tokens > _LONGEST:
            words = f"{tokens:,} tokens of prompts break here, too many to compare in a page; type verbatim doctor RUN"
            return {place: {"reason": "not_compared", "words": [words]} for place in breaking}
        logged = LoggedTrajectory(trajectory=trajectory, line=0)
        try:
            found = Doctor(self._text, self._template_line).examine(logged)
        except UsageError:  # ids that the tokenizer does not have
            found = Doctor().examine(logged)
        return {
            diagnosis.turn: {"reason": diagnosis.kind.value, "words": _words(diagnosis)}
            for diagnosis in found
            if diagnosis.turn in breaking
        }

    def warm_up(self) -> None:
        """Load what reads chat templates, which takes about a second, before it is asked for."""
        self._template_line(BreakClass.THINKING_STRIPPED)

    def _template_line(self, kind: BreakClass) -> TemplateLine | None:
        if self._text is None or self._text.chat_template is None:
            return None
        if self._lines is None:
            try:
                from verbatim.inspection.doctor.template_lines import template_lines

                self._lines = template_lines(self._text.chat_template)
            except (VerbatimError, ImportError):
                self._lines = lambda _: None
        found: TemplateLine | None = self._lines(kind)
        return found


def _words(diagnosis: Diagnosis) -> Sequence[str]:
    d = diagnosis
    lines = [
        f"{d.kind.heading}: {d.found}",
        f"compared with turn {d.against}, it differs from token {d.position:,} on",
        f"computed again: {counted(d.repeated, 'token')}, {d.share:.1%} of the trajectory as rows; "
        f"{d.repeated_in_tree:,} in a prefix tree",
    ]
    if d.template_line is not None:
        lines.append(f"template line {d.template_line.number}: {d.template_line.text.strip()}")
    before = [row.earlier for row in d.rows if row.differs and row.earlier is not None]
    now = [row.now for row in d.rows if row.differs and row.now is not None]
    for name, cells in (("recorded", before), ("sent", now)):
        shown = " ".join(cell.text if cell.text is not None else str(cell.token) for cell in cells)
        lines.append(f"{name}: {shown or '(nothing)'}")
    lines.append(d.kind.advice("verbatim"))
    return lines
