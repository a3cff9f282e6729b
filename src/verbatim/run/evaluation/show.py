"""Prints evaluation results on a terminal: one column per model, as many side by side as fit."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verbatim.run.evaluation.results import EnvResult
from verbatim.run.evaluation.rows import Compared, Row, difference_rows, example_rows, result_rows, unpaired_note

_GAP = 2
"""Characters between two columns of a table."""


def show_results(results: Sequence[tuple[str, EnvResult | None]], console: Console) -> None:
    """Print the results on one environment.

    Args:
        results: Letters and results.
        console: Where to print.
    """
    print_rows([letter for letter, _ in results], result_rows([result for _, result in results]), console)


def show_differences(compared: Sequence[Compared], env: str, console: Console) -> None:
    """Print the comparisons on one environment."""
    rows = difference_rows(compared, env)
    if rows:
        console.print()
        print_rows(["success", "mean reward", "pairs of episodes"], rows, console)
        note = unpaired_note(compared, env)
        if note is not None:
            console.print(Text(note, style="dim"))


def show_examples(results: Sequence[tuple[str, EnvResult | None]], console: Console, *, where: str) -> None:
    """Print the most informative examples; print nothing if all examples have the same success rate.

    Args:
        results: Letters and results.
        console: Where to print.
        where: The place where all examples can be found, for the note about the examples left out.
    """
    shares = {tuple(e.success for e in result.examples) for _, result in results if result is not None}
    if len({share for each in shares for share in each}) < 2:
        return
    rows, left = example_rows([result for _, result in results])
    console.print()
    order = "largest differences first" if len(results) > 1 else "hardest first"
    more = f"; {left:,} more: {where}" if left else ""
    console.print(Text(f"examples, {order}{more}", style="dim"), soft_wrap=True)
    print_rows([letter for letter, _ in results], rows, console)


def print_rows(columns: Sequence[str], rows: Sequence[Row], console: Console) -> None:
    """Print a table without lines. Columns that do not fit side by side continue in blocks below."""
    first = min(max((len(row[0]) for row in rows), default=0), max(12, console.width // 3))
    widths = [max(len(name), *(len(row[i + 1]) for row in rows)) for i, name in enumerate(columns)]
    for number, block in enumerate(_blocks(widths, console.width - first)):
        if number:
            console.print()
        table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, _GAP, 0, 0))
        table.add_column("", width=first, overflow="fold")
        for place in block:
            table.add_column(Text(columns[place], style="bold"), min_width=min(widths[place], 12), overflow="fold")
        for row in rows:
            table.add_row(row[0], *(row[place + 1] for place in block))
        console.print(table)


def _blocks(widths: Sequence[int], room: int) -> list[list[int]]:
    """Distribute the columns over blocks, so that each block is at most `room` wide.

    >>> _blocks([20, 20, 20], 50)
    [[0, 1], [2]]
    """
    blocks: list[list[int]] = [[]]
    used = 0
    for place, width in enumerate(widths):
        if blocks[-1] and used + _GAP + width > room:
            blocks.append([])
            used = 0
        blocks[-1].append(place)
        used += _GAP + width
    return blocks
