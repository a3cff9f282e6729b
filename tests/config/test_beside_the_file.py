"""Modules beside a configuration are found from any folder, behind those of the current one."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.tiny_runs import forget_modules_of_recipes
from verbatim.core.errors import UsageError
from verbatim.core.imports import search_beside

ENVIRONMENT = """\
from verbatim import Example
class Mine:
    def examples(self, split):
        raise RuntimeError("made in {place}")
    async def start(self, example, seed):
        ...
"""
RUN = '[model]\nname = "some/model"\n[[orchestrator.train.env]]\nimport_path = "beside_me.Mine"\n'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "run.toml").write_text(RUN)
    return folder


def said(folder: Path, *command: str) -> str:
    """What `verbatim` complains of, typed in a folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-m", "verbatim.cli", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    return done.stderr


@pytest.mark.realtime
def test_an_environment_beside_the_file_is_found_from_elsewhere(project: Path):
    (project / "beside_me.py").write_text(ENVIRONMENT.format(place="the project"))
    assert "made in the project" in said(project.parent, "config", "project/run.toml")


@pytest.mark.realtime
def test_the_current_folder_comes_first(project: Path):
    (project / "beside_me.py").write_text(ENVIRONMENT.format(place="the project"))
    (project.parent / "beside_me.py").write_text(ENVIRONMENT.format(place="the current folder"))
    assert "made in the current folder" in said(project.parent, "config", "project/run.toml")


@pytest.mark.realtime
def test_where_it_is_in_neither_both_are_named(project: Path):
    told = said(project.parent, "config", "project/run.toml")
    assert "there is no module 'beside_me'; looked in the current directory," in told
    assert f"next to the configuration, {project.resolve()}" in told


@pytest.mark.parametrize("content", ["[", '{"format": 1}', '{"format": 1, "folders": [3]}', "\udc80"])
def test_damaged_folders_of_modules_are_named(project: Path, content: str):
    stored = project / "module_folders.json"
    stored.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=r"module_folders\.json is damaged.*expected the folders that hold"):
        search_beside(project / "run.toml")


def test_a_runs_folder_remembers_where_its_modules_lie(tmp_path: Path, monkeypatch):
    """Its stored configuration names them, and is typed to resume."""
    from datetime import datetime

    from verbatim.config import load_config
    from verbatim.core import imports
    from verbatim.logs.checkpoints import CONFIG, RunFolder

    monkeypatch.setattr(imports, "_BESIDE", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    project = tmp_path / "project"
    project.mkdir()
    (project / "run.toml").write_text(RUN)
    (project / "beside_a_run.py").write_text("")
    config = load_config(project / "run.toml")
    with RunFolder.create(config, name="run", now=datetime.now(), root=tmp_path / "unused") as run:
        assert not (run.path / imports.MODULE_FOLDERS).exists()  # nothing was imported from there
    importlib.import_module("beside_a_run")
    with RunFolder.create(config, name="run", now=datetime.now(), root=tmp_path / "runs") as run:
        stored = run.path / CONFIG
    sys.path.remove(str(project))
    monkeypatch.setattr(imports, "_BESIDE", [])
    load_config(stored)
    assert str(project) in sys.path


def test_a_recipe_that_was_imported_as_a_part_of_the_package_lies_beside_nothing(monkeypatch):
    from verbatim.cli.recipes import parcel_desk
    from verbatim.config.recipe_files import recipes
    from verbatim.core import imports

    monkeypatch.setattr(imports, "_BESIDE", [])
    monkeypatch.setattr(imports, "_FILES_IN", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    forget_modules_of_recipes()
    search_beside(recipes()["guess_number"])
    assert os.path.dirname(parcel_desk.__file__) in sys.path
    assert imports.folders_beside() == ()
    monkeypatch.setitem(sys.modules, "parcel_desk", parcel_desk)
    assert imports.folders_beside() == (os.path.dirname(parcel_desk.__file__),)
