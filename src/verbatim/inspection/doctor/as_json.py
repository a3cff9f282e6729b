"""Writes the diagnoses as one JSON object, piece by piece, so that a long log needs little memory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

from verbatim.inspection.doctor.diagnosis import Diagnosis, Summary
from verbatim.inspection.doctor.logs import Problems
from verbatim.inspection.doctor.windows import Cell


class JsonReport:
    """Writes `{"file": ..., "format": ..., "breaks": [...], "unreadable": ..., "summary": ...}`, with the keys
    listed in docs/doctor.md."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._separator = "\n"
        self._format = ""

    def begin(self, *, file: str, format_name: str, note: str, tokenizer: str | None, tokenizer_note: str) -> None:
        """Write the file's name and format, and the tokenizer."""
        self._format = format_name
        head = {"file": file, "format": format_name, "note": note, "tokenizer": tokenizer}
        # Leave out the closing brace, which `close` writes.
        self._write(f'{json.dumps(head)[:-1]}, "breaks": [')

    def add(self, diagnosis: Diagnosis) -> None:
        d = diagnosis
        line = d.template_line
        found = {
            "class": d.kind.value,
            "by_design": d.kind.by_design,
            "trajectory": d.trajectory,
            "line": d.line,
            "turn": d.turn,
            "agent": d.agent,
            "position": d.position,
            "found": d.found,
            "recorded": _window(d.against, [row.earlier for row in d.rows]),
            "sent": _window(d.turn, [row.now for row in d.rows]),
            "template_line": None if line is None else dataclasses.asdict(line),
            "cost": {"tokens_again": d.repeated, "tokens_again_in_tree": d.repeated_in_tree, "share": d.share},
            "advice": d.kind.advice(self._format),
        }
        self._write(self._separator + json.dumps(found))
        self._separator = ",\n"

    def close(self, summary: Summary, problems: Problems) -> None:
        """Write the skipped lines and the summary, and close the JSON object."""
        lines = [problem._asdict() for problem in problems.kept]
        self._write(f'],\n"unreadable": {json.dumps({"count": problems.count, "lines": lines})},\n')
        self._write(f'"summary": {json.dumps(_summary(summary))}}}\n')


def _summary(summary: Summary) -> dict[str, Any]:
    return {
        "trajectories": summary.trajectories,
        "turns": summary.turns,
        "samples": summary.samples,
        "checked": summary.checked,
        "breaks": summary.breaks,
        "by_design": summary.by_design,
        "tokens": {
            "rows": summary.row_tokens,
            "tree": summary.tree_tokens,
            "again": summary.repeated,
            "share": summary.share(summary.repeated),
        },
        "classes": {
            kind.value: {
                "breaks": sums.breaks,
                "tokens_again": sums.repeated,
                "tokens_again_in_tree": sums.repeated_in_tree,
                "share": summary.share(sums.repeated),
            }
            for kind, sums in sorted(summary.classes.items())
        },
    }


def _window(turn: int, cells: Sequence[Cell | None]) -> dict[str, Any]:
    """The tokens to show for one of the two sequences, with their positions, which may have gaps."""
    shown = [cell for cell in cells if cell is not None]
    known = all(cell.text is not None for cell in shown)
    return {
        "turn": turn,
        "positions": [cell.position for cell in shown],
        "ids": [cell.token for cell in shown],
        "tokens": [cell.text for cell in shown] if known else None,
    }
