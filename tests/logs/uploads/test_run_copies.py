"""The copy of a run folder behind a URL: what is uploaded, in which order, and what a download makes of it."""

from __future__ import annotations

import importlib.util
import io
import threading
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileOpener

from logs.uploads.s3_server import s3_bucket
from verbatim.core.errors import RunStopped, UsageError
from verbatim.logs.checkpoints import CheckpointStore, find_damage
from verbatim.logs.uploads import RemoteFault, RemoteFolder, download_run, newest_run, newest_step, uploading
from verbatim.logs.uploads import uploads as module

has_s3 = pytest.mark.skipif(importlib.util.find_spec("moto") is None, reason="the extra s3 is not installed")


@pytest.fixture(params=["file", pytest.param("s3", marks=[has_s3, pytest.mark.extras, pytest.mark.realtime])])
def remote(request, tmp_path):
    if request.param == "file":
        yield RemoteFolder((tmp_path / "there").as_uri())
        return
    with s3_bucket() as url:
        yield RemoteFolder(f"{url}/somewhere")


def checkpoint(store: CheckpointStore, step: int) -> None:
    with store.writing(step) as folder:
        (folder / "weights").mkdir()
        (folder / "weights" / "model.safetensors").write_bytes(bytes([step]) * 1000)


@pytest.fixture
def run(tmp_path):
    """A run folder with two checkpoints, logs, and what is not copied."""
    folder = tmp_path / "20260131-142501"
    store = CheckpointStore(folder / "checkpoints")
    checkpoint(store, 1)
    checkpoint(store, 2)
    (folder / "config.toml").write_text("max_steps = 3\n")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    others = ("weights/v1/model.safetensors", "exchange/batch", "logs/orchestrator.log", "trajectories/step-1.parquet")
    for name in others:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "orchestrator.lock").write_text("17\n")
    (folder / ".summary.json.tmp").write_text("{")
    (folder / "best").symlink_to("checkpoints/step_000001/weights")
    (folder / "checkpoints" / "step_000003.damaged-1").mkdir()
    (folder / "checkpoints" / "step_000003.damaged-1" / "manifest.json").write_text("{}")
    return folder


COPIED = {
    "config.toml",
    "metrics.jsonl",
    "logs/orchestrator.log",
    "trajectories/step-1.parquet",
    *(f"checkpoints/step_00000{n}/{name}" for n in (1, 2) for name in ("weights/model.safetensors", "manifest.json")),
}


def test_a_copy_is_downloaded_as_it_was(run, remote, tmp_path):
    with uploading(run, remote) as uploads:
        uploads.checkpoint_written()
    assert uploads.step == 2 and uploads.failure is None
    assert remote.files() == {name: (run / name).stat().st_size for name in COPIED}
    target = tmp_path / "elsewhere" / "20260131-142501"
    assert download_run(remote, target) == 2
    assert {p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()} == COPIED
    for name in COPIED:
        assert (target / name).read_bytes() == (run / name).read_bytes()
    assert find_damage(target / "checkpoints" / "step_000002") is None
    assert (target / "config.toml").stat().st_mode & 0o777 == 0o600
    assert (target / "logs/orchestrator.log").stat().st_mode & 0o777 == 0o600


def test_only_what_has_changed_is_uploaded_again(run, remote, monkeypatch):
    sent, is_up = [], threading.Event()
    put = RemoteFolder.put

    def counted(self, local, name):
        put(self, local, name)
        sent.append(name)
        if name == "checkpoints/step_000002/manifest.json":
            is_up.set()

    monkeypatch.setattr(RemoteFolder, "put", counted)
    with uploading(run, remote) as uploads:
        uploads.checkpoint_written()
        is_up.wait()
        first = list(sent)
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3}\n')
        checkpoint(CheckpointStore(run / "checkpoints"), 3)  # keeps two: the first is removed
    sent = sent[len(first) :]
    assert set(first) == COPIED
    # Logs first, and each manifest after all other files of its checkpoint.
    assert first.index("metrics.jsonl") < first.index("checkpoints/step_000001/weights/model.safetensors")
    assert [name for name in first if name.startswith("checkpoints/")] == [
        "checkpoints/step_000001/weights/model.safetensors",
        "checkpoints/step_000001/manifest.json",
        "checkpoints/step_000002/weights/model.safetensors",
        "checkpoints/step_000002/manifest.json",
    ]
    assert sent == [
        "metrics.jsonl",
        "checkpoints/step_000003/weights/model.safetensors",
        "checkpoints/step_000003/manifest.json",
    ]
    assert not any(name.startswith("checkpoints/step_000001/") for name in remote.files())
    assert newest_step(remote.files()) == 3


def test_a_checkpoint_that_is_being_uploaded_is_not_removed(run, remote, monkeypatch):
    reached, go_on = threading.Event(), threading.Event()
    put = RemoteFolder.put

    def slow(self, local, name):
        if name == "checkpoints/step_000002/weights/model.safetensors":
            reached.set()
            go_on.wait()
        put(self, local, name)

    monkeypatch.setattr(RemoteFolder, "put", slow)
    with uploading(run, remote) as uploads:
        store = CheckpointStore(run / "checkpoints", keep_last=1, held=uploads.held)
        uploads.checkpoint_written()
        reached.wait()
        checkpoint(store, 3)
        assert store.steps() == [2, 3]
        go_on.set()
    checkpoint(store, 4)
    assert store.steps() == [4]


