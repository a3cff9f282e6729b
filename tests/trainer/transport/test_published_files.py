"""A reader sees all of a file, or the one before, or none."""

import errno
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from verbatim.core.errors import RunStopped
from verbatim.trainer.transport.files import publish_bytes, publish_json, read_published_json
from waiting import HANGS


class Killed(BaseException):
    """The process ends here: nothing after it is executed."""


@pytest.fixture
def full_disk(monkeypatch):
    """Half of the bytes are written, then the disk is full."""
    write = Path.write_bytes

    def half(self, data):
        write(self, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", half)


def test_a_value_that_was_not_published_yet_is_none(tmp_path):
    assert read_published_json(tmp_path / "a.json") is None
    publish_json(tmp_path / "a.json", {"x": 1})
    assert read_published_json(tmp_path / "a.json") == {"x": 1}


def test_a_disk_that_fills_up_in_the_middle_leaves_no_file(tmp_path, full_disk):
    with pytest.raises(OSError, match="No space left"):
        publish_bytes(tmp_path / "order", b"12345678")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_between_two_parts_leaves_no_file(tmp_path):
    def parts():
        yield memoryview(b"1234")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        publish_bytes(tmp_path / "order", parts())
    assert list(tmp_path.iterdir()) == []
    publish_bytes(tmp_path / "order", iter([memoryview(b"12"), memoryview(b"34")]))
    assert (tmp_path / "order").read_bytes() == b"1234"


def test_a_disk_that_fills_up_in_the_middle_leaves_the_file_before(tmp_path, request):
    publish_bytes(tmp_path / "order", b"before")
    request.getfixturevalue("full_disk")
    with pytest.raises(OSError, match="No space left"):
        publish_bytes(tmp_path / "order", b"12345678")
    assert [p.name for p in tmp_path.iterdir()] == ["order"]
    assert (tmp_path / "order").read_bytes() == b"before"


@pytest.mark.parametrize("before", [None, {"x": 1}])
def test_a_process_killed_between_writing_and_naming_changes_nothing_for_readers(tmp_path, monkeypatch, before):
    if before is not None:
        publish_json(tmp_path / "a.json", before)

    def die(source, target):
        raise Killed

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(Killed):
        publish_json(tmp_path / "a.json", {"x": 2})
    assert read_published_json(tmp_path / "a.json") == before
    monkeypatch.undo()
    publish_json(tmp_path / "a.json", {"x": 3})  # what it left is in nobody's way
    assert read_published_json(tmp_path / "a.json") == {"x": 3}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.realtime
def test_a_reader_never_sees_a_mixture_of_two_versions(tmp_path):
    size, path, ended = 1 << 18, tmp_path / "weights", threading.Event()
    publish_bytes(path, bytes(size))

    def publish():
        number = 0
        while not ended.is_set():
            number = (number + 1) % 256
            publish_bytes(path, bytes([number]) * size)

    writer = threading.Thread(target=publish)
    writer.start()
    try:
        seen, until = [path.read_bytes()], time.monotonic() + HANGS
        while len(seen) < 100 or len({data[0] for data in seen}) < 2:  # until the writer was at work
            assert time.monotonic() < until
            seen.append(path.read_bytes())
    finally:
        ended.set()
        writer.join()
    assert all(data == data[:1] * size for data in seen)


@pytest.mark.parametrize("content", [b"", b"{", bytes(20), b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_file_between_processes_stops_the_run_and_says_which(tmp_path, content):
    (tmp_path / "ready.json").write_bytes(content)
    with pytest.raises(RunStopped, match=r"ready\.json, which one process of the run wrote for the other, is damaged"):
        read_published_json(tmp_path / "ready.json")


def test_a_file_that_may_hold_keys_is_never_readable_by_others(tmp_path, monkeypatch):
    modes = []
    path = tmp_path / "config.toml"
    replace = os.replace

    def seen(source, target):
        modes.append(stat.S_IMODE(os.stat(source).st_mode))
        replace(source, target)

    monkeypatch.setattr(os, "replace", seen)
    publish_bytes(path, b"key", private=True)
    assert modes == [0o600] and stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_bytes() == b"key"
