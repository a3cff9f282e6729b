"""A vLLM server as a sampler, over a double of its routes: exact ids, and no version that is not proven."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncIterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from inference.vllm.tiny_model import TinyModel
from inference.vllm.vllm_double import VllmDouble, serving
from ports import held_port, number_of
from verbatim.core.errors import ModelError, RecordError, SamplerFault, UsageError
from verbatim.core.types import StopReason
from verbatim.inference import Sampler, SampleRequest, SamplingParams
from verbatim.inference.http.client import HttpClient
from verbatim.inference.pool.replica import ReplicaLoad
from verbatim.inference.vllm.control import VllmControl, read_metrics
from verbatim.inference.vllm.facts import ServerFacts
from verbatim.inference.vllm.replica import VllmReplica
from waiting import HANGS, until

pytestmark = pytest.mark.realtime

SIZES = (1e-3, 1e-6)
LAYER = "model.layers.1."


@pytest.fixture(params=["tied", "untied"])
def trainer(tmp_path: Path, request: pytest.FixtureRequest) -> TinyModel:
    return TinyModel(tmp_path / "weights", tied=request.param == "tied")


@pytest.fixture
def tied(tmp_path: Path) -> TinyModel:
    return TinyModel(tmp_path / "weights", tied=True)


@contextlib.asynccontextmanager
async def connected(trainer: TinyModel, **settings: Any) -> AsyncIterator[tuple[VllmDouble, VllmReplica]]:
    double = VllmDouble(trainer.published)
    async with serving(double) as url:
        replica = VllmReplica(
            url,
            **{
                "name": "replica 3",
                "model": "policy",
                "context_length": 512,
                "vocab_size": trainer.vocab_size,
                "policy_version": 0,
                "phase_timeout": HANGS,
                **settings,
            },
        )
        try:
            yield double, replica
        finally:
            await replica.close()


@contextlib.asynccontextmanager
async def controlling(replica: VllmReplica, *, phase_timeout: float) -> AsyncIterator[VllmControl]:
    """The phases of an update of a replica's server, one by one, with this limit for each."""
    client = HttpClient(replica.url, request_timeout=HANGS, max_retries=0, headers={"Connection": "close"})
    try:
        yield VllmControl(client, name=replica.name, phase_timeout=phase_timeout)
    finally:
        await client.close()


def request(ids: np.ndarray, **params: Any) -> SampleRequest:
    return SampleRequest(prompt_ids=ids, params=SamplingParams(**params), seed=0)


# ---- healthy


async def test_it_is_a_sampler_whose_logprobs_are_the_trainers_after_every_update(trainer: TinyModel):
    async with connected(trainer) as (_, replica):
        assert isinstance(replica, Sampler)
        await replica.check_server()
        await replica.prove_path(trainer.published)
        ids = trainer.ids(140)
        for version in range(1, 7):
            await replica.update_weights(trainer.step(f"v{version}", SIZES[version % 2]), version)
            assert replica.policy_version == version
            expected = trainer.logprobs(ids)
            scored = await replica.prompt_logprobs(ids)
            assert np.isnan(scored[0])
            assert np.abs(scored[1:] - expected).max() < 5e-5
            assert await replica.cached_logprob(ids) == pytest.approx(expected[-1], abs=5e-5)
            completion = await replica.generate(request(ids[:10], max_tokens=6))
            assert completion.policy_versions is not None and completion.logprobs is not None
            assert completion.policy_versions.tolist() == [version] * 6
            whole = trainer.logprobs(np.concatenate([ids[:10], completion.ids]))
            assert np.abs(completion.logprobs - whole[-6:]).max() < 5e-5


@pytest.mark.slow
async def test_many_healthy_updates_raise_no_alarm(tied: TinyModel):
    async with connected(tied) as (_, replica):
        for version in range(1, 31):
            path = tied.step("next", SIZES[version % 2])
            await replica.update_weights(path, version)
            shutil.rmtree(path)
        assert replica.policy_version == 30


async def test_an_update_pauses_proves_and_only_then_names_the_version(tied: TinyModel):
    async with connected(tied) as (double, replica):
        await replica.update_weights(tied.step("v1", 1e-3), 1)
        assert double.calls == [
            "/pause",
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/collective_rpc",
            "/update_weight_version",
            "/weight_info",
            "/reset_prefix_cache",
            "/resume",
        ]


