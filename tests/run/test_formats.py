"""What a run writes and reads again has the number of its format: with another one each reader refuses it by name."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from stored_runs import FORKABLE_STEPS, forkable_place
from verbatim.cli.main import main
from verbatim.cli.rollout_results import ResultFile, RolloutJob
from verbatim.config.schema import LoraConfig
from verbatim.core.errors import UsageError
from verbatim.core.formats import FORMATS, LINES
from verbatim.core.imports import search_beside
from verbatim.core.types import Trajectory, Turn
from verbatim.inspection.comparison.read_run import read_run
from verbatim.inspection.doctor import LogFile, detect_format, known_formats
from verbatim.inspection.viewer.columns import read_columns
from verbatim.inspection.viewer.run_view import RunView
from verbatim.logs.checkpoints import CheckpointStore, Origin, find_damage, read_loop_state, write_record
from verbatim.logs.checkpoints.origin import read_origin, write_origin
from verbatim.logs.checkpoints.ownership import require_ours
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.alarm_log import AlarmLog, read_alarms
from verbatim.logs.monitors.jsonl import refuse_other_log
from verbatim.logs.monitors.learning_curve import read_curve
from verbatim.logs.monitors.metrics_log import read_metrics
from verbatim.logs.monitors.trajectory_log import TrajectoryLog, read_evaluated, read_trajectories
from verbatim.logs.outcomes.files import OutcomeFolder, read_outcomes, read_records
from verbatim.models.adapters import read_adapter
from verbatim.models.loading import load_model
from verbatim.rollouts import TraceFolder
from verbatim.run.episode_log import Conditions, EpisodeLog
from verbatim.run.eval_models import EvalModel, find_models
from verbatim.run.evaluation.stored import read_evaluated_episodes
from verbatim.run.precision import PrecisionChoice, read_choices, write_choices
from verbatim.run.replay_data import read_step
from verbatim.run.result import read_result
from verbatim.run.summary import summary_of
from verbatim.trainer.lora import Adapters
from verbatim.trainer.optimizer_state import load_optimizer
from verbatim.trainer.progress import read_progress

pytestmark = [pytest.mark.slow, pytest.mark.realtime]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with every kind of file: those that this one had no cause to write are written by their writers."""
    with forkable_place(tmp_path_factory) as place:
        folder = place / "whole"
        write_choices(folder, [PrecisionChoice(key="trainer.dtype", dtype="float32", reason="it is faster")])
        write_origin(folder, Origin(run="/runs/a", step=1))
        write_record(folder / "module_folders.json", {"folders": [str(place)]})
        log = AlarmLog(folder / "alarms.jsonl")
        log.on_alarm(Alarm(name="stale", step=1, state="raised", message="m", cause="c", advice="a"))
        log.close()
        write_adapter(folder / "adapter", place / "model")
        write_lines(folder / "lines")
        yield folder


MODEL = EvalModel(label="m", fingerprint="f")


def write_lines(folder: Path) -> None:
    """What `export`, `eval --out`, `rollout --out` and a rollout with `trace_dir` write."""
    trajectory = Trajectory(example_id="x", turns=[Turn(prompt_ids=[1], completion_ids=[2])], env="e", reward=1.0)
    log = TrajectoryLog(folder / "exported.jsonl")
    log.write(1, trajectory)
    log.close()
    with EpisodeLog(folder / "episodes.jsonl", [MODEL]) as episodes:
        episodes.write(Conditions(model=MODEL, env="e", settings={}, digests={"x": "d"}), trajectory, True)
    with ResultFile(folder / "results.jsonl", {}) as results:
        results.write(RolloutJob(task="x", sample=0, digest="d", conversation={}), trajectory)
    trace = TraceFolder(folder).store(trajectory)
    assert trace is not None
    trace.rename(folder / "trace.json")


def write_adapter(folder: Path, model: Path) -> None:
    adapters = Adapters(LoraConfig(r=2), base=model, seed=0)
    adapters.begin(load_model(model, only_attention=False))
    adapters.save(None, folder)


def files_of(run: Path, kind: str) -> list[Path]:
    names = "lines/[!.]*" if kind == LINES else f"**/{kind}"
    return sorted(path for path in run.glob(names) if not path.is_symlink())


def test_lines_of_trajectories_are_written_by_four(run: Path):
    names = ["episodes.jsonl", "exported.jsonl", "results.jsonl", "trace.json"]
    assert [path.name for path in files_of(run, LINES)] == names


