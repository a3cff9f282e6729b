"""A file of a run folder is damaged: the resume says what, goes on where it can, and comes to the same end."""

from __future__ import annotations

import contextlib
import io
import random
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from campaigns import sized
from e2e.tiny_runs import train_lines, workplace
from faults.lost_power import after_loss
from faults.recorded_runs import MODULES, STEPS, Recorded, left_over, run_of, sampled, type_, what_differs
from verbatim.cli.main import main
from verbatim.logs.checkpoints import read_json

pytestmark = [pytest.mark.slow, pytest.mark.realtime]


@contextlib.contextmanager
def killed_after(run: Recorded, count: int, place: Path) -> Iterator[None]:
    """In the current directory the run was killed after so many operations."""
    place.mkdir()
    after_loss(run.ops[:count], "all", random.Random(0)).write(place)
    with workplace(place, MODULES):
        (place / "run.toml").write_text(run.toml)
        yield


def killed_after_step_2(run: Recorded, place: Path) -> contextlib.AbstractContextManager[None]:
    """Right after the checkpoint of this step."""
    return killed_after(run, run.after(2), place)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def torn(path: Path) -> None:
    """Cut behind an equals sign: what is left cannot be read, wherever the middle is."""
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"=", len(content) // 2) + 1])


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def binary(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size or 100))


def half_a_letter(path: Path) -> None:
    path.write_bytes(path.read_bytes() + "é".encode()[:1])


def flip(path: Path) -> None:
    """One bit in the middle."""
    content = bytearray(path.read_bytes() or b"x")
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def deep(path: Path) -> None:
    path.write_text("[" * 100_000)


def other_types(path: Path) -> None:
    path.write_text("model = [3]\n" if path.suffix == ".toml" else '{"step": "x", "files": 3, "logs": 1}\n')


def folder_instead(path: Path) -> None:
    remove(path)
    path.mkdir()


DAMAGES = (remove, empty, cut, zeros, binary, half_a_letter, flip, deep, other_types, folder_instead)
NEWEST = "checkpoints/step_000002"
IN_CHECKPOINT = (
    "manifest.json",
    "config.toml",
    "orchestrator.json",
    "easy_examples.jsonl",
    "trainer/trainer.json",
    "trainer/optimizer.safetensors",
    "weights/model.safetensors",
    "weights/config.json",
    "weights/tokenizer.json",
    "weights/tokenizer_config.json",
)
TRAJECTORIES = "trajectories/step-000001.parquet"
LOGS = ("metrics.jsonl", TRAJECTORIES)
FILES = (
    "config.toml",
    *LOGS,
    *(f"{NEWEST}/{name}" for name in IN_CHECKPOINT),
    "weights/v000002/model.safetensors",
    "orchestrator.lock",
)
NOT_READ = ("weights/v000002/model.safetensors", "orchestrator.lock")
SHORT: list[tuple[str, Callable[[Path], None]]] = list(
    dict.fromkeys(
        [
            ("config.toml", binary),
            ("config.toml", remove),
            ("metrics.jsonl", zeros),
            (TRAJECTORIES, cut),
            (f"{NEWEST}/manifest.json", deep),
            (f"{NEWEST}/weights/model.safetensors", flip),
            ("orchestrator.lock", binary),
            *((name, DAMAGES[3 * number % len(DAMAGES)]) for number, name in enumerate(FILES)),
        ]
    )
)
"""Every file, and every damage."""


def what_went_wrong(name: str, damage: Callable[[Path], None], run: Recorded) -> str | None:
    folder = run_of(Path())
    before = sampled(folder)
    size = (folder / name).stat().st_size
    damage(folder / name)
    status, said = type_("--resume")
    if "Traceback" in said:
        return f"a traceback: {said}"
    if name == "orchestrator.lock" and damage is folder_instead:
        return None if status == 2 and "orchestrator.lock cannot be opened: Is a directory; remove" in said else said
    if status != 0:
        return f"status {status}: {said}"
    told = said.count(f"{folder.name}/{name} ") + said.count(f"{folder.name}/{NEWEST} is damaged")
    if name == TRAJECTORIES and damage is remove:
        told = said.count(f"{folder.name}/trajectories: the file of step 1 is missing")
    harmless = name in NOT_READ or (name == "config.toml" and damage is flip)  # perhaps another value of some key
    harmless |= size == 0 and damage in (empty, cut, zeros)
    harmless |= name in LOGS and damage is half_a_letter  # behind the checkpoint: of a step that is done again
    if not harmless and not told:
        return f"the damage was not told: {said}"
    if (folder / "final" / "model.safetensors").read_bytes() != run.weights:
        return "the weights are others"
    if left_over(folder):
        return f"left over: {left_over(folder)}"
    steps = [line["step"] for line in train_lines(folder)]
    if steps[-1] != STEPS or steps != sorted(set(steps)):
        return f"steps {steps}"
    if name != "metrics.jsonl" and steps != list(range(1, STEPS + 1)):
        return f"steps {steps}"
    if name != TRAJECTORIES and sampled(folder) != run.trajectories:
        return "the trajectories are others"
    return None if set_of(sampled(folder)) <= set_of([*before, *run.trajectories]) else "trajectories that never were"


def set_of(trajectories: list[tuple[int, str, list[int]]]) -> set[str]:
    return set(map(str, trajectories))


