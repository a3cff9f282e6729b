"""Arranges the two sequences of a break side by side around the first difference, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from verbatim.inspection.doctor.difference import Difference
from verbatim.inspection.doctor.text import TokenText

BEFORE = 3
"""Number of equal tokens to show before the first difference and after the first change."""
SHOWN = 10
"""Maximum number of tokens of the first change to show, for each of the two sequences."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One token to show."""

    position: int
    token: int
    text: str | None
    """The token's text from `TokenText.piece`; None if there is no tokenizer."""
    control: bool
    """True for a control token (`TokenText.control`)."""


@dataclass(frozen=True, kw_only=True)
class WindowRow:
    """A token of the recorded sequence next to a token of the prompt. One of the two may be missing."""

    earlier: Cell | None
    now: Cell | None
    differs: bool
    """True if the row is part of the first change."""
    left_out: tuple[int, int] = (0, 0)
    """The number of tokens that are omitted after this row, from the recorded sequence and from the prompt."""


def side_by_side(d: Difference) -> tuple[WindowRow, ...]:
    """The rows of the equal tokens before the first change, then of the change, then of the equal tokens after it, if
    any."""
    change, at = d.change, d.at
    opening = _pair(d, range(max(0, at - BEFORE), at), range(max(0, at - BEFORE), at), differs=False)
    now_end = change.now_end
    if len(d.alignment.changes) == 1 and not d.alignment.meets_again:
        now_end = len(d.prompt)
    shown_end, shown_now_end = min(change.end, at + SHOWN), min(now_end, at + SHOWN)
    changed = _pair(d, range(at, shown_end), range(at, shown_now_end), differs=True)
    left_out = (change.end - shown_end, now_end - shown_now_end)
    if changed and any(left_out):
        last = changed[-1]
        changed[-1] = WindowRow(earlier=last.earlier, now=last.now, differs=True, left_out=left_out)
    closing = []
    if now_end == change.now_end:
        equal = _equal_run(d.earlier, d.prompt, change.end, change.now_end)
        closing = _pair(d, range(change.end, change.end + equal), range(now_end, now_end + equal), differs=False)
    return (*opening, *changed, *closing)


def _equal_run(earlier: Sequence[int], prompt: Sequence[int], at: int, now: int) -> int:
    pairs = zip(earlier[at : at + BEFORE], prompt[now : now + BEFORE], strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(BEFORE, len(earlier) - at, len(prompt) - now))


def _pair(d: Difference, earlier: range, now: range, *, differs: bool) -> list[WindowRow]:
    return [
        WindowRow(earlier=_cell(d.text, d.earlier, a), now=_cell(d.text, d.prompt, b), differs=differs)
        for a, b in zip_longest(earlier, now)
    ]


def _cell(text: TokenText | None, ids: Sequence[int], place: int | None) -> Cell | None:
    if place is None:
        return None
    token = ids[place]
    return Cell(
        position=place,
        token=token,
        text=text.piece(token) if text else None,
        control=text is not None and token in text.control,
    )
