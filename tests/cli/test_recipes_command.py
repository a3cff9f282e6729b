"""Recipes are listed, copied, and stand for their files by name."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from verbatim.cli.main import main
from verbatim.config.recipe_files import recipes
from verbatim.run.recipes import run_file

DOCS = Path(__file__).parents[2] / "docs"


def test_every_recipe_is_listed_with_its_first_comment(capsys):
    assert main(["recipes"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in listed] == [
        *sorted(recipes()),
        "first_steps",
        "minimal_rl",
        "run",
        "train",
    ]
    about = dict(line.split(": ", 1) for line in listed)
    assert about["guess_number"].startswith("An agent learns binary search by calling a tool")
    assert about["terminal_ipa"].endswith("Needs no GPU and no network, but bubblewrap: see docs/environments.md.")


def test_a_recipe_says_before_it_starts_how_long_it_took_where_it_was_measured(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VERBATIM_MODELS", str(tmp_path))
    assert main(["rl", "smollm2_calculator"]) == 2, "its model is not here"
    assert "Took 7 minutes on two quiet cores that multiply bfloat16" in capsys.readouterr().out
    page = (DOCS / "smollm2.md").read_text("utf-8")
    measured = re.search(r"\| whole command \| (\d+):(\d\d) minutes .*\| (\d+):(\d\d) \|", page)
    assert measured is not None
    first, seconds, second, more = map(int, measured.groups())
    assert {round(first + seconds / 60), round(second + more / 60)} == {7}
    assert main(["rl", "smollm2_calculator", "--quiet"]) == 2
    assert capsys.readouterr().out == ""


def test_a_recipe_is_copied_with_its_module(tmp_path: Path, capsys):
    assert main(["recipes", "copy", "parcel-desk", str(tmp_path / "mine")]) == 0
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["parcel_desk.py", "parcel_desk.toml"]
    assert (tmp_path / "mine" / "parcel_desk.toml").read_text() == recipes()["parcel_desk"].read_text()
    assert main(["recipes", "copy", "parcel_desk", str(tmp_path / "mine")]) == 2
    assert "parcel_desk.toml exists; remove it, or name another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("first-steps", "examples/first_steps.ipynb"),
        ("train.py", "examples/train.py"),
        ("run", "examples/run.py"),
        ("minimal_rl", "recipes/minimal_rl.py"),
    ],
)
def test_a_program_or_a_notebook_is_copied_without_a_checkout(name: str, file: str, tmp_path: Path):
    assert main(["recipes", "copy", name, str(tmp_path)]) == 0
    (copied,) = tmp_path.iterdir()
    assert copied.name == Path(file).name and copied.read_bytes() == (DOCS.parent / file).read_bytes()


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["copy"], "which one? There are alphabet_sort, calculator,"),
        (["copy", "chess"], "there is no recipe 'chess'. There are alphabet_sort, calculator,"),
        (["copy", "gues_number"], "there is no recipe 'gues_number'; did you mean \"guess_number\"?"),
        (["list", "guess_number"], "verbatim recipes list takes no name, found guess_number"),
        (["list", "--json"], "verbatim recipes has no option --json"),
    ],
)
def test_what_cannot_be_copied_is_refused(typed: list[str], told: str, capsys):
    assert main(["recipes", *typed]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_a_recipes_name_stands_for_its_file(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["config", "guess-number", "--max-steps", "7"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["max_steps"] == 7


def test_a_file_of_that_name_comes_first_and_other_paths_are_left_alone(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_file("guess_number") == recipes()["guess_number"]
    assert run_file("guess_number.toml") == Path("guess_number.toml")
    assert run_file("a/guess_number") == Path("a/guess_number")
    Path("guess_number").mkdir()
    assert run_file("guess_number") == Path("guess_number")
