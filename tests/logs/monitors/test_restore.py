"""A log is cut back to a checkpoint, and what is damaged or missing in it is told, kept aside and counted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from verbatim.logs.monitors.alarm_log import is_alarm
from verbatim.logs.monitors.jsonl import JsonlWriter, LogMark, measure
from verbatim.logs.monitors.metrics_log import is_metrics
from verbatim.logs.monitors.restore import Restored, restore


def line_of(step: int) -> bytes:
    return (json.dumps({"format": 1, "step": step, "kind": "train", "metrics": {"loss": step / 2}}) + "\n").encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Steps 1 to 5; the checkpoints are of the steps 2 and 4."""
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3, 4, 5):
        writer.write(json.loads(line_of(step)))
    writer.close()
    assert writer.path.read_bytes() == b"".join(map(line_of, (1, 2, 3, 4, 5)))
    return writer.path


def mark_of(*steps: int) -> LogMark:
    mark = LogMark()
    for step in steps:
        mark = mark.after(line_of(step))
    return mark


FOUR = mark_of(1, 2, 3, 4)


def back_to_4(path: Path, mark: LogMark | None = FOUR, **settings: Any) -> Restored:
    return restore(path, step=4, mark=mark, is_record=is_metrics, checkpoints=[2, 4], every_step=True, **settings)


def test_a_mark_goes_on_from_line_to_line_as_if_all_had_been_read_at_once(path: Path):
    assert measure(path) == mark_of(1, 2, 3, 4, 5)
    assert measure(path, FOUR.size) == FOUR
    assert FOUR.records == 4


def test_a_whole_log_is_cut_to_the_checkpoint_without_a_word(path: Path):
    assert back_to_4(path) == Restored(mark=FOUR)
    assert path.read_bytes() == b"".join(map(line_of, (1, 2, 3, 4)))
    assert [p.name for p in path.parent.iterdir()] == ["metrics.jsonl"]


def test_the_start_of_a_run_empties_the_log_whatever_is_in_it(path: Path):
    path.write_bytes(b"\0\xff nonsense")
    assert restore(path, step=0, mark=None, is_record=is_metrics) == Restored(mark=LogMark())
    assert path.read_bytes() == b""


