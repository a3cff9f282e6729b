"""Filters and sorts the rows of an index as the page requests."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from verbatim.core.errors import UsageError
from verbatim.core.trajectory_json import plain
from verbatim.inspection.viewer.columns import COLUMNS, EVAL, KINDS, SHOWN, TRAIN, RecordLocation, group_key, group_of

NONE = "(none)"
"""The name that stands for a missing value in facets and filters."""
NAMED = ("kind", "env", "stop_reason", "reason", "flag")
"""The filters that select by names. A row passes such a filter if its value is one of the given names."""
_SEARCHED = ("trajectory_id", "example_id", "group_id", "error")
_SORTED = [name for name in SHOWN if name != "flags"]
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})?(-)?({_NUMBER})?")

Rows = NDArray[np.int64]
Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Filters:
    """Selects rows of an index. By default, all rows are selected."""

    kind: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    stop_reason: tuple[str, ...] = ()
    reason: tuple[str, ...] = ()
    flag: tuple[str, ...] = ()
    step: Range | None = None
    reward: Range | None = None
    breaks: bool = False
    """True to select only rows with a break."""
    errors: bool = False
    """True to select only rows with an error."""
    group: str = ""
    """A group's key or id."""
    text: str = ""
    """A string that must occur in an id, an error or a message. The case of ASCII letters is ignored."""

    @classmethod
    def of(cls, asked: Mapping[str, Sequence[str]]) -> Filters:
        """Create filters from the parameters of a request, each of which may have several values. Empty values are
        ignored.

        Raises:
            UsageError: the name of a parameter is unknown, or a value is invalid.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        fields: dict[str, Any] = {}
        for name, values in asked.items():
            if name not in names:
                raise UsageError(f"there is no filter {name!r}; the filters are {', '.join(sorted(names))}")
            given = tuple(value for value in values if value)
            if not given:
                continue
            if name in NAMED:
                fields[name] = given
            elif name in ("step", "reward"):
                fields[name] = read_range(name, given[-1])
            elif name in ("breaks", "errors"):
                if given[-1] not in ("0", "1"):
                    raise UsageError(f"{name} = {given[-1]!r}; expected 0 or 1")
                fields[name] = given[-1] == "1"
            else:
                fields[name] = given[-1]
        return cls(**fields)


def read_range(name: str, text: str) -> Range:
    """Parse a range into its two ends, both of which belong to the range.

    >>> read_range("reward", "-1--0.5"), read_range("step", "10-"), read_range("step", "7")
    ((-1.0, -0.5), (10.0, inf), (7.0, 7.0))
    """
    match = _RANGE.fullmatch(text.strip())
    if match is None or not (match[1] or match[3]):
        raise UsageError(f"{name} = {text!r}; expected a number or a range, such as 7, 3-9, 3- or -1--0.5")
    low = float(match[1]) if match[1] else -math.inf
    high = float(match[3]) if match[3] else math.inf if match[2] else low
    if low > high:
        raise UsageError(f"{name} = {text!r}; expected the lower number first")
    return low, high


def matching(table: pa.Table, filters: Filters, in_messages: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
    """Return a mask of the rows that pass all filters: bool [rows].

    Args:
        table: The table of an index.
        filters: The filters.
        in_messages: Mask of the rows that are known so far to have `filters.text` in their messages; None if no such
            rows are known.
    """
    found = np.ones(table.num_rows, dtype=bool)
    for name in NAMED[:-1]:
        if values := getattr(filters, name):
            found &= _is_in(table.column(name), values)
    if filters.flag:
        found &= _has_flag(table.column("flags"), filters.flag)
    for name in ("step", "reward"):
        if (ends := getattr(filters, name)) is not None:
            column = np.asarray(pc.fill_null(pc.cast(table.column(name), pa.float64()), math.nan))
            found &= (column >= ends[0]) & (column <= ends[1])
    if filters.breaks:
        found &= np.asarray(table.column("num_breaks")) > 0
    if filters.errors:
        found &= np.asarray(pc.is_valid(table.column("error")))
    if filters.group:
        found &= _of_group(table, filters.group)
    if filters.text:
        found &= _has_text(table, filters.text) | (False if in_messages is None else in_messages)
    return found


def _is_in(column: Any, values: Sequence[str]) -> NDArray[np.bool_]:
    wanted = [value for value in values if value != NONE]
    found = np.asarray(pc.fill_null(pc.is_in(column, pa.array(wanted, pa.string())), False))
    return found | np.asarray(pc.is_null(column)) if NONE in values else found


def _has_flag(column: Any, values: Sequence[str]) -> NDArray[np.bool_]:
    lists = column.combine_chunks()
    found = np.zeros(len(lists), dtype=bool)
    hits = np.asarray(pc.is_in(lists.flatten(), pa.array([v for v in values if v != NONE], pa.string())))
    found[np.asarray(pc.list_parent_indices(lists))[hits]] = True
    if NONE in values:
        found |= np.asarray(pc.list_value_length(lists)) == 0
    return found


def _of_group(table: pa.Table, group: str) -> NDArray[np.bool_]:
    parts = group_of(group)
    if (place := RecordLocation.of(group)) is not None:
        rows = np.flatnonzero(_at(table, place))
        names = [table.column(name) for name in ("kind", "env", "step", "group_id")]
        parts = tuple(column[rows[0]].as_py() for column in names) if len(rows) else None
    if parts is None:
        return np.asarray(pc.fill_null(pc.equal(table.column("group_id"), group), False))
    kind, env, step, group_id = parts
    found = np.asarray(pc.fill_null(pc.equal(table.column("group_id"), group_id), False))
    found &= _is_in(table.column("kind"), [kind]) & _is_in(table.column("env"), [env])
    return found if kind == TRAIN else found & (np.asarray(table.column("step")) == step)


def _at(table: pa.Table, place: RecordLocation) -> NDArray[np.bool_]:
    """A mask that selects the row at a location. There is at most one such row."""
    found = np.ones(table.num_rows, dtype=bool)
    for column in ("source", "file", "place"):
        found &= np.asarray(table.column(column)) == getattr(place, column)
    return found


def rows_of(table: pa.Table, name: str) -> Rows:
    """The rows whose key or trajectory id is `name`. Rows of training come before rows of evaluations."""
    if (place := RecordLocation.of(name)) is not None:
        return np.flatnonzero(_at(table, place))
    rows = np.flatnonzero(np.asarray(pc.equal(table.column("trajectory_id"), name)))
    sources = np.asarray(table.column("source"))[rows]
    is_eval = np.isin(sources, [source for source, kind in KINDS.items() if kind == EVAL])
    found: Rows = rows[np.argsort(is_eval, kind="stable")]
    return found


def _has_text(table: pa.Table, text: str) -> NDArray[np.bool_]:
    found = np.zeros(table.num_rows, dtype=bool)
    for name in _SEARCHED:
        hits = pc.match_substring(table.column(name), text, ignore_case=True)
        found |= np.asarray(pc.fill_null(hits, False))
    return found


def in_order(table: pa.Table, rows: NDArray[np.bool_], sort: str) -> Rows:
    """Return the indices of the selected rows, sorted.

    Rows without a value come last. Among equal values, the newest step comes first.

    Args:
        table: The table of an index.
        rows: Mask of the rows to sort, as returned by `matching`.
        sort: The name of the column to sort by, preceded by `-` for the largest value first; empty for the newest step
            first.

    Raises:
        UsageError: there is no such column.
    """
    name = sort.removeprefix("-") or "step"
    if name not in _SORTED:
        raise UsageError(f"sort = {sort!r}; expected one of {', '.join(_SORTED)}, preceded by - for the largest first")
    places = np.flatnonzero(rows)
    wanted = table.select(list(dict.fromkeys([name, "step", "kind", "file", "place"]))).take(pa.array(places))
    newest_first = sort != "step"
    # `lexsort` compares the last of these keys first.
    keys = [
        np.asarray(wanted.column("place")),
        _ranks(wanted.column("file"), descending=newest_first),
        _ranks(wanted.column("kind"), descending=True),
        _ranks(wanted.column("step"), descending=newest_first),
    ]
    if name != "step":
        keys.append(_ranks(wanted.column(name), descending=sort.startswith("-")))
    found: Rows = places[np.lexsort(keys)]
    return found


def _ranks(column: Any, *, descending: bool) -> NDArray[np.float64]:
    """Convert a column to numbers that sort in the same order as its values. Equal values give equal numbers. A missing
    value gives NaN, which sorts last."""
    if pa.types.is_dictionary(column.type):
        column = pc.cast(column, pa.string())
    if pa.types.is_string(column.type):
        ranks = np.asarray(pc.rank(column, sort_keys="ascending", tiebreaker="dense"), dtype=np.float64)
    else:
        ranks = np.asarray(pc.fill_null(pc.cast(column, pa.float64()), 0.0))
    missing = np.asarray(pc.is_null(column))
    return np.where(missing, np.nan, -ranks if descending else ranks)


def facets(table: pa.Table) -> dict[str, Any]:
    """For each filter, its values with their counts, the most frequent first. For filters by number, the minimum and
    the maximum."""
    found: dict[str, Any] = {}
    for name in NAMED:
        column = table.column("flags" if name == "flag" else name)
        if name == "flag":
            lists = column.combine_chunks()
            counts = pc.value_counts(lists.flatten())
            missing = int(np.count_nonzero(np.asarray(pc.list_value_length(lists)) == 0))
        else:
            counts = pc.value_counts(pc.cast(pc.drop_null(column), pa.string()))
            missing = column.null_count
        pairs = sorted(((each["values"], each["counts"]) for each in counts.to_pylist()), key=lambda p: (-p[1], p[0]))
        found[name] = dict(pairs) | ({NONE: missing} if missing else {})
    for name in ("step", "reward"):
        values = np.asarray(pc.drop_null(table.column(name)), dtype=np.float64)
        values = values[np.isfinite(values)]
        ends = [values.min().item(), values.max().item()] if len(values) else None
        found[name] = [int(end) for end in ends] if name == "step" and ends else ends
    return found


def shown(table: pa.Table, rows: Rows) -> list[dict[str, Any]]:
    """Convert the given rows to the form in which the API returns them."""
    part = table.take(pa.array(rows))
    found: list[dict[str, Any]] = part.select([name for name in COLUMNS.names if name in SHOWN]).to_pylist()
    places = zip(*(part.column(name).to_pylist() for name in ("source", "file", "place")), strict=True)
    for row, place in zip(found, places, strict=True):
        row["key"] = RecordLocation(*place).key
        row["group_key"] = group_key(row["kind"], row["env"], row["step"], row["group_id"], row["key"])
        for name in ("reward", "advantage"):
            row[name] = plain(row[name])
    return found
