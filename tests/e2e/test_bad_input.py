"""Whatever is wrong with what was typed or written is explained, and nothing is lost or half written."""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.tiny_runs import (
    LOTS,
    TOML,
    assert_ledger_adds_up,
    build_tiny_model,
    num_sampled,
    snapshot,
    train_lines,
    trajectory_lines,
    workplace,
)
from verbatim.cli.main import main

# Every fourth episode that is started fails in the way it is told to.
FAULTY = """
import itertools

from verbatim import Example
from verbatim.environments import Episode

REWARDS = {"nan": float("nan"), "nan_part": {"fast": 1.0, "right": float("nan")}, "infinite": float("inf"),
           "text": "much"}


class Once(Episode):
    messages = ({"role": "user", "content": "go"},)

    def __init__(self, seed, fault):
        self.reward, self.fault = float(seed % 2), fault

    async def score(self, trajectory):
        if self.fault == "score":
            raise RuntimeError("score broke")
        return None if self.fault == "none" else REWARDS.get(self.fault, self.reward)


class Faulty:
    def __init__(self, fault: str, every: int = 4):
        self.fault, self.every, self.numbers = fault, every, itertools.count(1)

    def examples(self, split):
        return [Example(id=f"e{n}") for n in range(5)]

    async def start(self, example, seed):
        fails = next(self.numbers) % self.every == 0
        if fails and self.fault == "start":
            raise RuntimeError("start broke")
        return Once(seed, self.fault if fails else None)
"""

# Its tool raises at every other call; every call is counted. Rewards follow the seed, so that every group trains.
BROKEN_TOOL = """
from verbatim.environments.guess_number import GuessNumber, GuessNumberEpisode
from verbatim.environments.tools import FunctionTool

calls = raised = 0


class BrokenGame(GuessNumberEpisode):
    def __init__(self, rules, secret, seed):
        super().__init__(rules, secret)
        self.tools = (FunctionTool(self.guess, description="", inline=True),)
        self.seed = seed

    def guess(self, number: int):
        global calls, raised
        calls += 1
        if calls % 2:
            raised += 1
            raise RuntimeError("the dice fell off the table")
        return super().guess(number)

    async def score(self, trajectory):
        return float(self.seed % 2)


class BrokenTool(GuessNumber):
    async def start(self, example, seed):
        return BrokenGame(self, int(example.payload["secret"]), seed)
"""

# After `after` episodes no file may grow beyond `limit` bytes: a disk that fills up while a run is under way.
FILLING = """
import resource

from lots import Lots


class Filling(Lots):
    def __init__(self, after: int, limit: int):
        super().__init__()
        self.after, self.limit = after, limit

    async def start(self, example, seed):
        self.after -= 1
        if self.after == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        return await super().start(example, seed)
"""

MODULES = {
    "lots": LOTS,
    "faulty": FAULTY,
    "broken_tool": BROKEN_TOOL,
    "filling": FILLING,
    "breaks": "x = 1\nraise RuntimeError('no licence server')\n",
}
ALL_BUT_WEIGHTS = 80_000
"""Bytes that hold any file of a tiny run except weights and optimizer."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = build_tiny_model(tmp_path_factory.mktemp("bad_input") / "model")
    assert (folder / "model.safetensors").stat().st_size > ALL_BUT_WEIGHTS
    return folder


@pytest.fixture
def place(tmp_path: Path, model: Path) -> Iterator[Path]:
    """A folder with `run.toml`, which trains on lots.Lots; the current directory."""
    with workplace(tmp_path, MODULES):
        (tmp_path / "run.toml").write_text(TOML.format(model=model) + 'import_path = "lots.Lots"\n')
        yield tmp_path


@pytest.fixture
def typed(place: Path, capsys) -> Callable[..., tuple[int, str]]:
    """Types `verbatim rl run.toml ...`: its status, and everything it said.

    An exception other than the mistakes the command line explains passes through, and fails the test.
    """

    def run(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        status = main(["rl", "run.toml", *map(str, arguments)])
        said = "".join(capsys.readouterr())
        assert "Traceback" not in said
        return status, said

    return run


@contextlib.contextmanager
def disk_that_fills_up(limit: int | None = None) -> Iterator[None]:
    """No file may grow beyond `limit` bytes inside; whatever the limit has become, it is lifted afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# ---- refused before anything is made