def spoil(path: Path, number: int, line: bytes) -> None:
    """Another line in the place of this one, counted from 1."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = line
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    "line",
    [
        b"nonsense\n",
        b"\0" * len(line_of(3)) + b"\n",
        b'{"step": 3, "kind": "tra\xc3\n',
        b"[1]\n",
        b"\n",
        b"[" * 5000 + b"\n",
        b'{"format": 1, "step": "3", "kind": "train", "metrics": {}}\n',
        b'{"format": 1, "step": 3, "kind": "train"}\n',
        b'{"format": 1, "step": 3, "metrics": {}}\n',
        b'{"format": 2, "step": 3, "kind": "train", "metrics": {}}\n',
    ],
    ids=[
        "text",
        "zeros",
        "half a letter",
        "a list",
        "empty",
        "deep",
        "a step that is text",
        "no metrics",
        "no kind",
        "another format",
    ],
)
def test_one_corrupt_line_costs_that_line_and_is_told_with_its_step(path: Path, line: bytes):
    spoil(path, 3, line)
    damaged = path.read_bytes()
    found = back_to_4(path)
    aside = path.with_name("metrics.jsonl.damaged-1")
    assert found.fault == (
        f"{path} is damaged: line 3 is not a record; 3 of 4 records up to step 4 are left, none of step 3. "
        f"What was found is kept as {aside}"
    )
    assert path.read_bytes() == b"".join(map(line_of, (1, 2, 4)))
    assert aside.read_bytes() == damaged
    assert found.mark == mark_of(1, 2, 4) == measure(path)
    assert found.earlier == {2: mark_of(1, 2), 4: mark_of(1, 2, 4)}


def test_after_a_fault_the_corrected_marks_are_right_for_every_checkpoint(path: Path):
    spoil(path, 1, b"nonsense\n")
    found = back_to_4(path)
    assert back_to_4(path, found.earlier[4]).fault is None
    assert restore(path, step=2, mark=found.earlier[2], is_record=is_metrics) == Restored(mark=mark_of(2))
    assert path.read_bytes() == line_of(2)


@pytest.mark.parametrize(
    ("size", "left", "absent"),
    [
        (mark_of(1, 2, 3).size, (1, 2, 3), "step 4"),
        (mark_of(1, 2).size + 7, (1, 2), "steps 3-4"),
        (FOUR.size - 1, (1, 2, 3), "step 4"),
        (0, (), "steps 1-4"),
    ],
    ids=["a line", "half a line", "the last line's end", "everything"],
)
def test_a_log_that_was_cut_off_says_which_steps_are_missing(path: Path, size: int, left: tuple, absent: str):
    path.write_bytes(path.read_bytes()[:size])
    found = back_to_4(path)
    assert found.fault is not None
    assert found.fault.startswith(
        f"{path} is damaged: it has {size} bytes, and had {FOUR.size} at the checkpoint; {len(left)} of 4 records up "
        f"to step 4 are left, none of {absent}. What"
    )
    assert path.read_bytes() == b"".join(map(line_of, left))
    assert found.mark == mark_of(*left)


def test_a_log_whose_end_is_zeros_keeps_what_is_before_them(path: Path):
    """What a loss of power may leave where the length was written, and the content was not."""
    whole = path.read_bytes()
    path.write_bytes(whole[: mark_of(1, 2).size] + bytes(len(whole) - mark_of(1, 2).size))
    found = back_to_4(path)
    assert found.fault is not None
    assert "2 of 4 records up to step 4 are left, none of steps 3-4" in found.fault
    assert path.read_bytes() == line_of(1) + line_of(2)


def test_a_log_that_was_deleted_begins_anew_and_the_run_goes_on(path: Path):
    path.unlink()
    found = back_to_4(path)
    assert found.fault == f"{path} is missing; 0 of 4 records up to step 4 are left, none of steps 1-4"
    assert path.read_bytes() == b""
    assert found.earlier == {2: LogMark(), 4: LogMark()}


def test_a_line_that_was_changed_and_is_still_a_record_is_told_too(path: Path):
    spoil(path, 2, line_of(2).replace(b"1.0", b"7.0"))
    found = back_to_4(path)
    assert found.fault is not None
    assert "its content is not what was written; 4 of 4 records up to step 4 are left. What was found" in found.fault
    assert len(path.read_bytes().splitlines()) == 4


def test_damage_after_the_checkpoint_is_of_steps_that_are_done_again(path: Path):
    spoil(path, 5, b"nonsense\n")
    assert back_to_4(path) == Restored(mark=FOUR)


def test_a_second_damaged_log_does_not_replace_the_first(path: Path):
    for number in (1, 2):
        spoil(path, 2, b"nonsense %d\n" % number)
        back_to_4(path)
    kept = {p.name: p.read_bytes().splitlines()[1] for p in path.parent.glob("*.damaged-*")}
    assert kept == {"metrics.jsonl.damaged-1": b"nonsense 1", "metrics.jsonl.damaged-2": b"nonsense 2"}


def test_a_folder_in_the_place_of_a_log_is_kept_aside(path: Path):
    path.unlink()
    path.mkdir()
    found = back_to_4(path)
    assert found.fault is not None
    assert "cannot be read (Is a directory); a new log is started. What was found is kept as" in found.fault
    assert not path.exists()
    assert found.mark == LogMark()


def test_a_pipe_in_the_place_of_a_log_is_kept_aside_and_not_waited_for(path: Path):
    path.unlink()
    os.mkfifo(path)
    found = back_to_4(path)
    assert found.fault is not None
    assert "cannot be read (it is a pipe, a socket or a device); a new log is started" in found.fault
    assert path.with_name("metrics.jsonl.damaged-1").is_fifo()
    assert found.mark == LogMark()


# ---- a checkpoint that does not say how long the log was


def test_without_a_mark_the_steps_say_where_to_cut(path: Path):
    assert back_to_4(path, None) == Restored(mark=FOUR)
    assert path.read_bytes() == b"".join(map(line_of, (1, 2, 3, 4)))


def test_without_a_mark_missing_steps_are_told_where_every_step_has_a_line(path: Path):
    spoil(path, 2, b"nonsense\n")
    damaged = path.read_bytes()
    found = back_to_4(path, None)
    assert found.fault is not None
    assert "line 2 is not a record; 3 records up to step 4 are left, none of step 2." in found.fault
    path.write_bytes(damaged)
    found = restore(path, step=4, mark=None, is_record=is_metrics)
    assert found.fault is not None
    assert f"{path} is damaged: line 2 is not a record; 3 records up to step 4 are left." in found.fault


def test_without_a_mark_a_log_that_was_not_kept_is_not_missed(tmp_path: Path):
    path = tmp_path / "alarms.jsonl"
    assert restore(path, step=4, mark=None, is_record=is_alarm) == Restored(mark=LogMark())
