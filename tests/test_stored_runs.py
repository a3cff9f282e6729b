"""A stored folder is made once, by whichever worker asks first, and a test that changes it is found."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import stored_runs
from waiting import HANGS

pytestmark = pytest.mark.realtime
WORKERS = 4


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """That of a worker of pytest-xdist, whose folder lies in the session's."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")

    class Factory:
        def getbasetemp(self) -> Path:
            return tmp_path / "popen-gw0"

    return Factory()


def test_workers_that_ask_at_once_share_the_folder_that_one_of_them_makes(factory, tmp_path: Path):
    asked, made = threading.Barrier(WORKERS), []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "a").write_text("x")

    def ask(_: int) -> str:
        asked.wait(HANGS)
        return (stored_runs.stored(factory, "run", make) / "a").read_text()

    with ThreadPoolExecutor(WORKERS) as workers:
        assert list(workers.map(ask, range(WORKERS))) == ["x"] * WORKERS
    assert made == [tmp_path / "stored/run"]


def test_what_a_maker_left_that_failed_is_made_again(factory):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        stored_runs.stored(factory, "run", fail)
    folder = stored_runs.stored(factory, "run", lambda folder: (folder / "whole").write_text("x"))
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_a_stored_folder_that_was_changed_is_found(factory):
    folder = stored_runs.stored(factory, "run", lambda folder: (folder / "a").write_text("x"))
    stored_runs.assert_untouched(folder)
    (folder / "a").write_text("y")
    with pytest.raises(AssertionError):
        stored_runs.assert_untouched(folder)