async def test_requests_in_flight_finish_with_the_versions_that_drew_each_token(tied: TinyModel):
    async with connected(tied) as (double, replica):
        await replica.prove_path(tied.published)
        double.hold(after=3)
        running = asyncio.create_task(replica.generate(request(tied.ids(10), max_tokens=8)))
        await until(lambda: double.num_held)
        await replica.update_weights(tied.step("v1", 1e-3), 1)
        double.release()
        completion = await running
        assert completion.policy_versions is not None
        assert completion.policy_versions.tolist() == [0] * 3 + [1] * 5


async def test_the_first_version_is_the_one_that_was_told(tied: TinyModel):
    async with connected(tied, policy_version=7) as (_, replica):
        completion = await replica.generate(request(tied.ids(5), max_tokens=3))
        assert completion.policy_versions is not None
        assert completion.policy_versions.tolist() == [7, 7, 7]


async def test_a_packed_answer_and_that_of_a_server_without_our_middleware_are_the_same_completion(tied: TinyModel):
    """The size of the answers shows that one is packed: 11 bytes a token beside those of vLLM's own."""
    found, sizes = [], []
    for packs in (True, False):
        async with connected(tied) as (double, replica):
            double.packs, double.says = packs, [5, 0, 7, 3]
            found.append(await replica.generate(request(tied.ids(9), max_tokens=9, stop_token_ids=(3,))))
            sizes.append(double.answered[-1])
    one, other = found
    assert (one.ids.tolist(), one.stop_reason) == ([5, 0, 7, 3], StopReason.STOP)
    assert (one.ids.tolist(), one.stop_reason) == (other.ids.tolist(), other.stop_reason)
    assert one.logprobs is not None and other.logprobs is not None
    assert one.logprobs.tobytes() == other.logprobs.tobytes()
    assert one.policy_versions is not None and one.policy_versions.tolist() == [0] * 4
    assert one.num_cached_tokens == other.num_cached_tokens == 0
    assert sizes[1] - sizes[0] > 4 * 80


@pytest.mark.parametrize("packs", [True, False])
async def test_a_server_that_does_not_pack_is_named_when_it_is_checked_and_is_no_fault(
    tied: TinyModel, packs: bool, caplog: pytest.LogCaptureFixture
):
    async with connected(tied) as (double, replica):
        double.packs = packs
        await replica.check_server()
        said = f"replica 3 ({replica.url}): its answers list every token"
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [text.startswith(said) for text in warned] == ([] if packs else [True])


@pytest.mark.parametrize("packs", [True, False])
async def test_a_completion_with_a_token_whose_logprob_the_server_does_not_know_is_a_fault(
    tied: TinyModel, packs: bool
):
    async with connected(tied) as (double, replica):
        double.fault, double.packs = "no logprob", packs
        with pytest.raises(SamplerFault, match="replica 3: a completion without logprobs") as found:
            await replica.generate(request(tied.ids(5), max_tokens=3))
        assert found.value.num_tokens == 3
        with pytest.raises(SamplerFault, match=r"the server has no logprob of id \d+ at position 4"):
            await replica.cached_logprob(tied.ids(5))


async def test_asking_for_the_logprob_of_one_id_takes_none_from_requests_of_the_same_step(tied: TinyModel):
    async with connected(tied) as (double, replica):
        double.running.clear()
        double.says = [0]
        tasks = []
        for call in (replica.generate(request(tied.ids(5), max_tokens=3)), replica.cached_logprob(tied.ids(6))):
            tasks.append(asyncio.create_task(call))
            await until(lambda: double.in_flight == len(tasks))
        double.running.set()
        completion, _ = await asyncio.gather(*tasks)
        assert completion.ids[0] == 0
        assert completion.logprobs[0] == pytest.approx(tied.logprobs(np.append(tied.ids(5), np.int32(0)))[-1], abs=5e-5)


async def test_it_says_how_busy_the_server_is(tied: TinyModel):
    async with connected(tied) as (_, replica):
        ids = tied.ids(140)
        await replica.cached_logprob(ids)
        await replica.cached_logprob(ids)
        await replica.health()
        assert await replica.load_metrics() == ReplicaLoad(
            running=0, waiting=0, kv_usage=0.5, cache_queries=278, cache_hits=128, generated_tokens=2
        )


def test_figures_of_several_engines_are_added_and_shares_averaged():
    found = read_metrics(
        'vllm:num_requests_waiting{engine="0"} 2.0\nvllm:num_requests_waiting{engine="1"} 3.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} 0.1'
    )
    assert (found.waiting, found.kv_usage) == (5, pytest.approx(0.3))
    with pytest.raises(SamplerFault, match="none of vLLM's metrics"):
        read_metrics("python_gc 1.0")


