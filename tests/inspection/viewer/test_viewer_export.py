"""The exported file: the page inside, and the API's answers as blocks that nothing in the data can end."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from viewer_runs import make_run, read, trained, trajectory

from verbatim.cli.main import main
from verbatim.core.errors import UsageError
from verbatim.inspection.viewer import assets as assets_module
from verbatim.inspection.viewer.assets import Asset
from verbatim.inspection.viewer.encoding import to_json
from verbatim.inspection.viewer.export import export
from verbatim.inspection.viewer.query import Filters

SCRIPT = "console.log('a </script> inside a text')"
PAGE = {
    "index.html": Asset(
        b'<!doctype html><html><head><title>t</title><script type="module" crossorigin src="./app.js"></script>'
        b'<link rel="stylesheet" crossorigin href="./app.css"></head><body><div id="app"></div></body></html>',
        "text/html",
    ),
    "app.js": Asset(SCRIPT.encode(), "text/javascript"),
    "app.css": Asset(b"body { color: red }", "text/css"),
}


class Blocks(HTMLParser):
    """Reads a document as a browser does: scripts with their attributes and texts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles: list[str] = []
        self.metas: list[dict[str, str | None]] = []
        self.links = 0
        self._open: dict[str, str | None] | None = None
        self._tag = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.links += tag == "link"
        if tag == "meta":
            self.metas.append(dict(attrs))
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self._tag == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        if self._tag == "style":
            self.styles.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def answers(self) -> dict[str, Any]:
        return {
            str(attributes["data-url"]): json.loads(gzip.decompress(base64.b64decode(text)))
            for attributes, text in self.scripts
            if "data-url" in attributes
        }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    outcomes = [trained(trajectory(f"t{i}", reward=i / 4, group_id=f"g{i // 2}")) for i in range(6)]
    hostile = trajectory("h</script><script>alert(1)</script>", messages=({"content": "</script><!--<script>"},))
    steps = {1: outcomes, 2: [trained(hostile)]}
    return make_run(tmp_path_factory.mktemp("export") / "run", steps, metrics=[(1, {"loss": 0.5})])


def test_the_file_holds_the_answers_of_the_api(folder: Path, tmp_path: Path):
    out = tmp_path / "run.html"
    written = export([read(folder)], PAGE, out, filters={"reward": ["0.5-"]}, sort="-reward", most=3)
    assert (written.trajectories, written.of_total, written.size) == (3, 7, out.stat().st_size)
    blocks = Blocks(out)
    found = blocks.answers()
    run = read(folder)
    rows = run.rows(Filters.of({"reward": ["0.5-"]}), sort="-reward", limit=3)["rows"]
    assert [row["trajectory_id"] for row in rows] == ["t5", "t4", "t3"]
    assert found["/api/runs/0/trajectories"] == {"total": 3, "matched": 3, "pending": False, "rows": rows}
    assert set(found) == {
        "/api/runs",
        *(f"/api/runs/0/{name}" for name in ("metrics", "config", "summary", "facets", "trajectories")),
        *(f"/api/runs/0/trajectories/~1.{i}" for i in (5, 4, 3)),
        *{f"/api/runs/0/groups/{row['group_key']}" for row in rows},
    }
    assert found["/api/runs/0/metrics"]["columns"] == {"loss": [0.5]}
    assert found["/api/runs/0/trajectories/~1.5"] == json.loads(to_json(run.trajectory("t5")))
    assert [row["trajectory_id"] for row in found[f"/api/runs/0/groups/{rows[0]['group_key']}"]["rows"]] == ["t4", "t5"]
    (marker,) = [json.loads(text) for attributes, text in blocks.scripts if attributes.get("id") == "verbatim-export"]
    assert marker == {"version": 1, "of_total": 7}


def test_nothing_in_the_data_ends_a_block_and_only_the_page_itself_may_run(folder: Path, tmp_path: Path):
    out = tmp_path / "run.html"
    export([read(folder)], PAGE, out, filters={}, most=100)
    blocks = Blocks(out)
    programs = [text for attributes, text in blocks.scripts if attributes.get("type") != "application/json"]
    assert programs == ["console.log('a <\\/script> inside a text')"] and blocks.styles == ["body { color: red }"]
    assert not any("src" in attributes for attributes, _ in blocks.scripts) and not blocks.links
    assert "alert(1)" not in out.read_text()
    assert blocks.answers()["/api/runs/0/trajectories/~2.0"]["trajectory_id"] == "h</script><script>alert(1)</script>"
    (policy,) = [meta["content"] for meta in blocks.metas if meta.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    for text in (programs[0], blocks.styles[0]):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    assert "default-src 'none'" in policy and "connect-src" not in policy and "unsafe" not in policy
    assert not re.findall(r"https?://", out.read_text())


def test_a_file_that_is_there_and_a_wrong_filter_are_refused(folder: Path, tmp_path: Path):
    out = tmp_path / "run.html"
    out.write_text("mine")
    with pytest.raises(UsageError, match="already exists; name a new file"):
        export([read(folder)], PAGE, out, filters={}, most=1)
    assert out.read_text() == "mine"
    with pytest.raises(UsageError, match="step = 'x'"):
        export([read(folder)], PAGE, tmp_path / "other.html", filters={"step": ["x"]}, most=1)
    assert list(tmp_path.glob("*other*")) == []


def test_the_command_exports_what_its_options_ask_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(assets_module, "load_assets", lambda: PAGE)
    out = tmp_path / "run.html"
    asked = ["--trajectories", "2", "--sort", "reward", "--step", "1", "--group", "g1"]
    assert main(["view", str(folder), "--export", str(out), *asked]) == 0
    assert "wrote 2 of 7 trajectories" in capsys.readouterr().out
    rows = Blocks(out).answers()["/api/runs/0/trajectories"]["rows"]
    assert [row["trajectory_id"] for row in rows] == ["t2", "t3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["view", "{missing}"], "there is no folder {missing}. Type verbatim view "),
        (["view", "{run}", "--step", "3"], "--step is for --export FILE; the page has its own filters"),
        (["view", "{run}", "--colour"], "verbatim view has no option --colour"),
        (["view", "{run}", "--port", "70000"], "port 70000; expected 0 (any that is free) to 65535"),
        (["view", "{run}", "--export", "{out}", "--step", "9-3"], "step = '9-3'; expected the lower number first"),
        (["view", "{run}", "--export", "{out}", "--step", "900-"], "the filters match no trajectory of 7; nothing was"),
        (["view", "{run}", "--export", "{missing}/x.html"], "there is no folder {missing}; name a file in an existing"),
    ],
)
def test_what_the_command_refuses(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
):
    monkeypatch.setattr(assets_module, "load_assets", lambda: PAGE)
    names = {"missing": tmp_path / "missing", "run": folder, "out": tmp_path / "out.html"}
    assert main([argument.format(**names) for argument in arguments]) == 2
    assert message.format(**names) in capsys.readouterr().err.replace("\n", "")
