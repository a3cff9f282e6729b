"""Uses the doctor to explain why turns of a trajectory break the extension property."""

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
"""If the breaking prompts of a trajectory have more tokens than this, the breaks are not explained, because this would
take too long for the page."""


class BreakReader:
    """Explains the breaks of a run's trajectories.

    Args:
        tokenizer: The run's tokenizer. If it is None, most causes cannot be determined.
    """

    def __init__(self, tokenizer: RunTokenizer | None) -> None:
        self._text = None if tokenizer is None else TokenText(tokenizer)
        self._lines: Any = None

    def explain(self, trajectory: Trajectory) -> dict[int, dict[str, Any]]:
        """Return `{"reason": class, "words": [line, ...]}` for each turn that breaks, by the turn's index."""
        turns = trajectory.turns
        breaking = breaks(turns)
        if not breaking:
            return {}
        tokens = sum(turns[place].num_prompt_tokens for place in breaking)
        if tokens > _LONGEST:
            words = f"the breaking prompts have {tokens:,} tokens, too many to compare here; type verbatim doctor RUN"
            return {place: {"reason": "not_compared", "words": [words]} for place in breaking}
        logged = LoggedTrajectory(trajectory=trajectory, line=0)
        try:
            found = Doctor(self._text, self._template_line).examine(logged)
        except UsageError:  # the trajectory has ids that are not in the tokenizer's vocabulary
            found = Doctor().examine(logged)
        return {
            diagnosis.turn: {"reason": diagnosis.kind.value, "words": _words(diagnosis)}
            for diagnosis in found
            if diagnosis.turn in breaking
        }

    def warm_up(self) -> None:
        """Load the code for chat templates in advance, because loading it takes about a second."""
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