# ---- planted faults


FAULTS = {
    "stale head": r"were not rebuilt: (model\.embed_tokens\.weight \(as lm_head\)|lm_head\.weight)",
    "stale layer": r"were not rebuilt: model\.layers\.1\.mlp\.down_proj\.weight",
    "swapped q and k": r"other values: model\.layers\.0\.self_attn\.k_proj\.weight, model\.layers\.0\..*q_proj",
    "version not advanced": r"its weights are of version 'default', expected 1",
    "update skipped": "has loaded nothing in this update",
    "not a number": r"other values: model\.layers\.0\.self_attn\.q_proj",
    "one number": r"other values: model\.layers\.0\.self_attn\.k_proj",
    "stale norm": r"other values: model\.norm\.weight",
}


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_planted_fault_is_named_and_the_server_stays_paused_until_it_is_mended(
    trainer: TinyModel, fault: str, size: float
):
    async with connected(trainer) as (double, replica):
        double.fault = fault
        path = trainer.step("v1", size)
        with pytest.raises(SamplerFault, match=f"^replica 3: .*{FAULTS[fault]}"):
            await replica.update_weights(path, 1)
        assert not double.running.is_set()
        assert replica.policy_version == 0
        double.fault = ""
        await replica.update_weights(path, 1)
        assert double.running.is_set()
        assert replica.policy_version == 1


@pytest.mark.parametrize("size", SIZES)
async def test_an_update_of_which_nothing_is_done_shows(trainer: TinyModel, size: float):
    async with connected(trainer) as (double, replica):
        await replica.update_weights(trainer.step("v1", size), 1)
        double.fault = "nothing done"
        with pytest.raises(SamplerFault, match=r"other values: .* and \d+ more"):
            await replica.update_weights(trainer.step("v2", size), 2)


@pytest.mark.parametrize("size", SIZES)
async def test_a_new_request_that_reads_a_prefix_of_older_weights_shows(trainer: TinyModel, size: float):
    async with connected(trainer) as (double, replica):
        await replica.prove_path(trainer.published)
        ids = trainer.ids(160)
        await replica.cached_logprob(ids)
        double.fault = "stale prefix"
        await replica.cached_logprob(ids)
        await replica.update_weights(trainer.step("v1", size), 1)
        with pytest.raises(SamplerFault, match="read 128 tokens from the prefix cache of the weights before version 1"):
            await replica.cached_logprob(ids)


@pytest.mark.parametrize(("length", "times"), [(129, 1), (130, 0)])  # a block of 128, and two ids that are asked for
async def test_a_probe_that_no_block_of_the_prefix_cache_holds_is_told_once(
    tied: TinyModel, length: int, times: int, caplog: pytest.LogCaptureFixture
):
    async with connected(tied) as (_, replica):
        for version in (1, 2):
            await replica.update_weights(tied.step(f"v{version}", 1e-3), version)
            for _ in range(3):
                await replica.cached_logprob(tied.ids(length))
    expected = (
        f"replica 3: stale prefixes cannot be detected, because the prefix cache stores nothing of a probe of {length} "
    )
    assert sum(expected in record.getMessage() for record in caplog.records) == times


async def test_no_new_request_reads_what_requests_in_flight_keep(tied: TinyModel):
    async with connected(tied, on_weight_update="keep") as (double, replica):
        await replica.prove_path(tied.published)
        ids = tied.ids(160)
        await replica.cached_logprob(ids)
        double.keeps_blocks = True
        await replica.update_weights(tied.step("v1", 1e-3), 1)
        assert await replica.cached_logprob(ids) == pytest.approx(tied.logprobs(ids)[-1], abs=5e-5)
        assert double.hits == 0


async def test_a_cache_that_cannot_be_emptied_fails_an_update_that_recomputes(tied: TinyModel):
    async with connected(tied) as (double, replica):
        double.missing.add("/reset_prefix_cache")
        with pytest.raises(SamplerFault, match=r"replica 3: empty prefix cache: .*404"):
            await replica.update_weights(tied.step("v1", 1e-3), 1)
        assert not double.running.is_set()


