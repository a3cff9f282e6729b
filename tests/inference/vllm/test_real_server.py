"""A real vLLM server: exact logprobs after every update, planted faults, and the answers that the double imitates.

Run by `make test-vllm`; VERBATIM_VLLM_PYTHON names the Python of an environment with vLLM. What depends on the head is
tested with one that shares the embedding's weights and with one of its own.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from campaigns import Campaign, sized
from inference.vllm.real_servers import (
    LONGEST_START,
    PYTHON,
    SIZES,
    TOLERANCE,
    Served,
    asking,
    end_all_requests,
    until_drawn,
)
from inference.vllm.test_replica import FAULTS, controlling
from inference.vllm.test_server_pool import PLANTED
from inference.vllm.tiny_model import CONTEXT, TinyModel
from inference.vllm.vllm_double import VllmDouble, as_json, serving, shape_of
from verbatim.config.schema import TeacherConfig
from verbatim.core.errors import ModelError, SamplerFault, UsageError
from verbatim.core.types import StopReason
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.http.client import HttpClient, encode, read_json
from verbatim.inference.http.completions import read_completion
from verbatim.inference.teacher import make_teacher
from verbatim.inference.vllm.process import free_port, make_process
from verbatim.inference.vllm.replica import VllmReplica
from verbatim.inference.vllm.settings import VllmSettings
from waiting import HANGS

pytestmark = [pytest.mark.vllm, pytest.mark.realtime, pytest.mark.xdist_group("plain servers")]
PACKED = {"verbatim": {"packed": True}}
LONG = CONTEXT - 200
"""Tokens of a request that a test ends before it has drawn them all."""
KINDS = ("tied", "untied")
SAME_AS_THE_DOUBLE = (*FAULTS, "rows moved")
SAID = {"stale v": r"other values: model\.layers\.0\.self_attn\.v_proj"}
"""The kernel is built anew from all three, one of them old; the double has a kernel for each."""


@pytest.fixture
def served(tied_server: Served[TinyModel]) -> Served[TinyModel]:
    tied_server.plant("")
    return tied_server


@pytest.fixture
def either(request: pytest.FixtureRequest, kind: str) -> Served[TinyModel]:
    found: Served[TinyModel] = request.getfixturevalue(f"{kind}_server")
    found.plant("")
    return found


def request(ids: np.ndarray, seed: int = 0, **params: Any) -> SampleRequest:
    return SampleRequest(prompt_ids=ids, params=SamplingParams(**params), seed=seed)


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
async def test_logprobs_are_the_trainers_and_no_alarm_is_raised_over_many_updates(
    either: Served[TinyModel], campaign: Callable[[str], Campaign]
):
    row, num_updates = campaign("healthy updates of a real vLLM server"), sized(20, 200)
    replica, trainer = either.replica(), either.trainer
    await replica.prove_path(trainer.go_back())
    assert replica.num_unverified == 0
    ids, largest, hits = trainer.ids(160), 0.0, (await replica.load_metrics()).cache_hits
    for version in range(1, num_updates + 1):
        path = either.step(SIZES[version % 2])
        await replica.update_weights(path, version)
        shutil.rmtree(path)
        expected = trainer.logprobs(ids)
        largest = max(largest, float(np.abs((await replica.prompt_logprobs(ids))[1:] - expected).max()))
        for _ in range(2):  # the second reads the prefix cache
            largest = max(largest, abs(await replica.cached_logprob(ids) - float(expected[-1])))
        completion = await replica.generate(request(ids[:40], max_tokens=20))
        assert completion.logprobs is not None and completion.policy_versions is not None
        assert completion.policy_versions.tolist() == [version] * 20
        whole = trainer.logprobs(np.concatenate([ids[:40], completion.ids]))
        largest = max(largest, float(np.abs(completion.logprobs - whole[-20:]).max()))
        row.add()
    assert (await replica.load_metrics()).cache_hits - hits >= num_updates * 128
    row.note = f"largest |delta logprob| {largest:.2g}"
    assert largest <= TOLERANCE
    await replica.close()


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("fault", "kind", "size"),
    sized(
        [
            (fault, kind, SIZES[(number + n) % 2])
            for number, fault in enumerate((*SAME_AS_THE_DOUBLE, *SAID))
            for n, kind in enumerate(KINDS)
        ],
        [(fault, kind, size) for fault in (*SAME_AS_THE_DOUBLE, *SAID) for kind in KINDS for size in SIZES],
    ),
)
async def test_a_planted_fault_is_named_as_by_the_double_and_can_be_mended(
    either: Served[TinyModel], fault: str, size: float, campaign: Callable[[str], Campaign]
):
    """The campaign of healthy updates shows that none is named without a fault."""
    campaign("faults planted into a real vLLM server").add()
    replica = either.replica()
    before = either.step(size)
    await replica.update_weights(before, 1)
    path = either.step(size)
    either.plant(fault)
    with pytest.raises(SamplerFault) as found:
        await replica.update_weights(path, 2)
    said = str(found.value).replace("FaultyEngine", "FilesEngine")
    if fault in SAID:
        assert re.search(SAID[fault], said)
    else:
        assert said == await said_of_the_double(before, path, fault)
    either.plant("")
    await replica.update_weights(path, 2)
    ids = either.trainer.ids(30)
    assert np.abs((await replica.prompt_logprobs(ids))[1:] - either.trainer.logprobs(ids)).max() <= TOLERANCE
    await replica.close()


async def said_of_the_double(before: Path, path: Path, fault: str) -> str:
    double = VllmDouble(before)
    async with serving(double) as url:
        replica = VllmReplica(
            url,
            name="replica 0",
            model="policy",
            context_length=512,
            phase_timeout=HANGS,
            vocab_size=double.facts["vocab_size"],
            policy_version=0,
        )
        await replica.update_weights(before, 1)
        double.fault = fault
        with pytest.raises(SamplerFault, match=PLANTED[fault]) as found:
            await replica.update_weights(path, 2)
        await replica.close()
    return str(found.value)


@pytest.mark.parametrize(("kind", "size"), zip(KINDS, SIZES, strict=True))
async def test_a_new_request_that_reads_a_prefix_of_older_weights_shows(either: Served[TinyModel], size: float):
    replica = either.replica()
    await replica.update_weights(either.step(size), 1)
    ids = either.trainer.ids(160, seed=int(size * 1e6))
    either.plant("stale prefix")
    await replica.cached_logprob(ids)
    await replica.update_weights(either.step(size), 2)
    with pytest.raises(SamplerFault, match="read 128 tokens from the prefix cache of the weights before version 2"):
        await replica.cached_logprob(ids)
    either.plant("")
    await replica.update_weights(either.step(size), 3)
    await replica.close()


def half_a_file(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def without_a_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path / "model.safetensors")


def of_another_shape(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = tensors["model.layers.1.mlp.up_proj.weight"][:-1].contiguous()
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("damage", [half_a_file, without_a_tensor, of_another_shape])
async def test_a_damaged_folder_is_refused_by_the_server_too(served: Served[TinyModel], damage: Any):
    """As the server sees it that reads another copy than the client."""
    replica = served.replica()
    path = served.step(1e-3)
    await replica.update_weights(path, 1)
    damaged = served.trainer.publish(f"damaged_{damage.__name__}_{served.steps}")
    damage(damaged)
    with pytest.raises(ModelError):
        await replica.update_weights(damaged, 2)
    async with controlling(replica, phase_timeout=HANGS) as control:
        await control.pause()
        await control.start_update()
        await control.load({"path": str(damaged)})
        (report,) = await control.reports()  # and the update is not finished
    assert report.error is not None
    assert damage is half_a_file or "up_proj" in report.error or "gate_up_proj" in report.error
    await replica.update_weights(path, 2)
    await replica.close()


@pytest.mark.parametrize("mode", ["recompute", "keep"])
async def test_requests_in_flight_go_on_with_the_version_of_each_token(served: Served[TinyModel], mode: Any):
    replica, trainer = served.replica(on_weight_update=mode), served.trainer
    await replica.update_weights(served.step(1e-3), 1)
    ids = trainer.ids(40)
    old = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    path = served.step(1e-2)
    running = [asyncio.create_task(replica.generate(request(ids, seed, max_tokens=LONG))) for seed in range(4)]
    await until_drawn(replica, 20, requests=4)
    await replica.update_weights(path, 2)
    await until_drawn(replica, 200, requests=4)
    await end_all_requests(served.url)
    new = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    for completion in await asyncio.gather(*running):
        assert completion.policy_versions is not None and completion.logprobs is not None
        assert sorted(set(completion.policy_versions.tolist())) == [1, 2]
        switch = int((completion.policy_versions == 1).sum())
        whole = np.concatenate([ids, completion.ids])
        new_logprobs = trainer.logprobs(whole)[len(ids) - 1 :]
        trainer.model.load_state_dict(old)
        old_logprobs = trainer.logprobs(whole)[len(ids) - 1 :]
        trainer.model.load_state_dict(new)
        assert np.abs(completion.logprobs[:switch] - old_logprobs[:switch]).max() <= TOLERANCE
        after = np.abs(completion.logprobs[switch:] - new_logprobs[switch:]).max()
        if mode == "recompute":
            assert after <= TOLERANCE
        else:
            assert after > TOLERANCE  # the cache of the old weights goes on
    assert await replica.cached_logprob(ids) == pytest.approx(trainer.logprobs(ids)[-1], abs=TOLERANCE)
    await replica.close()


async def test_every_token_has_its_logprob_while_the_canary_asks_for_single_ids(served: Served[TinyModel]):
    """vLLM pads the other requests of such a step with id 0, so the test has the model draw it often."""
    replica = served.replica()
    served.trainer.go_back()
    await replica.update_weights(served.trainer.step_towards(0, "zeros"), 1)
    ids = served.trainer.ids(30)
    running = [asyncio.create_task(replica.generate(request(ids, seed, max_tokens=400))) for seed in range(8)]
    while not all(task.done() for task in running):
        await replica.cached_logprob(ids)
    completions = await asyncio.gather(*running)
    assert sum((completion.ids == 0).sum() for completion in completions) > 100
    for completion in completions:
        expected = served.trainer.logprobs(np.concatenate([ids, completion.ids]))[len(ids) - 1 :]
        assert completion.logprobs is not None
        assert np.abs(completion.logprobs - expected).max() <= TOLERANCE
    await replica.update_weights(served.trainer.go_back(), 2)
    await replica.close()


async def test_weights_travel_over_http(served: Served[TinyModel]):
    replica = served.replica(weight_transfer="http")
    path = served.step(1e-3)
    await replica.update_weights(path, 1)
    ids = served.trainer.ids(30)
    assert np.abs((await replica.prompt_logprobs(ids))[1:] - served.trainer.logprobs(ids)).max() <= TOLERANCE
    await replica.close()


async def test_what_the_server_was_started_without_is_named(served: Served[TinyModel]):
    replica = served.replica()
    with pytest.raises(UsageError, match=r'--weight-transfer-config .*"verbatim_files"'):  # it has the other engine
        await replica.check_server()
    await replica.close()


async def test_a_teacher_behind_vllm_scores_exact_ids(served: Served[TinyModel]):
    await (replica := served.replica()).update_weights(served.step(1e-3), 1)
    teacher = make_teacher(TeacherConfig(model="policy", base_url=f"{served.url}/v1"))
    ids = served.trainer.ids(50)
    scored = await teacher.logprobs(ids, 1.0)
    assert np.abs(scored[1:] - served.trainer.logprobs(ids)).max() <= TOLERANCE
    await teacher.close()
    await replica.close()


async def test_on_a_cpu_its_sleep_keeps_the_weights_and_its_waking_goes_the_same_way(served: Served[TinyModel]):
    """The CPU's worker ignores sleep and waking up, and everything above it does not."""
    replica, trainer = served.replica(), served.trainer
    await replica.update_weights(served.step(1e-3), 1)
    client = HttpClient(served.url, request_timeout=HANGS, max_retries=0)
    ids = trainer.ids(160)
    for version in (2, 3):
        await replica.cached_logprob(ids)
        await replica.sleep()
        assert await client.ask("GET", "/is_sleeping", None, read_json) == {"is_sleeping": True}
        waiting = asyncio.create_task(replica.generate(request(ids[:20], max_tokens=8)))
        await replica.update_weights(served.step(1e-3), version)
        assert await client.ask("GET", "/is_sleeping", None, read_json) == {"is_sleeping": False}
        expected = trainer.logprobs(ids)
        assert await replica.cached_logprob(ids) == pytest.approx(expected[-1], abs=TOLERANCE)
        assert np.abs((await replica.prompt_logprobs(ids))[1:] - expected).max() <= TOLERANCE
        completion = await waiting
        assert completion.policy_versions is not None and completion.policy_versions.tolist() == [version] * 8
    assert replica.seconds_waking is not None and replica.seconds_waking > 0
    await client.close()
    await replica.close()


