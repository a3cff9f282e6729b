"""Prints diagnoses: the two sequences of each break side by side, and a summary with advice for each class."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from verbatim.core.texts import counted
from verbatim.inspection.doctor.classes import BreakClass
from verbatim.inspection.doctor.diagnosis import Diagnosis, Summary
from verbatim.inspection.doctor.logs import Problems
from verbatim.inspection.doctor.text import printable
from verbatim.inspection.doctor.windows import Cell

_CLASS_STYLE = "bold red"
_BY_DESIGN_STYLE = "bold green"


class ConsoleReport:
    """Prints each break as it is found, and a summary at the end."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = 0
        self._format = ""

    def begin(self, *, file: str, format_name: str, note: str, tokenizer: str | None, tokenizer_note: str) -> None:
        """Print the file's name and format, and the tokenizer."""
        self._format = format_name
        head = f"{file}\nformat     {format_name}: {note}\ntokenizer  {tokenizer_note}\n"
        self._console.print(Text(head), soft_wrap=True)

    def add(self, diagnosis: Diagnosis) -> None:
        """Print one break: its class, evidence, cost and tokens."""
        self._shown += 1
        d, console = diagnosis, self._console
        agent = "" if d.agent == "main" else f" ({d.agent})"
        where = f"line {d.line}, trajectory {d.trajectory!r}, turn {d.turn}{agent}, token {d.position:,}"
        facts: list[Text | Table] = [_plain(where), _plain(d.found)]
        if d.template_line is not None:
            line = Text.assemble((f"template line {d.template_line.number}  ", "bold"), _plain(d.template_line.text))
            # This length fills about two lines.
            line.truncate(max(40, 2 * console.width - 20), overflow="ellipsis")
            facts.append(line)
        facts.append(
            Text(
                f"computed again: {counted(d.repeated, 'token')}, {d.share:.1%} of the trajectory as rows; "
                f"{d.repeated_in_tree:,} in a prefix tree"
            )
        )
        # The padding takes 2 columns.
        facts.append(_side_by_side(d, min(console.width, 120) - 2))
        console.print(Text.assemble((f"break {self._shown}  ", "bold"), _heading(d.kind)))
        for fact in facts:
            console.print(Padding(fact, (0, 0, 0, 2), expand=False))
        console.print()

    def close(self, summary: Summary, problems: Problems) -> None:
        """Print the skipped lines, and then the sums, costs and advice."""
        console = self._console
        for number, why in problems.kept:
            console.print(Text.assemble((f"line {number}: ", "bold yellow"), _plain(why)), soft_wrap=True)
        if problems.count > len(problems.kept):
            console.print(f"... and {problems.count - len(problems.kept):,} more lines that cannot be read")
        trajectories = counted(summary.trajectories, "trajectory", "trajectories")
        if not summary.checked:
            console.print(
                f"nothing was checked: no turn in {trajectories} has the token ids of both a prompt and a "
                "completion; log them (docs/doctor.md)",
                style=_CLASS_STYLE,
            )
            return
        if summary.breaks > self._shown:
            hidden = counted(summary.breaks - self._shown, "more break")
            console.print(f"{hidden} in the figures below; --limit N shows more\n")
        if summary.classes:
            console.print(_by_class(summary))
        by_design = f", {summary.by_design:,} of them by design" if summary.by_design else ""
        console.print(
            f"{trajectories}, {counted(summary.turns, 'turn')}, {counted(summary.samples, 'training sample')}\n"
            f"{counted(summary.breaks, 'break')}{by_design}\n"
            f"{counted(summary.row_tokens, 'token')} to compute as rows, {summary.tree_tokens:,} in a prefix tree\n"
            f"{summary.repeated:,} of them again because of breaks ({summary.share(summary.repeated):.1%})"
        )
        for kind in _ordered(summary):
            console.print(Text.assemble("\n", _heading(kind), ": ", kind.advice(self._format)))


def _side_by_side(diagnosis: Diagnosis, width: int) -> Table:
    """The tokens of both sequences around the first difference, one token per line."""
    d = diagnosis
    cells = [cell for row in d.rows for cell in (row.earlier, row.now) if cell is not None]
    places = max((len(str(cell.position)) for cell in cells), default=1)
    digits = max((len(str(cell.token)) for cell in cells), default=1)
    table = Table(box=SIMPLE_HEAD, width=width, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("", width=1)
    for side in (f"recorded up to turn {d.against}", f"sent as turn {d.turn}"):
        table.add_column("", justify="right", width=places, style="dim")
        table.add_column("", justify="right", width=digits)
        table.add_column(side, ratio=1, no_wrap=True, overflow="ellipsis")
    first = True
    for row in d.rows:
        mark = Text("▶" if first else "│", style=_CLASS_STYLE) if row.differs else Text(" ")
        first = first and not row.differs
        table.add_row(mark, *_cells(row.earlier, row.differs), *_cells(row.now, row.differs))
        if any(row.left_out):
            more = [Text(f"… {count:,} more" if count else "", style="dim italic") for count in row.left_out]
            table.add_row(Text("┆", style=_CLASS_STYLE), "", "", more[0], "", "", more[1])
    return table


def _cells(cell: Cell | None, differs: bool) -> tuple[Text, Text, Text]:
    if cell is None:
        return Text(""), Text(""), Text("")
    style = "bold" if differs else "dim"
    text = Text(cell.text if cell.text is not None else "", style=f"{style} cyan" if cell.control else style)
    return Text(str(cell.position)), Text(str(cell.token), style=style), text


def _by_class(summary: Summary) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    table.add_column("class")
    for heading in ("breaks", "tokens again", "of all", "again in a tree"):
        table.add_column(heading, justify="right")
    for kind in _ordered(summary):
        sums = summary.classes[kind]
        share = f"{summary.share(sums.repeated):.1%}"
        table.add_row(
            Text(*_heading(kind)), f"{sums.breaks:,}", f"{sums.repeated:,}", share, f"{sums.repeated_in_tree:,}"
        )
    return table


def _ordered(summary: Summary) -> list[BreakClass]:
    return sorted(summary.classes, key=lambda kind: (-summary.classes[kind].repeated, kind))


def _plain(text: str) -> Text:
    """Convert text from a log for printing: control characters are escaped, and markup is not interpreted."""
    return Text(printable(text, space=" "))


def _heading(kind: BreakClass) -> tuple[str, str]:
    """The styled heading of a class."""
    return kind.heading, _BY_DESIGN_STYLE if kind.by_design else _CLASS_STYLE
