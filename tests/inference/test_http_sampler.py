"""A sampler behind HTTP is the sampler: same ids, logprobs and versions, same errors, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import pickle
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from byte_renderer import END, VOCAB_SIZE, ByteRenderer
from verbatim.core.errors import ModelError, RecordError, SamplerFault, UsageError
from verbatim.core.types import StopReason
from verbatim.inference import Completion, Sampler, SampleRequest, SamplingParams
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.http import client, completions, connections, protocol
from verbatim.inference.http.request_body import read_request
from verbatim.inference.http.sampler import HttpSampler
from verbatim.inference.http.server import serve_sampler
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import MultiTurnRollout
from waiting import HANGS, until, wait_until

pytestmark = pytest.mark.realtime


def request(*prompt: int, seed: int = 0, session: str = "", **params: Any) -> SampleRequest:
    return SampleRequest(
        prompt_ids=np.array(prompt, np.int32), params=SamplingParams(**params), seed=seed, session=session
    )


def scripted(script: Any = ((5, 6, 7),), **fields: Any) -> ScriptedSampler:
    return ScriptedSampler(script=script, vocab_size=10, context_length=16, **fields)


@contextlib.asynccontextmanager
async def behind_http(sampler: Sampler, **settings: Any) -> AsyncIterator[HttpSampler]:
    async with serve_sampler(sampler, api_key="sk-test-key") as server:
        client = await HttpSampler.connect(server.url, api_key="sk-test-key", **settings)
        try:
            yield client
        finally:
            await client.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "pause", lambda attempt, retry_after, jitter: 0.01)


def assert_same(one: Completion, other: Completion) -> None:
    for name in ("ids", "logprobs", "policy_versions"):
        mine, its = getattr(one, name), getattr(other, name)
        assert mine.dtype == its.dtype
        assert mine.tobytes() == its.tobytes(), name
    assert one.stop_reason is other.stop_reason


# ---- the same as without HTTP


async def test_it_is_a_sampler_and_knows_what_the_server_is():
    async with behind_http(scripted(policy_version=3)) as client:
        assert isinstance(client, Sampler)
        assert (client.context_length, client.vocab_size, client.policy_version) == (16, 10, 3)


async def test_many_requests_at_a_time_get_the_ids_logprobs_and_versions_of_the_engine_bit_for_bit(models):
    from verbatim.inference.embedded.engine import TorchSampler

    config = TorchSettings(max_batch_size=8, device="cpu", deterministic=True)
    engine = TorchSampler(models["tied"], config=config, context_length=64, policy_version=5)
    requests = [
        request(
            *range(1, 2 + k % 7),
            seed=k,
            max_tokens=4 + k % 9,
            stop_token_ids=tuple(range(12)),
            temperature=0.5 + k / 40,
            top_k=(0, 20)[k % 2],
        )
        for k in range(40)
    ]
    try:
        direct = await asyncio.gather(*map(engine.generate, requests))
        async with behind_http(engine) as client:
            over_http = await asyncio.gather(*map(client.generate, requests))
            whole = np.arange(1, 30, dtype=np.int32)
            scored = await client.prompt_logprobs(whole, 0.7)
        expected = await engine.prompt_logprobs(whole, 0.7)
    finally:
        await engine.close()
    for one, other in zip(direct, over_http, strict=True):
        assert_same(one, other)
    assert {c.stop_reason for c in direct} == {StopReason.STOP, StopReason.LENGTH}
    assert set(np.concatenate([c.policy_versions for c in over_http])) == {5}
    assert scored.dtype == np.float32
    assert scored.tobytes() == expected.tobytes()


@pytest.mark.slow
async def test_recorded_experts_come_over_http(tmp_path):
    from verbatim.inference.embedded.engine import TorchSampler

    torch.manual_seed(0)
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
        )
    ).save_pretrained(tmp_path)
    engine = TorchSampler(
        tmp_path, config=TorchSettings(device="cpu", deterministic=True), context_length=64, return_routed_experts=True
    )
    asked = [request(*range(1, 9), seed=k, max_tokens=5) for k in range(3)]
    asked.append(replace(asked[0], routed_experts_start=6))
    try:
        direct = [await engine.generate(r) for r in asked]
        async with behind_http(engine) as client:
            over_http = [await client.generate(r) for r in asked]
    finally:
        await engine.close()
    for one, other, length in zip(direct, over_http, (12, 12, 12, 6), strict=True):
        assert one.routed_experts.shape == (length, 2, 2)
        assert one.routed_experts.dtype == other.routed_experts.dtype == np.uint8
        assert np.array_equal(one.routed_experts, other.routed_experts)
    assert np.array_equal(direct[0].routed_experts[6:], direct[3].routed_experts)


async def test_kept_sets_are_those_of_the_engine(models: dict[str, Path]):
    from verbatim.inference.embedded.engine import TorchSampler

    settings = TorchSettings(device="cpu", deterministic=True)
    engine = TorchSampler(models["tied"], config=settings, context_length=64)
    asked = [request(1, 2, seed=k, max_tokens=6, top_p=0.7, return_kept_sets=True) for k in range(3)]
    asked.append(request(1, 2, max_tokens=6, top_p=0.7))
    try:
        direct = [await engine.generate(r) for r in asked]
        async with behind_http(engine) as client:
            over_http = [await client.generate(r) for r in asked]
    finally:
        await engine.close()
    assert direct[-1].kept_sets is None and over_http[-1].kept_sets is None
    for one, other in zip(direct[:-1], over_http[:-1], strict=True):
        assert_same(one, other)
        for name in ("ids", "offsets"):
            assert np.array_equal(getattr(one.kept_sets, name), getattr(other.kept_sets, name))


def test_kept_sets_without_the_id_that_was_drawn_are_no_answer():
    found = Completion(ids=np.array([4, 5], np.int32), logprobs=None, policy_versions=None, stop_reason=StopReason.STOP)
    body = completions.completion_body(
        found, request_id="r", model="m", seed=0, num_prompt_tokens=1, policy_version=0, logprobs=None
    )
    for mask in ([[4], [6]], [[4]], 7, [[4], None], [[4], ["5"]]):
        body["choices"][0]["sampling_mask"] = mask
        with pytest.raises(ValueError, match=r"kept_sets: |sampling_mask: "):
            completions.read_completion(body)
    body["choices"][0]["sampling_mask"] = [[4, 1], []]
    read, _ = completions.read_completion(body)
    assert [read.kept_sets[place].tolist() for place in range(2)] == [[1, 4], []]


def test_experts_of_other_tokens_are_no_answer():
    asked = request(1, 2, 3)
    found = Completion(
        ids=np.arange(2, dtype=np.int32),
        logprobs=None,
        policy_versions=None,
        stop_reason=StopReason.STOP,
        routed_experts=np.zeros((5, 1, 2), dtype=np.uint8),
    )
    with pytest.raises(ValueError, match="the experts of 5 tokens, expected those of 4"):
        completions.check_experts(found, asked)
    cancelled = replace(found, stop_reason=StopReason.CANCELLED)
    assert completions.check_experts(cancelled, asked).routed_experts is None
    for text in ("no base64", "AAAA", 7):
        body = completions.completion_body(
            replace(found, routed_experts=None),
            request_id="r",
            model="m",
            seed=0,
            num_prompt_tokens=1,
            policy_version=0,
            logprobs=None,
        )
        body["choices"][0]["routed_experts"] = text
        with pytest.raises(ValueError, match="routed_experts: "):
            completions.read_completion(body)


@pytest.mark.slow
async def test_hundreds_of_requests_are_in_flight_together():
    sampler = scripted(lambda r: [1], trouble=lambda index, r: "hang")
    async with behind_http(sampler) as client:
        tasks = [asyncio.create_task(client.generate(request(1, seed=k))) for k in range(300)]
        await until(lambda: sampler.num_in_flight == 300)
        await sampler.close()
        assert {c.stop_reason for c in await asyncio.gather(*tasks)} == {StopReason.CANCELLED}


@pytest.mark.parametrize("style", ["objects", "packed"])
@given(bits=st.lists(st.integers(0x80000000, 0xFF7FFFFF), min_size=1, max_size=8))  # every float32 from -0 to -max
@settings(deadline=None)
def test_every_float32_logprob_survives_the_wire(style: protocol.LogprobStyle, bits: list[int]):
    logprobs = np.array(bits, dtype=np.uint32).view(np.float32)
    completion = Completion(
        ids=np.arange(len(bits), dtype=np.int32), logprobs=logprobs, policy_versions=None, stop_reason=StopReason.STOP
    )
    body = completions.completion_body(
        completion, request_id="r", model="m", seed=0, num_prompt_tokens=1, policy_version=0, logprobs=style
    )
    read, _ = completions.read_completion(json.loads(json.dumps(body)))
    assert read.logprobs is not None
    assert read.logprobs.tobytes() == logprobs.tobytes()


@pytest.mark.parametrize("seed_for_all", [False, True])
@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=15),
    seed=st.integers(0, 2**63 - 1),
    session=st.text(),
    temperature=st.just(0.0) | st.floats(1e-6, 10),
    max_tokens=st.integers(1, 100),
    top_p=st.floats(1e-30, 1),
    top_k=st.integers(0, 50),
    min_p=st.floats(0, 1, exclude_max=True),
    stop=st.lists(st.integers(0, 9), unique=True),
)
def test_every_request_survives_the_wire(
    seed_for_all, prompt, seed, session, temperature, max_tokens, top_p, top_k, min_p, stop
):
    sent = request(
        *prompt,
        seed=seed,
        session=session,
        temperature=temperature,
        max_tokens=max_tokens,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        stop_token_ids=tuple(stop),
    )
    body = json.loads(client.encode(completions.request_body(sent, "m", seed_for_all=seed_for_all)))
    read, logprobs = read_request(body, seed=-1, room=16, end_ids=(9,))
    assert (read.prompt_ids.tolist(), read.params, read.seed, read.session, logprobs) == (
        prompt,
        sent.params,
        seed,
        session,
        "packed",
    )


async def test_an_engine_without_logprobs_gives_none_over_http_either():
    async with behind_http(scripted(logprob=None)) as client:
        completion = await client.generate(request(1))
        assert completion.logprobs is None
        assert completion.ids.tolist() == [5, 6, 7]


# ---- weights and versions


async def test_new_weights_reach_the_engine_and_the_version_comes_back(tmp_path):
    sampler = scripted(lambda r: [4])
    async with behind_http(sampler) as client:
        await client.update_weights(tmp_path, 7)
        assert sampler.updates == [(tmp_path, 7)]
        assert client.policy_version == 7
        assert (await client.generate(request(1))).policy_versions.tolist() == [7]


async def test_a_version_that_somebody_else_made_is_known_from_the_next_answer(tmp_path):
    sampler = scripted(lambda r: [4])
    async with behind_http(sampler) as client:
        await sampler.update_weights(tmp_path, 9)
        await client.generate(request(1))
        assert client.policy_version == 9


async def test_weights_that_do_not_fit_are_a_model_error_and_change_nothing(tmp_path):
    async with behind_http(scripted(failing_updates=frozenset({2}))) as client:
        with pytest.raises(ModelError, match="does not fit the model"):
            await client.update_weights(tmp_path, 2)
        assert client.policy_version == 0


# ---- errors


async def test_a_bad_id_is_refused_naming_its_position():
    async with behind_http(scripted()) as client:
        with pytest.raises(RecordError, match="id 10 at position 2 is outside the vocabulary of 10"):
            await client.generate(request(1, 2, 10))
        with pytest.raises(RecordError, match="leave no room"):
            await client.generate(request(*[1] * 16))
        with pytest.raises(RecordError, match="at position 1"):
            await client.prompt_logprobs(np.array([1, 99], np.int32))
        with pytest.raises(RecordError, match="position 0"):
            await client.generate(request(-1))


async def test_a_fault_of_the_engine_is_one_here_and_is_not_asked_for_again():
    sampler = scripted([[1], [2]], trouble={0: "fail"})
    async with behind_http(sampler) as client:
        with pytest.raises(SamplerFault, match="request 0 fails: the script says so"):
            await client.generate(request(1))
        assert len(sampler.requests) == 1
        assert (await client.generate(request(1))).ids.tolist() == [2]


@pytest.mark.parametrize(("trouble", "said"), [("wrong_length", "2 logprobs for 3 ids"), ("nan", "nan as the logprob")])
async def test_what_cannot_be_a_completion_is_a_fault_and_not_an_answer(trouble, said):
    async with behind_http(scripted(trouble={0: trouble})) as client:
        with pytest.raises(SamplerFault, match=said):
            await client.generate(request(1))


async def test_cancelling_the_call_cancels_it_on_the_server():
    sampler = scripted(trouble={0: "hang"})
    async with behind_http(sampler) as client:
        task = asyncio.create_task(client.generate(request(1)))
        await until(lambda: sampler.num_in_flight == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: sampler.num_in_flight == 0)
        assert sampler.num_cancelled == 1


async def test_a_call_that_was_cancelled_at_any_moment_holds_up_no_other():
    sampler = scripted(lambda _: [1])
    async with behind_http(sampler) as client:
        for passes in range(40):
            await client.hang_up()  # so that the call has to connect anew
            task = asyncio.create_task(client.generate(request(1)))
            for _ in range(passes):
                await asyncio.sleep(0)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            async with asyncio.timeout(HANGS):
                assert (await client.generate(request(1))).ids.tolist() == [1]


async def test_closing_ends_what_is_in_flight_as_cancelled_and_the_server_goes_on():
    sampler = scripted([[1], [2]], trouble={0: "hang"})
    async with serve_sampler(sampler) as server:
        client = await HttpSampler.connect(server.url)
        task = asyncio.create_task(client.generate(request(1)))
        await until(lambda: sampler.num_in_flight == 1)
        await client.close()
        completion = await task
        assert (completion.stop_reason, completion.ids.tolist()) == (StopReason.CANCELLED, [])
        with pytest.raises(SamplerFault, match="closed"):
            await client.generate(request(1))
        other = await HttpSampler.connect(server.url)
        assert (await other.generate(request(1))).ids.tolist() == [2]
        await other.close()


async def test_a_server_that_stops_ends_what_is_in_flight_as_a_fault(monkeypatch):
    monkeypatch.setattr(connections, "_GRACE", HANGS)
    sampler = scripted(trouble={0: "hang"})
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve_sampler(sampler))
        client = await HttpSampler.connect(server.url, max_retries=1)
        task = asyncio.create_task(client.generate(request(1)))
        await until(lambda: sampler.num_in_flight == 1)
        await stack.aclose()
        with pytest.raises(SamplerFault, match="2 tries"):
            await task
        assert sampler.num_cancelled == 1
        await client.close()


async def test_a_key_is_asked_for_and_never_shown():
    async with serve_sampler(scripted(), api_key="sk-canary") as server:
        with pytest.raises(UsageError, match="api key"):
            await HttpSampler.connect(server.url)
        unknown = HttpSampler(server.url, context_length=16, vocab_size=10, api_key="sk-other")
        with pytest.raises(SamplerFault, match="api key"):
            await unknown.generate(request(1))
        await unknown.close()
        client = await HttpSampler.connect(server.url, api_key="sk-canary")
        assert (await client.generate(request(1))).ids.tolist() == [5, 6, 7]
        assert "canary" not in repr(client)
        await client.close()


@pytest.mark.parametrize("url", ["localhost:80", "ftp://a", "http://me:secret@host", "http://a?x=1"])
def test_an_address_that_cannot_be_is_refused(url: str):
    with pytest.raises(UsageError, match=r"expected an address|contains a password or a query") as error:
        HttpSampler(url)
    assert "secret" not in str(error.value)


# ---- loops and processes


class Elsewhere:
    """A server in an event loop of its own, as in another process."""

    def __enter__(self) -> str:
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        self._ready.wait()
        return self._url

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        async with serve_sampler(scripted(lambda r: [4, 5])) as server:
            self._url = server.url
            self._ready.set()
            await self._end.wait()

    def __exit__(self, *details: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()
        self._loop.close()


def test_it_travels_by_pickle_and_works_in_one_event_loop_after_the_other():
    with Elsewhere() as url:
        client = HttpSampler(url)
        assert (client.vocab_size, client.context_length) == (10, 16)

        async def once() -> list[int]:
            travelled = pickle.loads(pickle.dumps(client))  # noqa: S301 - our own
            both = [await client.generate(request(1)), await travelled.generate(request(1))]
            await travelled.close()
            return [i for completion in both for i in completion.ids.tolist()]

        assert asyncio.run(once()) == [4, 5, 4, 5]
        assert asyncio.run(once()) == [4, 5, 4, 5]


# ---- other servers


class Answers(BaseHTTPRequestHandler):
    """Answers each POST with what `script(number, body)` says: a status and JSON, or None to hang up."""

    def setup(self) -> None:
        super().setup()
        self.server.connected.add(self)  # type: ignore[attr-defined]

    def finish(self) -> None:
        self.server.connected.discard(self)  # type: ignore[attr-defined]
        super().finish()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append(body)  # type: ignore[attr-defined]
        self._answer(self.server.script(len(self.server.seen) - 1, body))  # type: ignore[attr-defined]

    def do_GET(self) -> None:
        known = {"/v1/models": {"data": [{"id": "qwen", "max_model_len": 64}]}}
        self._answer((200, known[self.path]) if self.path in known else (404, {"detail": "Not Found"}))

    def _answer(self, answer: tuple[int, Any] | None) -> None:
        if answer is None:
            self.connection.close()
            return
        data = answer[1].encode() if isinstance(answer[1], str) else json.dumps(answer[1]).encode()
        self.send_response(answer[0])
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


@contextlib.contextmanager
def answering(script: Callable[[int, Any], tuple[int, Any] | None]):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.script, server.seen, server.connected = script, [], set()  # type: ignore[attr-defined]
    server.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def as_vllm(number: int, body: Any) -> tuple[int, Any]:
    """An answer in the fields that vLLM's source has."""
    content = [{"token": f"token_id:{i}", "logprob": -i / 8, "bytes": None, "top_logprobs": []} for i in (4, 5)]
    choice = {"index": 0, "token_ids": [4, 5], "finish_reason": "stop", "logprobs": {"content": content}}
    return 200, {"request_id": "r", "choices": [choice], "prompt_logprobs": None, "kv_transfer_params": None}


