"""Published weights are whole, and what a killed process left never hides them."""

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from verbatim.trainer.transport import WeightFolders


def write(folder):
    (folder / "model.safetensors").write_text("weights")


def test_the_newest_two_versions_stay(tmp_path):
    folders = WeightFolders(tmp_path, keep=2)
    for version in (1, 2, 3):
        assert (folders.publish(version, write) / "model.safetensors").is_file()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v000002", "v000003"]


def test_versions_that_a_killed_process_left_ahead_are_removed(tmp_path):
    ahead = WeightFolders(tmp_path, keep=2)
    for version in (27, 28):
        ahead.publish(version, write)
    published = WeightFolders(tmp_path, keep=2).publish(26, write)
    assert (published / "model.safetensors").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["v000026"]


def test_a_version_that_cannot_be_written_leaves_nothing(tmp_path):
    def full(folder):
        write(folder)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        WeightFolders(tmp_path).publish(1, full)
    assert list(tmp_path.iterdir()) == []


def test_a_version_has_its_name_only_when_it_is_whole(tmp_path):
    class Killed(BaseException):
        pass

    def looked_at(folder):
        write(folder)
        assert [p.name for p in tmp_path.glob("v*")] == ["v000001"]
        raise Killed

    folders = WeightFolders(tmp_path)
    folders.publish(1, write)
    with pytest.raises(Killed):
        folders.publish(2, looked_at)
    assert [p.name for p in tmp_path.iterdir()] == ["v000001"]
    (tmp_path / ".v000002.partial").mkdir()  # as a process leaves it that cannot clean up any more
    (tmp_path / ".v000002.partial" / "half").write_text("x")
    published = folders.publish(2, write)
    assert [p.name for p in published.iterdir()] == ["model.safetensors"]


def test_a_half_written_version_of_a_killed_process_is_removed_and_nothing_else(tmp_path):
    for name in (".v000007.partial", "v000006", ".notes.partial", ".v2.partial.kept"):
        (tmp_path / name).mkdir()
    WeightFolders(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".notes.partial", ".v2.partial.kept", "v000006"]


def test_a_version_gets_its_name_in_one_step(tmp_path):
    written = []

    def look(folder):
        write(folder)
        written.append(folder.stat().st_ino)

    published = WeightFolders(tmp_path).publish(1, look)
    assert [published.stat().st_ino] == written  # the same folder, not a copy that grows under that name


def test_a_version_whose_file_lost_its_name_with_the_power_is_removed(tmp_path):
    folders = WeightFolders(tmp_path)
    folders.publish(1, write)
    lost = folders.publish(2, write)
    (lost / "model.safetensors").rename(lost / ".tmpeWRBik")  # the name under which safetensors writes
    (tmp_path / "v2_of_mine").mkdir()
    (tmp_path / "v2_of_mine" / ".tmpeWRBik").write_text("a person's own")
    WeightFolders(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v000001", "v2_of_mine"]


def test_safetensors_writes_under_the_name_that_is_looked_for(tmp_path):
    with pytest.raises(SafetensorError, match=r"/gone/\.tmp\w{6}\W"):
        save_file({"a": torch.zeros(1, dtype=torch.float32, device="cpu")}, tmp_path / "gone" / "a.safetensors")
