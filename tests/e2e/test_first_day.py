"""Each mistake in first_day.md is answered as the table says, and docs/symptoms.md quotes such answers only."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.first_day import MISTAKES, RUN, Mistake
from e2e.tiny_runs import build_tiny_model, workplace
from verbatim.cli.main import main

TABLE = Path(__file__).with_name("first_day.md")
PAGE = Path(__file__).parents[2] / "docs" / "symptoms.md"
ROW = re.compile(r"^\| ([^|`]+) \| `([^`]+)` \| (?:`` (.+) ``|`(.+)`) \|$", re.MULTILINE)
ANSWERS = {name: (command, quoted or plain) for name, command, quoted, plain in ROW.findall(TABLE.read_text("utf-8"))}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def place(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a model in it."""
    monkeypatch.setattr("verbatim.core.imports._BESIDE", [])
    monkeypatch.setattr("verbatim.inference.http.client.FIRST_PAUSE", 0.002)
    with workplace(tmp_path / "place", {"my_env": "", "my_rewards": ""}) as folder:
        for name in ("my_env.py", "my_rewards.py"):
            (folder / name).unlink()
        (folder / "model").symlink_to(model)
        yield folder


def test_the_table_has_every_mistake_and_no_other():
    assert len(MISTAKES) >= 30
    assert list(ANSWERS) == [mistake.name for mistake in MISTAKES]
    assert [command for command, _ in ANSWERS.values()] == [mistake.command for mistake in MISTAKES]


def test_each_message_that_troubleshooting_quotes_is_an_answer():
    refused = PAGE.read_text("utf-8").partition("\n## A run is refused\n")[2].partition("\n## ")[0]
    quoted = re.findall(r"^- `([^`]+)`: ", refused, re.MULTILINE)
    assert len(quoted) >= 10
    assert [message for message in quoted if not any(message in answer for _, answer in ANSWERS.values())] == []


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.parametrize("mistake", [pytest.param(mistake, id=mistake.name) for mistake in MISTAKES])
def test_a_mistake_is_answered(mistake: Mistake, place: Path, monkeypatch: pytest.MonkeyPatch, capsys, caplog):
    for name, text in mistake.files.items():
        (place / name).write_text(text)
    run = RUN.format(model="model", more=mistake.more, env=mistake.env) + mistake.tables
    (place / "run.toml").write_text(mistake.run or run)
    if mistake.prepare is not None:
        mistake.prepare(monkeypatch, place)
    for module in ("my_env", "my_rewards"):
        sys.modules.pop(module, None)
    capsys.readouterr()
    before = {path.name for path in (place / "runs").rglob("*") if path.is_dir()}
    typed = [
        "PORT" in mistake.command and (place / "port").read_text() if word == "PORT" else word
        for word in mistake.command.split()
    ]
    assert main(typed) == mistake.status
    told = capsys.readouterr()
    said = " ".join(f"{told.out}\n{told.err}\n{caplog.text}".split())
    position = 0
    for fragment in re.split(r"\s*\.\.\.\s*", ANSWERS[mistake.name][1]):
        position = said.find(" ".join(fragment.split()), position)
        assert position >= 0, f"{fragment!r} is not in: {said}"
    if mistake.status == 2:
        assert {path.name for path in (place / "runs").rglob("*") if path.is_dir()} == before
