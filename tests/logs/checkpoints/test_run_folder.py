"""A run has one folder, one process, and is continued only as what it was."""

from __future__ import annotations

import logging
import stat
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from verbatim.config import RunConfig, load_config
from verbatim.core.errors import CheckpointError, ConfigError, UsageError
from verbatim.logs.checkpoints import CheckpointStore, RunFolder, load_stored_config
from verbatim.logs.checkpoints.stored_config import damage_of_stored

NOON = datetime(2026, 1, 31, 12, 0, 5)


def config_of(tmp_path: Path, *overrides: str) -> RunConfig:
    file = tmp_path / "run.toml"
    file.write_text('[model]\nname = "some/model"\n[[orchestrator.train.env]]\nid = "guess_number"\n')
    return load_config(file, overrides)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_a_new_run_has_a_stamped_folder_and_the_latest_link_once_it_can_be_continued(tmp_path: Path, root: Path):
    config = config_of(tmp_path)
    with RunFolder.create(config, name="guess", now=NOON, root=root) as run:
        assert run.path == root / "guess" / "20260131-120005"
        assert not (root / "guess" / "latest").is_symlink()
        run.link_latest()
        assert (root / "guess" / "latest").readlink() == Path("20260131-120005")
        assert load_config(run.path / "config.toml") == config


def test_runs_of_the_same_second_have_their_own_folders(tmp_path: Path, root: Path):
    config = config_of(tmp_path)
    with (
        RunFolder.create(config, name="guess", now=NOON, root=root),
        RunFolder.create(config, name="guess", now=NOON, root=root) as second,
    ):
        assert second.path.name == "20260131-120005-2"
        second.link_latest()
        assert (root / "guess" / "latest").resolve() == second.path


def is_private(path: Path) -> bool:
    return stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_may_hold_keys_is_for_its_owners_eyes(tmp_path: Path, root: Path):
    config = config_of(tmp_path)
    with RunFolder.create(config, name="guess", now=NOON, root=root) as run:
        log = run.log("orchestrator")
        log.write_text("a line of before\n")
        log.chmod(0o644)
        assert is_private(run.path / "config.toml") and is_private(run.log("orchestrator"))
        assert log.read_text() == "a line of before\n"
        (run.path / "config.toml").chmod(0o644)
        run.link_latest()
    with RunFolder.resume(config, name="guess", root=root) as run:
        assert is_private(run.path / "config.toml")
    with RunFolder.join(config_of(tmp_path, "--run-dir", str(tmp_path / "met")), role="trainer") as run:
        assert is_private(run.path / "config.toml")


def create_and_link(config, root: Path) -> None:
    with RunFolder.create(config, name="guess", now=NOON, root=root) as run:
        run.link_latest()


def test_resume_finds_the_latest_run_of_the_name(tmp_path: Path, root: Path):
    config = config_of(tmp_path)
    create_and_link(config, root)
    with RunFolder.resume(config, name="guess", root=root) as run:
        assert run.path == root / "guess" / "20260131-120005"


def test_resume_takes_an_explicit_folder(tmp_path: Path, root: Path):
    config = config_of(tmp_path)
    first = RunFolder.create(config, name="guess", now=NOON, root=root)
    first.close()
    RunFolder.create(config, name="guess", now=NOON, root=root).close()
    with RunFolder.resume(config, name="other", folder=first.path, root=root) as run:
        assert run.path == first.path


def test_an_explicit_folder_that_holds_a_run_is_not_overwritten(tmp_path: Path):
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "mine"))
    RunFolder.create(config, name="guess", now=NOON).close()
    with pytest.raises(UsageError, match=r"mine already holds a run; add --resume \(in Python resume=True\) to con"):
        RunFolder.create(config, name="guess", now=NOON)
    with RunFolder.resume(config, name="guess") as run:
        assert run.path == tmp_path / "mine"


def test_resume_without_a_run_lists_the_runs_there_are(tmp_path: Path, root: Path):
    config = config_of(tmp_path)
    with pytest.raises(UsageError, match=r"there is no run to resume in .*guess/latest; found none in"):
        RunFolder.resume(config, name="guess", root=root)
    RunFolder.create(config, name="guess", now=NOON, root=root).close()
    with pytest.raises(UsageError, match=r"found .*/20260131-120005\. Give its folder, --resume FOLDER \(in Python re"):
        RunFolder.resume(config, name="guess", folder=root / "guess" / "20260131-12", root=root)


