"""What is written is synced before it gets its name, and the name is synced after."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from verbatim.core import disk


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, str]]:
    """Renames and syncs, in order, by the name of the file or folder."""
    seen: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def traced_fsync(descriptor: int) -> None:
        seen.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def traced_replace(source: Path, target: Path) -> None:
        seen.append(("rename", f"{Path(source).name} -> {Path(target).name}"))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "replace", traced_replace)
    return seen


def test_a_file_is_synced_then_named_then_its_folder_is_synced(tmp_path: Path, calls: list):
    disk.write_file(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert calls == [("sync", ".a.tmp"), ("rename", ".a.tmp -> a"), ("sync", tmp_path.name)]


def test_every_new_folder_is_synced_into_the_one_above(tmp_path: Path, calls: list):
    disk.make_folder(tmp_path / "a" / "b" / "c")
    assert {name for _, name in calls} == {tmp_path.name, "a", "b"}
    calls.clear()
    disk.make_folder(tmp_path / "a" / "b")
    assert calls == []


def test_a_tree_is_synced_with_every_file_and_folder_in_it(tmp_path: Path, calls: list):
    (tmp_path / "t" / "inner").mkdir(parents=True)
    (tmp_path / "t" / "x").write_text("x")
    (tmp_path / "t" / "inner" / "y").write_text("y")
    (tmp_path / "t" / "link").symlink_to("nowhere")
    disk.sync_tree(tmp_path / "t")
    assert sorted(calls) == [("sync", "inner"), ("sync", "t"), ("sync", "x"), ("sync", "y")]


def test_a_file_that_cannot_be_written_is_as_it_was(tmp_path: Path, monkeypatch):
    disk.write_file(tmp_path / "a", b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        disk.write_file(tmp_path / "a", b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("a", b"old")]


def test_a_device_has_nothing_to_sync(tmp_path: Path):
    disk.sync(Path("/dev/null"))


def test_what_is_kept_aside_gets_a_number_of_its_own(tmp_path: Path):
    for text in ("first", "second"):
        (tmp_path / "log").write_text(text)
        disk.keep_aside(tmp_path / "log")
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"log.damaged-1": "first", "log.damaged-2": "second"}


def test_a_folder_that_is_made_again_is_kept_aside_where_somebody_has_put_a_file_into_it(tmp_path: Path):
    target = tmp_path / "final"
    for text in ("first", "second", "third"):
        with disk.making(target) as partial:
            (partial / "model").write_text(text)
        if text == "second":
            (target / "sub").mkdir()
            (target / "sub/card.md").write_text("mine")
    assert (target / "model").read_text() == "third"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["final", "final.kept-1"]
    assert (tmp_path / "final.kept-1/sub/card.md").read_text() == "mine"
    assert (tmp_path / "final.kept-1/model").read_text() == "second"
