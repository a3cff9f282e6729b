"""JSON lines survive a killed writer and go back to an earlier step."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from verbatim.errors import UsageError
from verbatim.monitors import JsonlWriter, read_jsonl


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "metrics.jsonl"


def test_a_record_is_on_disk_as_soon_as_it_is_written(path: Path):
    writer = JsonlWriter(path)
    writer.write({"step": 1, "x": 0.5})
    assert path.read_text() == '{"step": 1, "x": 0.5}\n'
    writer.close()


@pytest.mark.parametrize("size", [10, 70_000, 65_536])
def test_a_torn_last_line_is_cut_off_before_appending(path: Path, size: int):
    path.parent.mkdir()
    path.write_text('{"step": 1}\n{"step": 2, "x": "' + "y" * size)
    writer = JsonlWriter(path)
    writer.write({"step": 2})
    writer.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_file_that_is_one_torn_line_becomes_empty(path: Path):
    path.parent.mkdir()
    path.write_text('{"step": 1')
    JsonlWriter(path).close()
    assert path.read_text() == ""


def test_whole_lines_are_left_alone(path: Path):
    path.parent.mkdir()
    path.write_text('{"step": 1}\n')
    JsonlWriter(path).close()
    assert path.read_text() == '{"step": 1}\n'


def test_going_back_to_a_step_drops_what_came_after(path: Path):
    writer = JsonlWriter(path)
    for step in (0, 1, 2, 2, 3):
        writer.write({"step": step})
    assert writer.truncate_after(1) == 3
    writer.write({"step": 2, "again": True})
    writer.close()
    assert list(read_jsonl(path)) == [{"step": 0}, {"step": 1}, {"step": 2, "again": True}]


def test_numbers_that_json_does_not_have_are_texts_that_float_reads(path: Path):
    writer = JsonlWriter(path)
    writer.write({"a": math.nan, "b": [math.inf, -math.inf], "c": np.float32(0.5), "d": np.array([1, 2])})
    writer.close()
    line = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert math.isnan(float(line["a"]))
    assert [float(b) for b in line["b"]] == [math.inf, -math.inf]
    assert line["c"] == 0.5
    assert line["d"] == [1, 2]


def test_text_of_any_kind_stays_on_one_line(path: Path):
    text = "a\nb\u2028c \ud800 é"
    writer = JsonlWriter(path)
    writer.write({"text": text})
    writer.close()
    assert list(read_jsonl(path)) == [{"text": text}]


def test_a_reader_leaves_out_the_line_being_written(path: Path):
    path.parent.mkdir()
    path.write_text('{"step": 1}\n{"ste')
    assert list(read_jsonl(path)) == [{"step": 1}]


@pytest.mark.parametrize(("line", "found"), [("nonsense", "expected a JSON object on"), ("[1]", "found list")])
def test_a_line_that_is_no_record_is_named(path: Path, line: str, found: str):
    path.parent.mkdir()
    path.write_text('{"step": 1}\n' + line + "\n")
    with pytest.raises(UsageError, match=f"metrics.jsonl:2: .*{found}"):
        list(read_jsonl(path))


def test_a_missing_file_is_named(path: Path):
    with pytest.raises(UsageError, match="there is no file"):
        list(read_jsonl(path))
