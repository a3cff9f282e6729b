"""A command holds the folder of its run before it checks the run, and gives it up as it was where the checks fail."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from verbatim.cli import sft_command, trainer_command
from verbatim.cli.main import main
from verbatim.config import RunConfig, load_config
from verbatim.core.errors import UsageError
from verbatim.logs.checkpoints import ORCHESTRATOR, TRAINER, RunFolder, hold, holding
from verbatim.logs.checkpoints.hold import Held, hold_new
from verbatim.logs.checkpoints.lock import FolderLock, is_locked
from verbatim.logs.checkpoints.ownership import MARKER, claim
from verbatim.run import execute

NOON = datetime(2026, 1, 31, 12)
TOML = """
[model.build]
[[orchestrator.train.env]]
id = "guess_number"
[warm_start]
steps = 1
"""


def config_of(tmp_path: Path, *options: str) -> RunConfig:
    file = tmp_path / "run.toml"
    file.write_text(TOML)
    return load_config(file, options).named("run")


class ChecksFail(Exception):
    pass


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def check(config: RunConfig, role: str = ORCHESTRATOR, *, resume: bool | Path = False, joins: bool = False) -> None:
    """What a command does whose checks fail; a second one is refused meanwhile."""
    with pytest.raises(ChecksFail), holding(config, role, resume=resume, joins=joins):
        with (
            pytest.raises(UsageError, match=r"is in use by process \d+; wait for it to end"),
            holding(config, role, resume=resume, joins=joins),
        ):
            pytest.fail("two commands go on")
        raise ChecksFail


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a file system's root"])
def test_a_folder_is_held_while_a_run_is_checked_and_is_then_as_it_was(tmp_path: Path, there: str):
    mine = tmp_path / "a" / "b" / "mine"
    if there != "nothing":
        (mine / "lost+found" if there == "a file system's root" else mine).mkdir(parents=True)
    config = config_of(tmp_path, "--run-dir", str(mine))
    before = sorted(tmp_path.rglob("*"))
    check(config)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_was_put_into_a_folder_meanwhile_stays(tmp_path: Path):
    mine = tmp_path / "mine"
    with pytest.raises(ChecksFail), holding(config_of(tmp_path, "--run-dir", str(mine)), ORCHESTRATOR, resume=False):
        (mine / "notes.txt").write_text("theirs")
        raise ChecksFail
    assert names_in(mine) == ["notes.txt"]


def test_a_folder_that_a_run_has_withdrawn_from_stays_a_runs(tmp_path: Path):
    claim(tmp_path / "mine")
    (tmp_path / "mine" / "logs").mkdir()
    check(config_of(tmp_path, "--run-dir", str(tmp_path / "mine")))
    assert names_in(tmp_path / "mine") == ["logs", "orchestrator.lock", MARKER]


def test_a_run_that_goes_on_is_held_too_wherever_it_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("verbatim.logs.checkpoints.hold._LEAVING", 0.0)
    config = config_of(tmp_path)
    with RunFolder.create(config, name="run", now=NOON) as run:
        run.link_latest()
    before = names_in(run.path)
    check(config, resume=True)
    check(config, resume=run.path)
    check(config, TRAINER, resume=run.path)
    assert names_in(run.path) == sorted([*before, "trainer.lock"])


def test_processes_that_are_started_one_by_one_hold_it_each_for_its_role(tmp_path: Path):
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "mine"))
    with holding(config, TRAINER, resume=False, joins=True):
        check(config, joins=True)
    assert names_in(tmp_path / "mine") == ["orchestrator.lock", "trainer.lock", MARKER]


def test_a_held_folder_becomes_the_runs(tmp_path: Path):
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "mine"))
    with holding(config, ORCHESTRATOR, resume=False) as held:
        opened = RunFolder.create(config, name="run", now=NOON, held=held)
    with opened as run:
        assert is_locked(run.path / "orchestrator.lock")
        assert names_in(run.path) == ["config.toml", "orchestrator.lock", MARKER]
    assert not is_locked(run.path / "orchestrator.lock")


def test_a_new_run_that_names_no_folder_has_its_own(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with holding(config_of(tmp_path), ORCHESTRATOR, resume=False) as held:
        assert held is None
    assert names_in(tmp_path) == ["run.toml"]


def test_a_run_that_began_until_the_folder_was_locked_is_not_replaced(tmp_path: Path, monkeypatch):
    """Another command creates its run, and ends, between the first look and the lock."""
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "mine"))

    def lock(folder: Path, name: str, *, patience: float = 0.0) -> FolderLock:
        monkeypatch.undo()
        RunFolder.create(config, name="other", now=NOON).close()
        return FolderLock(folder, name, patience=patience)

    monkeypatch.setattr("verbatim.logs.checkpoints.hold.FolderLock", lock)
    with pytest.raises(UsageError, match="mine already holds a run; add --resume"):
        RunFolder.create(config, name="run", now=NOON)
    assert not is_locked(tmp_path / "mine" / "orchestrator.lock")


def test_a_folder_that_is_given_up_until_it_was_locked_is_claimed_again(tmp_path: Path, monkeypatch):
    (tmp_path / "mine").mkdir()
    first = hold_new(tmp_path / "mine")

    def lock(folder: Path, name: str, *, patience: float = 0.0) -> FolderLock:
        monkeypatch.undo()
        first.give_up()
        return FolderLock(folder, name, patience=patience)

    monkeypatch.setattr("verbatim.logs.checkpoints.hold.FolderLock", lock)
    held = hold_new(tmp_path / "mine")
    assert names_in(tmp_path / "mine") == ["orchestrator.lock", MARKER]
    held.give_up()
    assert names_in(tmp_path / "mine") == []


def test_a_folder_that_is_being_given_up_is_not_taken_for_somebody_elses(tmp_path: Path, monkeypatch):
    """The marker is gone, and the lock is not: the second command waits for neither, and is not refused."""
    mine = tmp_path / "mine"
    first = hold_new(mine)
    taken: list[Held] = []
    remove = FolderLock.remove

    def removed_in_the_middle(lock: FolderLock) -> None:
        monkeypatch.undo()
        with pytest.raises(UsageError, match=r"is in use by process \d+"):
            hold_new(mine)
        remove(lock)
        taken.append(hold_new(mine))

    monkeypatch.setattr(FolderLock, "remove", removed_in_the_middle)
    first.give_up()
    assert names_in(mine) == ["orchestrator.lock", MARKER]
    assert is_locked(mine / "orchestrator.lock")
    taken[0].give_up()
    assert not is_locked(mine / "orchestrator.lock")


@pytest.mark.parametrize("text", ["my own notes\n", "12345\n67890\n", "12345"])
def test_a_lock_of_that_name_that_is_no_lock_of_ours_is_not_removed(tmp_path: Path, text: str):
    (tmp_path / "orchestrator.lock").write_text(text)
    with pytest.raises(UsageError, match="is not empty, and nothing proves that a run made what is there"):
        hold_new(tmp_path)
    assert (tmp_path / "orchestrator.lock").read_text() == text and names_in(tmp_path) == ["orchestrator.lock"]


@pytest.mark.parametrize("at", ["claim", "lock_of"])
def test_a_folder_that_is_removed_meanwhile_is_made_again(tmp_path: Path, monkeypatch, at: str):
    mine = tmp_path / "mine"
    first = hold_new(mine)
    original = getattr(hold, at)

    def given_up_before(path: Path, *args: object, **more: object) -> object:
        monkeypatch.undo()
        first.give_up()
        assert not mine.exists()
        return original(path, *args, **more)

    monkeypatch.setattr(hold, at, given_up_before)
    held = hold_new(mine)
    assert names_in(mine) == ["orchestrator.lock", MARKER]
    held.give_up()


def test_a_lock_file_that_was_removed_locks_nobody_out_and_is_waited_for_by_nobody(tmp_path: Path, monkeypatch):
    first = FolderLock(tmp_path, "a.lock")

    def sleep(seconds: float) -> None:
        first.remove()
        first.release()

    monkeypatch.setattr("verbatim.logs.checkpoints.lock.time.sleep", sleep)
    second = FolderLock(tmp_path, "a.lock", patience=1000.0)
    with pytest.raises(UsageError, match="is in use"):
        FolderLock(tmp_path, "a.lock")
    second.release()


DTYPES = ("--trainer.dtype", "float32", "--inference.torch.dtype", "float32")
COMMANDS = {
    "rl": (execute, ORCHESTRATOR, ["rl"]),
    "rl --resume": (execute, ORCHESTRATOR, ["rl", "--resume", "mine"]),
    "orchestrator": (execute, ORCHESTRATOR, ["orchestrator", *DTYPES]),
    "trainer": (trainer_command, TRAINER, ["trainer", *DTYPES]),
    "sft": (sft_command, ORCHESTRATOR, ["sft"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_that_trains_holds_its_folder_while_it_checks(tmp_path: Path, monkeypatch, command: str):
    where, role, typed = COMMANDS[command]
    monkeypatch.chdir(tmp_path)
    config = config_of(tmp_path, "--run-dir", "mine")
    if "--resume" in typed:
        RunFolder.create(config, name="run", now=NOON).close()
    found = []

    def checks(*given: object, **more: object) -> None:
        found.append(is_locked(Path("mine", f"{role}.lock")))
        raise UsageError("the checks fail")

    monkeypatch.setattr(where, "check_run", checks)
    name, *options = typed
    assert main([name, "run.toml", "--run-dir", "mine", *options]) == 2
    assert found == [True]
    assert not is_locked(Path("mine", f"{role}.lock"))
    if command in ("rl", "sft"):
        assert not Path("mine").exists()


@pytest.mark.parametrize("name", ["trajectories", "evaluations", "checkpoints", "weights", "metrics.jsonl", "logs"])
def test_a_run_does_not_go_on_through_a_link(tmp_path: Path, name: str):
    """It would write into the other folder, and remove the later steps there."""
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "mine"))
    with RunFolder.create(config, name="run", now=NOON) as run:
        pass
    other = tmp_path / "other"
    other.mkdir()
    (other / "step-000003.parquet").write_text("theirs")
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(other)
    with pytest.raises(UsageError, match=rf"mine/{name} is a link, which is not followed"):
        RunFolder.resume(config, name="run")
    assert names_in(other) == ["step-000003.parquet"] and (other / "step-000003.parquet").read_text() == "theirs"
    (run.path / name).unlink()
    (run.path / "best").symlink_to(other)  # is a link in every run
    RunFolder.resume(config, name="run").close()


@pytest.mark.parametrize("name", ["final", "states", "weights", "metrics.jsonl", "summary.json", "notes.txt"])
def test_a_folder_whose_run_was_killed_at_its_start_is_not_taken_with_what_was_put_there(tmp_path: Path, name: str):
    """So it is with a marker that was copied from another folder."""
    mine = tmp_path / "mine"
    claim(mine)
    (mine / "orchestrator.lock").touch()
    (mine / ".config.toml.orchestrator.tmp").touch()  # the run was writing it
    config = config_of(tmp_path, "--run-dir", str(mine))
    check(config)
    (mine / name).write_text("theirs")
    before = names_in(mine)
    with pytest.raises(
        UsageError, match=rf"mine belongs to a run that never began, and contains {name}, which that run"
    ):
        RunFolder.create(config, name="run", now=NOON)
    assert names_in(mine) == before and (mine / name).read_text() == "theirs"