def test_resume_with_a_folder_here_names_the_current_folder(tmp_path: Path, monkeypatch):
    """ "none in .." would be another folder."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"no run to resume in mine; found none in the current folder\. Give its"):
        RunFolder.resume(config_of(tmp_path), name="guess", folder=Path("mine"))


def test_a_changed_model_is_refused_naming_both(tmp_path: Path, root: Path):
    create_and_link(config_of(tmp_path), root)
    other = config_of(tmp_path, "--model.name", "other/model")
    with pytest.raises(CheckpointError, match=r"model\.name: 'some/model' -> 'other/model'"):
        RunFolder.resume(other, name="guess", root=root)
    RunFolder.resume(config_of(tmp_path), name="guess", root=root).close()


def test_a_changed_key_is_listed_without_its_value(tmp_path: Path, root: Path, caplog):
    typed = ["--keys-in-config", "--orchestrator.train.env.0.args"]
    create_and_link(config_of(tmp_path, *typed, "{api_key = 'open sesame'}"), root)
    changed = config_of(tmp_path, *typed, "{api_key = 'shut sesame'}")
    with caplog.at_level(logging.WARNING), RunFolder.resume(changed, name="guess", root=root):
        pass
    (message,) = [record.getMessage().partition(": ")[2] for record in caplog.records]
    assert message == "orchestrator.train.env.0.args.api_key: '[redacted]' -> '[redacted]'"


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("{key = 'answer'}", "{key = 'question'}", "key: 'answer' -> 'question'"),
        ("{}", "{api_key = 'open sesame'}", "api_key: 'not set' -> '[redacted]'"),
        ("{}", "{max_completion_tokens = 4}", "max_completion_tokens: 'not set' -> 4"),
    ],
)
def test_what_is_no_secret_is_told_of_a_changed_key(tmp_path, root, caplog, before: str, after: str, told: str):
    typed = ["--keys-in-config", "--orchestrator.train.env.0.args"]
    create_and_link(config_of(tmp_path, *typed, before), root)
    with (
        caplog.at_level(logging.WARNING),
        RunFolder.resume(config_of(tmp_path, *typed, after), name="guess", root=root),
    ):
        pass
    assert told in caplog.records[-1].getMessage()


def test_a_model_to_build_instead_of_the_named_one_is_refused(tmp_path: Path, root: Path):
    create_and_link(config_of(tmp_path), root)
    other = config_of(tmp_path, "--model", "{build = {num_layers = 1}}")
    with pytest.raises(CheckpointError, match=r"model\.build\.num_layers: 'not set' -> 1"):
        RunFolder.resume(other, name="guess", root=root)


def test_other_changes_are_listed_and_stored(tmp_path: Path, root: Path, caplog):
    create_and_link(config_of(tmp_path), root)
    changed = config_of(tmp_path, "--max-steps", "200", "--orchestrator.train.env.0.max-turns", "3")
    with caplog.at_level(logging.WARNING), RunFolder.resume(changed, name="guess", root=root) as run:
        assert load_config(run.path / "config.toml") == changed
    assert [record.getMessage().partition(": ")[2] for record in caplog.records] == [
        "max_steps: 100 -> 200",
        "orchestrator.train.env.0.max_turns: 16 -> 3",
    ]


HOLD = """
import sys
from pathlib import Path
from verbatim.logs.checkpoints.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), "orchestrator.lock")
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.mark.realtime
def test_a_folder_in_use_names_the_process_and_a_killed_one_holds_nothing(tmp_path: Path, root: Path):
    config = config_of(tmp_path)
    folder = RunFolder.create(config, name="guess", now=NOON, root=root)
    folder.link_latest()
    folder.close()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    with pytest.raises(UsageError, match=rf"is in use by process {holder.pid}; wait"):
        RunFolder.resume(config, name="guess", root=root)
    holder.kill()
    holder.communicate()
    RunFolder.resume(config, name="guess", root=root).close()


