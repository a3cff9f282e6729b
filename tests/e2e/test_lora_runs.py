"""Whole runs with low-rank adapters: warm-started, sampled, trained, stopped, resumed, kept."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from e2e.tiny_runs import assert_ledger_adds_up, train_lines, trajectory_lines, warm_started_workplace
from verbatim.cli.main import main
from verbatim.logs.monitors.trajectory_log import read_trajectories

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

STEPS = 6
LORA = """
[trainer.lora]
r = 4
alpha = 8
merge_final = true
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Path]:
    """`run.toml` builds a model, trains all of it on conversations, and then adapters alone."""
    with warm_started_workplace(tmp_path_factory.mktemp("lora"), LORA) as folder:
        yield folder


@pytest.fixture(scope="module")
def unstopped(place: Path) -> Path:
    assert main(["rl", "run.toml", "--run-dir", "unstopped", "--max-steps", str(STEPS)]) == 0
    return place / "unstopped"


def logprobs(model: torch.nn.Module, ids: np.ndarray) -> np.ndarray:
    tokens = torch.from_numpy(ids).long()
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()


def test_adapters_alone_are_trained_published_and_kept(unstopped: Path):
    names = {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    newest = sorted((unstopped / "weights").iterdir())[-1]
    for folder in (newest, unstopped / "checkpoints" / f"step_{STEPS:06d}" / "weights", unstopped / "final"):
        found = {path.name for path in folder.iterdir()}
        assert names <= found
        assert not any(name.startswith("model") for name in found)
    assert all(line["metrics"]["grad_norm"] > 0 for line in train_lines(unstopped))
    assert_ledger_adds_up(unstopped)
    versions = {v for t in trajectory_lines(unstopped) for turn in t["turns"] for v in turn["policy_versions"]}
    assert versions == set(range(STEPS))


def test_what_was_sampled_last_has_the_logprobs_of_the_adapter_in_plain_peft(unstopped: Path):
    """The last trajectories were sampled with the version before the last; `weights/` still has it."""
    import peft

    folder = unstopped / "weights" / f"v{STEPS - 1:06d}"
    base = AutoModelForCausalLM.from_pretrained(unstopped / "warm_start")
    plain = peft.PeftModel.from_pretrained(base, folder)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == str(
        unstopped.resolve() / "warm_start"
    )
    deltas = []
    for _, trajectory in read_trajectories(unstopped):
        (turn,) = trajectory.turns
        if set(turn.policy_versions) == {STEPS - 1}:
            found = logprobs(plain, np.concatenate([turn.prompt_ids, turn.completion_ids]))[len(turn.prompt_ids) - 1 :]
            deltas.append(np.abs(found - turn.logprobs))
    delta = np.concatenate(deltas)
    assert len(delta) > 20
    assert np.median(delta) <= 1e-6
    assert delta.max() <= 5e-5


def test_the_merged_model_is_that_of_the_final_adapter(unstopped: Path):
    """The adapter is loaded by the lines of docs/lora.md."""
    page = (Path(__file__).parents[2] / "docs" / "lora.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(snippet.replace("runs/my_run/latest/final", str(unstopped / "final")), names)
    ids = np.random.default_rng(0).integers(0, 400, 50)
    merged = AutoModelForCausalLM.from_pretrained(unstopped / "final" / "merged")
    adapted = names["model"]
    base = AutoModelForCausalLM.from_pretrained(unstopped / "warm_start")
    assert np.abs(logprobs(merged, ids) - logprobs(adapted, ids)).max() < 1e-5
    assert np.abs(logprobs(merged, ids) - logprobs(base, ids)).max() > 1e-3
    assert (unstopped / "final" / "merged" / "tokenizer.json").is_file()


def test_the_final_adapter_is_measured_by_eval(place: Path, unstopped: Path, capsys):
    extra = ["--orchestrator.eval.episodes", "4"]
    assert main(["eval", "run.toml", *extra, "--model", str(unstopped / "final")]) == 0
    assert "lots.Shown" in capsys.readouterr().out


def test_a_run_that_was_moved_and_resumed_is_bit_for_bit_the_run_that_never_stopped(place: Path, unstopped: Path):
    """Its folder has another name afterwards: the base model is found in it all the same."""
    assert main(["rl", "run.toml", "--run-dir", "short", "--max-steps", "3"]) == 0
    shutil.rmtree(place / "short" / "weights")
    shutil.move(place / "short", place / "moved")
    assert main(["rl", "run.toml", "--run-dir", "moved", "--resume", "--max-steps", str(STEPS)]) == 0
    last = f"checkpoints/step_{STEPS:06d}/trainer/optimizer.safetensors"
    for name in ("final/adapter_model.safetensors", "final/merged/model.safetensors", last):
        assert (place / "moved" / name).read_bytes() == (unstopped / name).read_bytes()
    said = [[turn["completion_ids"] for turn in t["turns"]] for t in trajectory_lines(place / "moved")]
    assert said == [[turn["completion_ids"] for turn in t["turns"]] for t in trajectory_lines(unstopped)]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--trainer.lora.r", "8"], "resume with trainer.lora.r = 4"),
        (["--trainer.lora.target_modules", '["q_proj"]'], "resume with trainer.lora.target_modules"),
    ],
)
def test_another_shape_is_refused_when_a_run_is_resumed(place: Path, unstopped: Path, changed, said, capsys):
    resumed = shutil.copytree(unstopped, place / "other", symlinks=True)
    try:
        assert main(["rl", "run.toml", "--run-dir", str(resumed), "--resume", "--max-steps", "8", *changed]) in (1, 2)
        assert said in "".join(capsys.readouterr()).replace("\n", " ")
    finally:
        shutil.rmtree(resumed)


def test_a_run_with_adapters_is_not_resumed_without_the_table(place: Path, unstopped: Path, capsys):
    resumed = shutil.copytree(unstopped, place / "without", symlinks=True)
    (place / "plain.toml").write_text((place / "run.toml").read_text().partition("[trainer.lora]")[0])
    assert main(["rl", "plain.toml", "--run-dir", str(resumed), "--resume", "--max-steps", "8"]) in (1, 2)
    assert "was started with [trainer.lora]" in "".join(capsys.readouterr()).replace("\n", " ")


def test_the_number_of_trained_parameters_is_printed(place: Path, capsys):
    assert main(["rl", "run.toml", "--run-dir", "printed", "--max-steps", "1"]) == 0
    out = capsys.readouterr().out
    a_and_b = 4 * ((32 + 32) * 2 + (16 + 32) * 2 + (32 + 64) * 3)
    assert f"{a_and_b:,} parameters are trained" in out
    assert "rank 4 on 7 layers" in out


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--trainer.lora.dropout", "0.1"], "use dropout = 0"),
        (["--trainer.lora.target_modules", '["nothing"]'], "its linear layers are down_proj, gate_proj"),
    ],
)
def test_mistakes_are_refused_before_there_is_a_folder(place: Path, wrong, said, capsys):
    assert main(["rl", "run.toml", "--run-dir", "refused", *wrong]) == 2
    assert said in "".join(capsys.readouterr()).replace("\n", " ")
    assert not (place / "refused").exists()
