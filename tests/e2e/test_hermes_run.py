"""A model whose chat template has no tools: refused with the answer, and trained with tools = "hermes"."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from e2e.tiny_runs import SIZES, TOML, assert_ledger_adds_up, train_lines, trajectory_lines, workplace
from verbatim.cli.main import main
from verbatim.environments.guess_number import GuessNumber
from verbatim.logs.monitors.trajectory_log import read_trajectories
from verbatim.models.build import build_model
from verbatim.models.loading import load_tokenizer
from verbatim.models.renderers import create_renderer
from verbatim.models.renderers.hermes import HermesFormat
from verbatim.rollouts import trajectory_from_messages

TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2-135M-Instruct's."""
SHY = '''
from verbatim.environments.guess_number import GuessNumber


class Shy:
    """The same game, without demonstrations."""

    def __init__(self):
        self.game = GuessNumber()

    def examples(self, split):
        return self.game.examples(split)

    async def start(self, example, seed):
        return await self.game.start(example, seed)
'''
GUESSES = TOML + 'id = "guess_number"\n'
WARM = "\n[warm_start]\nsteps = 60\nbatch_size = 16\nconversations = 100\noptim = { lr = 1e-2 }\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hermes") / "model"
    wrap = HermesFormat(opening="system", answering="tool").wrap
    texts = [
        message["content"]
        for shown in GuessNumber().demonstrations(100, seed=0)
        for message in wrap(shown.messages, shown.tools)
    ]
    build_model(folder, SIZES, texts, seed=0)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def place(tmp_path: Path):
    with workplace(tmp_path / "work", {"shy": SHY}) as folder:
        yield folder


@pytest.mark.parametrize("command", ["config", "rl"])
def test_tools_that_the_template_does_not_show_are_refused_before_anything_is_made(
    command: str, model: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "run.toml").write_text(GUESSES.format(model=model))
    assert main([command, "run.toml"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "environment 'guess_number': the model's chat template shows no tools and writes no tool calls" in error
    assert 'set tools = "hermes" under [orchestrator.renderer]' in error
    assert not (place / "runs").exists()


def test_the_first_episode_is_refused_where_nothing_is_known_of_the_tools_before(
    model: Path, place: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (place / "run.toml").write_text(TOML.format(model=model) + 'import_path = "shy:Shy"\n')
    assert main(["config", "run.toml"]) == 2  # it begins an episode of each example
    assert "the conversation has guess; set tools" in " ".join(capsys.readouterr().err.split())
    assert "if environment 'shy:Shy' has tools, its first episode is refused" in caplog.text
    assert main(["rl", "run.toml"]) == 2
    assert "the conversation has guess; set tools" in " ".join(capsys.readouterr().err.split())


def test_conversations_with_tools_are_refused_before_anything_is_made(
    model: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"type": "function", "function": {"name": "guess", "arguments": {"number": 1}}}
    messages = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    (place / "shown.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (place / "run.toml").write_text(
        TOML.format(model=model) + 'import_path = "shy:Shy"\n[warm_start]\nsteps = 1\ndata = "shown.jsonl"\n'
    )
    assert main(["config", "run.toml"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "shown.jsonl:1: the model's chat template writes no tool calls" in error


def test_a_family_beside_hermes_is_refused_with_its_line(
    model: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "run.toml").write_text(GUESSES.format(model=model))
    renderer = '{name = "qwen3", tools = "hermes"}'
    assert main(["config", "run.toml", "--orchestrator.renderer", renderer]) == 2
    assert "a family with a tool format of its own" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_with_hermes_learns_the_calls_and_trains_on_them(
    model: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = GUESSES.replace("max_tokens = 8", "max_tokens = 32")
    (place / "run.toml").write_text(text.format(model=model) + WARM)
    assert main(["rl", "run.toml", "--orchestrator.renderer.tools", "hermes"]) == 0, capsys.readouterr().err
    run = next((place / "runs" / "run").iterdir())
    assert_ledger_adds_up(run)
    assert len(train_lines(run)) == 2
    turns = [turn for trajectory in trajectory_lines(run) for turn in trajectory["turns"]]
    calls = [call for turn in turns for call in turn["tool_calls"] if call["status"] == "ok"]
    assert len(calls) > len(turns) // 2  # the warm start has taught them
    assert {call["name"] for call in calls} == {"guess"}
    played = [trajectory for _, trajectory in read_trajectories(run)]
    pairs = [pair for trajectory in played for pair in pairwise(trajectory.turns)]
    assert len(pairs) > len(played)
    for earlier, later in pairs:  # bridged, each of them
        kept = [*earlier.prompt_ids.tolist(), *earlier.completion_ids.tolist()]
        assert later.prompt_ids[: len(kept)].tolist() == kept
    renderer = create_renderer("template", load_tokenizer(model), tools="hermes")
    shown = GuessNumber().demonstrations(1, seed=0)[0]
    written = trajectory_from_messages(renderer, shown.messages, shown.tools).turns[0]
    opening = "<|im_start|>system\nYou play a game.\n\nYou are a function calling AI model. You are provided with"
    assert renderer.decode(written.prompt_ids).startswith(opening)
    assert renderer.decode(written.completion_ids).startswith('<tool_call>\n{"name": "guess", "arguments": ')
