"""Rollouts over a real server process, `verbatim serve` and, where it is installed, vLLM's: all of it trainable."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from e2e.tiny_runs import SIZES as TINY
from inference.vllm.real_servers import LONGEST_START, ONE_PROCESS, SMALL_CACHE
from ports import held_port, number_of
from verbatim import Trajectory, build_samples
from verbatim.environments.tools import ToolManager
from verbatim.inference import SamplingParams
from verbatim.inference.http.sampler import HttpSampler
from verbatim.inference.openai import OpenAI
from verbatim.inference.vllm.process import free_port
from verbatim.rollouts import APIMultiTurnRollout, MultiTurnRollout, trajectory_from_messages
from waiting import HANGS, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.realtime]

SIZES = TINY.model_copy(update={"hidden_size": 64})
"""Heads of 32, the smallest that vLLM has for CPUs."""
PAIRS = [(a, b) for a in range(1, 4) for b in range(1, 4)]
CONVERSATIONS = [{"id": f"{a}+{b}", "messages": [{"role": "user", "content": f"{a} {b}"}]} for a, b in PAIRS]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


TOOLS = ToolManager([add])


def shown(a: int, b: int) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    return [
        {"role": "user", "content": f"{a} {b}"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "name": "add", "content": str(a + b)},
        {"role": "assistant", "content": str(a + b)},
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of some ten thousand weights that has learnt to call `add` and to say what it answers."""
    from verbatim.algorithms.losses import LOSSES
    from verbatim.config.schema import TrainerConfig
    from verbatim.core.trajectories import build
    from verbatim.models.build import build_model
    from verbatim.models.loading import load_tokenizer
    from verbatim.models.renderers import create_renderer
    from verbatim.models.trained_tokenizer import chat_text
    from verbatim.trainer.trainer import Trainer
    from verbatim.trainer.warm_start import warm_start

    folder = tmp_path_factory.mktemp("adds") / "model"
    talks = [shown(a, b) for a, b in PAIRS]
    build_model(folder, SIZES, [chat_text(talk, TOOLS.schemas) for talk in talks], seed=0)
    tokenizer = load_tokenizer(folder)
    renderer = create_renderer("auto", tokenizer)
    samples = [
        build(
            trajectory_from_messages(renderer, talk, TOOLS.schemas, trajectory_id=str(k), env="adds"),
            max_length=384,
            needs_logprobs=False,
        ).samples
        for k, talk in enumerate(talks)
    ]
    config = TrainerConfig.model_validate({"optim": {"lr": 5e-3}})
    trainer = Trainer(folder, config, loss=LOSSES["sft"], total_optimizer_steps=120, tokenizer=tokenizer)
    warm_start(trainer, samples, steps=120, batch_size=9, seed=0)
    trainer.save_weights(folder)
    return folder


