"""CONTRIBUTING.md names every campaign beside the paths whose change asks for it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import verbatim

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (`.+`) \| (`tests/.+) \|$", re.MULTILINE)


def rows() -> list[tuple[list[str], list[str]]]:
    """The paths below src/verbatim, and those below tests, of each row."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = ROW.findall(text)
    return [(re.findall(r"`([^`]+)`", source), re.findall(r"tests/[\w/.]+", tests)) for source, tests in found]


def campaigns() -> list[Path]:
    """The files with campaigns of their own."""
    marks = re.compile(r"@pytest\.mark\.campaign\b|pytestmark = .*mark\.campaign|@drawn\(")
    return [path for path in (ROOT / "tests").rglob("test_*.py") if marks.search(path.read_text(encoding="utf-8"))]


def test_every_path_of_the_table_exists():
    source = Path(verbatim.__file__).parent
    found = rows()
    assert len(found) > 10
    assert [path for paths, _ in found for path in paths if not (source / path).exists()] == []
    assert [path for _, paths in found for path in paths if not (ROOT / path).exists()] == []


def test_every_campaign_is_in_the_table():
    named = [ROOT / path for _, paths in rows() for path in paths]
    listed = [path for path in campaigns() if any(path.is_relative_to(name) for name in named)]
    assert len(listed) > 30
    assert sorted(set(campaigns()) - set(listed)) == []


def test_what_counts_its_cases_as_a_campaign_or_has_two_sizes_is_one():
    """`make campaigns` runs only what is marked."""
    found = []
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text(encoding="utf-8")
        if "campaign" not in text and "sized" not in text:
            continue
        body = ast.parse(text).body
        of_all = " ".join(ast.unparse(node) for node in body if isinstance(node, ast.Assign))
        for test in (node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            marks = " ".join(map(ast.unparse, test.decorator_list))
            asks = "campaign" in [argument.arg for argument in test.args.args] or "sized(" in marks
            marked = "mark.campaign" in of_all + marks or "drawn(" in marks
            if test.name.startswith("test_") and asks and not marked:
                found.append(f"{path.name}::{test.name}")
    assert found == []


def test_every_path_of_the_table_has_a_campaign():
    files = campaigns()
    named = [path for _, paths in rows() for path in paths]
    assert [path for path in named if not any(file.is_relative_to(ROOT / path) for file in files)] == []
