"""The checkpoint of the best evaluation stays, and people find it by its name."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from verbatim.config import load_config
from verbatim.core.errors import ConfigError, UsageError
from verbatim.logs.checkpoints import CheckpointStore, RunFolder, find_checkpoint, read_json

BEST = {"step": 20, "value": 0.75, "metric": "success", "mode": "max", "env": None}


def save(store: CheckpointStore, step: int, best: int | None = None) -> None:
    with store.writing(step, best=None if best is None else {**BEST, "step": best}) as folder:
        (folder / "weights").mkdir()
        (folder / "weights" / "model.safetensors").write_text(str(step))


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep_last=2)


def test_the_best_is_kept_as_long_as_it_is_the_best(store: CheckpointStore):
    for step, best in ((10, None), (20, 20), (30, 20), (40, 20), (50, 20), (60, 60), (70, 60)):
        save(store, step, best)
    assert store.steps() == [60, 70]
    for step in (80, 90, 100):
        save(store, step, 60)
    assert store.steps() == [60, 90, 100]
    assert store.best() == {**BEST, "step": 60}


def test_without_it_nothing_is_kept_for_it(store: CheckpointStore):
    for step, best in ((10, 10), (20, 10), (30, None), (40, None)):
        save(store, step, best)
    assert store.steps() == [30, 40]
    assert store.best() is None


def test_a_checkpoint_that_was_written_before_its_evaluation_is_marked_and_stays_whole(store, tmp_path):
    save(store, 0)
    store.mark_best(0, {**BEST, "step": 0})
    assert store.best() == {**BEST, "step": 0}
    assert find_checkpoint(tmp_path, "best").folder == store.folder / "step_000000"
    for step in (10, 20, 30):
        save(store, step, 0)
    assert store.steps() == [0, 20, 30]


def test_a_damaged_manifest_costs_only_what_it_says(store: CheckpointStore):
    save(store, 10, 10)
    save(store, 20, 10)
    (store.folder / "step_000020" / "manifest.json").write_text("{")
    assert store.best() == {**BEST, "step": 10}


# ---- by name


@pytest.fixture
def run(store: CheckpointStore, tmp_path: Path) -> Path:
    for step, best in ((10, None), (20, 20), (30, 20), (40, 20)):
        save(store, step, best)
    return tmp_path


@pytest.mark.parametrize(("which", "step"), [("latest", 40), ("best", 20), ("30", 30), ("030", 30)])
def test_a_checkpoint_is_found_by_what_people_call_it(run: Path, which: str, step: int):
    found = find_checkpoint(run, which)
    assert found.step == step
    assert (found.weights / "model.safetensors").read_text() == str(step)


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ("10", "has no checkpoint of step 10; there are checkpoints of steps 20, 30, 40"),
        ("last", "checkpoint 'last' of {run}: expected latest, best or a step; there are checkpoints of steps 20"),
        ("-1", "expected latest, best or a step"),
        ("", "expected latest, best or a step"),
        ("²", "expected latest, best or a step"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(run: Path, which: str, said: str):
    with pytest.raises(UsageError) as refused:
        find_checkpoint(run, which)
    assert said.format(run=run) in str(refused.value)


def test_no_run_and_a_run_without_a_best_are_refused(tmp_path: Path, store: CheckpointStore):
    with pytest.raises(UsageError, match=r"has no checkpoints; expected the folder of a run"):
        find_checkpoint(tmp_path / "nowhere", "best")
    with pytest.raises(UsageError, match="has no checkpoints"):
        find_checkpoint(tmp_path)
    save(store, 5)
    with pytest.raises(UsageError, match=r"set checkpoint.keep_best = \{\} .* there are checkpoints of step 5"):
        find_checkpoint(tmp_path, "best")


def test_a_damaged_one_is_not_used_and_the_latest_is_the_newest_whole_one(run: Path):
    (run / "checkpoints" / "step_000020" / "weights" / "model.safetensors").write_text("xx")
    (run / "checkpoints" / "step_000040" / "weights" / "model.safetensors").write_text("xx")
    with pytest.raises(UsageError, match=r"step_000020 is damaged: weights/model\.safetensors has a different SHA-256"):
        find_checkpoint(run, "best")
    assert find_checkpoint(run).step == 30


# ---- the link


@pytest.fixture
def folder(tmp_path: Path):
    (tmp_path / "run.toml").write_text('[model]\nname = "x"\n[[orchestrator.train.env]]\nid = "guess_number"\n')
    config = load_config(tmp_path / "run.toml", ["--run-dir", str(tmp_path / "mine")])
    with RunFolder.create(config, name="x", now=datetime(2026, 1, 31)) as folder:
        yield folder


def test_best_is_a_link_to_weights_that_moves_with_the_best_and_with_the_folder(folder: RunFolder, tmp_path: Path):
    store = CheckpointStore(folder.checkpoints)
    for step in (1, 2):
        save(store, step, step)
        folder.link_best(step)
        assert (folder.path / "best" / "model.safetensors").read_text() == str(step)
    folder.close()
    moved = folder.path.rename(tmp_path / "moved")
    assert (moved / "best" / "model.safetensors").read_text() == "2"
    assert sorted(path.name for path in moved.iterdir() if path.name.startswith((".", "best"))) == ["best"]


def test_a_link_is_removed_when_there_is_no_best_and_what_is_somebody_elses_stays(folder: RunFolder, caplog):
    folder.link_best(1)
    folder.link_best(None)
    assert not folder.best.is_symlink()
    folder.best.mkdir()
    (folder.best / "mine").write_text("x")
    folder.link_best(2)
    folder.link_best(None)
    assert (folder.best / "mine").read_text() == "x"
    assert "best could not be linked to the best checkpoint" in caplog.text


# ---- the keys


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ("[checkpoint]\nkeep_best = {}", "and this run has none; add [orchestrator.eval], or remove keep_best"),
        (
            '[orchestrator.eval]\n[checkpoint]\nkeep_best = { metric = "sucess" }',
            "checkpoint.keep_best.metric: found 'sucess', expected a metric of evaluations: success, success/low",
        ),
        ('[orchestrator.eval]\n[checkpoint]\nkeep_best = { mode = "most" }', "expected 'max' or 'min'"),
        (
            '[orchestrator.eval]\n[checkpoint]\nkeep_best = { env = "other" }',
            "checkpoint.keep_best.env: found 'other', expected an environment that is evaluated: guess_number",
        ),
        ('[orchestrator.eval]\nearly_stopping = { env = "other" }', "eval.early_stopping.env: found 'other'"),
        ("[orchestrator.eval]\nearly_stopping = { patience = 0 }", "expected greater than or equal to 1"),
        ("[orchestrator.eval]\nearly_stopping = { min_delta = -0.1 }", "expected greater than or equal to 0"),
        ("[orchestrator.eval]\nearly_stopping = { min_delta = nan }", "expected a finite number"),
        ("[orchestrator.eval]\nearly_stopping = { patients = 3 }", 'did you mean "patience"?'),
        ("[orchestrator.eval]\nearly_stopping = 3", "expected a table"),
    ],
)
def test_a_criterion_that_cannot_be_is_refused(tmp_path: Path, tables: str, said: str):
    file = tmp_path / "run.toml"
    file.write_text(f'[model]\nname = "x"\n[[orchestrator.train.env]]\nid = "guess_number"\n{tables}\n')
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    assert said in str(refused.value)


def test_the_environments_of_the_evaluation_are_the_ones_that_can_be_named(tmp_path: Path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\nname = "x"\n[[orchestrator.train.env]]\nid = "guess_number"\n'
        '[[orchestrator.eval.env]]\nid = "calculator"\nname = "sums"\n'
        '[checkpoint]\nkeep_best = { metric = "reward_part/right/mean", env = "sums" }\n'
    )
    assert load_config(file).checkpoint.keep_best.env == "sums"
    with pytest.raises(ConfigError, match="expected an environment that is evaluated: sums"):
        load_config(file, ["--checkpoint.keep-best.env", "guess_number"])


def test_the_manifest_still_has_what_it_had(store: CheckpointStore):
    save(store, 3)
    assert sorted(read_json(store.folder / "step_000003" / "manifest.json")) == ["files", "format", "logs", "step"]