def of_vllm(*logprobs: Any) -> Any:
    """Logprobs of ids 4 and 5 as vLLM writes them."""
    return {"content": [{"token_id": 4 + at, "logprob": logprob} for at, logprob in enumerate(logprobs)]}


async def test_what_may_pass_is_tried_again_with_the_same_seed():
    faults = [None, (503, "busy"), (500, {"error": {"message": "oom", "type": "InternalServerError"}}), (200, "{")]
    with answering(lambda number, body: faults[number] if number < 4 else as_vllm(number, body)) as server:
        client = HttpSampler(server.url, vocab_size=10, context_length=64)
        completion = await client.generate(request(1, seed=11))
        assert completion.ids.tolist() == [4, 5]
        assert [body["verbatim"]["seed"] for body in server.seen] == [11] * 5
        await client.close()


@pytest.mark.parametrize(("settings", "seed"), [({}, None), ({"send_seeds": True}, 11)])
async def test_a_server_that_is_not_ours_gets_a_seed_only_where_it_is_asked_for(settings: Any, seed: int | None):
    """vLLM for CPUs ends at a seed where it computes a prompt in parts: a request must not be able to do that."""
    with answering(as_vllm) as server:
        client = HttpSampler(server.url, vocab_size=10, context_length=64, **settings)
        await client.generate(request(1, seed=11))
        assert server.seen[0]["sampling_params"].get("seed") == seed
        await client.close()


