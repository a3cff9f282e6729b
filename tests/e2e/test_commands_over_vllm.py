"""`verbatim rollout` and `verbatim eval` by a run's [inference] with vLLM, over the double: servers that are there, and
servers that the command starts."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from e2e.tiny_runs import LOTS, build_tiny_model, workplace
from inference.vllm.double_server import fake_python
from inference.vllm.vllm_double import VllmDouble, serving_on_a_thread
from verbatim.cli.main import main
from verbatim.core.trajectory_json import trajectory_from_json
from verbatim.inference.vllm.process import free_port

pytestmark = pytest.mark.realtime
KEY = "sk-of-the-double"
RUN = """
[model]
name = "{model}"
[orchestrator]
seq_len = 384
sampling = {{ max_tokens = 6 }}
[orchestrator.eval]
episodes = 5
[inference]
backend = "vllm"
[inference.vllm]
{servers}
[[orchestrator.train.env]]
import_path = "lots.Lots"
"""
ROLLOUT = ["rollout", "tasks.jsonl", "--inference", "run.toml", "--out", "out.jsonl", "--max-tokens", "6"]
EVAL = ["eval", "run.toml", "--out", "out.jsonl"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("commands") / "model")


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory) -> Path:
    """A model of another size."""
    from e2e.tiny_runs import SIZES
    from verbatim.models.build import build_model

    folder = tmp_path_factory.mktemp("other") / "model"
    build_model(folder, SIZES.model_copy(update={"vocab_size": 300}), ["number 1"], seed=0)
    return folder


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("DOUBLE_KEY", KEY)
    with workplace(tmp_path / "work", {"lots": LOTS}) as folder:
        tasks = [{"messages": [{"role": "user", "content": text}], "id": text} for text in ("go", "stay")]
        (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
        yield folder


def write_run(model: Path, servers: str) -> None:
    Path("run.toml").write_text(RUN.format(model=model, servers=servers))


def at(url: str) -> str:
    return f'urls = ["{url}"]\napi_key_env = "DOUBLE_KEY"'


def assert_logprobs_are_the_models(model: Path, count: int) -> None:
    """Checks every token that stands in the results."""
    from verbatim.inference.embedded.whole_sequence import sequence_logprobs
    from verbatim.models.head import CausalLM
    from verbatim.models.loading import load_model

    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert len(lines) == count
    head = CausalLM(load_model(str(model)))
    for line in lines:
        trajectory = trajectory_from_json(line["trajectory"])
        assert trajectory.error is None
        (turn,) = trajectory.turns
        assert turn.policy_versions.tolist() == [0] * len(turn.completion_ids) != []
        ids = torch.from_numpy(np.concatenate([turn.prompt_ids, turn.completion_ids]).astype(np.int64))
        with torch.inference_mode():
            expected = sequence_logprobs(head, ids, 1.0).numpy()[len(turn.prompt_ids) :]
        assert np.abs(turn.logprobs - expected).max() <= 5e-5


@pytest.mark.slow
def test_conversations_over_a_server_that_is_there(place: Path, model: Path, capsys):
    double = VllmDouble(model)
    double.key = KEY
    with serving_on_a_thread(double) as url:
        write_run(model, at(url))
        assert main([*ROLLOUT, "--samples", "2"]) == 0
        assert_logprobs_are_the_models(model, 4)
        assert KEY not in Path("out.jsonl").read_text() + "".join(capsys.readouterr())
        num_asked = len(double.calls)
        assert main([*ROLLOUT, "--samples", "2"]) == 0  # all is done: nothing is asked, nothing is loaded
        assert len(double.calls) == num_asked
        assert main([*ROLLOUT, "--samples", "3"]) == 0
        assert_logprobs_are_the_models(model, 6)
        assert main([*ROLLOUT, "--samples", "3", "--model", "elsewhere"]) == 2
    drawn = [
        tuple(json.loads(line)["trajectory"]["turns"][0]["completion_ids"])
        for line in Path("out.jsonl").read_text().splitlines()
    ]
    assert len(set(drawn)) == 6


@pytest.mark.slow
def test_conversations_with_the_settings_of_a_run_that_cuts_need_no_server_that_returns_kept_sets(
    place: Path, model: Path, capsys
):
    """They are not trained, and have no `top_k`."""
    double = VllmDouble(model)
    double.key = KEY
    with serving_on_a_thread(double) as url:
        write_run(model, at(url))
        text = Path("run.toml").read_text().replace("max_tokens = 6", "max_tokens = 6, top_p = 0.9, top_k = 20")
        Path("run.toml").write_text(text)
        assert main(ROLLOUT) == 0
        assert_logprobs_are_the_models(model, 2)
        assert main(["eval", "run.toml"]) != 0
        assert "add --return-sampling-mask" in " ".join(capsys.readouterr().err.split())
        double.facts["returns_kept_sets"] = True
        assert main(["eval", "run.toml"]) == 0


@pytest.mark.slow
def test_conversations_with_the_embedded_engine_never_draw_with_a_seed_again(place: Path, model: Path):
    """Seeds are by place in what is left to do: a command that goes on must not begin with the first ones again."""
    write_run(model, "")
    engine = [*ROLLOUT, "--inference.backend", "torch", "--inference.torch.deterministic", "true", "--seed", "5"]
    for samples in ("1", "2", "4"):
        assert main([*engine, "--samples", samples]) == 0
    assert_logprobs_are_the_models(model, 8)
    drawn = [
        tuple(json.loads(line)["trajectory"]["turns"][0]["completion_ids"])
        for line in Path("out.jsonl").read_text().splitlines()
    ]
    assert len(set(drawn)) == 8
    Path("out.jsonl").unlink()
    assert main([*engine, "--samples", "1"]) == 0
    again = {
        line["task"]: tuple(line["trajectory"]["turns"][0]["completion_ids"])
        for line in map(json.loads, Path("out.jsonl").read_text().splitlines())
    }
    assert set(again.values()) == set(drawn[:2])


def test_an_evaluation_over_a_server_that_is_there(place: Path, model: Path, capsys):
    double = VllmDouble(model)
    double.key = KEY
    with serving_on_a_thread(double) as url:
        write_run(model, at(url))
        assert main([*EVAL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["models"][0]["environments"]["lots.Lots"]
    assert (found["episodes"], found["failed"]) == (5, 0)
    assert_logprobs_are_the_models(model, 5)


@pytest.mark.slow
@pytest.mark.parametrize("command", [ROLLOUT, EVAL], ids=["rollout", "eval"])
def test_a_server_that_the_command_starts_ends_with_it(place: Path, model: Path, tmp_path: Path, command):
    python = fake_python(tmp_path)
    write_run(model, f'python = "{python}"')
    assert main(command) == 0
    assert_logprobs_are_the_models(model, 2 if command is ROLLOUT else 5)
    left = subprocess.run(["pgrep", "-f", str(model)], capture_output=True, text=True, check=False).stdout.split()
    assert left == []


@pytest.mark.parametrize("command", [ROLLOUT, EVAL], ids=["rollout", "eval"])
@pytest.mark.parametrize(
    ("servers", "status", "said"),
    [
        ('python = "/no/python"', 2, 'inference.vllm.python: there is no program "/no/python"'),
        ('python = "/bin/true-is-no-python"', 2, "inference.vllm.python: there is no program"),
        ('urls = ["10.0.0.7:8000"]', 2, "inference.vllm.urls: url '10.0.0.7:8000'; expected an address such as"),
        ('urls = ["http://127.0.0.1:1"]\napi_key_env = "NO_KEY"', 2, "the environment variable NO_KEY is empty"),
        ('urls = ["http://127.0.0.1:{port}"]', 1, "replica 0 (http://127.0.0.1:{port})"),
        ('max_model_len = 100\nurls = ["http://127.0.0.1:{port}"]', 2, "is shorter than orchestrator.seq_len = 384"),
        ("replica = 2", 2, "replica"),
    ],
)
def test_servers_that_cannot_be_used_are_told(place: Path, model: Path, capsys, command, servers, status, said):
    with socket.socket() as unused:  # bound, not listening: it refuses connections, and keeps the port
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
        write_run(model, servers.replace("{port}", port))
        assert main(command) == status
    told = capsys.readouterr().err
    assert said.replace("{port}", port) in " ".join(told.split())
    assert "Traceback" not in told


@pytest.mark.parametrize("command", [ROLLOUT, EVAL], ids=["rollout", "eval"])
def test_a_server_with_another_key_or_another_model_is_told(place: Path, model: Path, other: Path, capsys, command):
    double = VllmDouble(other)
    with serving_on_a_thread(double) as url:
        write_run(model, at(url))
        assert main(command) == 2
        assert "but this run's model has" in capsys.readouterr().err
        double.key = "another-key"
        assert main(command) == 2
        assert "it requires a key" in capsys.readouterr().err
    assert double.generated == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ["--base-url", "http://127.0.0.1:1/v1"],
            "--base-url is for a chat server, and --inference samples by a run's",
        ),
        (["--extra-body", "{}"], "--extra-body is for a chat server"),
        (["--max-turns", "0"], "max_turns = 0; expected a number above 0"),
        (["--orchestrator.seq-length", "5"], "seq_length"),
        (["--inference", "none.toml"], "none.toml"),
        (["--model", "none"], "none"),
    ],
)
def test_options_of_a_rollout_that_do_not_go_together_are_refused(place: Path, model: Path, capsys, more, said):
    write_run(model, at(f"http://127.0.0.1:{free_port()}"))
    assert main([*ROLLOUT, *more]) == 2
    assert said in capsys.readouterr().err
    assert not Path("out.jsonl").exists()


@pytest.mark.slow
def test_a_rollout_without_any_way_to_sample_says_both(place: Path, capsys):
    assert main(["rollout", "tasks.jsonl", "--out", "out.jsonl"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "--base-url URL --model NAME; or a run's file that says how to sample, --inference FILE" in said