@pytest.mark.campaign
def test_a_damaged_file_is_told_and_the_run_comes_to_the_same_end(plain: Recorded, tmp_path: Path, campaign):
    row, wrong = campaign("damaged files of a run"), []
    for name, damage in sized(SHORT, [(name, damage) for name in FILES for damage in DAMAGES]):
        with killed_after_step_2(plain, tmp_path / f"{name.replace('/', '_')}-{damage.__name__}"):
            fault = what_went_wrong(name, damage, plain)
        row.add(wrong=fault is not None)
        wrong += [f"{name}, {damage.__name__}: {fault}"] if fault else []
    assert wrong == []


def test_the_short_part_damages_every_file_and_in_every_way():
    assert len(SHORT) >= 20
    assert {name for name, _ in SHORT} == set(FILES) and {damage for _, damage in SHORT} == set(DAMAGES)


def test_a_resume_that_checks_nothing_is_found(plain: Recorded, tmp_path: Path, monkeypatch):
    """The campaign can fail."""
    monkeypatch.setattr("verbatim.logs.checkpoints.store.find_damage", lambda folder: None)
    with killed_after_step_2(plain, tmp_path / "place"):
        assert what_went_wrong(f"{NEWEST}/weights/model.safetensors", flip, plain) is not None


def test_a_run_without_a_whole_checkpoint_is_refused_and_says_so(plain: Recorded, tmp_path: Path):
    with killed_after_step_2(plain, tmp_path / "place"):
        folder = run_of(Path())
        for checkpoint in (folder / "checkpoints").iterdir():
            flip(checkpoint / "weights" / "model.safetensors")
        status, said = type_("--resume")
    assert status == 2
    assert "every checkpoint of this run is damaged:" in said
    assert said.count("weights/model.safetensors has a different SHA-256 than when it was written") >= 2
    assert "start a new run in another folder, without --resume" in said


def test_a_checkpoint_that_was_damaged_is_kept_aside_and_written_again(plain: Recorded, tmp_path: Path):
    with killed_after_step_2(plain, tmp_path / "place"):
        folder = run_of(Path())
        cut(folder / NEWEST / "orchestrator.json")
        assert type_("--resume")[0] == 0
        names = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert names == ["step_000002", "step_000002.damaged-1", "step_000003"]


def test_a_run_folder_that_was_copied_without_its_logs_goes_on_and_says_so_once(plain: Recorded, tmp_path: Path):
    with killed_after_step_2(plain, tmp_path / "place"):
        folder = run_of(Path())
        (folder / "metrics.jsonl").unlink()
        shutil.rmtree(folder / "trajectories")
        status, said = type_("--resume")
        assert status == 0
        assert said.count("metrics.jsonl is missing; 0 of 2 records up to step 2 are left, none of steps 1-2") == 1
        assert said.count("trajectories: the files of steps 1-2 are missing") == 1
        assert [line["step"] for line in train_lines(folder)] == [3]
        assert {step for step, *_ in sampled(folder)} == {3}
        assert read_json(folder / "summary.json")["steps_missing_in_log"] == 2
        assert type_("--resume")[1].count("is missing") == 0


def test_a_prepared_model_that_is_damaged_before_the_first_checkpoint_is_made_again(prepared: Recorded, tmp_path: Path):
    """Built, then warm-started; killed before the first checkpoint."""
    opened = next(n for n, op in enumerate(prepared.ops) if op[0] == "add" and op[2] == "metrics.jsonl")
    with killed_after(prepared, opened, tmp_path / "place"):
        folder = run_of(Path())
        assert (folder / "model").is_dir()
        assert not list((folder / "checkpoints").iterdir())
        flip(folder / "warm_start" / "model.safetensors")
        cut(folder / "model" / "tokenizer.json")
        status, said = type_("--resume", str(folder))  # `latest` names a run with its first checkpoint
        assert status == 0
        assert (
            "warm_start is damaged: model.safetensors has a different SHA-256 than when it was written; it is" in said
        )
        assert "model is damaged: tokenizer.json has " in said
        assert {path.name for path in folder.glob("*.damaged-*")} == {"warm_start.damaged-1", "model.damaged-1"}
        assert what_differs(folder, prepared) is None


def test_the_damaged_configuration_that_was_typed_names_its_copy(plain: Recorded, tmp_path: Path):
    """`verbatim rl FOLDER/config.toml --resume FOLDER` is what a run that was stopped says how to go on."""
    with killed_after_step_2(plain, tmp_path / "place"):
        folder = run_of(Path())
        stored = folder / "config.toml"
        for damage in (torn, binary, other_types):
            damage(stored)
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                assert main(["rl", str(stored), "--resume", str(folder)]) == 2
            command = said.getvalue().rpartition("to restore it:  ")[2]
            assert command == f"cp {folder / NEWEST / 'config.toml'} {stored}\n"
        subprocess.run(shlex.split(command), check=True)
        assert main(["rl", str(stored), "--resume", str(folder)]) == 0
        assert what_differs(folder, plain) is None


def test_a_damaged_configuration_without_a_copy_says_how_to_write_it_anew(plain: Recorded, tmp_path: Path):
    with killed_after_step_2(plain, tmp_path / "place"):
        folder = run_of(Path())
        shutil.rmtree(folder / "checkpoints")
        (folder / "config.toml").write_bytes(b"\xff\xfe")
        status, said = type_("--resume")
        assert status == 2
        stored = (folder / "config.toml").resolve()
        assert f"{stored}, the run's stored configuration, is damaged: it is not valid TOML" in said
        assert f"verbatim config FILE > {stored}" in said
        said_config = io.StringIO()
        with contextlib.redirect_stdout(said_config):
            assert main(["config", "run.toml"]) == 0
        stored.write_text(said_config.getvalue())
        assert type_("--resume")[0] == 0
        assert what_differs(folder, plain) is None
