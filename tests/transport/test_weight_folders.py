"""Published weights are whole, and what a killed process left never hides them."""

import pytest

from verbatim.transport import WeightFolders


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