@pytest.mark.parametrize(
    ("arguments", "explained"),
    [
        pytest.param(
            ["--orchestrator.batch-sice", "8"],
            ["--orchestrator.batch-sice 8", 'unknown key "batch_sice"', 'did you mean "batch_size"?'],
            id="unknown key",
        ),
        pytest.param(
            ["--model.name", "./no-such-model"],
            ["there is no model folder './no-such-model'", "model.name", "[model.build]"],
            id="missing model folder",
        ),
        pytest.param(
            ["--model.name", "./empty"],
            ["model folder './empty' has no config.json", "save_pretrained"],
            id="model folder without a model",
        ),
        pytest.param(
            ["--orchestrator.sampling.temperature", "0"],
            ["orchestrator.sampling.temperature = 0", "no distribution to train on", "for example 1.0"],
            id="temperature 0",
        ),
        pytest.param(
            ["--orchestrator.train.env.0.sampling", "{temperature = 0}"],
            ["orchestrator.train.env.0.sampling.temperature = 0", "[[orchestrator.eval.env]]"],
            id="temperature 0 of one environment",
        ),
        pytest.param(
            ["--orchestrator.train.env.0.import_path", "no_such_module.Lots"],
            ["orchestrator.train.env.0.import_path", "there is no module 'no_such_module'", "current directory"],
            id="environment without a module",
        ),
        pytest.param(
            ["--orchestrator.train.env.0.import_path", "breaks.Lots"],
            ["orchestrator.train.env.0.import_path", "RuntimeError: no licence server", "breaks.py:2"],
            id="environment whose module raises",
        ),
        pytest.param(
            ["--orchestrator.train.env.0.import_path", "lots.Lotts"],
            ["orchestrator.train.env.0.import_path", "has no 'Lotts'", 'did you mean "Lots"'],
            id="environment that its module does not have",
        ),
        pytest.param(
            ["--run-dir", "run.toml/mine"],
            ["run folder run.toml/mine cannot be written to: Not a directory", "--run-dir FOLDER"],
            id="run folder below a file",
        ),
        pytest.param(
            ["--run-dir", "/proc/verbatim"],
            ["run folder /proc/verbatim cannot be written to", "--run-dir FOLDER"],
            id="run folder on a read-only file system",
        ),
    ],
)
def test_a_mistake_is_explained_and_nothing_is_made(typed, place: Path, arguments: list[str], explained: list[str]):
    (place / "empty").mkdir()
    before = snapshot(place)
    status, said = typed(*arguments)
    assert status == 2
    for words in explained:
        assert words in said
    assert snapshot(place) == before


def test_an_unknown_key_of_the_file_is_named_with_its_line(typed, place: Path):
    with (place / "run.toml").open("a") as file:
        file.write("[checkpoint]\nintervall = 1\n")
    number = len((place / "run.toml").read_text().splitlines())
    before = snapshot(place)
    status, said = typed()
    assert status == 2
    assert f"run.toml:{number}: " in said
    assert 'unknown key "intervall" in [checkpoint]; did you mean "interval"?' in said
    assert snapshot(place) == before


def test_a_model_without_a_chat_template_is_refused(typed, place: Path, model: Path):
    shutil.copytree(model, place / "base_model")
    (place / "base_model" / "chat_template.jinja").unlink()
    tokenizer_config = place / "base_model" / "tokenizer_config.json"
    assert "chat_template" not in json.loads(tokenizer_config.read_text())
    before = snapshot(place)
    status, said = typed("--model.name", "base_model")
    assert status == 2
    assert "model 'base_model' has no chat template" in said
    assert "chat_template.jinja" in said
    assert snapshot(place) == before


def test_a_model_folder_without_weights_is_refused(typed, place: Path, model: Path):
    shutil.copytree(model, place / "hollow")
    (place / "hollow" / "model.safetensors").unlink()
    status, said = typed("--model.name", "hollow")
    assert status == 2
    assert "model folder 'hollow' has no *.safetensors" in said


