"""JSON lines survive a killed writer and go back to an earlier step."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from verbatim.core.errors import UsageError
from verbatim.logs.monitors import JsonlWriter, read_jsonl
from verbatim.logs.monitors.jsonl import measure


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


def test_the_mark_is_that_of_the_file(path: Path):
    writer = JsonlWriter(path)
    for step in range(3):
        writer.write({"step": step, "text": "é" * step})
        assert writer.sync() == measure(path)
    writer.close()
    again = JsonlWriter(path)
    assert again.mark == writer.mark
    assert again.mark.records == 3
    again.close()


@pytest.mark.parametrize("bytes_that_fit", [0, 5])
def test_a_record_that_does_not_fit_on_the_disk_leaves_nothing_of_it(path: Path, monkeypatch, bytes_that_fit: int):
    writer = JsonlWriter(path)
    writer.write({"step": 1})
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if bytes_that_fit and path.stat().st_size == writer.mark.size:
            return write(descriptor, data[:bytes_that_fit])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        writer.write({"step": 2})
    assert path.read_bytes() == b'{"step": 1}\n'
    monkeypatch.undo()
    writer.write({"step": 3})
    writer.close()
    assert list(read_jsonl(path)) == [{"step": 1}, {"step": 3}]
    assert writer.mark == measure(path)


def test_a_torn_record_that_cannot_be_cut_off_is_cut_off_before_the_next_one(path: Path, monkeypatch):
    writer = JsonlWriter(path)
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]) and 1 / 0)
    monkeypatch.setattr(os, "ftruncate", lambda descriptor, size: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.write({"step": 1})
    assert path.read_bytes() == b'{"s'
    monkeypatch.undo()
    writer.write({"step": 2})
    writer.close()
    assert path.read_bytes() == b'{"step": 2}\n'


def test_a_device_may_be_written_to():
    writer = JsonlWriter(Path("/dev/null"))
    writer.write({"step": 1})
    writer.close()


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