def test_a_checkpoint_that_is_gone_has_no_manifest_in_the_copy(run, remote, monkeypatch):
    put = RemoteFolder.put

    def put_while_removed(self, local, name):
        if name == "config.toml":
            CheckpointStore(run / "checkpoints").remove(1)
        put(self, local, name)

    monkeypatch.setattr(RemoteFolder, "put", put_while_removed)
    with uploading(run, remote):
        pass
    assert not any("step_000001" in name for name in remote.files())
    assert newest_step(remote.files()) == 2


class Broken(RemoteFolder):
    """Fails while `faults` is not empty."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.faults: list[str] = []

    def put(self, local: Path, name: str) -> None:
        if self.faults and name == "metrics.jsonl":
            raise RemoteFault(f"{self.url}/{name}", self.faults.pop())
        super().put(local, name)


@pytest.fixture
def broken(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PAUSES", (0.0, 0.0))
    return Broken((tmp_path / "there").as_uri())


def test_a_fault_that_passes_costs_nothing(run, broken):
    broken.faults = ["the network is down"] * 2
    with uploading(run, broken):
        pass
    assert set(broken.files()) == COPIED


def test_a_copy_that_stays_incomplete_is_said(run, broken, caplog):
    broken.faults = ["the network is down"] * 1000
    with (
        pytest.raises(RunStopped, match=r"metrics\.jsonl: the network is down\. The copy in .* holds no checkpoint"),
        uploading(run, broken),
    ):
        pass
    assert newest_step(broken.files()) is None
    # The error of the run itself is not hidden by that of the copy.
    with pytest.raises(ValueError, match="the run's own"), uploading(run, broken):
        raise ValueError("the run's own")
    assert "the network is down" in caplog.text


def test_what_reads_back_differently_is_no_copy(run, tmp_path, monkeypatch):
    write = LocalFileOpener.write
    monkeypatch.setattr(LocalFileOpener, "write", lambda self, data: write(self, data[:-1]))
    with pytest.raises(RemoteFault, match="reads back differently"):
        RemoteFolder((tmp_path / "there").as_uri()).put(run / "metrics.jsonl", "metrics.jsonl")


class EndsHalfWay(type(Path())):
    """A file whose second block cannot be read."""

    def open(self, *_args, **_options):
        class Source(io.BytesIO):
            def read(self, size=-1):
                if self.tell():
                    raise KeyboardInterrupt
                return super().read(4)

        return Source(Path(str(self)).read_bytes())


def test_a_file_that_is_being_written_keeps_its_old_content(run, remote):
    remote.put(run / "config.toml", "config.toml")
    with pytest.raises(KeyboardInterrupt):
        remote.put(EndsHalfWay(run / "metrics.jsonl"), "config.toml")
    assert remote.files() == {"config.toml": (run / "config.toml").stat().st_size}


def test_the_newest_run_with_a_checkpoint(run, remote):
    assert newest_run(remote) is None
    for name in ("20260101-000000", "20260102-000000"):
        with uploading(run, remote.below(name)):
            pass
    remote.below("20260103-000000").put(run / "config.toml", "config.toml")
    assert newest_run(remote) == "20260102-000000"
    with pytest.raises(UsageError, match="it holds no complete checkpoint"):
        download_run(remote.below("20260103-000000"), run.with_name("new"))


def test_a_name_that_leaves_the_folder_is_refused(run, remote, monkeypatch):
    with uploading(run, remote):
        pass
    files = {**remote.files(), "../../evil": 1}
    monkeypatch.setattr(RemoteFolder, "files", lambda self: files)
    with pytest.raises(UsageError, match="would lie outside the run folder"):
        download_run(remote, run.with_name("new"))
    assert not run.with_name("new").exists()


def test_refused_urls(tmp_path):
    with pytest.raises(UsageError, match=r"is not a URL; expected for example s3://bucket/runs or file:///"):
        RemoteFolder("runs")
    with pytest.raises(UsageError, match=r"cannot be used: Protocol not known: nothing"):
        RemoteFolder("nothing://x")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be written: .*; name an existing bucket or folder"):
        RemoteFolder((tmp_path / "file" / "below").as_uri()).check_writable()


@has_s3
@pytest.mark.extras
@pytest.mark.realtime
def test_a_missing_bucket_is_refused_and_not_made():
    with s3_bucket() as url:
        with pytest.raises(UsageError, match="cannot be written"):
            RemoteFolder(f"{url}-else/runs").check_writable()
        RemoteFolder(url).check_writable()
        assert RemoteFolder(url).files() == {}


def test_an_untested_scheme_is_said(caplog):
    RemoteFolder("memory://runs").warn_if_untested()
    assert "uploads to memory:// are not tested; tested are file, s3" in caplog.text