# ---- a folder that holds a run


@pytest.fixture
def held(typed, place: Path) -> Path:
    """A finished run in an explicit folder."""
    assert typed("--run-dir", "mine", "--max-steps", "1")[0] == 0
    return place / "mine"


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_left_as_it_is(typed, held: Path):
    before = snapshot(held)
    status, said = typed("--run-dir", "mine", "--max-steps", "1")
    assert status == 2
    assert "mine already holds a run; add --resume (in Python resume=True) to continue it" in said
    assert "--run-dir FOLDER" in said
    assert snapshot(held) == before


@pytest.mark.slow
def test_a_resume_with_a_changed_model_is_refused(typed, held: Path, place: Path, model: Path):
    shutil.copytree(model, place / "other_model")
    before = snapshot(held)
    status, said = typed("--run-dir", "mine", "--max-steps", "2", "--resume", "--model.name", "other_model")
    assert status == 2
    assert f"model.name: {str(model)!r} -> 'other_model'" in said
    assert "start a new run without --resume" in said
    assert snapshot(held) == before
    assert typed("--run-dir", "mine", "--max-steps", "2", "--resume")[0] == 0
    assert [line["step"] for line in train_lines(held)] == [1, 2]


def test_a_resume_without_a_run_says_so_and_makes_nothing(typed, place: Path):
    before = snapshot(place)
    status, said = typed("--resume")
    assert status == 2
    assert "there is no run to resume in runs/run/latest" in said
    assert "--resume FOLDER" in said
    assert snapshot(place) == before


# ---- a full disk


@pytest.mark.slow
def test_a_disk_that_is_full_from_the_start_leaves_no_half_made_run(typed, place: Path):
    """Folders and empty files can still be made, as on a real one."""
    with disk_that_fills_up(64):
        status, said = typed("--run-dir", "mine")
    assert status == 1
    assert "stopped: the run folder mine cannot be written to: File too large (mine); choose another folder" in said
    assert snapshot(place / "mine") == {}
    assert typed("--run-dir", "mine")[0] == 0


@pytest.mark.slow
def test_a_disk_that_is_full_at_the_first_checkpoint_stops_the_run_which_can_be_resumed(typed, place: Path):
    with disk_that_fills_up(ALL_BUT_WEIGHTS):
        status, said = typed("--run-dir", "mine")
    assert status == 1
    assert "stopped: checkpoint mine/checkpoints/step_000000 could not be written" in said
    assert "File too large" in said
    assert not list((place / "mine" / "checkpoints").iterdir())
    assert typed("--run-dir", "mine", "--resume")[0] == 0
    assert_ledger_adds_up(place / "mine")


@pytest.mark.slow
@pytest.mark.parametrize("interval", [1, 100])
def test_a_disk_that_fills_up_in_the_middle_of_a_run_loses_nothing_that_was_written(typed, place: Path, interval: int):
    """16 episodes are two batches; no file may be large from the 17th on."""
    run = [
        "--run-dir",
        "mine",
        "--max-steps",
        "4",
        "--checkpoint.interval",
        interval,
        "--orchestrator.train.env.0.import_path",
        "filling.Filling",
        "--orchestrator.train.env.0.args",
    ]
    with disk_that_fills_up():
        status, said = typed(*run, f"{{after = 17, limit = {ALL_BUT_WEIGHTS}}}")
    assert status == 1
    assert "the results of training on batch 2 could not be written" in said
    assert "mine/weights" in said
    assert "File too large" in said
    assert "--resume" in said
    unfinished = [name for name in snapshot(place) if "partial" in name or ".writing" in name or name.endswith(".tmp")]
    assert not unfinished
    assert [line["step"] for line in train_lines(place / "mine")] == [1, 2]

    assert typed(*run, f"{{after = 1000, limit = {ALL_BUT_WEIGHTS}}}", "--resume")[0] == 0
    assert [line["step"] for line in train_lines(place / "mine")] == [1, 2, 3, 4]
    assert len(trajectory_lines(place / "mine")) == 4 * 8
    assert_ledger_adds_up(place / "mine")


