"""Answers all API requests about one run folder. The methods block, so they must be called on threads, never on the
event loop."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from verbatim.core.errors import UsageError, VerbatimError
from verbatim.core.texts import error_text
from verbatim.core.trajectory_json import plain
from verbatim.inspection.viewer import details, query
from verbatim.inspection.viewer.breaks import BreakReader
from verbatim.inspection.viewer.columns import RecordLocation
from verbatim.inspection.viewer.group_tree import group_tree
from verbatim.inspection.viewer.index import RunIndex, Snapshot
from verbatim.inspection.viewer.messages_search import MessageSearch
from verbatim.inspection.viewer.metrics import MetricsFollower
from verbatim.inspection.viewer.query import Filters, Rows
from verbatim.inspection.viewer.records import read_record, trajectory_of
from verbatim.inspection.viewer.run_state import check_run, config_text, origin_in, read_state, summary_text
from verbatim.inspection.viewer.tokenizer import RunTokenizer, find_tokenizer
from verbatim.logs.monitors.trajectory_log import trajectory_line
from verbatim.logs.outcomes.table import StoredOutcome

logger = logging.getLogger(__name__)

MOST_ROWS = 1000
"""Maximum number of rows in one answer."""
_KEPT_ORDERS = 8
"""Maximum number of sorted tables to keep, so that scrolling the page does not sort a table again."""
_WARM_UP_SECONDS = 3.0
"""Seconds to wait after the start before the warm-up, so that the page is drawn first."""
_FOLLOW_SECONDS = 1.0
"""Seconds between refreshes of the index."""
_LARGEST_GROUP = 512
"""Maximum number of trajectories in an answer about a group."""
_TEXT_OF_NODE = 160
"""Maximum number of characters of text in an answer for each node of a prefix tree."""
_MISSING = "no trajectory {!r} here; the file of its step may have been removed, or the step repeated"


class RunView:
    """One run folder. From `start` to `close`, a thread follows the folder.

    Args:
        folder: The run folder.
        model: A folder with the tokenizer. If None, the run's own tokenizer is used, if it can be found.

    Raises:
        UsageError: the folder is not a run folder.
    """

    def __init__(self, folder: Path, *, model: Path | None = None) -> None:
        check_run(folder)
        self.folder = folder
        self._model = model
        self._index = RunIndex(folder)
        self._metrics = MetricsFollower(folder)
        self._search = MessageSearch(folder)
        self._orders: OrderedDict[tuple[int, Filters, str], Rows] = OrderedDict()
        self._facets: tuple[int, dict[str, Any]] | None = None
        # Requests are answered on several threads, so `_lock` guards `_orders`, and `_metrics_lock` guards `_metrics`.
        self._lock, self._metrics_lock = threading.Lock(), threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- following

    def start(self) -> None:
        """Start the thread that follows the folder."""
        self._thread = threading.Thread(target=self._follow, name=f"index of {self.folder.name}", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        failed, warm_at = "", time.monotonic() + _WARM_UP_SECONDS
        while not self._stop.is_set():
            try:
                self._index.refresh(self._stop)
                failed = ""
            except Exception as error:  # noqa: BLE001  the thread must go on, because the next refresh may succeed
                if (told := error_text(error)) != failed:
                    logger.warning("%s could not be read: %s", self.folder, told)
                failed = told
            self._stop.wait(_FOLLOW_SECONDS)
            if time.monotonic() > warm_at and not self._stop.is_set():
                self._breaks.warm_up()
                warm_at = math.inf

    def read_all(self) -> None:
        """Read the whole folder now, without a thread."""
        self._index.refresh()

    def close(self) -> None:
        """End the threads."""
        self._stop.set()
        self._search.close()
        if self._thread is not None:
            # Wait at most 5 s, because the thread checks `_stop` only between two files. As a daemon, it does not keep
            # the process alive.
            self._thread.join(timeout=5)

    # ---- the run

    def about(self) -> dict[str, Any]:
        """The run's entry in `/api/runs`."""
        snapshot, state = self._index.snapshot, read_state(self.folder)
        with self._metrics_lock:
            self._metrics.refresh()
            step, alarms = self._metrics.last_step, len(self._metrics.alarms)
            generation, problems = self._metrics.generation, list(self._metrics.problems)
        tokenizer, why = self._tokenizer
        origin = origin_in(self.folder, problems)
        return {
            "name": state.name,
            "folder": str(self.folder),
            "state": state.state,
            "step": step,
            "max_steps": state.max_steps,
            "num_trajectories": snapshot.table.num_rows,
            "num_alarms": alarms,
            "indexed": snapshot.indexed,
            # If either of the two numbers changes, so does their sum. The page then reads the metrics from the
            # beginning.
            "generation": generation + snapshot.generation,
            "version": snapshot.version,
            "problems": [*snapshot.problems, *problems],
            "tokenizer": None if tokenizer is None else tokenizer.name_or_path,
            "tokenizer_problem": why,
            "forked_from": None if origin is None else origin.in_short(),
        }

    def metrics(self, after: int | None) -> dict[str, Any]:
        """Answer `/metrics`."""
        with self._metrics_lock:
            self._metrics.refresh()
            answer = self._metrics.answer(after)
        answer["generation"] += self._index.snapshot.generation
        return answer

    def config(self) -> dict[str, Any]:
        """Answer `/config`."""
        return {"toml": config_text(self.folder)}

    def summary(self) -> dict[str, Any]:
        """Answer `/summary`."""
        return {"text": summary_text(self.folder)}

    # ---- the table

    def rows(self, filters: Filters, *, sort: str = "", offset: int = 0, limit: int = 100) -> dict[str, Any]:
        """Answer `/trajectories` with a range of the rows that pass the filters.

        Raises:
            UsageError: there is no such column to sort by, or `offset` or `limit` is out of range.
        """
        if offset < 0 or not 0 <= limit <= MOST_ROWS:
            raise UsageError(
                f"offset = {offset}, limit = {limit}; expected an offset of at least 0 and a limit of 0 to {MOST_ROWS}"
            )
        snapshot = self._index.snapshot
        order, pending = self._order(snapshot, filters, sort)
        return {
            "total": snapshot.table.num_rows,
            "matched": len(order),
            "pending": pending or snapshot.indexed < 1,
            "rows": query.shown(snapshot.table, order[offset : offset + limit]),
        }

    def _order(self, snapshot: Snapshot, filters: Filters, sort: str) -> tuple[Rows, bool]:
        in_messages, pending = None, False
        if filters.text:
            in_messages, pending = self._search.found(snapshot, filters.text)
        key = (snapshot.version, filters, sort)
        with self._lock:
            if key in self._orders:
                self._orders.move_to_end(key)
                return self._orders[key], pending
        # Sort without the lock, so that no other request waits. While a search is unfinished, it may find more rows, so
        # the order is not kept.
        order = query.in_order(snapshot.table, query.matching(snapshot.table, filters, in_messages), sort)
        if not pending:
            with self._lock:
                self._orders[key] = order
                while len(self._orders) > _KEPT_ORDERS:
                    self._orders.popitem(last=False)
        return order, pending

    def facets(self) -> dict[str, Any]:
        """Answer `/facets`."""
        # No lock is needed: at worst, two threads compute the same facets.
        snapshot, known = self._index.snapshot, self._facets
        if known is None or known[0] != snapshot.version:
            known = (snapshot.version, query.facets(snapshot.table))
            self._facets = known
        return known[1]

    # ---- one trajectory

    def trajectory(self, name: str) -> dict[str, Any]:
        """Answer `/trajectories/{key or id}`.

        Raises:
            LookupError: there is no such trajectory.
            UsageError: the record of the trajectory is damaged.
        """
        row, found = self._found(name)
        cuts: list[dict[str, Any]] = []
        record, problems = found.record, []
        try:
            explained = self._breaks.explain(trajectory_of(found))
        except VerbatimError as error:
            explained, problems = {}, [str(error)]
        turns = details.turn_answers(found, explained)
        texts = {name: details.cut_texts(record[name], name, cuts) for name in ("messages", "tools", "info", "error")}
        answer = {
            **row,
            **texts,
            "seed": details.cut_texts(record["seed"], "seed", cuts),
            "run_id": record["run_id"],
            "unrecorded": found.row["unrecorded"],
            "num_unrecorded_tokens": record["num_unrecorded_tokens"],
            "num_unrecorded_turns": record["num_unrecorded_turns"],
            **{
                name: {part: details.cut_texts(plain(value), name, cuts) for part, value in record[name].items()}
                for name in ("reward_parts", "agent_rewards")
            },
            "turns": [
                {**turn, "tool_calls": details.cut_texts(turn["tool_calls"], f"turns/{i}/tool_calls", cuts)}
                for i, turn in enumerate(turns)
            ],
            "cut": cuts,
            "problems": problems,
            "tokens_omitted": sum(turn["tokens_omitted"] for turn in turns),
            **self._pieces(turns),
        }
        return answer

    def part(self, name: str, turn: int, offset: int) -> dict[str, Any]:
        """Return more tokens of a turn.

        Raises:
            LookupError: there is no such trajectory.
            UsageError: the record of the trajectory is damaged, or the trajectory has no such turn or offset.
        """
        _, found = self._found(name)
        part = details.one_part(found, turn, offset)
        return {"turn": part, **self._pieces([part])}

    def text(self, name: str, path: str) -> dict[str, Any]:
        """Return the full string at a path in a trajectory. Raises the same errors as `part`."""
        _, found = self._found(name)
        return {"path": path, "text": details.text_at(found.record, path)}

    def raw(self, name: str) -> dict[str, Any]:
        """Return the record of a trajectory in the form in which `verbatim export` writes it. Raises the same errors as
        `trajectory`."""
        _, found = self._found(name)
        record: dict[str, Any] = plain(trajectory_line(found.row["step"], trajectory_of(found)))
        return record

    def _found(self, name: str) -> tuple[dict[str, Any], StoredOutcome]:
        snapshot = self._index.snapshot
        rows = query.rows_of(snapshot.table, name)
        if not len(rows):
            raise LookupError(_MISSING.format(name[:100]))
        # The same id may occur in training and in evaluations. The first row is then the one from training.
        (shown,) = query.shown(snapshot.table, rows[:1])
        place = RecordLocation.of(shown["key"])
        assert place is not None
        return shown, read_record(self.folder, place)

    # ---- a group

    def group(self, name: str) -> dict[str, Any]:
        """Answer `/groups/{group_key or id}` with the group's rows and their prefix tree.

        Raises:
            LookupError: there is no such group.
            UsageError: a record of the group is damaged.
        """
        table = self._index.snapshot.table
        order = query.in_order(table, query.matching(table, Filters(group=name)), "sample_index")
        if not len(order):
            raise LookupError(f"no group {name[:100]!r} here")
        rows = query.shown(table, order[:_LARGEST_GROUP])
        members = []
        for row in rows:
            place = RecordLocation.of(row["key"])
            assert place is not None
            found = read_record(self.folder, place)
            members.append((trajectory_of(found), found.outcomes))
        tokenizer, _ = self._tokenizer
        nodes = group_tree(members, lambda ids: None if tokenizer is None else tokenizer.decode(ids)[:_TEXT_OF_NODE])
        return {"rows": rows, "num_rows": len(order), "tree": {"nodes": nodes}}

    # ---- the tokenizer

    @cached_property
    def _tokenizer(self) -> tuple[RunTokenizer | None, str | None]:
        """Either (tokenizer, None), or (None, the reason why there is no tokenizer)."""
        folder = self._model or find_tokenizer(self.folder)
        if folder is None:
            return None, "the run folder has no tokenizer, so ids are shown instead of text; add --model FOLDER"
        try:
            return RunTokenizer(folder), None
        except ValueError as error:
            return None, str(error)

    @cached_property
    def _breaks(self) -> BreakReader:
        return BreakReader(self._tokenizer[0])

    def _pieces(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        tokenizer, _ = self._tokenizer
        if tokenizer is None:
            return {"pieces": {}, "byte_pieces": [], "special": []}
        return tokenizer.pieces(details.ids_of(parts))


def list_runs(runs: Sequence[RunView]) -> list[dict[str, Any]]:
    """Answer `/api/runs`. If several runs have the same name, the part of the folder path in which they differ is added
    to each name.

    Example: two runs `guess_number` in `runs/a/0` and `runs/b/0` become `guess_number (a/0)` and `guess_number (b/0)`.
    """
    found = [{"id": number, **run.about()} for number, run in enumerate(runs)]
    parts = [run.folder.resolve().parts for run in runs]
    for name, count in Counter(each["name"] for each in found).items():
        same = [each["id"] for each in found if each["name"] == name]
        if count > 1:
            longest = max(len(parts[number]) for number in same)
            needed = next((n for n in range(1, longest) if len({parts[i][-n:] for i in same}) == count), longest)
            for number in same:
                found[number]["name"] = f"{name} ({'/'.join(parts[number][-needed:])})"
    return found
