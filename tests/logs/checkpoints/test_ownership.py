"""No byte of a folder that no run has made is changed, whatever is in it and whatever asks for it."""

import json
import os
import random
from datetime import datetime
from pathlib import Path

import pytest

from campaigns import sized
from verbatim.cli.main import main
from verbatim.config import load_config
from verbatim.config.schema import RunConfig
from verbatim.core.errors import UsageError
from verbatim.logs.checkpoints.ownership import MARKER, NAMES, claim, remove_from, remove_run, require_ours
from verbatim.logs.checkpoints.run_folder import RunFolder

NOON = datetime(2026, 1, 31, 12)
OTHERS = (
    "notes.txt",
    "src",
    "run.toml",
    ".git",
    ".probe-7",
    ".latest-1",
    "latest",
    "x.tmp",
    ".x.partial",
    "step_000001",
    f".{MARKER}.77",
)
FORGED = (
    b"",
    b"{}",
    b"[]",
    b"\xff",
    b'{"format": 1, "id": "00", "names": []}',
    json.dumps({"format": 2, "id": "00" * 16, "names": []}).encode(),
    json.dumps({"format": 1, "id": "00" * 16, "names": ["src"]}).encode(),
)
"""Files of the marker's name that no run has written."""
TOML = """
[model.build]
[[orchestrator.train.env]]
id = "guess_number"
"""


def config_in(folder: Path, *options: str) -> RunConfig:
    folder.mkdir()
    (folder / "run.toml").write_text(TOML)
    return load_config(folder / "run.toml", list(options))


def fill(folder: Path, rng: random.Random) -> None:
    """Files, folders and links of names that a run uses, and of others; perhaps a configuration and a marker."""
    folder.mkdir()
    for name in rng.sample(sorted(NAMES | set(OTHERS)), rng.randint(1, 9)):
        path = folder / name
        match rng.randrange(4):
            case 0:
                path.write_bytes(rng.randbytes(rng.randrange(99)))
            case 1:
                (path / "v000001").mkdir(parents=True)
                (path / "v000001" / "a").write_bytes(b"theirs")
            case 2:
                path.symlink_to(rng.choice(("..", "nowhere", "../beside", "/")))
            case 3:
                path.mkdir()
    if rng.random() < 0.5 and not (folder / MARKER).exists():
        (folder / MARKER).write_bytes(rng.choice(FORGED))


def seen(folder: Path) -> dict[str, object]:
    """Everything in a folder: a file's bytes, a link's target."""
    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        else:
            found[str(path)] = path.read_bytes() if path.is_file() else None
    return found


@pytest.mark.slow
@pytest.mark.campaign
def test_no_byte_of_anybody_else_is_changed(tmp_path: Path, campaign):
    row = campaign("folders that no run has made")
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "file").write_text("theirs")
    config = config_in(tmp_path / "config", "--run-dir", str(tmp_path / "mine"))
    asks = {
        "create": lambda: RunFolder.create(config, name="x", now=NOON),
        "fork": lambda: RunFolder.create(config, name="x", now=NOON, beginning=lambda path: pytest.fail("it began")),
        "join as trainer": lambda: RunFolder.join(config, role="trainer"),
        "join": lambda: RunFolder.join(config, role="orchestrator"),
        "resume": lambda: RunFolder.resume(config, name="x"),
        "resume as trainer": lambda: RunFolder.resume(config, name="x", role="trainer"),
    }
    for seed in range(sized(60, 3000)):
        rng = random.Random(seed)
        mine = tmp_path / "mine"
        fill(mine, rng)
        before = seen(tmp_path)
        for ask in asks.values():
            with pytest.raises(UsageError):
                ask()
        row.add(wrong=seen(tmp_path) != before)
        mine.rename(tmp_path / f"was-{seed}")
    assert row.wrong == 0


def test_a_run_that_removes_what_it_finds_is_noticed(tmp_path: Path, monkeypatch):
    """The fault that was there: what is left half written by a name was removed before anything was asked."""
    config = config_in(tmp_path / "config", "--run-dir", str(tmp_path / "mine"))
    fill(tmp_path / "mine", random.Random(0))
    (tmp_path / "mine" / "states").mkdir(exist_ok=True)
    before = seen(tmp_path)
    monkeypatch.setattr("verbatim.logs.checkpoints.hold.claim", lambda path: None)
    RunFolder.join(config, role="orchestrator").close()
    assert seen(tmp_path) != before


@pytest.mark.slow
@pytest.mark.parametrize(
    "typed",
    [
        ["rl", "run.toml", "--run-dir", "."],
        ["rl", "run.toml", "--resume", "."],
        ["sft", "data.jsonl", "--run-dir", "."],
        ["orchestrator", "run.toml", "--run-dir", "."],
        ["trainer", "run.toml", "--run-dir", "."],
        ["rl", "--replay", "1", "--run-dir", "."],
        ["rl", "--fork", ".", "--run-dir", "."],
    ],
    ids=" ".join,
)
def test_a_command_in_a_project_changes_nothing(tmp_path: Path, typed, monkeypatch):
    assert main(["init", str(tmp_path / "project")]) == 0
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    for name in ("states", "final", "exchange", "weights"):
        Path(name).mkdir()
        Path(name, "theirs").write_text("theirs")
    for name in ("metrics.jsonl", "summary.json", "summary.txt", "learning_curve.png", "config.toml", "data.jsonl"):
        Path(name).write_text("theirs")
    before = seen(tmp_path)
    assert main(typed) == 2
    assert seen(tmp_path) == before


def test_a_folder_that_is_empty_or_a_runs_is_taken(tmp_path: Path):
    for _ in range(2):
        claim(tmp_path / "new")
    (tmp_path / "disk" / "lost+found").mkdir(parents=True)
    claim(tmp_path / "disk")
    require_ours(tmp_path / "disk")
    assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["lost+found", MARKER]
    assert set(json.loads((tmp_path / "new" / MARKER).read_text())["names"]) == NAMES


def test_what_no_run_makes_stays_when_a_run_is_removed(tmp_path: Path):
    run = tmp_path / "run"
    claim(run)
    (run / "weights" / "v000001").mkdir(parents=True)
    (run / "notes.txt").write_text("theirs")
    remove_run(run)
    assert [path.name for path in run.iterdir()] == ["notes.txt"]
    with pytest.raises(AssertionError):
        remove_from(run, ["notes.txt"])


@pytest.mark.parametrize("content", FORGED)
def test_a_marker_that_no_run_has_written_proves_nothing(tmp_path: Path, content):
    (tmp_path / MARKER).write_bytes(content)
    with pytest.raises(
        UsageError, match=rf"nothing proves that a run .*{MARKER} (is damaged|has no format number|has format 2)"
    ):
        require_ours(tmp_path)


def test_a_marker_that_is_a_link_or_no_file_proves_nothing(tmp_path: Path):
    claim(tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / MARKER).symlink_to(tmp_path / "run" / MARKER)
    with pytest.raises(UsageError, match="cannot be read"):
        require_ours(tmp_path / "mine")
    (tmp_path / "mine" / MARKER).unlink()
    os.mkfifo(tmp_path / "mine" / MARKER)
    with pytest.raises(UsageError, match="it is not a regular file"):
        claim(tmp_path / "mine")