@pytest.mark.parametrize("kind", FORMATS)
def test_a_run_stamps_each_kind_of_its_files(run: Path, kind: str):
    assert files_of(run, kind)
    for path in files_of(run, kind):
        if path.suffix == ".parquet":
            found = int((pq.read_schema(path).metadata or {})[b"verbatim_format"])
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as opened:
                found = int((opened.metadata() or {})["verbatim_format"])
        else:
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            (found,) = {json.loads(line)["format"] for line in lines}
        assert found == FORMATS[kind], path


def with_number(path: Path, number: int | None) -> None:
    """The same file with another number, or none."""
    if path.suffix == ".parquet":
        metadata = {} if number is None else {"verbatim_format": str(number)}
        pq.write_table(pq.read_table(path, partitioning=None).replace_schema_metadata(metadata), path)
    elif path.suffix == ".safetensors":
        save_file(load_file(path), path, metadata=None if number is None else {"verbatim_format": str(number)})
    else:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        contents = [{name: value for name, value in json.loads(line).items() if name != "format"} for line in lines]
        numbered = [content if number is None else {"format": number, **content} for content in contents]
        path.write_text("".join(json.dumps(content) + "\n" for content in numbered))


def load_moments(folder: Path) -> None:
    model = torch.nn.Linear(1, 1)
    load_optimizer(torch.optim.AdamW(model.parameters()), model, folder)


def resumed(run: Path) -> OutcomeFolder:
    files = OutcomeFolder(run / "trajectories")
    files.write(9, [])
    marks = files.marks()
    with_number(run / "trajectories" / "step-000009.parquet", 9)
    written = (run / "trajectories" / "step-000009.parquet").read_bytes()
    files.restore(9, {**marks, "9": {"size": len(written), "crc32": zlib.crc32(written)}})
    return files


def examined(path: Path) -> object:
    """As `verbatim doctor` reads it."""
    file = LogFile(path)
    return list(detect_format(file, known_formats()).read(file))


NEWEST = f"checkpoints/step_{FORKABLE_STEPS:06d}"
READERS: dict[str, dict[str, Callable[[Path], object]]] = {
    "verbatim_run.json": {"ownership": require_ours},
    "precision.json": {"choices": read_choices},
    "module_folders.json": {"folders": lambda run: search_beside(run / "config.toml")},
    "forked_from.json": {"origin": read_origin},
    "metrics.jsonl": {
        "records": lambda run: list(read_metrics(run / "metrics.jsonl")),
        "curve": lambda run: read_curve(run / "metrics.jsonl"),
        "summary": lambda run: summary_of(run / "metrics.jsonl", {}),
        "result": lambda run: read_result(run, {}, lambda **_: None),
        "replay": lambda run: read_step(run, 1),
        "resume": lambda run: refuse_other_log(run / "metrics.jsonl"),
    },
    "alarms.jsonl": {
        "alarms": lambda run: read_alarms(run / "alarms.jsonl"),
        "resume": lambda run: refuse_other_log(run / "alarms.jsonl"),
    },
    "step-*.parquet": {
        "trajectory_outcomes": lambda run: list(read_outcomes(run / "trajectories")),
        "records": lambda run: list(read_records(run / "trajectories" / "step-000001.parquet")),
        "trajectories": lambda run: list(read_trajectories(run)),
        "evaluated": lambda run: list(read_evaluated(run)),
        "outcomes": lambda run: list(read_evaluated_episodes(run)),
        "replay": lambda run: read_step(run, 1),
        "index": lambda run: read_columns(run / "trajectories" / "step-000001.parquet", 1),
        "resume": resumed,
    },
    "manifest.json": {
        "damage": lambda run: find_damage(run / NEWEST),
        "latest": lambda run: CheckpointStore(run / "checkpoints").latest(),
        "logs": lambda run: CheckpointStore(run / "checkpoints").logs(FORKABLE_STEPS),
    },
    "orchestrator.json": {"state": lambda run: read_loop_state(run / NEWEST)},
    "trainer.json": {"progress": lambda run: read_progress(run / NEWEST / "trainer", {})},
    "optimizer*.safetensors": {"moments": lambda run: load_moments(run / NEWEST / "trainer")},
    "base_model.json": {"adapter": lambda run: read_adapter(run / "adapter")},
    "summary.json": {"evaluated model": lambda run: find_models([str(run)], lambda *_: None)},
    LINES: {
        "exported": lambda run: list(read_trajectories(run / "lines" / "exported.jsonl")),
        "examined": lambda run: examined(run / "lines" / "exported.jsonl"),
        "examined trace": lambda run: examined(run / "lines" / "trace.json"),
        "evaluation that goes on": lambda run: EpisodeLog(run / "lines" / "episodes.jsonl", [MODEL]),
        "rollout that goes on": lambda run: ResultFile(run / "lines" / "results.jsonl", {}),
    },
}


