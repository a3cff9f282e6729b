"""JSON files are replaced whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from verbatim.core.errors import CheckpointError
from verbatim.logs.checkpoints import read_json, write_json


def test_a_value_comes_back(tmp_path: Path):
    value = {"rng": {"state": 2**100}, "list": [1, None, 0.1], "text": "é"}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_value_that_cannot_be_written_leaves_the_old_file(tmp_path: Path):
    write_json(tmp_path / "a.json", 1)
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", {"x": object()})
    assert read_json(tmp_path / "a.json") == 1


@pytest.mark.parametrize(("text", "found"), [(None, "cannot be read: No such file"), ("{", "is not valid JSON")])
def test_a_file_without_json_is_named(tmp_path: Path, text: str | None, found: str):
    file = tmp_path / "a.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(CheckpointError, match=rf"a\.json {found}"):
        read_json(file)