async def test_our_server_samples_with_the_seed_of_the_request():
    sampler = scripted([[5]] * 3)
    async with behind_http(sampler) as client:
        for seed in (0, 11, 2**63 - 1):
            await client.generate(request(1, seed=seed))
    assert [r.seed for r in sampler.requests] == [0, 11, 2**63 - 1]


@pytest.mark.parametrize("answer", [(400, "no"), (404, "no"), (200, {"choices": []})])
async def test_what_will_not_pass_is_a_fault_at_once(answer):
    with answering(lambda number, body: answer) as server:
        client = HttpSampler(server.url, vocab_size=10, context_length=64)
        with pytest.raises(SamplerFault):
            await client.generate(request(1))
        assert len(server.seen) == 1
        await client.close()


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        ({"logprobs": "AAAAvw=="}, "expected 2 logprobs, found 1"),
        ({"logprobs": "AAAAvwAAwH8="}, "packed logprobs: expected a finite number"),  # NaN
        ({"logprobs": "AAAAvwAAgH8="}, "packed logprobs: expected a finite number"),  # infinity
        ({"logprobs": "AAAAvwAAgL"}, "packed logprobs: expected an array as base64, found 'AAAAvwAAgL'"),
        ({"logprobs": "AAAAvwAA"}, "packed logprobs: expected an array as base64, found 'AAAAvwAA'"),  # a half
        ({"logprobs": "AAAA vwAAgL4="}, "packed logprobs: expected an array as base64"),
        ({"logprobs": "\u00e9"}, "packed logprobs: expected an array as base64"),
        ({"logprobs": [-0.5, -0.25]}, "packed logprobs: expected an array as base64, found list"),
        ({"token_ids": None}, "packed token_ids: expected an array as base64, found NoneType"),
        ({"token_ids": "BQAAAP////8="}, "packed token_ids: expected token ids, found -1"),
    ],
)
async def test_packed_arrays_that_cannot_be_a_completion_are_a_fault_that_names_it(packed: Any, message: str):
    def changed(number: int, body: Any) -> tuple[int, Any]:
        status, answer = as_vllm(number, body)
        return status, {**answer, "packed": {"token_ids": "BQAAAAcAAAA=", "logprobs": "AAAAvwAAgL4=", **packed}}

    with answering(changed) as server:
        client = HttpSampler(server.url, vocab_size=10, context_length=64)
        with pytest.raises(SamplerFault, match=message):
            await client.generate(request(1))
        await client.close()


