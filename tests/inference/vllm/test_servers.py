"""What a run does with servers that it cannot use."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from e2e.tiny_runs import build_tiny_model
from verbatim.errors import SamplerFault, UsageError
from verbatim.inference.backends import BackendInputs
from verbatim.inference.vllm.backend import vllm_backend
from verbatim.inference.vllm.process import free_port
from verbatim.inference.vllm.settings import VllmSettings


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("servers") / "model")


async def test_a_context_shorter_than_the_runs_sequences_is_refused(model):
    inputs = BackendInputs(model=model, context_length=128)
    with pytest.raises(UsageError, match=r"max_model_len = 64 is shorter than orchestrator\.seq_len = 128"):
        await vllm_backend(inputs, VllmSettings(max_model_len=64))


async def test_servers_that_do_not_answer_are_named_and_their_connections_closed(model, caplog):
    inputs = BackendInputs(model=model, context_length=128)
    urls = tuple(f"http://127.0.0.1:{free_port()}" for _ in range(2))
    with caplog.at_level(logging.ERROR), pytest.raises(SamplerFault, match=r"replica \d \(http://127\.0\.0\.1:\d+\)"):
        await vllm_backend(inputs, VllmSettings(urls=urls))
    assert "Unclosed" not in caplog.text


async def test_a_server_that_cannot_start_is_told_with_its_log(model, tmp_path):
    inputs = BackendInputs(model=model, context_length=128, logs=tmp_path / "logs")
    with pytest.raises(SamplerFault, match=r"(?s)ended before it answered \(status 1\)\. From .*replica_0\.log"):
        await vllm_backend(inputs, VllmSettings(python="false"))
