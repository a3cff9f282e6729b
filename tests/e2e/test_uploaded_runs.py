"""A run whose machine is lost goes on elsewhere, from its copy behind a URL."""

from __future__ import annotations

import importlib.util
import shutil

import pytest

from e2e.tiny_runs import LOTS, TOML, assert_ledger_adds_up, lines, train_lines, workplace
from faults.tiny_places import deterministic
from logs.uploads.s3_server import s3_bucket
from stored_runs import light_runs, tiny_model
from verbatim.cli.exit_status import FINISHED, STOPPED, USAGE
from verbatim.cli.main import main
from verbatim.logs.checkpoints import read_json
from verbatim.logs.uploads import RemoteFault, RemoteFolder

pytestmark = [pytest.mark.slow, pytest.mark.realtime]

TABLES = """
[checkpoint]
interval = 1
keep_last = 1
"""


@pytest.fixture
def place(tmp_path_factory):
    with workplace(tmp_path_factory.mktemp("uploaded"), {"lots": LOTS}) as folder, light_runs():
        text = TOML.format(model=tiny_model(tmp_path_factory))
        text = text.replace("[inference.torch]", "[inference.torch]\ndeterministic = true")
        (folder / "run.toml").write_text(text + 'import_path = "lots.Lots"\n' + TABLES)
        yield folder


def rl(url: str, *more: str) -> int:
    return main(["rl", "run.toml", "--checkpoint.upload-to", url, *more])


def lose(place) -> None:
    shutil.rmtree(place / "runs")


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.extras)])
def url(request, tmp_path):
    if request.param == "file":
        yield (tmp_path / "there").as_uri()
        return
    if importlib.util.find_spec("moto") is None:
        pytest.skip("the extra s3 is not installed")
    with s3_bucket() as bucket:
        yield bucket


def test_a_lost_machine_costs_nothing_that_was_uploaded(place, url, capsys):
    assert main(["rl", "run.toml", "--run-dir", "whole", "--max-steps", "4"]) == FINISHED
    assert rl(url, "--max-steps", "2") == FINISHED
    (name,) = RemoteFolder(f"{url}/run").folders()
    copied = RemoteFolder(f"{url}/run/{name}").files()
    assert {"final/model.safetensors", "summary.json", "checkpoints/step_000002/manifest.json"} <= copied.keys()
    kept = {path.name for path in (place / "runs" / "run" / name / "checkpoints").iterdir()}
    # That of step 1 is kept only if it was still being uploaded when that of step 2 was written.
    assert {file.split("/")[1] for file in copied if file.startswith("checkpoints/")} == kept
    lose(place)
    assert rl(url, "--max-steps", "4", "--resume") == FINISHED
    run = place / "runs" / "run" / name
    assert "continuing after step 2" in capsys.readouterr().out
    assert (place / "runs" / "run" / "latest").resolve() == run
    for file in ("final/model.safetensors", "checkpoints/step_000004/trainer/optimizer.safetensors"):
        assert (run / file).read_bytes() == (place / "whole" / file).read_bytes(), file
    own, other = (
        [(line["step"], deterministic(line["metrics"])) for line in train_lines(folder)]
        for folder in (run, place / "whole")
    )
    assert own == other and len(own) == 4
    assert_ledger_adds_up(run)
    (place / "runs" / "run" / "latest").unlink()
    assert rl(url, "--max-steps", "4", "--resume") == FINISHED, "the folder is there: nothing is downloaded over it"
    assert "checkpoints/step_000004/manifest.json" in RemoteFolder(f"{url}/run/{name}").files()


def test_a_folder_that_another_machine_has_overtaken_is_refused(place, tmp_path, capsys):
    url = (tmp_path / "there").as_uri()
    assert rl(url, "--max-steps", "1") == FINISHED
    shutil.copytree(place / "runs", place / "old", symlinks=True)
    assert rl(url, "--max-steps", "2", "--resume") == FINISHED
    lose(place)
    (place / "old").rename(place / "runs")
    assert rl(url, "--max-steps", "3", "--resume") == USAGE
    assert "holds a checkpoint of step 2" in capsys.readouterr().err


def test_what_cannot_be_uploaded_ends_with_a_failure_and_is_uploaded_by_a_resume(place, tmp_path, capsys, monkeypatch):
    url = (tmp_path / "there").as_uri()
    monkeypatch.setattr("verbatim.logs.uploads.uploads._PAUSES", (0.0, 0.0))
    with monkeypatch.context() as patched:

        def refused(self, local, name):
            raise RemoteFault(f"{self.url}/{name}", "the disk is full")

        patched.setattr(RemoteFolder, "put", refused)
        assert rl(url) == STOPPED
    said = capsys.readouterr().err
    assert "the disk is full" in said and "holds no checkpoint" in said and "is complete" in said
    assert rl(url, "--resume") == FINISHED
    (name,) = RemoteFolder(f"{url}/run").folders()
    assert "final/model.safetensors" in RemoteFolder(f"{url}/run/{name}").files()
    assert (
        len(lines(place / "runs" / "run" / name / "metrics.jsonl"))
        == read_json(place / "runs" / "run" / name / "summary.json")["steps"]
    )


def test_mistakes_are_refused_before_a_folder_is_made(place, tmp_path, capsys):
    assert rl("nothing://x") == USAGE
    assert "Protocol not known: nothing" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert rl((tmp_path / "file").as_uri()) == USAGE
    assert "cannot be written" in capsys.readouterr().err
    assert rl((tmp_path / "there").as_uri(), "--resume") == USAGE
    assert "there is no run to resume: neither" in capsys.readouterr().err
    assert not (place / "runs").exists()
    assert rl((tmp_path / "there").as_uri(), "--run-dir", "mine", "--max-steps", "1") == FINISHED
    shutil.rmtree(place / "mine")
    assert rl((tmp_path / "there").as_uri(), "--run-dir", "mine", "--max-steps", "1") == USAGE
    assert "already holds a run" in capsys.readouterr().err