async def test_no_list_of_packed_arrays_is_a_fault():
    with answering(lambda number, body: (200, {**as_vllm(number, body)[1], "packed": [1]})) as server:
        client = HttpSampler(server.url, vocab_size=10, context_length=64)
        with pytest.raises(SamplerFault, match="packed token_ids"):
            await client.generate(request(1))
        await client.close()


@pytest.mark.parametrize(
    ("where", "found", "message"),
    [
        ("choice", {"finish_reason": ["stop"]}, r"finish_reason \['stop'\]"),
        ("choice", {"finish_reason": None}, "finish_reason None"),
        ("choice", {"token_ids": [4, "5"]}, "position 1"),
        ("choice", {"logprobs": {"content": [{"token": "token_id:4"}, {"token": "token_id:5"}]}}, "a logprob: .* None"),
        ("choice", {"logprobs": {"content": [4, 5]}}, "expected id 4"),
        ("verbatim", {"policy_versions": [1]}, "2 policy versions"),
        ("verbatim", {"policy_versions": [1, "2"]}, "2 policy versions"),
        ("verbatim", {"policy_versions": [1, 2**40]}, "2 policy versions"),
        ("verbatim", {"policy_versions": 7}, "2 policy versions"),
        ("verbatim", {"queued_seconds": 10**400}, "queued_seconds: expected a finite number"),
        ("choice", {"logprobs": of_vllm(-0.5, -1e308)}, "a logprob: expected a finite number"),
        ("choice", {"logprobs": of_vllm(-0.5, -(10**400))}, "a logprob: expected a finite number"),
        ("choice", {"logprobs": of_vllm(-0.5, None)}, "a logprob: expected a finite number"),
        ("choice", {"logprobs": of_vllm(-0.5, "x")}, "a logprob: expected a finite number"),
        ("choice", {"logprobs": of_vllm(-0.5)}, "expected a logprob for each of 2 ids"),
        ("choice", {"logprobs": -0.5}, "expected a logprob for each of 2 ids"),
        ("verbatim", {"queued_seconds": "soon"}, "queued_seconds: expected a finite number, found 'soon'"),
    ],
)
async def test_an_answer_with_something_else_in_a_field_is_a_fault_that_names_it(where: str, found: Any, message: str):
    def changed(number: int, body: Any) -> tuple[int, Any]:
        status, answer = as_vllm(number, body)
        if where == "verbatim":
            return status, {**answer, "verbatim": found}
        answer["choices"][0].update(found)
        return status, answer

    with answering(changed) as server:
        client = HttpSampler(server.url, vocab_size=10, context_length=64)
        with pytest.raises(SamplerFault, match=message):
            await client.generate(request(1))
        await client.close()