def test_a_folder_that_cannot_be_written_to_is_refused_early(tmp_path: Path):
    (tmp_path / "file").write_text("")
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "file" / "run"))
    with pytest.raises(UsageError, match=r"run folder .*file/run cannot be written to: Not a directory"):
        RunFolder.create(config, name="guess", now=NOON)


def test_a_read_only_folder_is_refused_early(tmp_path: Path, monkeypatch):
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("verbatim.logs.checkpoints.ownership.tempfile.TemporaryFile", refuse)
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "run"))
    with pytest.raises(UsageError, match=r"cannot be written to: Permission denied .*another folder with --run-dir"):
        RunFolder.create(config, name="guess", now=NOON)


# ---- the two processes of a run


def joined(config: RunConfig, role: str) -> RunFolder:
    return RunFolder.join(config, role=role)


def test_both_processes_of_a_run_join_the_folder_that_the_first_one_makes(tmp_path: Path):
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "mine"))
    with joined(config, "trainer") as trainer, joined(config, "orchestrator") as orchestrator:
        assert trainer.path == orchestrator.path == tmp_path / "mine"
        assert load_config(trainer.path / "config.toml") == config
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == [
        "config.toml",
        "orchestrator.lock",
        "trainer.lock",
        "verbatim_run.json",
    ]


def test_another_configuration_than_that_of_the_other_process_is_refused_naming_every_key(tmp_path: Path):
    mine = ("--run-dir", str(tmp_path / "mine"))
    joined(config_of(tmp_path, *mine), "trainer").close()
    other = config_of(tmp_path, *mine, "--max-steps", "7", "--trainer.optim.lr", "0.5")
    with pytest.raises(UsageError, match=r"stored -> given: max_steps: 100 -> 7; trainer\.optim\.lr: 1e-06 -> 0\.5\."):
        joined(other, "orchestrator")
    joined(config_of(tmp_path, *mine), "orchestrator").close()  # and the lock of the refused one is free


def test_two_processes_of_a_resumed_run_agree_wherever_they_are_told_it_is(tmp_path: Path):
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "mine"))
    with joined(config, "trainer") as run:
        theirs = (run.path / "config.toml").read_text()
        run.agree(config_of(tmp_path), theirs)  # --resume FOLDER has no run_dir
    changed = config_of(tmp_path, "--seed", "3")
    with RunFolder.resume(changed, name="x", folder=tmp_path / "mine") as run:
        assert load_config(run.path / "config.toml") == changed
        with pytest.raises(UsageError, match=r"the other process of the run .* seed: 0 -> 3"):
            run.agree(changed, theirs)
    assert (tmp_path / "mine" / "config.toml").read_text() == theirs  # what was refused is no part of the run


def test_processes_that_are_started_one_by_one_need_a_folder(tmp_path: Path):
    with pytest.raises(UsageError, match="give it: --run-dir FOLDER, the same for `verbatim orchestrator` and"):
        joined(config_of(tmp_path), "trainer")


def test_a_run_that_has_checkpoints_is_not_joined_as_a_new_one(tmp_path: Path):
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "mine"))
    with joined(config, "trainer") as run:
        (run.checkpoints / "step_000000").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"already holds a run; add --resume \(in Python resume=True\) to continue it"):
        joined(config, "orchestrator")


def test_a_trainer_waits_for_the_one_before_to_end(tmp_path: Path, monkeypatch):
    """That of a killed run notices only after a moment that it is alone."""
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "mine"))
    leaving = joined(config, "trainer")
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            leaving.close()

    monkeypatch.setattr("verbatim.logs.checkpoints.lock.time.sleep", sleep)
    joined(config, "trainer").close()
    assert len(looks) == 3


def test_a_second_orchestrator_is_refused_at_once(tmp_path: Path, monkeypatch):
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "mine"))
    monkeypatch.setattr("verbatim.logs.checkpoints.lock.time.sleep", lambda seconds: pytest.fail("it waits"))
    with joined(config, "orchestrator"), pytest.raises(UsageError, match=r"mine is in use by process \d+; wait"):
        joined(config, "orchestrator")


# ---- what killed processes leave, and files that are damaged


