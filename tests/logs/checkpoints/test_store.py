"""A checkpoint is complete and verified, or it is not there."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from verbatim.core.errors import CheckpointError, CheckpointNotWritten, FormatError, RunStopped
from verbatim.core.machine_faults import is_machine_fault
from verbatim.logs.checkpoints import CheckpointStore, read_json, write_json
from verbatim.logs.checkpoints import store as module


def save(store: CheckpointStore, step: int, text: str = "weights") -> None:
    with store.writing(step) as folder:
        (folder / "model").mkdir()
        (folder / "model" / "a.bin").write_text(f"{text} {step}")
        write_json(folder / "state.json", {"step": step})


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep_last=2)


def test_what_was_written_is_found_again(store: CheckpointStore):
    assert store.latest() is None
    save(store, 25)
    checkpoint = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == 25
    assert checkpoint.folder == store.folder / "step_000025"
    assert read_json(checkpoint.folder / "state.json") == {"step": 25}


def test_the_manifest_has_size_and_sha256_of_every_file(store: CheckpointStore):
    save(store, 3)
    manifest = json.loads((store.folder / "step_000003" / "manifest.json").read_text())
    assert manifest["step"] == 3
    assert sorted(manifest["files"]) == ["model/a.bin", "state.json"]
    assert manifest["files"]["model/a.bin"] == {"size": 9, "sha256": hashlib.sha256(b"weights 3").hexdigest()}


def test_nothing_has_its_final_name_before_it_is_complete(store: CheckpointStore):
    with store.writing(1) as folder:
        (folder / "a").write_text("x")
        assert store.steps() == []
        assert CheckpointStore(store.folder, read_only=True).latest() is None
    assert store.steps() == [1]


def test_only_the_newest_and_every_nth_are_kept(tmp_path: Path):
    store = CheckpointStore(tmp_path, keep_last=2, keep_every=20)
    for step in (10, 20, 30, 40, 50, 60, 70):
        save(store, step)
    assert store.steps() == [20, 40, 60, 70]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000020", "step_000040", "step_000060", "step_000070"]


def test_a_checkpoint_of_the_same_step_is_replaced(store: CheckpointStore):
    save(store, 5, "old")
    save(store, 5, "new")
    checkpoint = store.latest()
    assert checkpoint is not None
    assert (checkpoint.folder / "model" / "a.bin").read_text() == "new 5"
    assert sorted(p.name for p in store.folder.iterdir()) == ["step_000005"]


def change(file: Path) -> None:
    file.write_text("Weights 2")


def shorten(file: Path) -> None:
    file.write_text("w")


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (change, "model/a.bin has a different SHA-256 than when it was written"),
        (shorten, "model/a.bin has 1 bytes, expected 9"),
        (Path.unlink, "model/a.bin is missing"),
    ],
)
def test_a_damaged_newest_one_is_reported_and_the_one_before_is_used(store, caplog, damage, found: str):
    save(store, 1)
    save(store, 2)
    damage(store.folder / "step_000002" / "model" / "a.bin")
    with caplog.at_level(logging.WARNING):
        checkpoint = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert f"{store.folder / 'step_000002'} is damaged and not used: {found}" in caplog.text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        '{"format": 1}',
        '{"format": "99", "files": {}}',
        '{"files": {}}',
        '{"format": 1, "files": [1]}',
    ],
)
def test_a_damaged_manifest_is_damage(store: CheckpointStore, text: str):
    save(store, 1)
    save(store, 2)
    (store.folder / "step_000002" / "manifest.json").write_text(text)
    checkpoint = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == 1


def test_a_checkpoint_of_another_version_is_neither_passed_over_nor_touched(store: CheckpointStore):
    save(store, 1)
    save(store, 2)
    manifest = store.folder / "step_000002" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 99'))
    kept = manifest.read_bytes()
    with pytest.raises(FormatError, match=rf"{manifest} has format 99; this version of Verbatim reads format 1 of"):
        store.latest()
    assert store.steps() == [1, 2] and manifest.read_bytes() == kept


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_afresh(store: CheckpointStore):
    save(store, 1)
    (store.folder / "step_000001" / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"every checkpoint of this run is damaged:\n  .*state.json is missing"):
        store.latest()


def test_a_full_disk_leaves_no_half_checkpoint(store: CheckpointStore):
    save(store, 1)

    def fill(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "rest"))

    with pytest.raises(CheckpointNotWritten) as caught, store.writing(2) as folder:
        fill(folder)
    name = store.folder / "step_000002"
    assert str(caught.value).startswith(f"checkpoint {name} could not be written: No space left on device")
    assert [p.name for p in store.folder.iterdir()] == ["step_000001"]
    assert store.latest() is not None


def test_a_disk_that_fills_while_sealing_leaves_no_half_checkpoint(store: CheckpointStore, monkeypatch):
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("verbatim.core.disk.sync", full)
    with pytest.raises(CheckpointNotWritten, match="No space left"), store.writing(2) as folder:
        (folder / "a").write_text("x")
    assert list(store.folder.iterdir()) == []


def test_a_replacement_that_fails_keeps_the_old_one(store: CheckpointStore, monkeypatch):
    save(store, 5, "old")
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if Path(source).name.startswith(".writing-"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(module.os, "rename", refuse)
    with pytest.raises(CheckpointNotWritten, match="Input/output error"):
        save(store, 5, "new")
    checkpoint = store.latest()
    assert checkpoint is not None
    assert (checkpoint.folder / "model" / "a.bin").read_text() == "old 5"


def test_another_error_passes_through_and_leaves_nothing(store: CheckpointStore):
    with pytest.raises(ZeroDivisionError), store.writing(2) as folder:
        (folder / "a").write_text("x")
        raise ZeroDivisionError
    assert list(store.folder.iterdir()) == []


def test_what_a_killed_process_left_is_removed_on_start(tmp_path: Path):
    for name in (".writing-step_000003", ".deleting-step_000001", ".replaced-step_000002", "step_000002"):
        (tmp_path / name).mkdir()
    CheckpointStore(tmp_path, read_only=True)
    assert len(list(tmp_path.iterdir())) == 4
    CheckpointStore(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["step_000002"]


def test_a_checkpoint_that_was_moved_aside_when_the_process_died_comes_back(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    save(store, 2)
    (tmp_path / "step_000002").rename(tmp_path / ".replaced-step_000002")
    checkpoint = CheckpointStore(tmp_path).latest()
    assert checkpoint is not None
    assert checkpoint.step == 2


def write_until_killed(folder: Path, at: int, says: int) -> None:
    """Writes checkpoints 1 to 5, and says which are written; is killed at the operation of this number on a file or a
    folder, from checkpoint 4 on. To be called in a process of its own."""
    step = num_operations = 0

    def count(event: str, arguments: object) -> None:
        nonlocal num_operations
        if step >= 4 and event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            num_operations += 1
            if num_operations == at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    store = CheckpointStore(folder, keep_last=2)
    for step in range(1, 6):
        with store.writing(step) as writing:
            for i in range(4):
                (writing / f"{i}.bin").write_bytes(bytes([step]) * 20_000)
        os.write(says, bytes([step]))


@pytest.mark.slow
@pytest.mark.realtime
def test_a_process_killed_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path):
    """Before each operation on a file or a folder in the time of two checkpoints, of which the second removes one."""
    for at in itertools.count(1):
        (folder := tmp_path / str(at)).mkdir()
        heard, says = os.pipe()
        writer = os.fork()
        if writer == 0:
            try:
                write_until_killed(folder, at, says)
            finally:
                os._exit(0)
        os.close(says)
        with open(heard, "rb") as said:
            last = max(said.read())
        _, status = os.waitpid(writer, 0)
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        store = CheckpointStore(folder)
        checkpoint = store.latest()
        assert checkpoint is not None
        assert checkpoint.step in (last, last + 1)
        assert all(module.find_damage(store.folder / f"step_{step:06d}") is None for step in store.steps())
        shutil.rmtree(folder)
    assert last == 5 and at > 20


@pytest.mark.parametrize("reads", ["verbatim.logs.checkpoints.json_files.read_regular", "pathlib.Path.open"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES])
def test_a_checkpoint_that_this_process_cannot_read_is_not_taken_for_damaged(
    store: CheckpointStore, monkeypatch, reads: str, number: int
):
    """Of the manifest, or of a file. Whoever takes it for damaged goes on from an older one."""
    for step in (1, 2):
        with store.writing(step) as folder:
            (folder / "a").write_text("x")

    def refuse(path: Path, *args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(reads, refuse)
        with pytest.raises(CheckpointError, match=f"step_000002 cannot be read: {os.strerror(number)}") as caught:
            store.latest()
    assert is_machine_fault(caught.value) == (number == errno.EMFILE)
    assert store.latest().step == 2


def test_what_refused_a_checkpoint_is_told_before_what_it_quotes(store: CheckpointStore):
    """A trainer that is gone is quoted with the end of its log."""
    told = store.refused(3, RunStopped("the trainer was ended by SIGKILL\nthe last lines of its log:\n    ..."))
    assert str(told) == (
        f"checkpoint {store.folder / 'step_000003'} could not be written: the trainer was ended by SIGKILL; the "
        "checkpoints before it are untouched\nthe last lines of its log:\n    ..."
    )


def test_the_manifest_says_how_long_the_logs_are_and_can_be_corrected(store: CheckpointStore):
    with store.writing(4, logs={"metrics.jsonl": {"size": 10}}) as folder:
        (folder / "a").write_text("x")
    assert store.logs(4) == {"metrics.jsonl": {"size": 10}}
    store.set_logs(4, {"metrics.jsonl": {"size": 5}})
    assert store.logs(4) == {"metrics.jsonl": {"size": 5}}
    assert module.find_damage(store.folder / "step_000004") is None
    save(store, 5)
    assert store.logs(5) == {}


def test_damaged_checkpoints_that_a_run_does_not_go_on_from_count_no_more(store: CheckpointStore, caplog):
    store.keep_last = 3
    for step in (1, 2, 3):
        save(store, step)
    for step in (2, 3):
        (store.folder / f"step_{step:06d}" / "state.json").write_text("")
    store.set_aside_after(1)
    assert store.steps() == [1]
    assert "the damaged checkpoint of step 3 is kept aside as" in caplog.text
    save(store, 3)
    assert {p.name for p in store.folder.iterdir()} == {
        "step_000001",
        "step_000002.damaged-1",
        "step_000003",
        "step_000003.damaged-1",
    }


def test_a_file_that_cannot_be_read_is_damage(store: CheckpointStore, monkeypatch):
    save(store, 1)
    save(store, 2)
    digest = hashlib.file_digest

    def broken(file, name):
        if "step_000002" in file.name and file.name.endswith("a.bin"):
            raise OSError(errno.EIO, "Input/output error", file.name)
        return digest(file, name)

    monkeypatch.setattr(hashlib, "file_digest", broken)
    checkpoint = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == 1


def test_a_manifest_of_another_step_is_damage(store: CheckpointStore):
    save(store, 1)
    save(store, 2)
    shutil.rmtree(store.folder / "step_000002")
    shutil.copytree(store.folder / "step_000001", store.folder / "step_000002")
    checkpoint = store.latest()
    assert checkpoint is not None
    assert checkpoint.step == 1


def test_a_retired_checkpoint_with_a_file_of_somebody_else_is_kept_aside(store: CheckpointStore, caplog):
    for step in (1, 2):
        save(store, step)
    note = store.folder / "step_000001" / "model" / "notes.txt"
    note.write_text("the one to show on Monday")
    save(store, 3)
    assert store.steps() == [2, 3]
    kept = store.folder / "step_000001.kept-1"
    assert (kept / "model" / "notes.txt").read_text() == "the one to show on Monday"
    assert (kept / "model" / "a.bin").read_text() == "weights 1"
    assert any("step_000001.kept-1" in message and "model/notes.txt" in message for message in caplog.messages)
    save(store, 4)
    assert sorted(path.name for path in store.folder.iterdir()) == ["step_000001.kept-1", "step_000003", "step_000004"]


def test_a_checkpoint_that_is_written_again_is_kept_aside_where_it_has_a_file_of_somebody_else(store: CheckpointStore):
    save(store, 1)
    (store.folder / "step_000001" / "link").symlink_to("nowhere")
    save(store, 1, "other")
    assert (store.folder / "step_000001.kept-1" / "link").is_symlink()
    assert (store.folder / "step_000001" / "model" / "a.bin").read_text() == "other 1"
    save(store, 1, "third")
    assert sorted(path.name for path in store.folder.iterdir()) == ["step_000001", "step_000001.kept-1"]


def test_a_checkpoint_without_a_manifest_that_can_be_read_is_not_removed(store: CheckpointStore):
    save(store, 1)
    (store.folder / "step_000001" / "manifest.json").write_text("{")
    for step in (2, 3):
        save(store, step)
    assert (store.folder / "step_000001.kept-1" / "model" / "a.bin").read_text() == "weights 1"
