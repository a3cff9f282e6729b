"""Servers that a run cannot use are refused before anything is sampled, with what to type."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from inference.vllm.tiny_model import TinyModel
from inference.vllm.vllm_double import VllmDouble, serving
from private_ca import make_private_ca
from verbatim.core.errors import SamplerFault, UsageError
from verbatim.inference.backends import BackendInputs
from verbatim.inference.http.server import serve_sampler
from verbatim.inference.scripted import ScriptedSampler
from verbatim.inference.vllm.backend import vllm_backend
from verbatim.inference.vllm.process import ServerProcess, free_port, is_taken
from verbatim.inference.vllm.settings import VllmSettings
from waiting import HANGS

pytestmark = pytest.mark.realtime

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "without the token endpoint": ({"takes_ids": False}, "it does not accept token ids: add --enable-scale-out"),
    "of a release without the token endpoint": (
        {"missing": {"/inference/v1/generate"}},
        "it does not accept token ids: add --enable-scale-out",
    ),
    "with raw logprobs": ({"logprobs_mode": "raw_logprobs"}, "add --logprobs-mode processed_logprobs"),
    "of another vocabulary": (
        {"vocab_size": 1000, "model": "other"},
        "it serves other with a vocabulary of 1000 ids, but this run's model has 289: start it with --model and",
    ),
    "with a short context": (
        {"max_model_len": 64},
        "its context is 64 tokens, expected at least 256: add --max-model-len 256",
    ),
    "that needs a key": ({"key": "sk-other"}, "it requires a key, .* inference.vllm.api_key_env names"),
    "with a key of vLLM's own": (
        {"own_key": "sk-other"},
        "it requires a key, .* inference.vllm.api_key_env names",
    ),
    "without routes for weights": (
        {"missing": {"/collective_rpc"}},
        "start it with the environment variable VLLM_SERVER_DEV_MODE=1",
    ),
    "without the plug-in": ({"fault": "no plug-in"}, "--worker-extension-cls verbatim_vllm.WeightReport"),
    "with heads that a CPU cannot compute": (
        {"unsupported_heads": "16, and vLLM's attention for CPUs supports [32, 64]"},
        r"its attention heads have a size of 16, and vLLM's attention for CPUs supports \[32, 64\]: sample this model "
        "with a GPU, or with inference.backend",
    ),
}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(tmp_path_factory.mktemp("bad_servers"), tied=True)


async def open_run(trainer: TinyModel, url: str) -> None:
    pool = await vllm_backend(BackendInputs(model=trainer.published, context_length=256), VllmSettings(urls=(url,)))
    await pool.close()


@pytest.mark.parametrize("bad", BAD)
async def test_a_server_is_refused_with_what_to_type(trainer: TinyModel, bad: str):
    change, said = BAD[bad]
    double = VllmDouble(trainer.published)
    double.facts.update({name: value for name, value in change.items() if name in double.facts})
    vars(double).update({name: value for name, value in change.items() if name not in double.facts})
    async with serving(double) as url:
        with pytest.raises(UsageError, match=rf"^replica 0 \({url}\)(:| cannot be used:) .*{said}"):
            await open_run(trainer, url)
        assert "/update_weights" not in double.calls and double.generated == 0


async def test_https_needs_the_authority_of_its_certificate_and_nothing_else(trainer: TinyModel, tmp_path, monkeypatch):
    """Every connection of a replica, for requests and for weights, knows the authority that SSL_CERT_FILE names."""
    ca = make_private_ca(tmp_path)
    double = VllmDouble(trainer.published)
    async with serving(double, ca.tls()) as url:
        assert url.startswith("https://")
        with pytest.raises(SamplerFault, match=rf"^replica 0 \({url}\).* not trusted .*SSL_CERT_FILE"):
            await open_run(trainer, url)
        assert double.calls == []
        monkeypatch.setenv("SSL_CERT_FILE", str(ca.authority))
        await open_run(trainer, url)
        assert {"/update_weights", "/inference/v1/generate"} <= set(double.calls)
        with pytest.raises(SamplerFault, match=r"its certificate is not trusted .*mismatch"):
            await open_run(trainer, url.replace("127.0.0.1", "localhost"))


@pytest.mark.parametrize("option", ["--port=5", "--host", "--ssl-keyfile", "--api-key", "--api_key=x"])
def test_options_that_hide_a_server_from_its_run_are_refused(option):
    with pytest.raises(ValueError, match=f"leave out {option.partition('=')[0]}, because the run could not reach"):
        VllmSettings(args=("--enforce-eager", option, "x"))


async def test_a_healthy_server_is_not_refused(trainer: TinyModel):
    async with serving(VllmDouble(trainer.published)) as url:
        await open_run(trainer, url)


async def test_a_server_of_another_model_with_this_vocabulary_is_refused(trainer: TinyModel, tmp_path: Path):
    other = TinyModel(tmp_path / "other", tied=False)
    async with serving(VllmDouble(other.published)) as url:
        with pytest.raises(UsageError, match=r"do not reach every tensor: .*lm_head.*start it with --model and the"):
            await open_run(trainer, url)


async def test_a_server_of_the_embedded_engine_is_refused(trainer: TinyModel):
    engine = ScriptedSampler(script=lambda r: [5], vocab_size=320, context_length=256)
    async with serve_sampler(engine) as server:
        with pytest.raises(UsageError, match=r"server of the embedded engine: .* list it in \[inference.torch\] urls"):
            await open_run(trainer, server.url)


async def test_a_port_in_use_is_refused_although_whoever_has_it_is_healthy(tmp_path: Path):
    """vLLM would share the port, and the health check would be answered by the other server."""
    sleep = shutil.which("sleep")
    assert sleep is not None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert is_taken("127.0.0.1", port)
        process = ServerProcess("replica 0", [sleep, "1e9"], {}, port=port, log=tmp_path / "log")
        with pytest.raises(SamplerFault, match=rf"cannot listen on 127\.0\.0\.1, port {port}: address already in use"):
            await process.start(HANGS)
        assert process.has_ended
    assert not is_taken("127.0.0.1", free_port())