# ---- faults of single rollouts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("start", "environment: start raised RuntimeError: start broke"),
        ("score", "environment: score raised RuntimeError: score broke"),
        ("nan", "environment: score returned nan; expected a finite number"),
        ("nan_part", "environment: score returned {'fast': 1.0, 'right': nan}; expected a finite number"),
        ("infinite", "environment: score returned inf; expected a finite number"),
        ("text", "environment: score returned 'much'; expected a number"),
    ],
)
def test_a_rollout_that_fails_fails_alone_and_is_counted(typed, place: Path, fault: str, reason: str):
    """Two batches of 8 episodes, of which every fourth fails: 4 in all, and 12 that are not touched."""
    status, _ = typed(
        "--run-dir",
        "mine",
        "--orchestrator.train.env.0.import_path",
        "faulty.Faulty",
        "--orchestrator.train.env.0.args",
        f'{{fault = "{fault}"}}',
    )
    assert status == 0
    steps = [line["metrics"] for line in train_lines(place / "mine")]
    assert [m["rollouts"] for m in steps] == [8, 8]
    assert sum(m["rollouts/failed"] for m in steps) == 4
    assert sum(m.get("errors/environment", 0) for m in steps) == 4

    trajectories = trajectory_lines(place / "mine")
    failed = [t for t in trajectories if t["error"] is not None]
    completed = [t for t in trajectories if t["error"] is None]
    assert (len(failed), len(completed)) == (4, 12)
    assert all(t["error"].startswith(reason) and t["reward"] is None for t in failed)
    assert {t["reward"] for t in completed} <= {0.0, 1.0}

    last = assert_ledger_adds_up(place / "mine")
    lost = sum(map(num_sampled, failed))
    assert last.get("ledger/dropped/error", 0) == lost
    assert (lost == 0) == (fault == "start")
    assert last["ledger/trained"] > 0


def every(fault: str) -> list[str]:
    """A run in which each episode has the fault."""
    environment = ["--orchestrator.train.env.0.import_path", "faulty.Faulty"]
    arguments = ["--orchestrator.train.env.0.args", f'{{fault = "{fault}", every = 1}}']
    return ["--run-dir", "mine", "--max-steps", "50", *environment, *arguments]


@pytest.mark.slow
def test_a_run_in_which_every_rollout_fails_stops_and_says_why(typed, place: Path):
    status, said = typed(*every("none"))
    assert status == 1
    assert "every rollout of the last" in said
    assert "no reward: `score` returned None" in said
    assert not (place / "mine" / "final").exists()
    assert not (place / "mine" / "summary.json").exists()


@pytest.mark.slow
def test_a_run_of_which_no_episode_can_begin_is_refused_before_it_has_a_folder(typed, place: Path):
    status, said = typed(*every("start"))
    assert status == 2
    assert "no episode can begin: example" in said
    assert "start raised RuntimeError: start broke" in said
    assert not (place / "mine").exists()


@pytest.mark.slow
def test_a_tool_that_raises_answers_the_model_and_is_counted(typed, place: Path):
    status, _ = typed(
        "--run-dir",
        "mine",
        "--orchestrator.train.env.0.import_path",
        "broken_tool.BrokenTool",
        "--orchestrator.sampling.max-tokens",
        "32",
        "--warm-start",
        "{steps = 300, batch_size = 8, conversations = 200, optim = {lr = 1e-2}}",
    )
    assert status == 0
    module = sys.modules["broken_tool"]
    assert module.raised > 0
    trajectories = trajectory_lines(place / "mine")
    assert sum(t["info"].get("tool_errors", {}).get("exception", 0) for t in trajectories) == module.raised
    told = [m["content"] for t in trajectories for m in t["messages"] if m["role"] == "tool"]
    answer = "Error: guess failed: RuntimeError: the dice fell off the table"
    assert told.count(answer) == module.raised
    assert all(t["error"] is None for t in trajectories)
    steps = [line["metrics"] for line in train_lines(place / "mine")]
    assert [m["rollouts/failed"] for m in steps] == [0, 0]
    assert sum(m["tool_errors"] for m in steps) * 8 >= module.raised
    assert_ledger_adds_up(place / "mine")
