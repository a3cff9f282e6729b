"""Runs that sample through real vLLM servers: `make test-vllm`.

Runs whose servers are killed and frozen: `faults/test_replicas`; a run that is killed: `test_vllm_lora_run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from e2e.tiny_runs import LOTS, train_lines, workplace
from inference.vllm.real_servers import LONGEST_START, ONE_PROCESS, SMALL_CACHE
from verbatim.config.schema import BuildConfig
from verbatim.inference.vllm.process import free_port, make_process
from verbatim.inference.vllm.settings import VllmSettings
from verbatim.logs.monitors.trajectory_log import read_trajectories

pytestmark = [pytest.mark.vllm, pytest.mark.realtime]

PYTHON = Path(os.environ.get("VERBATIM_VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()
MARK = "VERBATIM_TEST_OF_VLLM"
LONGEST = 3600
"""Seconds until a run counts as hung."""
RUN = f"""
max_steps = {{steps}}
[model]
name = "{{model}}"
[orchestrator]
batch_size = 16
group_size = 4
seq_len = 384
max_async_level = 1
sampling = {{{{ max_tokens = 24 }}}}
[trainer.optim]
lr = 1e-3
[checkpoint]
interval = 5
[inference]
backend = "vllm"
[inference.vllm]
python = "{PYTHON}"
replicas = {{replicas}}
args = ["--enforce-eager", "--block-size", "32", "--num-gpu-blocks-override", "512"]
env = {{{{ VLLM_CPU_KVCACHE_SPACE = "1", OMP_NUM_THREADS = "1", VLLM_CPU_OMP_THREADS_BIND = "nobind" }}}}
[[orchestrator.filters]]
type = "zero_advantage"
[[orchestrator.train.env]]
import_path = "lots.Lots"
args = {{{{ delay = 0.05 }}}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Heads of 32, because vLLM's kernels for CPUs know none of 16."""
    from verbatim.environments.guess_number import GuessNumber
    from verbatim.models.build import build_model
    from verbatim.models.trained_tokenizer import chat_text

    sizes = BuildConfig(
        hidden_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=64,
        vocab_size=512,
        context_length=384,
    )
    folder: Path = tmp_path_factory.mktemp("vllm") / "model"
    texts = [chat_text(shown.messages, shown.tools) for shown in GuessNumber().demonstrations(100, seed=0)]
    build_model(folder, sizes, texts, seed=0)
    return folder


@pytest.fixture
def place(tmp_path: Path):
    with workplace(tmp_path, {"lots": LOTS}):
        yield tmp_path


def start(
    place: Path, model: Path, *arguments: str, steps: int, replicas: int, text: str = RUN
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    """`verbatim rl`; see `command`."""
    more = ("rl", "run.toml", "--run-dir", "mine", *arguments)
    return command(place, model, *more, steps=steps, replicas=replicas, text=text)


@contextlib.contextmanager
def command(
    place: Path, model: Path, *arguments: str, steps: int = 1, replicas: int = 1, text: str = RUN, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """`verbatim` with these arguments, beside a run's file; it does not outlive a test that fails."""
    (place / "run.toml").write_text(text.format(model=model, steps=steps, replicas=replicas))
    with subprocess.Popen(
        [sys.executable, "-m", "verbatim.cli", *arguments],
        cwd=place,
        **options,
        env={**os.environ, MARK: str(place), "PYTHONPATH": os.pathsep.join([str(place), *sys.path])},
    ) as run:
        try:
            yield run
        finally:
            run.kill()


def assert_every_token_is_in_the_ledger(place: Path) -> None:
    last = train_lines(place / "mine")[-1]["metrics"]
    dropped = sum(value for name, value in last.items() if name.startswith("ledger/dropped/"))
    booked = last["ledger/trained"] + last["ledger/masked_by_loss"] + dropped + last["ledger/pending"]
    assert last["ledger/sampled"] == booked > 0


def servers(place: Path) -> list[int]:
    """Process ids of the vLLM servers of this test's run, with their workers and keepers."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            mine = entry.name.isdigit() and f"{MARK}={place}".encode() in (entry / "environ").read_bytes().split(b"\0")
            if mine and b"vllm" in (entry / "cmdline").read_bytes().lower():
                found.append(int(entry.name))
    return found


def test_twenty_batches_are_sampled_by_vllm_and_trained(place, model):
    with start(place, model, steps=20, replicas=1) as run:
        assert run.wait(LONGEST) == 0
    steps = train_lines(place / "mine")
    assert [line["step"] for line in steps] == list(range(1, 21))
    for line in steps:
        metrics = line["metrics"]
        assert metrics["replicas/serving"] == 1 and metrics["replicas/failed_checks"] == 0
        assert metrics["replica/0/policy_version"] == line["step"]
        assert metrics["trained_tokens"] > 0
        if metrics["staleness/max"] == 0:
            assert metrics["mismatch_kl"] < 1e-8
        assert metrics["replicas/requests_failed"] == metrics["replica/0/unverified_tensors"] == 0
    assert_every_token_is_in_the_ledger(place)
    assert servers(place) == []
    assert "stale prefixes cannot be detected" not in (place / "mine" / "logs" / "orchestrator.log").read_text()
    versions = {
        version
        for _, trajectory in read_trajectories(place / "mine")
        for turn in trajectory.turns
        for version in turn.policy_versions.tolist()
    }
    assert min(versions) == 0 and 10 < max(versions) <= 19  # which of those between sampled is a matter of speed


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of this model that the commands find."""
    settings = VllmSettings(python=str(PYTHON), args=SMALL_CACHE, env={"VLLM_CPU_KVCACHE_SPACE": "1", **ONE_PROCESS})
    server = make_process(
        settings,
        0,
        model=model,
        port=free_port(),
        context_length=384,
        num_threads=1,
        logs=tmp_path_factory.mktemp("found"),
    )
    with asyncio.Runner() as runner:
        runner.run(server.start(LONGEST_START))
        try:
            yield server.url
        finally:
            runner.run(server.stop())


@pytest.mark.xdist_group("a server of runs")
def test_an_evaluation_samples_through_vllm_and_its_logprobs_are_the_models(place, model, url):
    from verbatim.core.trajectory_json import trajectory_from_json
    from verbatim.inference.embedded.whole_sequence import sequence_logprobs
    from verbatim.models.head import CausalLM
    from verbatim.models.loading import load_model

    arguments = (
        "eval",
        "run.toml",
        "--out",
        "said.jsonl",
        "--json",
        "--orchestrator.eval",
        "{ episodes = 10 }",
        "--inference.vllm.urls",
        f'["{url}"]',
    )
    with command(place, model, *arguments, stdout=subprocess.PIPE) as evaluation:
        assert evaluation.stdout is not None
        printed = evaluation.stdout.read().decode()
        assert evaluation.wait(LONGEST) == 0
    said = json.loads(printed[printed.index("{") :])["models"][0]["environments"]["lots.Lots"]
    lines = (place / "said.jsonl").read_text().splitlines()
    sampled = [trajectory_from_json(json.loads(line)["trajectory"]) for line in lines]
    assert (said["episodes"], said["failed"], len(sampled)) == (10, 0, 10)
    assert said["reward"]["value"] == pytest.approx(np.mean([trajectory.reward for trajectory in sampled]))
    head = CausalLM(load_model(str(model)))
    for trajectory in sampled:
        (turn,) = trajectory.turns
        assert turn.policy_versions.tolist() == [0] * len(turn.completion_ids)
        ids = torch.from_numpy(np.concatenate([turn.prompt_ids, turn.completion_ids]).astype(np.int64))
        with torch.inference_mode():
            expected = sequence_logprobs(head, ids, 1.0).numpy()[len(turn.prompt_ids) :]
        assert np.abs(turn.logprobs - expected).max() <= 5e-5


@pytest.mark.xdist_group("a server of runs")
def test_a_student_follows_a_teacher_behind_vllm(place, model, url):
    """The teacher has the student's own first weights: over vLLM too their logprobs of the first batch are the same."""
    teacher = f'{{ model = "policy", base_url = "{url}/v1" }}'
    options = (
        "--inference.backend",
        "torch",
        "--orchestrator.training-mode",
        "opd",
        "--orchestrator.seq-len",
        "383",  # vLLM scores what leaves room for one token more
        "--orchestrator.teacher",
        teacher,
        "--run-dir",
        "mine",
    )
    with command(place, model, "rl", "run.toml", *options, steps=4) as run:
        assert run.wait(LONGEST) == 0
    kl = [line["metrics"]["teacher_kl"] for line in train_lines(place / "mine")]
    assert len(kl) == 4
    assert abs(kl[0]) < 1e-5
    assert_every_token_is_in_the_ledger(place)
