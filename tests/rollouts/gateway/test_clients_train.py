"""`verbatim rl` trains a small model through agents on three SDKs, unmodified: each token as it was sampled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_clients import CLIENTS, installed

from verbatim import build_samples
from verbatim.cli.main import main
from verbatim.logs.monitors.trajectory_log import read_trajectories

pytestmark = [pytest.mark.clients, pytest.mark.realtime, pytest.mark.slow]

RUN = Path("runs", "run", "latest")
TOML = """\
max_steps = 2
[model.build]
hidden_size = 64
num_layers = 2
vocab_size = 512
[warm_start]
steps = 120
batch_size = 8
conversations = 300
optim = {{ lr = 3e-3 }}
[orchestrator]
batch_size = 32
group_size = 8
seq_len = 1024
sampling = {{ max_tokens = 40 }}
filters = []
[[orchestrator.train.env]]
id = "program"
[orchestrator.train.env.args]
command = {command}
cwd = {cwd}
reuse = true
max_processes = 1
episodes_per_process = 32
sandbox = false
demonstrations = {demonstrations}
data = [{{ secret = 3 }}, {{ secret = 8 }}, {{ secret = 11 }}, {{ secret = 14 }}]
"""


def demonstrations(path: Path) -> None:
    """Games with the tool's schema in every form that the SDKs send; half of the guesses are right."""
    rows = []
    for n in range(60):
        first, second = 1 + n % 15, 1 + n * 7 % 15
        messages = [
            {"role": "system", "content": "You play a game."},
            {"role": "user", "content": "Find the number from 1 to 15 in 4 guesses."},
        ]
        for number, answer in ((first, "higher" if second > first else "lower"), (second, None)):
            call = {
                "id": f"c{number}",
                "type": "function",
                "function": {"name": "guess", "arguments": {"number": number}},
            }
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
            if answer is not None:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": answer})
        rows.append({"messages": messages, "tools": [SCHEMAS[n % len(SCHEMAS)]]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


NUMBER = {"number": {"type": "integer"}}
PARAMETERS = [  # as the SDKs write them
    {
        "properties": {"number": {"title": "Number", "type": "integer"}},
        "required": ["number"],
        "title": "guess_args",
        "type": "object",
        "additionalProperties": False,
    },
    {"additionalProperties": False, "properties": NUMBER, "required": ["number"], "type": "object"},
    {"properties": NUMBER, "required": ["number"], "type": "object"},
]
SCHEMAS = [
    {"type": "function", "function": {"name": "guess", "description": about, "parameters": parameters}}
    for about, parameters in zip(["", "", "Guess the number."], PARAMETERS, strict=True)
]


@pytest.mark.parametrize("sdk", ["openai_agents", "pydantic_ai", "langgraph"])
def test_a_model_is_trained_through_an_sdk(sdk: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    demonstrations(tmp_path / "games.jsonl")
    command = [installed("agents/bin/python"), "guess_agents.py", sdk]
    (tmp_path / "run.toml").write_text(
        TOML.format(
            command=json.dumps(command),
            cwd=json.dumps(str(CLIENTS)),
            demonstrations=json.dumps(str(tmp_path / "games.jsonl")),
        )
    )
    monkeypatch.chdir(tmp_path)
    assert main(["rl", "run.toml", "--quiet"]) == 0
    lines = [json.loads(line) for line in (tmp_path / RUN / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in lines if line["kind"] == "train"]
    assert [(m["rollouts"], m["rollouts/failed"]) for m in steps] == [(32, 0)] * 2
    last = steps[-1]
    ledger = {name.removeprefix("ledger/"): count for name, count in last.items() if name.startswith("ledger/")}
    assert ledger.pop("sampled") == sum(ledger.values())
    # The trainer computes the logprobs of every token in the context that it was recorded in: those of the sampler.
    assert all(m["mismatch_kl"] < 1e-3 for m in steps)
    trajectories = [trajectory for _, trajectory in read_trajectories(tmp_path / RUN)]
    assert len(trajectories) >= 64
    assert max(len(trajectory.turns) for trajectory in trajectories) > 1
    for trajectory in trajectories:
        samples = build_samples(trajectory)
        branches = trajectory.info["gateway"]["branches"]
        # A renderer that cannot continue an empty thought renders the conversation anew: a sample of its own, too.
        assert 1 + len(branches) <= len(samples) <= len(trajectory.turns)
        assert all(branch["reason"] == "history_edited" and branch["found"] for branch in branches)
        assert sum(int(sample.loss_mask.sum()) for sample in samples) == trajectory.num_sampled_tokens