async def test_a_cpu_refuses_the_flag_of_the_sleep_mode(served: Served[TinyModel], tmp_path: Path):
    settings = VllmSettings(python=PYTHON, colocate=True)
    with pytest.raises(UsageError, match="has a CPU build of vLLM, which cannot release its memory"):
        settings.check()
    process = make_process(
        settings, 0, model=served.trainer.published, port=free_port(), context_length=512, logs=tmp_path, num_threads=1
    )
    with pytest.raises(SamplerFault, match="Sleep mode is not supported on current platform"):
        await process.start(LONGEST_START)


def without_names(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without its own name and time, and without ids and logprobs."""
    (choice,) = answer["choices"]
    rest = {key: value for key, value in answer.items() if key not in ("request_id", "created", "packed")}
    return {**rest, "choices": [{**choice, "token_ids": None, "logprobs": None}]}


async def test_a_packed_answer_is_vllms_own_bit_for_bit(served: Served[TinyModel]):
    await (replica := served.replica()).update_weights(served.step(1e-3), 1)
    async with asking(served.url) as ask:
        for max_tokens, stops in ((1, []), (60, []), (60, [3])):
            sampling = {
                "temperature": 0.9,
                "top_p": 0.95,
                "max_tokens": max_tokens,
                "logprobs": 0,
                "seed": 11,
                "ignore_eos": True,
                "stop_token_ids": stops,
            }
            body = {"token_ids": served.trainer.ids(30).tolist(), "sampling_params": sampling}
            own = await ask(body)
            if max_tokens == 60 and stops:  # one that is sampled
                stops[:] = [own["choices"][0]["token_ids"][20]]
                own = await ask(body)
            packed = await ask({**body, **PACKED})
            assert without_names(packed) == without_names(own)
            assert packed["choices"][0]["token_ids"] is None and packed["choices"][0]["logprobs"] is None
            (one, _), (other, _) = map(read_completion, (packed, own))
            assert own["choices"][0]["finish_reason"] == ("stop" if stops else "length")
            assert (one.stop_reason, one.ids.tolist()) == (other.stop_reason, other.ids.tolist())
            assert one.logprobs is not None and other.logprobs is not None
            assert one.logprobs.tobytes() == other.logprobs.tobytes()
            assert len(one.ids) == max_tokens or stops
    await replica.close()


@pytest.mark.parametrize("others", [{"logprobs": 1}, {"logprobs": None}, {"prompt_logprobs": 0}, {"n": 2}])
async def test_what_is_no_packed_answer_comes_as_if_it_had_not_been_asked_for(served: Served[TinyModel], others: Any):
    sampling = {"temperature": 1.0, "max_tokens": 5, "logprobs": 0, "seed": 3, "ignore_eos": True, **others}
    body = {"token_ids": [5, 6, 7], "sampling_params": sampling}
    async with asking(served.url) as ask:
        own, asked = await ask(body), await ask({**body, **PACKED})
        assert "packed" not in asked
        assert [choice["token_ids"] for choice in asked["choices"]] == [c["token_ids"] for c in own["choices"]]
        assert [choice["logprobs"] for choice in asked["choices"]] == [c["logprobs"] for c in own["choices"]]
        assert asked["prompt_logprobs"] == own["prompt_logprobs"]


async def test_a_stream_is_vllms_own(served: Served[TinyModel]):
    sampling = {"temperature": 1.0, "max_tokens": 5, "logprobs": 0, "seed": 3, "ignore_eos": True}
    body = {"token_ids": [5, 6, 7], "sampling_params": sampling}
    async with asking(served.url) as ask:
        whole = await ask(body)
        text = await ask({**body, **PACKED, "stream": True}, lambda answer: answer.text)
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [token for choice in choices for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    logprobs = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    assert logprobs == whole["choices"][0]["logprobs"]["content"]


async def test_an_aborted_request_answers_packed_with_what_was_sampled(served: Served[TinyModel]):
    replica = served.replica()
    sampling = {"temperature": 1.0, "max_tokens": LONG, "logprobs": 0, "ignore_eos": True}
    body = {"token_ids": [5, 6, 7], "sampling_params": sampling, "request_id": "mine", **PACKED}
    async with asking(served.url) as ask, asking(served.url, "/inference/v1/abort_requests") as abort:
        running = asyncio.create_task(ask(body))
        await until_drawn(replica, 1)
        await abort({"request_ids": ["generate-tokens-mine"]}, lambda answer: answer.status)
        completion, _ = read_completion(await running)
    assert completion.stop_reason is StopReason.CANCELLED
    assert 0 < len(completion.ids) < LONG
    assert completion.logprobs is not None and len(completion.logprobs) == len(completion.ids)
    await replica.close()


async def test_a_cancelled_call_ends_on_the_server(served: Served[TinyModel]):
    replica = served.replica()
    before = (await replica.load_metrics()).generated_tokens
    call = asyncio.create_task(replica.generate(request(served.trainer.ids(9), max_tokens=LONG)))
    await until_drawn(replica, 1)
    call.cancel()
    async with asyncio.timeout(HANGS):
        while (await replica.load_metrics()).running:  # noqa: ASYNC110 - the server sets no event
            await asyncio.sleep(0.02)
    assert (await replica.load_metrics()).generated_tokens - before < LONG
    await replica.close()


async def test_the_double_answers_as_the_real_server_does(served: Served[TinyModel]):
    double = VllmDouble(served.trainer.published)
    path = served.step(1e-3)
    sampling = {"temperature": 1.0, "max_tokens": 2, "logprobs": 0, "ignore_eos": True}
    asked: list[tuple[str, str, Any]] = [
        ("POST", "/pause?mode=keep&clear_cache=false", None),
        ("POST", "/start_weight_update", None),
        ("POST", "/update_weights", {"update_info": {"path": str(path)}}),
        ("POST", "/finish_weight_update", {}),
        ("POST", "/collective_rpc", {"method": "verbatim_report"}),
        ("POST", "/collective_rpc", {"method": "verbatim_facts"}),
        ("POST", "/update_weight_version", {"new_version": "9"}),
        ("GET", "/weight_info", None),
        ("POST", "/reset_prefix_cache?reset_running_requests=true", None),
        ("POST", "/resume", None),
        ("POST", "/sleep?level=2&mode=wait", None),
        ("GET", "/is_sleeping", None),
        ("POST", "/wake_up?tags=weights", None),
        ("POST", "/start_weight_update", None),
        ("POST", "/update_weights", {"update_info": {"path": str(path)}}),
        ("POST", "/finish_weight_update", {}),
        ("POST", "/wake_up?tags=kv_cache", None),
        ("GET", "/is_sleeping", None),
        ("POST", "/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": sampling, "cache_salt": "a"}),
        ("POST", "/inference/v1/generate", {"token_ids": [5, 6, 7], "sampling_params": sampling, **PACKED}),
        (
            "POST",
            "/inference/v1/generate",
            {"token_ids": [5, 6, 7], "sampling_params": {**sampling, "max_tokens": 1, "prompt_logprobs": 0}, **PACKED},
        ),
        (
            "POST",
            "/inference/v1/generate",
            {
                "token_ids": [5, 6],
                "sampling_params": {**sampling, "max_tokens": 1, "logprobs": 2, "logprob_token_ids": [7, 7]},
                **PACKED,
            },
        ),
    ]
    async with serving(double) as url:
        there, here = (HttpClient(root, request_timeout=HANGS, max_retries=0) for root in (served.url, url))
        for method, route, body in asked:
            answers = [
                await client.ask(method, route, None if body is None else encode(body), read_json)
                for client in (there, here)
            ]
            real, ours = map(shape_of, answers)
            assert ours == real, f"{route}: {as_json(real)}\n{as_json(ours)}"
            if route == "/collective_rpc" and body == {"method": "verbatim_report"}:
                reports = [answer["results"][0]["report"]["tensors"] for answer in answers]
                reports = [{tuple(map(str, entry[:1] + entry[3:6])) for entry in report} for report in reports]
                assert reports[0] == reports[1]
        await there.close()
        await here.close()
