"""A run's sampler over servers of the embedded engine that exist: exact, checked, and refused where they do not fit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from inference.serving import TorchServer
from inference.vllm.vllm_double import VllmDouble
from inference.vllm.vllm_double import serving as serving_double
from ports import held_port, number_of
from verbatim.core.errors import SamplerFault, UsageError
from verbatim.inference import Completion, SampleRequest, SamplingParams
from verbatim.inference.backends import BackendInputs
from verbatim.inference.embedded.backend import torch_backend
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.http import client
from verbatim.inference.http.replica import HttpReplica
from verbatim.inference.pool import servers as pool_servers
from verbatim.inference.pool.servers import ServerPool
from verbatim.inference.scripted import ScriptedSampler

pytestmark = pytest.mark.realtime

KEY = "a-secret-key"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "pause", lambda attempt, retry_after, jitter: 0.01)
    monkeypatch.setattr(pool_servers, "_ASK_EVERY", 0.02)


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SERVERS_KEY", KEY)
    return KEY


@contextlib.contextmanager
def servers(*made: TorchServer) -> Iterator[list[str]]:
    try:
        yield [server.start().url for server in made]
    finally:
        for server in made:
            server.stop()


@contextlib.asynccontextmanager
async def pool_of(model: Path, urls: list[str], *, version: int = 0, **table: Any) -> AsyncIterator[ServerPool]:
    inputs = BackendInputs(model=model, context_length=128, policy_version=version)
    made = await torch_backend(inputs, TorchSettings(urls=tuple(urls), **table))
    assert isinstance(made, ServerPool)
    try:
        yield made
    finally:
        await made.close()


def request(*prompt: int, seed: int = 0, session: str = "", **params: Any) -> SampleRequest:
    return SampleRequest(
        prompt_ids=np.array(prompt, np.int32), params=SamplingParams(**params), seed=seed, session=session
    )


def logprobs_of(model: torch.nn.Module, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        table = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return table[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].numpy()


def assert_sampled_by(model: torch.nn.Module, prompt: list[int], completion: Completion) -> None:
    assert completion.logprobs is not None
    expected = logprobs_of(model, [*prompt, *completion.ids.tolist()])[-len(completion.ids) :]
    assert np.abs(completion.logprobs - expected).max() < 5e-5


# ---- healthy


@pytest.mark.slow
async def test_both_servers_sample_with_the_weights_of_the_run_whatever_they_were_started_with(
    models: dict[str, Path], references: dict[str, torch.nn.Module], key: str
):
    started = [TorchServer(models["tied_later"], context_length=128, api_key=key) for _ in range(2)]
    with servers(*started) as urls:
        async with pool_of(models["tied"], urls, version=4, api_key_env="SERVERS_KEY") as pool:
            assert (pool.context_length, pool.vocab_size, pool.policy_version) == (128, 97, 4)
            prompt = list(range(1, 21))
            for version, name in ((4, "tied"), (5, "tied_later")):
                if version == 5:
                    await pool.update_replicas(models[name], 5, None)
                found = await asyncio.gather(
                    *(pool.generate(request(*prompt, seed=k, session=f"{k % 4}", max_tokens=6)) for k in range(8))
                )
                for completion in found:
                    assert completion.policy_versions is not None
                    assert set(completion.policy_versions.tolist()) == {version}
                    assert_sampled_by(references[name], prompt, completion)
                scored = await pool.prompt_logprobs(np.array(prompt, np.int32))
                assert np.abs(scored[1:] - logprobs_of(references[name], prompt)).max() < 5e-5
            assert all(server.engine is not None and server.engine.stats().completions == 8 for server in started)


async def test_it_says_how_busy_a_server_is(models: dict[str, Path], key: str):
    with servers(TorchServer(models["tied"], context_length=128, api_key=key)) as (url,):
        replica = HttpReplica(
            url, name="replica 0", context_length=128, vocab_size=97, policy_version=0, how={}, api_key=key
        )
        for _ in range(2):
            await replica.generate(request(*range(1, 11), session="a", max_tokens=3))
        load = await replica.load_metrics()
        assert (load.generated_tokens, load.cache_queries, load.cache_hits) == (6, 20, 9)
        assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)
        await replica.close()


async def test_weights_are_sent_to_a_host_that_does_not_share_the_folder(
    models: dict[str, Path], references: dict[str, torch.nn.Module], key: str, tmp_path: Path
):
    there = tmp_path / "there"
    with servers(TorchServer(models["tied"], context_length=128, api_key=key, uploads=there)) as (url,):
        async with pool_of(models["tied"], [url], api_key_env="SERVERS_KEY", weight_transfer="http") as pool:
            await pool.update_replicas(models["tied_later"], 1, None)
            assert_sampled_by(references["tied_later"], [1, 2], await pool.generate(request(1, 2, max_tokens=4)))
            assert [path.name for path in there.iterdir()] == ["v1"]
            sent = (there / "v1" / "model.safetensors").read_bytes()
            assert sent == (models["tied_later"] / "model.safetensors").read_bytes()


@pytest.mark.slow
async def test_what_is_sampled_between_an_update_and_its_check_is_withheld_and_a_wrong_server_is_taken_out(
    models: dict[str, Path], key: str
):
    class Wrong:
        async def prepare(self, sampler: Any) -> None:
            """Nothing is cached."""

        async def __call__(self, sampler: Any) -> str | None:
            if sampler.url != wrong:
                return None
            held.append(asyncio.create_task(sampler.generate(request(1, max_tokens=2))))
            await held[-1]
            return "its logprobs differ"

    held: list[asyncio.Task[Completion]] = []
    with servers(*(TorchServer(models["tied"], context_length=128, api_key=key) for _ in range(2))) as urls:
        wrong = urls[1]
        async with pool_of(models["tied"], urls, api_key_env="SERVERS_KEY") as pool:
            await pool.update_replicas(models["tied_later"], 1, Wrong())
            metrics = pool.metrics()
            assert (metrics["replicas/serving"], metrics["replicas/failed_checks"], len(held)) == (1, 2, 2)


# ---- a server that was started again


@pytest.mark.slow
async def test_a_server_that_was_started_again_gets_the_newest_weights_before_it_samples(
    models: dict[str, Path], references: dict[str, torch.nn.Module], key: str
):
    """It says version 0 as the run does, and holds other weights: only its name shows that it was started again."""
    server = TorchServer(models["tied_later"], context_length=128, api_key=key)
    with servers(server) as (url,):
        async with pool_of(models["tied"], [url], api_key_env="SERVERS_KEY") as pool:
            assert_sampled_by(references["tied"], [1, 2], await pool.generate(request(1, 2, max_tokens=4)))
            server.stop()
            server.start()
            completion = await pool.generate(request(1, 2, seed=1, max_tokens=4))
            assert_sampled_by(references["tied"], [1, 2], completion)
            assert pool.metrics()["replicas/lost"] == 1


@pytest.mark.slow
async def test_an_answer_under_another_name_is_discarded_and_its_tokens_are_counted(models: dict[str, Path], key: str):
    server = TorchServer(models["tied"], context_length=128, api_key=key)
    with servers(server) as (url,):
        replica = HttpReplica(
            url, name="replica 0", context_length=128, vocab_size=97, policy_version=0, how={}, api_key=key
        )
        await replica.check_server()
        server.stop()
        server.start()
        with pytest.raises(SamplerFault, match="restarted, or another server answers") as lost:
            await replica.generate(request(1, 2, max_tokens=4))
        assert lost.value.num_tokens == 4
        for call in (
            replica.health(),
            replica.update_weights(models["tied"], 1),
            replica.prompt_logprobs(np.array([1, 2], np.int32)),
        ):
            with pytest.raises(SamplerFault, match="restarted, or another server answers"):
                await call
        await replica.close()


# ---- what is refused before anything is sampled


@pytest.mark.parametrize(
    ("started", "table", "said"),
    [
        ({"api_key": "another-key"}, {}, "needs a key, or another one; .* inference.torch.api_key_env"),
        (
            {"context_length": 64},
            {},
            r"context is 64 tokens, expected at least 128 \(orchestrator.seq_len\): .*"
            "--context-length 128",
        ),
        ({"api_key": None}, {}, "does not accept weights: start it with --api-key-env VARIABLE"),
        ({}, {"weight_transfer": "http"}, "does not accept uploads: start it with --uploads FOLDER"),
        ({}, {"dtype": "bfloat16"}, "its dtype is 'float32', expected 'bfloat16': start it with `verbatim inference"),
        ({"on_weight_update": "keep"}, {}, "its on_weight_update is 'keep', expected 'recompute'"),
        ({"weights_folder": "/proc"}, {}, "does not accept the weights of this run: .* outside the folder .*--uploads"),
    ],
)
async def test_a_server_that_does_not_fit_is_refused_with_what_to_type(
    models: dict[str, Path], key: str, started: dict[str, Any], table: dict[str, Any], said: str
):
    if "weights_folder" in started:
        started = {"weights_folder": Path(started["weights_folder"])}
    server = TorchServer(models["tied"], **{"context_length": 128, "api_key": key, **started})
    with servers(server) as (url,), pytest.raises(UsageError, match=rf"^replica 0 \({url}\).*{said}"):
        async with pool_of(models["tied"], [url], api_key_env="SERVERS_KEY", **table):
            pass
    assert server.engine is not None
    assert server.engine.stats().sampled_tokens == 0


async def test_a_server_of_another_model_is_refused(models: dict[str, Path], key: str):
    server = TorchServer(models["untied"], context_length=128, api_key=key)
    refused = pytest.raises(UsageError, match=r"does not accept the weights .* It has to serve the model of this run")
    with servers(server) as (url,), refused:
        async with pool_of(models["tied"], [url], api_key_env="SERVERS_KEY"):
            pass


async def test_a_server_of_another_vocabulary_is_refused(models: dict[str, Path], key: str):
    from verbatim.inference.http.server import serve_sampler

    other = ScriptedSampler(script=lambda r: [5], vocab_size=10, context_length=128)
    async with serve_sampler(other, api_key=key, model="policy") as server:
        with pytest.raises(UsageError, match="serves 'policy' with 10 ids, expected the model of this run with 97"):
            async with pool_of(models["tied"], [server.url], api_key_env="SERVERS_KEY"):
                pass


async def test_a_server_of_vllm_is_refused(models: dict[str, Path]):
    async with serving_double(VllmDouble(models["tied"])) as url:
        with pytest.raises(UsageError, match=r'use \[inference.vllm\] and inference.backend = "vllm"'):
            async with pool_of(models["tied"], [url]):
                pass


async def test_a_server_that_does_not_answer_is_named(models: dict[str, Path]):
    with held_port() as held:
        url = f"http://127.0.0.1:{number_of(held)}"
        with pytest.raises(SamplerFault, match=rf"^replica 0 \({url}\): describe: .*Connection error"):
            async with pool_of(models["tied"], [url]):
                pass


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"urls": ["http://a:1", "http://a:1"]}, "urls: http://a:1 is listed twice"),
        ({"api_key_env": "SERVERS_KEY"}, "api_key_env applies only to the servers in urls"),
        ({"urls": ["http://a:1"], "weight_transfer": "nccl"}, "weight_transfer"),
    ],
)
def test_settings_that_cannot_be_are_refused(table: dict[str, Any], said: str):
    with pytest.raises(ValidationError, match=said):
        TorchSettings(**table)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"urls": ["localhost:8000"]}, "urls: url 'localhost:8000'; expected an address"),
        ({"urls": ["http://a:1"], "api_key_env": "NO_SUCH_KEY"}, "the environment variable NO_SUCH_KEY is empty"),
    ],
)
def test_what_cannot_work_on_this_machine_is_refused(table: dict[str, Any], said: str):
    with pytest.raises(UsageError, match=said):
        TorchSettings(**table).check()
    TorchSettings(urls=("http://a:1",), device="cuda:9").check()  # the device is the servers'