@contextlib.contextmanager
def process(*command: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A process of ours that has ended when the block does."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
    started = subprocess.Popen(list(command), stdout=subprocess.PIPE, text=True, env=env)
    try:
        yield started
    finally:
        started.terminate()
        try:
            started.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            started.kill()
            started.communicate()


@contextlib.contextmanager
def verbatim_serve(model: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`verbatim serve` on a port of this machine (0: on a free one), and its address."""
    with process(
        sys.executable,
        "-m",
        "verbatim.cli",
        "serve",
        str(model),
        "--port",
        str(port),
        "--name",
        "adds",
        "--deterministic",
        "--device",
        "cpu",
        "--seed",
        "0",
    ) as started:
        assert started.stdout is not None
        said = started.stdout.readline()
        found = re.search(r"adds at (http://\S+)", said)
        assert found, said
        yield started, found[1]


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with verbatim_serve(model) as (_, url):
        yield url


def over(url: str, name: str = "adds", **settings: Any) -> APIMultiTurnRollout:
    api = OpenAI(model=name, base_url=f"{url}/v1", api_key="none", processed_logprobs=True, max_retries=1)
    return APIMultiTurnRollout(
        api=api,
        extra_body={"return_token_ids": True},
        progress=False,
        **{
            "concurrency": 9,
            "seed": 3,
            "tool_manager": TOOLS,
            "sampling_params": SamplingParams(temperature=0.8, max_tokens=64),
            **settings,
        },
    )


async def assert_logprobs_are_the_models(sampler: Any, trajectories: list[Trajectory], atol: float) -> None:
    """Of each sampled token, given exactly the ids that stood before it."""
    for trajectory in trajectories:
        for turn in trajectory.turns:
            assert turn.logprobs is not None
            whole = np.concatenate([turn.prompt_ids, turn.completion_ids])
            expected = await sampler.prompt_logprobs(whole, turn.temperature)
            np.testing.assert_allclose(turn.logprobs, expected[turn.num_prompt_tokens :], atol=atol)


def test_trajectories_over_a_server_process_are_whole_and_trainable(url: str):
    results = over(url)(CONVERSATIONS)
    assert [r["error"] for r in results] == [None] * len(results)
    answered = [r for r, (a, b) in zip(results, PAIRS, strict=True) if r["messages"][-1]["content"] == str(a + b)]
    assert len(answered) >= 7, [r["messages"] for r in results]  # it has learnt its task, calls and all
    for result in results:
        samples = build_samples(result)
        assert sum(s.num_trained_tokens for s in samples) == result.num_sampled_tokens > 0
        assert {int(v) for turn in result.turns for v in turn.policy_versions} == {0}  # the served model's
    for result in answered:
        assert [m["role"] for m in result["messages"]] == ["user", "assistant", "tool", "assistant"]
        assert result.info["usage"]["completion_tokens"] == result.num_sampled_tokens


def test_breaks_are_those_of_the_ids(url: str):
    """The server renders each conversation anew: where that is not what was sampled, a break says so."""
    results = over(url, sampling_params=SamplingParams(temperature=1.5, max_tokens=48))(CONVERSATIONS * 2)
    for result in results:
        pairs = [([*one.prompt_ids, *one.completion_ids], other.prompt_ids) for one, other in pairwise(result.turns)]
        assert result.num_breaks == sum(list(prompt[: len(before)]) != before for before, prompt in pairs)
        if result["error"] is None:
            assert len(build_samples(result)) == result.num_breaks + bool(result.turns)
        else:  # it called so often that the answers fill the context
            assert "leave no room" in str(result["error"]) and build_samples(result) == []
    assert sum(len(result.turns) > 1 and result["error"] is None for result in results) > 3


def test_what_was_sampled_comes_again_from_its_seed(url: str):
    params = SamplingParams(temperature=1.5, max_tokens=48)
    first, again, other = (
        [
            [turn.completion_ids.tolist() for turn in result.turns]
            for result in over(url, seed=seed, sampling_params=params)(CONVERSATIONS[:4])
        ]
        for seed in (3, 3, 4)
    )
    assert first == again != other


async def test_recorded_logprobs_are_those_of_the_local_model(url: str, model: Path):
    from verbatim.inference.embedded.engine import TorchSampler
    from verbatim.inference.embedded.settings import TorchSettings

    results = await over(url).run(CONVERSATIONS)
    local = TorchSampler(model, config=TorchSettings(device="cpu"), context_length=384, num_threads=1)
    try:
        await assert_logprobs_are_the_models(local, results, atol=2e-5)
    finally:
        await local.close()


async def test_token_in_token_out_over_the_process_equals_the_local_rollout(url: str, model: Path):
    from verbatim.inference.embedded.engine import TorchSampler
    from verbatim.inference.embedded.settings import TorchSettings
    from verbatim.models.loading import load_tokenizer
    from verbatim.models.renderers import create_renderer

    renderer = create_renderer("auto", load_tokenizer(model))
    local = TorchSampler(
        model, config=TorchSettings(device="cpu", deterministic=True), context_length=384, num_threads=1
    )
    remote = await HttpSampler.connect(url)
    found = []
    for sampler in (local, remote):
        rollout = MultiTurnRollout(
            sampler=sampler,
            template=renderer,
            tool_manager=TOOLS,
            seed=5,
            sampling_params=SamplingParams(max_tokens=48),
        )
        found.append(await rollout.run(CONVERSATIONS))
        await sampler.close()
    for one, other in zip(*found, strict=True):
        assert one["messages"] == other["messages"]
        assert len(one.turns) == len(other.turns) > 0
        for mine, its in zip(one.turns, other.turns, strict=True):
            assert mine.completion_ids.tolist() == its.completion_ids.tolist()
            assert mine.logprobs.tobytes() == its.logprobs.tobytes()
            assert mine.policy_versions.tolist() == its.policy_versions.tolist()


def test_a_server_that_dies_in_the_middle_fails_trajectories_and_loses_none(model: Path):
    with verbatim_serve(model) as (started, url):
        number = count(1)  # tools are called on several threads: each number is given once

        def add(a: int, b: int) -> int:
            """Add two numbers."""
            if next(number) == 3:
                started.kill()
                started.wait(timeout=HANGS)
            return a + b

        results = over(url, tool_manager=ToolManager([add]), concurrency=2)(CONVERSATIONS)
    assert [r.example_id for r in results] == [c["id"] for c in CONVERSATIONS]
    failed = [r for r in results if r["stop_reason"] == "api_error"]
    assert len(failed) >= len(CONVERSATIONS) - 4  # two were under way, and few had ended before
    assert all(r["error"].startswith("api: ") and r.info["request_errors"]["connection"] == 2 for r in failed)
    assert any(r.turns for r in failed)  # what had been sampled is kept


def test_ctrl_c_ends_the_server_cleanly(model: Path):
    with held_port() as held, verbatim_serve(model, number_of(held)) as (started, url):
        started.send_signal(signal.SIGINT)
        assert started.wait(timeout=HANGS) == 0
        with pytest.raises(OSError, match="refused"):
            urllib.request.urlopen(f"{url}/health", timeout=HANGS)


# ---- vLLM's own server


@pytest.fixture(scope="module")
def vllm_url(model: Path) -> Iterator[str]:
    """vLLM has requirements of its own, so it may live in another environment than ours. Prompts are computed in parts
    of 64 tokens, where its build for CPUs does not survive a seed."""
    python = os.environ.get("VERBATIM_VLLM_PYTHON", ".venv-vllm/bin/python")
    port = free_port()
    with process(
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        "adds",
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--dtype",
        "float32",
        "--max-model-len",
        "384",
        "--max-num-batched-tokens",
        "64",
        "--max-num-seqs",
        "16",
        *SMALL_CACHE,
        "--enable-scale-out",
        "--logprobs-mode",
        "processed_logprobs",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
        **ONE_PROCESS,
    ) as started:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: started.poll() is not None or _is_up(url), LONGEST_START)
        assert started.poll() is None, "vLLM's server ended"
        yield url


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.mark.vllm
async def test_trajectories_over_vllm_have_the_local_models_logprobs(vllm_url: str, model: Path):
    from verbatim.inference.embedded.engine import TorchSampler
    from verbatim.inference.embedded.settings import TorchSettings

    results = await over(vllm_url, seed=None).run(CONVERSATIONS)
    assert [r["error"] for r in results] == [None] * len(results)
    remote = await HttpSampler.connect(vllm_url, vocab_size=SIZES.vocab_size, policy_version=2, processed_logprobs=True)
    local = TorchSampler(model, config=TorchSettings(device="cpu"), context_length=384, num_threads=1)
    try:
        await assert_logprobs_are_the_models(local, results, atol=1e-4)
        from verbatim.models.loading import load_tokenizer
        from verbatim.models.renderers import create_renderer

        rollout = MultiTurnRollout(
            sampler=remote,
            template=create_renderer("auto", load_tokenizer(model)),
            tool_manager=TOOLS,
            sampling_params=SamplingParams(max_tokens=48),
        )
        exact = await rollout.run(CONVERSATIONS)
        assert [r["error"] for r in exact] == [None] * len(exact)
        await assert_logprobs_are_the_models(local, exact, atol=1e-4)
        assert {int(v) for r in exact for turn in r.turns for v in turn.policy_versions} == {2}
    finally:
        await asyncio.gather(local.close(), remote.close())