def half_a_file(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without_a_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors.pop(LAYER + "mlp.up_proj.weight")
    save_file(tensors, path / "model.safetensors")


def of_another_shape(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    name = LAYER + "mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()
    save_file(tensors, path / "model.safetensors")


def not_a_number(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors[LAYER + "mlp.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("damage", [half_a_file, without_a_tensor, of_another_shape, not_a_number])
async def test_a_damaged_folder_is_refused_before_the_server_is_paused(tied: TinyModel, damage: Any, size: float):
    async with connected(tied) as (double, replica):
        await replica.prove_path(tied.published)
        path = tied.step("v1", size)
        damage(path)
        double.calls.clear()
        with pytest.raises(ModelError, match=r"cannot be read|shapes differ from .*up_proj|up_proj.* not finite"):
            await replica.update_weights(path, 1)
        assert double.calls == []
        assert len((await replica.generate(request(tied.ids(4), max_tokens=2))).ids) == 2


async def test_a_path_that_leaves_a_tensor_stale_refuses_to_start(trainer: TinyModel):
    async with connected(trainer) as (double, replica):
        double.fault = "stale head"
        with pytest.raises(UsageError, match=r"^replica 3 \(http.*do not reach every tensor: .*lm_head"):
            await replica.prove_path(trainer.published)


# ---- phases


PHASES = {
    "/pause": "pause",
    "/start_weight_update": "start weight update",
    "/update_weights": "load weights",
    "/finish_weight_update": "finish weight update",
    "/collective_rpc": "report weights",
    "/update_weight_version": "set version",
    "/weight_info": "set version",
    "/reset_prefix_cache": "empty prefix cache",
    "/resume": "resume",
}


@pytest.mark.parametrize("route", PHASES)
async def test_a_phase_that_fails_is_named_with_its_replica(tied: TinyModel, route: str):
    async with connected(tied) as (double, replica):
        double.fails_at = route
        with pytest.raises(SamplerFault, match=f"^replica 3: {PHASES[route]}: http.* status 500"):
            await replica.update_weights(tied.step("v1", 1e-3), 1)


HANGING = {
    "/pause": lambda control: control.pause(),
    "/start_weight_update": lambda control: control.start_update(),
    "/update_weights": lambda control: control.load({}),
    "/finish_weight_update": lambda control: control.finish_update(),
    "/collective_rpc": lambda control: control.reports(),
    "/update_weight_version": lambda control: control.set_version(1),
    "/reset_prefix_cache": lambda control: control.forget_prefixes(running_too=True),
    "/resume": lambda control: control.resume(),
}
"""Each phase alone, with a limit that the phases before it might not keep on a busy machine."""


@pytest.mark.slow
@pytest.mark.parametrize("route", HANGING)
async def test_a_phase_that_hangs_is_named_with_its_replica_and_its_limit(tied: TinyModel, route: str):
    async with connected(tied) as (double, replica):
        double.hangs_at = route
        with pytest.raises(SamplerFault, match=rf"^replica 3: {PHASES[route]}: no answer within 0\.2 s$"):
            async with controlling(replica, phase_timeout=0.2) as control:
                await HANGING[route](control)


async def test_the_limit_of_a_phase_is_the_one_that_the_replica_was_given(tied: TinyModel):
    async with connected(tied, phase_timeout=0.2) as (double, replica):
        double.hangs_at = "/pause"
        with pytest.raises(SamplerFault, match=r"^replica 3: pause: no answer within 0\.2 s$"):
            await replica.update_weights(tied.step("v1", 1e-3), 1)


async def test_an_update_that_was_given_up_in_the_middle_is_made_again(tied: TinyModel):
    path = tied.step("v1", 1e-3)
    async with connected(tied) as (double, replica):
        double.fails_at = "/finish_weight_update"
        with pytest.raises(SamplerFault, match="finish weight update"):
            await replica.update_weights(path, 1)
        double.fails_at = ""
        await replica.update_weights(path, 1)
        assert replica.policy_version == 1


async def test_a_server_that_is_gone_is_named(tied: TinyModel):
    facts = {"model": "policy", "context_length": 512, "vocab_size": tied.vocab_size, "policy_version": 0}
    with held_port() as held:
        lost = VllmReplica(f"http://127.0.0.1:{number_of(held)}", name="replica 3", **facts)
        for call in (lost.health(), lost.load_metrics(), lost.check_server()):
            with pytest.raises(SamplerFault, match=r"^replica 3: .*Connection error"):
                await call
        await lost.close()


# ---- what is refused before anything is sampled


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "--logprobs-mode processed_logprobs"),
        ({"generation_config": "auto"}, "--generation-config vllm"),
        ({"prefix_caching": False}, "--enable-prefix-caching"),
        ({"chunked_prefill": False}, "--enable-chunked-prefill"),
        ({"max_model_len": 256}, "--max-model-len 512"),
        ({"vocab_size": 1000, "model": "other"}, "other with a vocabulary of 1000 ids, but this run's model has"),
        ({"weight_transfer": None}, '--weight-transfer-config \'{"backend": "verbatim_files"}\''),
        ({"speculative": True}, "leave out --speculative-config"),
        ({"unsupported_heads": "16, and it knows [32]"}, "heads have a size of 16, and it knows [32]"),
    ],
)
async def test_a_server_that_was_started_wrongly_is_refused_with_the_flag_to_add(
    tied: TinyModel, facts: dict[str, Any], said: str
):
    async with connected(tied) as (double, replica):
        double.facts.update(facts)
        with pytest.raises(UsageError) as refused:
            await replica.check_server()
        assert said in str(refused.value)
        assert str(refused.value).startswith("replica 3 (http://127.0.0.1:")


async def test_everything_that_is_wrong_is_named_at_once(tied: TinyModel):
    async with connected(tied) as (double, replica):
        double.facts.update(prefix_caching=False, logprobs_mode="raw_logits")
        with pytest.raises(UsageError, match=r"raw_logits.*; it computes every prompt from scratch"):
            await replica.check_server()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"missing": {"/collective_rpc"}}, "VLLM_SERVER_DEV_MODE=1"),
        ({"fault": "no plug-in"}, "--worker-extension-cls verbatim_vllm.WeightReport"),
        ({"key": "sk-other"}, "inference.vllm.api_key_env"),
        ({"missing": {"/inference/v1/generate"}}, "--enable-scale-out"),
        ({"says_cached_tokens": False}, "--enable-prompt-tokens-details"),
    ],
)
async def test_a_server_without_a_route_or_with_another_key_is_refused(
    tied: TinyModel, change: dict[str, Any], said: str
):
    async with connected(tied) as (double, replica):
        vars(double).update(change)
        with pytest.raises(UsageError, match=said):
            await replica.check_server()


