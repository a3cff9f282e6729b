"""A run folder may come from anybody: what lies elsewhere is never shown, and no file of it ends a command."""

import json
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from viewer_runs import PAGE, make_run, read, trained, trajectory

from verbatim.cli.main import main
from verbatim.core.disk import is_inside, open_regular
from verbatim.core.errors import CheckpointError, UsageError
from verbatim.inspection.comparison.read_run import read_run
from verbatim.inspection.viewer.export import export
from verbatim.inspection.viewer.run_state import config_text, read_config, read_state, summary_text
from verbatim.logs.checkpoints.json_files import read_json
from verbatim.logs.monitors.trajectory_log import EVALUATIONS, read_evaluated
from verbatim.run.evaluation.stored import read_evaluated_episodes

STEPS = {1: [trained(trajectory("a")), trained(trajectory("b"))]}
SECRET = "zqsecret"
NAMES = (
    "summary.txt",
    "summary.json",
    "config.toml",
    "metrics.jsonl",
    "alarms.jsonl",
    "forked_from.json",
    "logs/orchestrator.log",
    "model/tokenizer.json",
    "model/tokenizer_config.json",
    "model/chat_template.jinja",
)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Files outside of the run, each of them one that would be shown."""
    folder = tmp_path / "elsewhere"
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        text = {
            ".toml": f'name = "{SECRET}"',
            ".jsonl": json.dumps({"step": 1, "name": SECRET, SECRET: 1.0}) + "\n",
            ".json": json.dumps({SECRET: 1, "chat_template": SECRET}),
        }.get(Path(name).suffix, SECRET)
        (folder / name).write_text(text)
    return folder


def linked(run: Path, elsewhere: Path) -> None:
    """Each file that is read of a run is a link that leads out of it."""
    for name in NAMES:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(elsewhere / name)


def test_links_that_lead_elsewhere_are_not_followed(tmp_path: Path, elsewhere: Path):
    run = tmp_path / "run"
    make_run(run, STEPS)
    linked(run, elsewhere)
    assert summary_text(run) is None
    assert SECRET not in config_text(run)
    assert read_config(run) == {}
    assert SECRET not in str(read_state(run))
    view = read(run)
    view.read_all()
    shown = json.dumps([view.about(), view.metrics(None), view.config(), view.summary(), view.facets()], default=str)
    assert SECRET not in shown
    page = tmp_path / "page.html"
    export([view], PAGE, page, filters={}, most=100)
    assert SECRET not in page.read_text()
    compared = read_run(run)
    assert SECRET not in str(compared) and "metrics.jsonl cannot be read" in " ".join(compared.problems)
    with pytest.raises(CheckpointError):
        read_json(run / "forked_from.json")


def test_a_trajectory_file_that_is_a_link_is_not_in_the_table(tmp_path: Path):
    make_run(tmp_path / "other", STEPS)
    make_run(tmp_path / "run", STEPS)
    count = len(list((tmp_path / "run" / "trajectories").iterdir()))
    for file in list((tmp_path / "run" / "trajectories").iterdir()):
        file.unlink()
        file.symlink_to(tmp_path / "other" / "trajectories" / file.name)
    assert count
    view = read(tmp_path / "run")
    view.read_all()
    assert view.about()["num_trajectories"] == 0
    assert "is reached by a link, which is not followed" in view.about()["problems"][0]
    (tmp_path / "run" / "trajectories").rename(tmp_path / "was")
    (tmp_path / "run" / "trajectories").symlink_to(tmp_path / "other" / "trajectories")
    view = read(tmp_path / "run")
    view.read_all()
    assert view.about()["num_trajectories"] == 0
    assert len([told for told in view.about()["problems"] if "by a link" in told]) == count


LINKED = {
    "the folder": lambda run, other: run.rename(run.with_name("was")) and run.symlink_to(other),
    "a file": lambda run, other: [_swapped(file, other / file.name) for file in list(run.iterdir())],
    "a pipe": lambda run, other: [(file.unlink(), os.mkfifo(file)) for file in list(run.iterdir())],
}


def _swapped(file: Path, other: Path) -> None:
    file.unlink()
    file.symlink_to(other)


@pytest.mark.parametrize("how", LINKED)
@pytest.mark.parametrize(
    "command",
    [
        ["doctor", "run"],
        ["export", "run", "--out", "out.jsonl"],
        ["rl", "--replay", "1", "--run-dir", "run"],
    ],
    ids=" ".join,
)
def test_trajectories_that_lie_elsewhere_are_refused_in_a_sentence(tmp_path: Path, monkeypatch, capfd, command, how):
    monkeypatch.chdir(tmp_path)
    secret = trajectory("a", example_id=SECRET)
    make_run(tmp_path / "other", {1: [trained(secret)]})
    make_run(tmp_path / "run", STEPS)
    LINKED[how](tmp_path / "run" / "trajectories", tmp_path / "other" / "trajectories")
    assert main(command) == 2
    said = capfd.readouterr()
    assert SECRET not in said.out + said.err
    place = r"run/trajectories" + ("" if how == "the folder" else r"/step-000001\.parquet")
    what = "is not a regular file" if how == "a pipe" else "is a link, which is not followed"
    assert re.search(rf"{place} {what}", said.err)
    assert not (tmp_path / "out.jsonl").exists()


def test_a_folder_of_trajectories_that_was_typed_is_read_wherever_it_leads(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "other", STEPS)
    (tmp_path / "named").symlink_to(tmp_path / "other" / "trajectories")
    assert main(["export", "named", "--out", "out.jsonl"]) == 0
    (tmp_path / "latest").symlink_to(tmp_path / "other")
    assert main(["export", "latest", "--out", "again.jsonl"]) == 0
    assert (tmp_path / "out.jsonl").read_text() == (tmp_path / "again.jsonl").read_text() != ""


def test_evaluations_that_lie_elsewhere_are_refused(tmp_path: Path):
    make_run(tmp_path / "run", STEPS)
    (tmp_path / "run" / EVALUATIONS).symlink_to(tmp_path)
    for reads in (read_evaluated_episodes, read_evaluated):
        with pytest.raises(UsageError, match=rf"run/{EVALUATIONS} is a link, which is not followed"):
            list(reads(tmp_path / "run"))


def test_pipes_and_devices_are_neither_waited_for_nor_read(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        open_regular(Path("/dev/zero"))
    (tmp_path / "file").write_text("x")
    assert is_inside(tmp_path, tmp_path / "file")
    assert not is_inside(tmp_path / "file", tmp_path / "file")
    assert not is_inside(tmp_path, tmp_path / "pipe")


def damaged(file: Path, **columns: pa.Array) -> None:
    """The file again, with other columns in the place of some."""
    table = pq.read_table(file, partitioning=None)
    for name, column in columns.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, column)
    pq.write_table(table.replace_schema_metadata(pq.read_schema(file).metadata), file)


DEEP = "[" * 200_000 + "]" * 200_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("messages", DEEP),
        ("info", DEEP),
        ("tools", DEEP),
        ("messages", "5"),
        ("messages", None),
        ("info", "[]"),
        ("tools", "{"),
        ("turns", None),
        ("turns", 5),
        ("turns", "x"),
        ("turns", [1]),
        ("turns", {"a": 1}),
        ("turns", [{"path": 1}]),
        ("flags", "x"),
        ("reward", "x"),
        ("step", "x"),
        ("step", None),
    ],
)
@pytest.mark.parametrize(
    "command", [["doctor"], ["export", "--out", "out.jsonl"], ["view", "--export", "page.html"]], ids=" ".join
)
def test_hostile_columns_are_told_in_a_sentence(tmp_path: Path, monkeypatch, capfd, command, name, value):
    monkeypatch.chdir(tmp_path)
    make_run(Path("run"), STEPS)
    (file, *_) = sorted(Path("run", "trajectories").iterdir())
    table = pq.read_table(file, partitioning=None)
    damaged(file, **{name: pa.array([value] * table.num_rows)})
    status = main([command[0], "run", *command[1:]])
    said = capfd.readouterr()
    assert status in (0, 1, 2)
    assert "Traceback" not in said.out + said.err