async def test_logprobs_of_other_ids_than_were_sampled_are_a_fault():
    def shifted(number: int, body: Any) -> tuple[int, Any]:
        status, answer = as_vllm(number, body)
        answer["choices"][0]["token_ids"] = [5, 4]
        return status, answer

    with answering(shifted) as server:
        client = HttpSampler(server.url, vocab_size=10, context_length=64)
        with pytest.raises(SamplerFault, match="expected id 5 at position 0"):
            await client.generate(request(1))
        await client.close()


async def test_another_server_says_its_context_and_has_to_be_helped_with_the_rest():
    with answering(as_vllm) as server:
        with pytest.raises(UsageError, match="does not report its vocab_size"):
            await HttpSampler.connect(server.url)
        client = await HttpSampler.connect(server.url, vocab_size=10)
        assert (client.context_length, client.vocab_size) == (64, 10)
        completion = await client.generate(request(1, stop_token_ids=(5,)))
        assert completion.policy_versions is None
        assert completion.logprobs.tolist() == [-0.5, -0.625]
        (sent,) = server.seen
        assert sent["model"] == "qwen"
        assert sent["token_ids"] == [1]
        assert sent["sampling_params"]["stop_token_ids"] == [5]
        assert sent["sampling_params"]["ignore_eos"] is True
        await client.close()