async def test_the_key_is_sent_on_every_route(tied: TinyModel):
    async with connected(tied, api_key="sk-secret-key") as (double, replica):
        double.key = "sk-secret-key"
        await replica.check_server()
        await replica.update_weights(tied.step("v1", 1e-3), 1)
        await replica.generate(request(tied.ids(4), max_tokens=2))


async def test_what_vllm_cannot_score_is_refused(tied: TinyModel):
    async with connected(tied) as (_, replica):
        with pytest.raises(UsageError, match=r"temperature = 0\.5: vLLM returns prompt logprobs at temperature 1 only"):
            await replica.prompt_logprobs(tied.ids(4), temperature=0.5)
        with pytest.raises(RecordError, match="outside the vocabulary"):
            await replica.prompt_logprobs(np.array([1, 9999], dtype=np.int32))
        with pytest.raises(RecordError, match="512 ids leave no room"):
            await replica.generate(request(tied.ids(512), max_tokens=1))
        with pytest.raises(RecordError, match="at least 2 ids"):
            await replica.cached_logprob(tied.ids(1))


async def test_without_a_trainer_that_sends_the_folder_is_read(tied: TinyModel):
    async with connected(tied, weight_transfer="gloo") as (double, replica):
        await replica.update_weights(tied.step("v1", 1e-3), 1)
        assert double.version == "1" and double.received is None and "/get_world_size" not in double.calls


def test_every_fault_of_the_double_is_one_of_the_faulty_engine_or_of_its_routes():
    from verbatim_faulty_tensors import wrong

    tensors = {
        name: torch.ones(2, 2)
        for name in (
            "lm_head.weight",
            "model.layers.1.x",
            "model.norm.weight",
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.0.self_attn.k_proj.weight",
        )
    }
    tensors["model.layers.0.self_attn.k_proj.weight"] *= 2
    healthy = {name: tensor.tolist() for name, tensor in tensors.items()}
    in_routes = {"version not advanced", "update skipped"}
    for fault in FAULTS.keys() - in_routes:
        found = {name: tensor.tolist() for name, tensor in wrong(fault, dict(tensors))}
        assert str(found) != str(healthy), fault


def test_the_double_says_every_fact_that_is_asked_of_a_server(tied: TinyModel):
    assert {field.name for field in fields(ServerFacts)} <= set(VllmDouble(tied.published).facts)