@pytest.mark.parametrize(("kind", "reader"), [(kind, reader) for kind in FORMATS for reader in READERS[kind]])
def test_each_reader_refuses_another_number_by_name(run: Path, tmp_path: Path, kind: str, reader: str):
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    for path in files_of(tmp_path / "run", kind):
        with_number(path, 9)
    name = r"lines/\w+\.jsonl?" if kind == LINES else re.escape(kind).replace(r"\*", ".*")
    reads = rf"this version of Verbatim reads format {FORMATS[kind]} of {re.escape(kind)}\. Another"
    expected = rf"{name}(:1)? has format 9; {reads}"
    with pytest.raises(UsageError, match=expected):
        READERS[kind][reader](tmp_path / "run")


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "manifest.json"])
def test_a_file_without_a_number_is_refused_too(run: Path, tmp_path: Path, kind: str):
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    for path in files_of(tmp_path / "run", kind):
        with_number(path, None)
    with pytest.raises(
        UsageError, match=f"has no format number; this version of Verbatim reads format {FORMATS[kind]} of"
    ):
        next(iter(READERS[kind].values()))(tmp_path / "run")


def test_a_manifest_without_a_number_is_a_damaged_one(run: Path, tmp_path: Path):
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    with_number(tmp_path / "run" / NEWEST / "manifest.json", None)
    assert "manifest.json has no format number" in str(find_damage(tmp_path / "run" / NEWEST))
    found = CheckpointStore(tmp_path / "run" / "checkpoints").latest()
    assert found is not None and found.step == FORKABLE_STEPS - 1


def test_the_page_and_a_comparison_tell_of_files_in_other_formats_and_show_the_rest(run: Path, tmp_path: Path):
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    for kind in ("metrics.jsonl", "alarms.jsonl", "step-*.parquet", "summary.json", "forked_from.json"):
        for path in files_of(tmp_path / "run", kind):
            with_number(path, 9)
    view = RunView(tmp_path / "run")
    view.read_all()
    told = " ".join(view.about()["problems"])
    for name in (
        "metrics.jsonl, byte 0,",
        "alarms.jsonl, byte 0,",
        "trajectories/step-000001.parquet",
        "forked_from.json",
    ):
        number = FORMATS["step-*.parquet"] if name.endswith(".parquet") else 1
        assert f"{name} has format 9; this version of Verbatim reads format {number} of" in told
    said = " ".join(read_run(tmp_path / "run").problems)
    for name in ("metrics.jsonl, byte 0,", "alarms.jsonl, byte 0,", "summary.json", "forked_from.json"):
        assert f"{name} has format 9; this version of Verbatim reads format 1 of" in said


@pytest.mark.parametrize(
    "kind",
    ["verbatim_run.json", "manifest.json", "orchestrator.json", "trainer.json", "metrics.jsonl", "step-*.parquet"],
)
def test_a_run_of_another_version_is_not_resumed(run: Path, tmp_path: Path, monkeypatch, capfd, kind: str):
    """The files are whole, and this version reads the next format of one kind."""
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    (tmp_path / "run" / "alarms.jsonl").unlink()
    kept = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    number = FORMATS[kind]
    monkeypatch.setitem(FORMATS, kind, number + 1)
    steps = str(FORKABLE_STEPS + 1)
    status = main(["rl", str(run.parent / "run.toml"), "--resume", str(tmp_path / "run"), "--max-steps", steps])
    assert status == 2
    said = capfd.readouterr()
    reads = f"this version of Verbatim reads format {number + 1} of {kind}. Another version wrote the file"
    assert f"has format {number}; {reads}" in said.err
    assert "Traceback" not in said.out + said.err
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == kept


@pytest.mark.parametrize("command", [["doctor"], ["export", "--out", "out.jsonl"]], ids=" ".join)
def test_commands_tell_of_another_format_in_a_sentence(run: Path, tmp_path: Path, monkeypatch, capfd, command):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    for path in files_of(tmp_path / "run", "step-*.parquet"):
        with_number(path, 9)
    assert main([command[0], "run", *command[1:]]) == 2
    said = capfd.readouterr()
    reads = f"this version of Verbatim reads format {FORMATS['step-*.parquet']}"
    assert f"step-000001.parquet has format 9; {reads}" in said.err
    assert "Traceback" not in said.out + said.err