def changing(**changes: Any) -> Callable[[int, Any], tuple[int, Any]]:
    """`as_vllm`, the choice changed."""

    def changed(number: int, body: Any) -> tuple[int, Any]:
        status, answer = as_vllm(number, body)
        answer["choices"][0].update(changes)
        return status, answer

    return changed


def spans(*ends: tuple[str, int]) -> list[dict[str, Any]]:
    starts = [0, *(end for _, end in ends)]
    return [{"version": name, "start": start, "end": end} for start, (name, end) in zip(starts, ends, strict=False)]


@pytest.mark.parametrize(
    ("said", "told", "versions"),
    [
        (spans(("7", 2)), None, [7, 7]),
        (spans(("7", 1), ("8", 2)), 3, [7, 8]),
        (spans(("default", 1), ("8", 2)), 3, [3, 8]),
        (spans(("default", 1), ("8", 2)), None, None),
        (spans(("step-8", 2)), 3, [3, 3]),
        (spans(("20261122015208", 2)), 3, [3, 3]),
        (None, 3, [3, 3]),
        (None, None, None),
    ],
)
async def test_vllms_weight_versions_are_the_tokens_where_they_are_numbers(said: Any, told: Any, versions: Any):
    with answering(changing(weight_versions=said)) as server:
        client = await HttpSampler.connect(server.url, vocab_size=10, context_length=64, policy_version=told)
        for _ in range(2):  # what was heard meanwhile changes nothing
            found = (await client.generate(request(1))).policy_versions
            assert (None if found is None else found.tolist()) == versions
        assert client.policy_version == (versions[-1] if versions else 0)
        await client.close()


