"""Folders through an object store: whole, once for each node, and by digest."""

import hashlib
import json
import os

import numpy as np
import pytest

from run.cluster.fake_ray import FakeRay, Lost
from verbatim.core.errors import UsageError
from verbatim.logs.checkpoints import find_damage, write_manifest
from verbatim.run.cluster.folders import PART, bring, ship, write
from verbatim.run.cluster.node_folder import NodeFolder
from verbatim.run.cluster.shipments import Shipments


def published(root, name="weights/v000001", content=b"abc"):
    folder = root / name
    (folder / "deep").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    (folder / "deep" / "empty.txt").write_bytes(b"")
    return folder


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_arrives_whole_and_its_digest_is_that_of_names_sizes_and_contents(tmp_path):
    ray = FakeRay()
    published(tmp_path / "sender")
    shipped = ship(ray, tmp_path / "sender", "weights/v000001")
    folder = bring(ray, shipped, tmp_path / "node")
    assert folder == tmp_path / "node" / "weights" / "v000001"
    assert contents(folder) == {"model.safetensors": b"abc", "deep/empty.txt": b""}
    assert shipped.num_bytes == 3
    expected = json.dumps(["deep/empty.txt", 0]).encode() + json.dumps(["model.safetensors", 3]).encode() + b"abc"
    assert shipped.digest == hashlib.sha256(expected).hexdigest()


@pytest.mark.slow
def test_large_files_travel_in_parts(tmp_path):
    ray = FakeRay()
    content = np.random.default_rng(0).integers(0, 255, 2 * PART + 5, dtype=np.uint8).tobytes()
    published(tmp_path / "sender", content=content)
    shipped = ship(ray, tmp_path / "sender", "weights/v000001")
    assert [len(ray.get(part)) for part in shipped.files["model.safetensors"]] == [PART, PART, 5]
    assert contents(bring(ray, shipped, tmp_path / "node"))["model.safetensors"] == content


def test_a_node_that_has_the_folder_fetches_nothing_and_one_with_other_weights_of_that_name_does(tmp_path):
    ray = FakeRay()
    published(tmp_path / "sender")
    first = ship(ray, tmp_path / "sender", "weights/v000001")
    bring(ray, first, tmp_path / "node")
    ray.objects.clear()
    assert contents(bring(ray, first, tmp_path / "node"))["model.safetensors"] == b"abc"
    (tmp_path / "sender" / "weights" / "v000001" / "model.safetensors").write_bytes(b"other")
    again = ship(ray, tmp_path / "sender", "weights/v000001")
    assert again.digest != first.digest
    assert contents(bring(ray, again, tmp_path / "node"))["model.safetensors"] == b"other"


def test_the_sending_node_has_it_already(tmp_path):
    ray = FakeRay()
    published(tmp_path)
    shipped = ship(ray, tmp_path, "weights/v000001")
    ray.objects.clear()
    assert bring(ray, shipped, tmp_path) == tmp_path / "weights" / "v000001"


def test_entries_can_be_left_out(tmp_path):
    ray = FakeRay()
    published(tmp_path)
    assert set(ship(ray, tmp_path, "weights/v000001", leave_out=["deep"]).files) == {"model.safetensors"}


def test_a_lost_object_leaves_no_folder(tmp_path):
    ray = FakeRay()
    published(tmp_path / "sender")
    shipped = ship(ray, tmp_path / "sender", "weights/v000001")
    ray.objects.clear()
    with pytest.raises(Lost):
        bring(ray, shipped, tmp_path / "node")
    assert not (tmp_path / "node" / "weights" / "v000001").exists()


@pytest.mark.parametrize(
    ("base", "expected"), [("{sender}/warm_start", "{node}/warm_start"), ("org/model", "org/model"), ("/m", "/m")]
)
def test_an_adapter_names_its_base_in_the_run_folder_of_the_node(tmp_path, base, expected):
    ray, places = FakeRay(), {"sender": tmp_path / "sender", "node": tmp_path / "node"}
    folder = published(places["sender"])
    about = {"base_model_name_or_path": base.format(**places), "r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    shipped = ship(ray, places["sender"], "weights/v000001")
    found = json.loads((bring(ray, shipped, places["node"]) / "adapter_config.json").read_text())
    assert found == {"base_model_name_or_path": expected.format(**places), "r": 8}


def test_an_adapter_in_a_checkpoint_stays_as_its_manifest_says(tmp_path):
    ray, sender = FakeRay(), tmp_path / "sender"
    folder = published(sender, "checkpoints/step_000001")
    (folder / "weights").mkdir()
    about = json.dumps({"base_model_name_or_path": str(sender / "warm_start")}).encode()
    (folder / "weights" / "adapter_config.json").write_bytes(about)
    write_manifest(folder, {"step": 1})
    found = bring(ray, ship(ray, sender, "checkpoints/step_000001"), tmp_path / "node")
    assert (found / "weights" / "adapter_config.json").read_bytes() == about and find_damage(found) is None


def test_a_folder_that_is_missing_is_not_shipped_empty(tmp_path):
    with pytest.raises(FileNotFoundError, match="weights/v000001"):
        ship(FakeRay(), tmp_path, "weights/v000001")


def test_a_run_ships_a_folder_once_and_again_once_its_objects_are_lost(tmp_path):
    ray = FakeRay()
    folder = published(tmp_path)
    shipments = Shipments(ray, tmp_path)
    assert shipments.of(folder) is shipments.of(folder)
    number = len(ray.objects)
    shipments.forget(folder)
    shipments.of(folder)
    assert len(ray.objects) == 2 * number


def test_only_the_newest_two_folders_stay_in_the_store(tmp_path):
    ray, folders = FakeRay(), [published(tmp_path, f"weights/v00000{n}") for n in range(3)]
    shipments = Shipments(ray, tmp_path)
    first = shipments.of(folders[0])
    for folder in folders[1:]:
        shipments.of(folder)
    assert shipments.of(folders[2]) is shipments.of(folders[2])
    assert shipments.of(folders[0]) is not first


def test_files_of_a_shipped_folder_can_be_written_anywhere(tmp_path):
    ray = FakeRay()
    published(tmp_path / "sender")
    shipped = ship(ray, tmp_path / "sender", "weights/v000001")
    (tmp_path / "partial").mkdir()
    write(ray, shipped, tmp_path / "partial", tmp_path)
    assert contents(tmp_path / "partial") == contents(tmp_path / "sender" / "weights" / "v000001")


def test_the_last_actor_of_a_node_removes_its_folder_and_the_next_run_those_of_killed_ones(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, second = NodeFolder("one", "node-a"), NodeFolder("one", "node-a")
    other = NodeFolder("one", "node-b")
    assert first.path == second.path != other.path
    (first.path / "weights").mkdir()
    first.leave()
    assert (second.path / "weights").is_dir()
    second.leave()
    assert not second.path.exists() and other.path.exists()
    left = other.path.with_name("killed-node-a")  # nobody holds it
    left.mkdir()
    (left / ".held").touch()
    NodeFolder("two", "node-a").leave()
    assert not left.exists() and other.path.exists()
    other.leave()


def test_a_folder_that_no_actor_made_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    held = NodeFolder("one", "node-a")
    other = held.path.with_name("somebodys")
    other.mkdir()
    NodeFolder("two", "node-a").leave()
    assert list(other.iterdir()) == []
    held.leave()


def test_a_link_in_place_of_the_parent_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"verbatim-cluster-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is not a folder of this user"):
        NodeFolder("one", "node-a")
    assert list((tmp_path / "elsewhere").iterdir()) == []