def test_what_a_killed_process_left_half_written_is_removed_and_nothing_else(tmp_path: Path):
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "mine"))
    RunFolder.create(config, name="x", now=NOON).close()
    mine = tmp_path / "mine"
    left = {
        ".trainer_state",
        "states",
        ".final.partial",
        ".summary.json.tmp",
        ".metrics.jsonl.tmp",
        ".config.toml.orchestrator.tmp",
    }
    for name in left:
        if name.endswith(".tmp"):
            (mine / name).write_text("half")
        else:
            (mine / name / "inner").mkdir(parents=True)
    of_trainer = {".model.partial", ".config.toml.trainer.tmp"}
    theirs = {".notes", "notes.tmp", "final", ".probe-77"} | of_trainer
    for name in theirs:
        (mine / name).mkdir()
    known = {"config.toml", "orchestrator.lock", "verbatim_run.json"}
    RunFolder.resume(config, name="x").close()
    assert {p.name for p in mine.iterdir()} == known | theirs
    RunFolder.resume(config, name="x", role="trainer").close()
    assert {p.name for p in mine.iterdir()} == (known | theirs | {"trainer.lock"}) - of_trainer


def test_a_half_made_link_of_a_killed_run_is_removed_by_the_next_one(tmp_path: Path, root: Path):
    config = config_of(tmp_path)
    alive = RunFolder.create(config, name="guess", now=NOON, root=root)
    dead = RunFolder.create(config, name="guess", now=NOON, root=root)
    dead.close()
    for run in (alive, dead):
        (root / "guess" / f".latest-{run.path.name}").symlink_to(run.path.name)
    RunFolder.create(config, name="guess", now=NOON, root=root).close()
    assert [p.name for p in (root / "guess").iterdir() if p.is_symlink()] == [f".latest-{alive.path.name}"]
    alive.close()


def test_a_folder_with_checkpoints_and_no_configuration_holds_a_run(tmp_path: Path):
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "mine"))
    (tmp_path / "mine" / "checkpoints" / "step_000003").mkdir(parents=True)
    with pytest.raises(UsageError, match="mine already holds a run"):
        RunFolder.create(config, name="x", now=NOON)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"", "it has no \\[model\\] table"),
        (b"max_steps = 3\n[mod", "it is not valid TOML: "),
        (b"\0" * 50, "it is not valid TOML: "),
        (b"\xff\xfe", "it is not valid TOML: 'utf-8' codec"),
        (b"model = 3\n", "it has no \\[model\\] table"),
        (b"a = " + b"[" * 100_000, "it is nested too deeply"),
    ],
    ids=["empty", "cut off", "zeros", "binary", "another type", "deep"],
)
def test_a_damaged_configuration_is_restored_from_a_checkpoint_or_says_what_to_type(
    tmp_path: Path, caplog, content: bytes, found: str
):
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "mine"))
    RunFolder.create(config, name="x", now=NOON).close()
    stored = tmp_path / "mine" / "config.toml"
    whole = stored.read_bytes()
    stored.write_bytes(content)
    told = rf"config\.toml, the run's stored configuration, is damaged: {found}.*config FILE > {stored}"
    with pytest.raises(UsageError, match=told):
        RunFolder.resume(config, name="x")
    assert stored.read_bytes() == content
    for step, text in ((1, whole), (2, b"damaged too")):
        folder = tmp_path / "mine" / "checkpoints" / f"step_{step:06d}"
        folder.mkdir(parents=True)
        (folder / "config.toml").write_bytes(text)
    RunFolder.resume(config, name="x").close()
    assert stored.read_bytes() == whole
    assert stored.with_name("config.toml.damaged-1").read_bytes() == content
    assert f"it is restored from {tmp_path / 'mine' / 'checkpoints' / 'step_000001' / 'config.toml'}" in caplog.text


def with_a_checkpoint(tmp_path: Path, config: RunConfig) -> tuple[Path, Path]:
    """The stored configuration of a run, and its copy in a sealed checkpoint."""
    RunFolder.create(config, name="x", now=NOON).close()
    stored = tmp_path / "mine" / "config.toml"
    with CheckpointStore(tmp_path / "mine" / "checkpoints").writing(1) as folder:
        (folder / "config.toml").write_bytes(stored.read_bytes())
    return stored, tmp_path / "mine" / "checkpoints" / "step_000001" / "config.toml"