@pytest.mark.parametrize("said", [spans(("7", 1)), spans(("7", 3)), spans(("7", 1)) * 2, [{"version": "7"}], ["7"]])
async def test_weight_versions_that_are_not_of_these_tokens_are_a_fault(said: Any):
    with answering(changing(weight_versions=said)) as server:
        client = HttpSampler(server.url, vocab_size=10, context_length=64)
        with pytest.raises(SamplerFault, match="weight_versions: expected spans of 2 tokens"):
            await client.generate(request(1))
        await client.close()


@pytest.mark.parametrize("last", [-0.625, -9999.0])
async def test_vllm_names_tokens_by_their_id_and_says_when_it_does_not_know_a_logprob(last: float):
    content = [
        {"token_id": 4, "logprob": -0.5, "rank": 1, "top_logprobs": []},
        {"token_id": 5, "logprob": last, "rank": None, "top_logprobs": []},
    ]
    with answering(changing(logprobs={"content": content})) as server:
        client = HttpSampler(server.url, vocab_size=10, context_length=64)
        found = (await client.generate(request(1))).logprobs
        assert (None if found is None else found.tolist()) == ([-0.5, -0.625] if last == -0.625 else None)
        await client.close()


async def test_a_server_without_the_endpoint_is_named_with_what_vllm_needs():
    with answering(lambda number, body: (404, {"detail": "Not Found"})) as server:
        client = HttpSampler(server.url, vocab_size=10, context_length=64)
        with pytest.raises(SamplerFault, match=r"/inference/v1/generate: status 404: .*--enable-scale-out"):
            await client.generate(request(1))
        await client.close()


