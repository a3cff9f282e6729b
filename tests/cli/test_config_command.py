"""`verbatim config` prints what a run would use, or what is wrong with it, without torch."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import warm
from doctor.corpus import tokenizer
from verbatim.cli.config_command import _continued
from verbatim.cli.main import main
from verbatim.config.orchestrator import RendererConfig
from verbatim.renderers import create_renderer

FILE = """\
[model]
build = { hidden_size = 64 }
[[orchestrator.train.env]]
id = "guess_number"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def test_the_resolved_configuration_is_printed_as_toml(file: Path, capsys):
    assert main(["config", str(file), "--orchestrator.batch-size", "64"]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["orchestrator"]["batch_size"] == 64
    assert printed["orchestrator"]["group_size"] == 16
    assert printed["orchestrator"]["train"]["env"][0]["id"] == "guess_number"


def test_a_misspelt_knob_of_a_built_in_is_refused_with_its_line(file: Path, capsys):
    file.write_text(FILE + "[trainer.loss]\nkl_tao = 0.1\n")
    assert main(["config", str(file)]) == 2
    message = f'error: {file}:6: trainer.loss.kl_tao: unknown knob "kl_tao"; did you mean "kl_tau"?'
    assert capsys.readouterr().err.startswith(message)


def test_an_unknown_environment_is_refused(file: Path, capsys):
    assert main(["config", str(file), "--orchestrator.train.env.0.id", "guess_numbre"]) == 2
    assert "there is no environment 'guess_numbre'; did you mean \"guess_number\"?" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.realtime
def test_neither_torch_nor_transformers_is_imported(file: Path):
    script = (
        "import sys; from verbatim.cli.main import main; status = main(['config', sys.argv[1]]); "
        "print([m for m in ('torch', 'transformers') if m in sys.modules], file=sys.stderr); sys.exit(status)"
    )
    with warm.cold("it tells what is imported"):
        done = subprocess.run([sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "[]\n"


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
            ["max_concurrent = 256 holds less than the 384 episodes in flight that oversampling_factor = 3 asks for"],
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
    lines = printed.err.splitlines()
    assert len(lines) == len(notes)
    for line, note in zip(lines, notes, strict=True):
        assert line.startswith(f"note: orchestrator.{note}")


@pytest.mark.parametrize(
    ("retention", "outcome"),
    [
        ("tool_cycle", "starts a new sample: the user has spoken, and the format drops what was thought before"),
        ("all", "continues what was sampled"),
    ],
)
def test_which_turns_of_the_model_continue_is_told(retention: str, outcome: str):
    renderer = create_renderer("qwen3", tokenizer(), thinking_retention=retention)
    told = list(_continued(renderer, RendererConfig(thinking_retention=retention)))
    assert told[0] == f'renderer "qwen3", thinking_retention = "{retention}", history = "verbatim":'
    assert told[1:4] == [
        "a tool's answer continues what was sampled",
        "a tool's answer, after a thought continues what was sampled",
        "a user's message continues what was sampled",
    ]
    assert told[4].startswith(f"a user's message, after a thought {outcome}")
    assert told[5].startswith("a system message starts a new sample")


def test_history_as_a_chat_endpoint_has_it_continues_nothing():
    renderer = create_renderer("qwen3", tokenizer(), history="template")
    told = list(_continued(renderer, RendererConfig(history="template")))
    assert all('starts a new sample: history = "template" renders every prompt' in line for line in told[1:])