@pytest.mark.slow
def test_a_configuration_that_is_cut_off_between_two_keys_is_damaged_though_it_is_toml(tmp_path: Path, caplog):
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "mine"), "--trainer.optim.lr", "0.5")
    stored, copy = with_a_checkpoint(tmp_path, config)
    whole = stored.read_bytes()
    lines = whole.splitlines(keepends=True)
    cuts = [sum(map(len, lines[:number])) for number in range(1, len(lines))]
    cuts.append(whole.index(b"lr = 0.5") + len(b"lr = 0."))  # in the middle of a number
    for size in cuts:
        stored.write_bytes(whole[:size])
        assert damage_of_stored(stored) is not None, whole[:size][-80:]
        with pytest.raises(ConfigError) as told:
            load_stored_config(stored, load_config)
        assert str(told.value).endswith(f"to restore it:  cp {copy} {stored}")
    before = whole.index(b"lr = 0.5")
    stored.write_bytes(whole[:before])
    assert load_config(stored).model_dump() != config.model_dump(), "it would train with other keys"
    RunFolder.resume(config, name="x").close()
    assert stored.read_bytes() == whole
    assert f"it is cut off, after {len(whole[:before].rstrip()):,} of the {len(whole.rstrip()):,} bytes" in caplog.text
    assert "the configuration changed" not in caplog.text and "edited" not in caplog.text


def test_a_stored_configuration_that_is_not_that_of_the_checkpoint_is_told_key_by_key(tmp_path: Path, caplog):
    """Whether it was edited or damaged cannot be known; it is the configuration that the run goes on with."""
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "mine"))
    stored, copy = with_a_checkpoint(tmp_path, config)
    edited = stored.read_text().replace("max_steps = 100\n", "max_steps = 900\n").replace("seed = 0\n", "", 1)
    stored.write_text(edited)
    RunFolder.resume(load_stored_config(stored, load_config), name="x").close()
    assert (
        f"{stored} was edited or damaged, or the run was resumed with other keys and has had no checkpoint since; "
        f"the file differs from {copy}: max_steps: 100 -> 900; seed: 0 -> 'not set'"
    ) in caplog.text
    assert load_config(stored).max_steps == 900
    caplog.clear()
    copy.write_text(edited.replace("900", "800"))  # not what its manifest lists: it is no witness
    RunFolder.resume(load_stored_config(stored, load_config), name="x").close()
    assert "is not what" not in caplog.text


def test_a_stored_configuration_that_is_that_of_the_checkpoint_is_no_news(tmp_path: Path, caplog):
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "mine"))
    stored, _ = with_a_checkpoint(tmp_path, config)
    RunFolder.resume(load_stored_config(stored, load_config), name="x").close()
    assert caplog.text == ""


def test_a_damaged_lock_file_locks(tmp_path: Path):
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "mine"))
    with RunFolder.create(config, name="x", now=NOON) as run:
        (run.path / "orchestrator.lock").write_bytes(b"\xff\xfe" * 1000)
        with pytest.raises(UsageError, match=r"is in use by process \\xff"):
            RunFolder.resume(config, name="x")
    RunFolder.resume(config, name="x").close()


@pytest.mark.parametrize("named", [True, False])
def test_a_folder_that_was_made_for_a_run_that_cannot_begin_is_removed(tmp_path: Path, named: bool):
    def fails(path: Path) -> list[str]:
        (path / "metrics.jsonl").write_text("copied")
        raise UsageError("the checkpoint is gone")

    config = config_of(tmp_path, *(["--run-dir", str(tmp_path / "mine")] if named else []))
    with pytest.raises(UsageError, match="the checkpoint is gone"):
        RunFolder.create(config, name="x", now=NOON, root=tmp_path / "runs", beginning=fails)
    assert list((tmp_path / "runs").glob("x/*")) == [] and not (tmp_path / "mine").exists()


def test_a_folder_that_was_there_before_stays(tmp_path: Path):
    def fails(path: Path) -> list[str]:
        raise UsageError("the checkpoint is gone")

    (tmp_path / "mine").mkdir()
    config = config_of(tmp_path, "--run-dir", str(tmp_path / "mine"))
    with pytest.raises(UsageError, match="the checkpoint is gone"):
        RunFolder.create(config, name="x", now=NOON, beginning=fails)
    assert (tmp_path / "mine").is_dir()
