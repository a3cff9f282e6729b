"""`verbatim config` prints what a run would use, or what is wrong with it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from e2e.tiny_runs import SIZES, build_tiny_model
from inspection.doctor.corpus import tokenizer
from verbatim.cli.main import main
from verbatim.models.build import build_model
from verbatim.models.renderers import create_renderer
from verbatim.models.renderers.continuations import told

FILE = """\
[model]
name = "{model}"
[[orchestrator.train.env]]
id = "guess_number"
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return FILE.format(model=build_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context_length=2048))


@pytest.fixture
def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_the_resolved_configuration_is_printed_as_toml(file: Path, capsys):
    assert main(["config", str(file), "--orchestrator.batch-size", "64"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["orchestrator"]["batch_size"] == 64
    assert printed["orchestrator"]["group_size"] == 16
    assert printed["orchestrator"]["train"]["env"][0]["id"] == "guess_number"


def test_a_misspelt_parameter_of_a_built_in_is_refused_with_its_line(file: Path, text: str, capsys):
    file.write_text(text + "[trainer.loss]\nkl_tao = 0.1\n")
    assert main(["config", str(file)]) == 2
    message = f'error: {file}:6: trainer.loss.kl_tao: unknown parameter "kl_tao"; did you mean "kl_tau"?'
    assert capsys.readouterr().err.startswith(message)


def test_an_unknown_environment_is_refused(file: Path, capsys):
    assert main(["config", str(file), "--orchestrator.train.env.0.id", "guess_numbre"]) == 2
    assert "there is no environment 'guess_numbre'; did you mean \"guess_number\"?" in capsys.readouterr().err


FILTERING = ["--orchestrator.buffer.online-difficulty-filtering", "true"]


@pytest.mark.parametrize(
    ("options", "notes"),
    [
        (["--orchestrator.oversampling-factor", "2"], []),
        (
            ["--orchestrator.oversampling-factor", "2.5"],
            ["oversampling_factor = 2.5 acts as 2: with max_async_level = 1"],
        ),
        (
            ["--orchestrator.oversampling-factor", "3", "--orchestrator.max-async-level", "0"],
            ["oversampling_factor = 3 acts as 1: with max_async_level = 0 rollouts may start for 1 batch at a time"],
        ),
        (["--orchestrator.oversampling-factor", "2", "--orchestrator.max-async-level", "0", *FILTERING], []),
        (
            ["--orchestrator.oversampling-factor", "3", "--orchestrator.max-async-level", "0", *FILTERING],
            ["max_concurrent = 256 is less than the 384 episodes in flight that oversampling_factor = 3 allows"],
        ),
        (
            ["--orchestrator.max-async-level", "3", "--orchestrator.max-off-policy-steps", "1"],
            ["max_async_level = 3 acts as 1: a rollout that started 3 batches ahead would be older than"],
        ),
    ],
)
def test_what_the_staleness_rule_caps_is_said(file: Path, capsys, options, notes):
    assert main(["config", str(file), *options]) == 0
    printed = capsys.readouterr()
    tomllib.loads(printed.out)
    lines = [line for line in printed.err.splitlines() if line.startswith("note: orchestrator.")]
    assert len(lines) == len(notes)
    for line, note in zip(lines, notes, strict=True):
        assert line.startswith(f"note: orchestrator.{note}")


@pytest.mark.parametrize(
    ("retention", "outcome"),
    [
        ("tool_cycle", "starts a new sample: the format drops earlier thoughts at a user's message"),
        ("all", "continues the sampled tokens"),
    ],
)
def test_which_turns_of_the_model_continue_is_told(retention: str, outcome: str):
    renderer = create_renderer("qwen3", tokenizer(), thinking_retention=retention)
    found = list(told(renderer, retention, "verbatim"))
    assert found[0] == f'renderer "qwen3", thinking_retention = "{retention}", history = "verbatim":'
    assert found[1:4] == [
        "a tool's answer continues the sampled tokens",
        "a tool's answer, after a thought continues the sampled tokens",
        "a user's message continues the sampled tokens",
    ]
    assert found[4].startswith(f"a user's message, after a thought {outcome}")
    assert found[5].startswith("a system message starts a new sample")


@pytest.mark.slow
@pytest.mark.parametrize(("retention", "history"), [("tool_cycle", "template"), ("all", "verbatim")])
def test_which_turns_of_a_model_that_is_built_continue_is_told(file: Path, capsys, retention, history):
    renderer = create_renderer("auto", tokenizer(), thinking_retention=retention, history=history)
    keys = [
        "--model",
        "{ build = {} }",
        "--orchestrator.renderer.thinking-retention",
        retention,
        "--orchestrator.renderer.history",
        history,
    ]
    assert main(["config", str(file), *keys]) == 0
    notes = capsys.readouterr().err.splitlines()
    assert notes[-7:-1] == [f"note: {sentence}" for sentence in told(renderer, retention, history)]


def test_history_as_a_chat_endpoint_has_it_continues_nothing():
    renderer = create_renderer("qwen3", tokenizer(), history="template")
    found = list(told(renderer, "tool_cycle", "template"))
    assert all('starts a new sample: history = "template" renders every prompt' in line for line in found[1:])


LENGTHS = """\
from verbatim import Example
from verbatim.environments import Episode


class Asked(Episode):
    def __init__(self, words):
        self.messages = [{"role": "user", "content": "word " * words}]

    async def score(self, trajectory):
        return 0.0


class Lengths:
    def __init__(self, words):
        self.words = words

    def examples(self, split):
        return [Example(id=f"{split}-{n}", payload={"words": n}) for n in self.words]

    async def start(self, example, seed):
        return Asked(example.payload["words"])
"""


@pytest.fixture
def lengths(tmp_path: Path, monkeypatch) -> Path:
    """A run with a model and examples of 10, 2000 and 30 words."""
    (tmp_path / "lengths.py").write_text(LENGTHS)
    monkeypatch.syspath_prepend(str(tmp_path))
    build_model(tmp_path / "model", SIZES, ["a word and another word"] * 8, seed=0)
    path = tmp_path / "run.toml"
    path.write_text(
        f'model.name = "{tmp_path / "model"}"\norchestrator.seq_len = 256\n[[orchestrator.train.env]]\n'
        'import_path = "lengths.Lengths"\nargs = { words = [10, 2000, 30] }\n'
    )
    return path


@pytest.mark.slow
@pytest.mark.realtime
def test_examples_whose_opening_prompts_do_not_fit_are_named_by_config_and_env_check(lengths: Path, capsys):
    """Counted by the model's own renderer: about 2,000 tokens, where four characters a token would give 2,500."""
    from verbatim.models.loading import load_tokenizer

    words = load_tokenizer(lengths.parent / "model")("word " * 2000)["input_ids"]
    assert main(["config", str(lengths)]) == 0
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "opening prompts" in line and '"train"' in line]
    assert "prompts of 1 of 3 examples leave no room in seq_len = 256" in said
    named = re.search(r": 'train-2000' \(([\d,]+) tokens\)", said)
    assert len(words) < int(named[1].replace(",", "")) < len(words) + 50
    assert main(["env", "check", str(lengths), "--examples", "1"]) == 1
    printed, aside = capsys.readouterr()
    assert f"'train-2000' ({named[1]} tokens)" in printed
    assert "note: a user's message, after a thought starts a new sample" in aside
    assert main(["config", str(lengths), "--orchestrator.seq-len", "8"]) == 2
    assert "opening prompts of 3 of 3 examples leave no room in seq_len = 8" in capsys.readouterr().err


SILENT = """

from verbatim.core.errors import NoDemonstrations


class Silent(Lengths):
    def demonstrations(self, count, seed):
        raise NoDemonstrations("there is nothing to show with these settings")
"""


@pytest.mark.slow
def test_an_environment_that_shows_nothing_needs_none_with_a_pretrained_model(lengths: Path, capsys):
    (lengths.parent / "silent.py").write_text(LENGTHS + SILENT)
    text = lengths.read_text().replace("lengths.Lengths", "silent.Silent").replace("2000, ", "")
    lengths.write_text(text)
    assert main(["config", str(lengths)]) == 0
    capsys.readouterr()
    lengths.write_text(text + "[warm_start]\nsteps = 1\n")
    assert main(["config", str(lengths)]) == 2
    assert "there is nothing to show with these settings" in capsys.readouterr().err