async def test_a_version_that_was_told_is_that_of_another_servers_tokens():
    with answering(as_vllm) as server:
        client = HttpSampler(server.url, vocab_size=10, context_length=64, policy_version=3)
        assert (await client.generate(request(1))).policy_versions.tolist() == [3, 3]
        await client.close()


async def test_raw_logprobs_of_another_distribution_are_missing_not_wrong():
    with answering(as_vllm) as server:
        raw = HttpSampler(server.url, vocab_size=10, context_length=64)
        assert (await raw.generate(request(1, temperature=0.5))).logprobs is None
        assert (await raw.generate(request(1, top_p=0.5))).logprobs is None
        processed = HttpSampler(server.url, vocab_size=10, context_length=64, processed_logprobs=True)
        assert (await processed.generate(request(1, temperature=0.5))).logprobs.tolist() == [-0.5, -0.625]
        await raw.close()
        await processed.close()


@pytest.mark.parametrize(
    "answer", [(200, "[" * 100_000), (500, "[" * 100_000), (200, "null"), (200, "[1]"), (200, "1")]
)
async def test_an_answer_that_is_nothing_is_a_fault_whatever_was_asked(answer: tuple[int, str], tmp_path: Path):
    with answering(lambda number, body: answer) as server:
        client = HttpSampler(server.url, vocab_size=10, context_length=64, max_retries=1)
        with pytest.raises(SamplerFault):
            await client.generate(request(1))
        with pytest.raises(SamplerFault):
            await client.prompt_logprobs(np.array([1, 2, 3], np.int32))
        with pytest.raises(SamplerFault):
            await client.update_weights(tmp_path, 1)
        await client.close()


@pytest.mark.parametrize(
    "logprobs", [[None], [None, -1, -1, -1], [None, None, -1], [None, "-1", -1], [None, -1, -1e300], 1]
)
async def test_prompt_logprobs_that_are_not_of_these_ids_are_a_fault(logprobs: Any):
    with answering(lambda number, body: (200, {"logprobs": logprobs})) as server:
        client = HttpSampler(server.url, vocab_size=10, context_length=64)
        with pytest.raises(SamplerFault, match="logprob"):
            await client.prompt_logprobs(np.array([1, 2, 3], np.int32))
        await client.close()


@pytest.mark.slow
def test_calls_of_one_event_loop_after_the_other_leave_no_connection_open(monkeypatch):
    """Each call of a rollout brings an event loop of its own."""
    monkeypatch.setattr(Answers, "protocol_version", "HTTP/1.1")  # which keeps connections open
    with answering(changing(token_ids=[5, END], logprobs=None)) as server:
        sampler = HttpSampler(server.url, vocab_size=VOCAB_SIZE, context_length=200, processed_logprobs=True)
        rollout = MultiTurnRollout(sampler=sampler, template=ByteRenderer())
        asked = [{"messages": [{"role": "user", "content": str(k)}]} for k in range(8)]
        for _ in range(3):
            results = rollout(asked)
            assert [(result["stop_reason"], result.error) for result in results] == [("stop", None)] * 8
            wait_until(lambda: not server.connected)
        for _ in range(3):  # whoever brings loops and does not say when they end
            asyncio.run(sampler.generate(request(1)))
        wait_until(lambda: gc.collect() >= 0 and len(server.connected) == 1)
