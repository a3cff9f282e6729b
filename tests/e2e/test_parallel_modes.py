"""What one process can be asked for, two can: adapters with their base as reference, evaluation, distillation, sft."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.test_parallel_runs import verbatim
from e2e.tiny_runs import (
    DEMONSTRATED,
    LOTS,
    SIZES,
    TOML,
    assert_ledger_adds_up,
    build_tiny_model,
    lines,
    train_lines,
    workplace,
)

pytestmark = [pytest.mark.slow, pytest.mark.realtime, pytest.mark.filterwarnings("ignore::FutureWarning")]

STEPS = 4
COMMON = """
[checkpoint]
interval = 1
[warm_start]
steps = 3
batch_size = 4
conversations = 20
[orchestrator.eval]
interval = 2
episodes = 4
[trainer.loss]
kl_ref_tau = 0.1
"""
LORA = """
[trainer.lora]
r = 3
alpha = 6
merge_final = true
"""
SAME = ("loss", "grad_norm", "entropy", "ref_kl", "trained_tokens", "ledger/sampled", "ledger/trained")
"""Metrics of a step that do not depend on the number of processes."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Path]:
    with workplace(tmp_path_factory.mktemp("modes"), {"lots": LOTS + DEMONSTRATED}) as folder:
        sizes = "\n".join(f"{key} = {value}" for key, value in SIZES.model_dump().items())
        text = TOML.replace('[model]\nname = "{model}"', f"[model.build]\n{sizes}").format()
        text = text.replace("separate_process = false\n", "parallel = { processes = 2 }\n")
        text = text.replace("[inference.torch]", "[inference.torch]\ndeterministic = true")
        text += 'import_path = "lots.Shown"' + COMMON
        (folder / "whole.toml").write_text(text)
        (folder / "lora.toml").write_text(text + LORA)
        student = build_tiny_model(folder / "student")
        text = TOML.format(model=student).replace("separate_process = false\n", "parallel = { processes = 2 }\n")
        (folder / "opd.toml").write_text(text + 'import_path = "lots.Lots"\n')
        yield folder


def trained(place: Path, config: str) -> Path:
    """The run of two processes, made once."""
    if not (place / f"{config}-2").exists():
        run(f"{config}.toml", f"{config}-2", "--max-steps", str(STEPS))
    return place / f"{config}-2"


def run(config: str, folder: str, *options: str) -> None:
    status, said = verbatim("rl", config, "--run-dir", folder, *options)
    assert status == 0, said


def assert_as_one(two: Path, one: Path, steps: int = 2) -> None:
    """The first steps: the second one's texts were sampled from weights that differ by rounding alone."""
    for mine, alone in zip(train_lines(two)[:steps], train_lines(one)[:steps], strict=True):
        found, expected = ({name: line["metrics"][name] for name in SAME} for line in (mine, alone))
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6)  # a loss of advantages whose sum is 0


@pytest.mark.parametrize("config", ["lora", "whole"])
def test_two_processes_warm_start_train_evaluate_and_resume_as_one_does(place: Path, config: str):
    """With the model after its warm start as reference: under adapters their base, else a sharded model of its own."""
    two = trained(place, config)
    run(f"{config}.toml", f"{config}-1", "--max-steps", "2", "--trainer.parallel.processes", "1")
    assert_as_one(two, place / f"{config}-1")
    kl = [line["metrics"]["ref_kl"] for line in train_lines(two)]
    assert kl[0] == 0.0 and min(kl[1:]) > 0
    evaluated = [line["step"] for line in lines(two / "metrics.jsonl") if line["kind"] == "eval"]
    assert evaluated == [0, 2, 4]
    assert_ledger_adds_up(two)
    newest = {path.name for path in (two / "checkpoints" / f"step_{STEPS:06d}" / "weights").iterdir()}
    assert ("adapter_model.safetensors" in newest) == (config == "lora") != ("model.safetensors" in newest)
    for processes in (1, 2):  # what two saved, one goes on with, and two with that
        last = str(STEPS + processes)
        run(f"{config}.toml", str(two), "--resume", "--max-steps", last, "--trainer.parallel.processes", str(processes))
    assert [line["step"] for line in train_lines(two)] == list(range(1, STEPS + 3))
    assert_ledger_adds_up(two)
    assert (two / "final" / ("merged/model.safetensors" if config == "lora" else "model.safetensors")).is_file()


def test_another_shape_of_adapters_is_refused_when_two_processes_resume(place: Path):
    shutil.copytree(trained(place, "lora"), place / "other", symlinks=True)
    status, said = verbatim(
        "rl", "lora.toml", "--run-dir", "other", "--resume", "--max-steps", "9", "--trainer.lora.r", "8"
    )
    assert status in (1, 2) and "resume with trainer.lora.r = 3" in " ".join(said.split()), said


def test_adapters_of_layers_that_are_not_there_are_refused_before_a_process_is_started(place: Path):
    status, said = verbatim("rl", "lora.toml", "--run-dir", "no", "--trainer.lora.target_modules", '["c_attn"]')
    assert status == 2 and "its linear layers are down_proj" in " ".join(said.split()), said
    assert not (place / "no").exists()


def test_two_processes_distil_on_policy(place: Path):
    teacher = build_tiny_model(place / "teacher")
    run(
        "opd.toml",
        "opd-2",
        "--orchestrator.training-mode",
        "opd",
        "--orchestrator.teacher",
        f'{{ model = "{teacher}" }}',
        "--max-steps",
        "3",
    )
    kl = [line["metrics"]["teacher_kl"] for line in train_lines(place / "opd-2")]
    assert kl[0] == pytest.approx(0.0, abs=1e-5)  # the teacher has the student's first weights
    assert len(kl) == 3 and all(line["metrics"]["trained_tokens"] > 0 for line in train_lines(place / "opd-2"))
    assert_ledger_adds_up(place / "opd-2")


def test_verbatim_sft_trains_with_two_processes_of_its_own(place: Path):
    from safetensors.torch import load_file

    trained = []
    for processes in ("2", "1"):
        shutil.copy(place / "whole.toml", place / f"sft{processes}.toml")
        status, said = verbatim("sft", f"sft{processes}.toml", "--trainer.parallel.processes", processes)
        assert status == 0 and "trained model" in said, said
        (run,) = (place / "runs").glob(f"sft{processes}-sft/2*")
        assert (run / "logs" / "trainer-rank-1.log").exists() == (processes == "2")
        trained.append(load_file(run / "warm_start" / "model.safetensors"))
    two, one = trained
    assert two.keys() == one.keys()
    for name, tensor in one.items():
        assert float((two[name] - tensor).norm() / tensor.norm()) < 1e-4, name
