"""The server's endpoints as clients that are not ours use them: what is answered, and what is refused by name."""

from __future__ import annotations

import asyncio
import contextlib
import doctest
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import renderers.client

from byte_renderer import END, VOCAB_SIZE, ByteRenderer, call, say, text
from verbatim.core.errors import UsageError
from verbatim.inference.http import connections, protocol
from verbatim.inference.http.limits import ServerLimits
from verbatim.inference.http.server import serve_sampler
from verbatim.inference.scripted import ScriptedSampler, default_logprob
from waiting import HANGS, until

pytestmark = pytest.mark.realtime
ADD = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"


def scripted(script: Any = None, **fields: Any) -> ScriptedSampler:
    return ScriptedSampler(
        script=script or (lambda r: say("yo")), vocab_size=VOCAB_SIZE, **{"context_length": 400, **fields}
    )


@contextlib.asynccontextmanager
async def asking(sampler: ScriptedSampler, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    settings = {"renderer": ByteRenderer(), **settings}
    async with serve_sampler(sampler, **settings) as server:  # noqa: SIM117
        async with httpx.AsyncClient(base_url=server.url, timeout=HANGS, verify=False) as client:
            yield client


def token_body(*ids: int, **params: Any) -> dict[str, Any]:
    return {"token_ids": list(ids), "sampling_params": params}


async def refusal(client: httpx.AsyncClient, path: str, body: Any, status: int = 400) -> str:
    """The message of an answer that refuses, in OpenAI's format."""
    answer = await client.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == status
    return f"{error['type']}: {error['message']}"


# ---- ids in, ids out


def test_the_examples_of_the_format_are_true():
    assert doctest.testmod(protocol).failed == 0


async def test_an_answer_has_vllms_fields_and_the_versions_beside_them():
    async with asking(scripted([[5, 6]], policy_version=3)) as client:
        answer = (await client.post(protocol.GENERATE, json=token_body(1, 2, logprobs=1, seed=4, max_tokens=2))).json()
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "token_ids": [5, 6],
        "finish_reason": "length",
        "logprobs": {
            "content": [
                {
                    "token": "token_id:5",
                    "token_id": 5,
                    "logprob": float(np.float32(-1 / 6)),
                    "bytes": None,
                    "top_logprobs": [],
                },
                {
                    "token": "token_id:6",
                    "token_id": 6,
                    "logprob": float(np.float32(-1 / 7)),
                    "bytes": None,
                    "top_logprobs": [],
                },
            ]
        },
        "weight_versions": [{"version": "3", "start": 0, "end": 2}],
    }
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert (answer["verbatim"]["policy_versions"], answer["verbatim"]["seed"]) == ([3, 3], 4)


async def test_logprobs_are_told_where_they_are_asked_for():
    async with asking(scripted()) as client:
        answer = (await client.post(protocol.GENERATE, json=token_body(1))).json()
    assert answer["choices"][0]["logprobs"] is None


async def test_what_is_not_said_is_vllms_default():
    sampler = scripted()
    async with asking(sampler) as client:
        for body in (token_body(1, 2), token_body(1, 2, top_k=-1, stop=None, n=1, skip_special_tokens=True)):
            assert (await client.post(protocol.GENERATE, json=body)).status_code == 200
    for seen in sampler.requests:
        params = seen.params
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
        assert params.max_tokens == 398  # what the prompt leaves of the context
        assert params.stop_token_ids == (END,)  # the model's own, as there is a renderer
    assert sampler.requests[0].seed != sampler.requests[1].seed


async def test_ignore_eos_leaves_only_the_stop_ids_that_are_given():
    sampler = scripted()
    async with asking(sampler) as client:
        await client.post(protocol.GENERATE, json=token_body(1, stop_token_ids=[7], ignore_eos=True))
        await client.post(protocol.GENERATE, json=token_body(1, stop_token_ids=[7]))
    assert [seen.params.stop_token_ids for seen in sampler.requests] == [(7,), (7, END)]


async def test_a_session_is_handed_on_from_the_body_or_the_header():
    sampler = scripted()
    async with asking(sampler) as client:
        await client.post(protocol.GENERATE, json={**token_body(1), "verbatim": {"session": "a"}})
        await client.post(protocol.GENERATE, json=token_body(1), headers={"X-Session-ID": "b"})
    assert [seen.session for seen in sampler.requests] == ["a", "b"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty = 0.5 cannot be honoured here; only 0"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"n": 2}, "n = 2"),
        ({"stop": ["x"]}, "stop = "),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"logprobs": 5}, "logprobs = 5"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"no_such": 1}, "no_such"),
        ({"temperature": -1}, "temperature = -1"),
        ({"temperature": "hot"}, "temperature = 'hot'; expected a number"),
        ({"temperature": True}, "expected a number"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"max_tokens": 1.5}, "max_tokens = 1.5; expected an integer"),
        ({"top_p": 0}, "top_p"),
        ({"seed": 2**80}, "seed"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ],
)
async def test_a_parameter_that_cannot_be_honoured_is_refused_by_name(params, said):
    sampler = scripted()
    async with asking(sampler) as client:
        assert said in await refusal(client, protocol.GENERATE, token_body(1, **params))
    assert sampler.requests == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (token_body(1, 263), "record_error: prompt_ids: id 263 at position 1 is outside the vocabulary"),
        (token_body(1, -1), "found -1 at position 1"),
        (token_body(1, 2.0), "found 2.0 at position 1"),
        (token_body(1, True), "found True at position 1"),
        (token_body(), "at least one token id"),
        ({"token_ids": "abc"}, "expected a list of token ids"),
        ({}, "expected a list of token ids"),
        ({"token_ids": [1], "sampling_params": 3}, "sampling_params: expected an object"),
        ({**token_body(1), "stream": True}, "stream = True"),
        ({**token_body(1), "features": {}}, "features"),
        ([1], "expected a JSON object"),
    ],
)
async def test_a_request_that_is_none_is_refused_saying_where(body, said):
    async with asking(scripted()) as client:
        assert said in await refusal(client, protocol.GENERATE, body)


async def test_bodies_that_are_no_json_too_large_or_of_another_type_are_refused():
    async with asking(scripted(), limits=ServerLimits(max_body=1000), weights_folder=Path("/")) as client:
        json_type = {"Content-Type": "application/json"}
        for content in (b"{", b"\xff", b'{"token_ids": [NaN]}', b"[" * 900):
            answer = await client.post(protocol.GENERATE, content=content, headers=json_type)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert "1000 bytes" in await refusal(client, protocol.GENERATE, token_body(*range(900)), 413)
        plain = await client.post(protocol.WEIGHTS, content=b'{"path": "/", "version": 1}')
        assert plain.status_code == 415


async def test_another_model_is_not_found():
    async with asking(scripted(), model="mine") as client:
        assert (await client.post(protocol.GENERATE, json={**token_body(1), "model": "mine"})).status_code == 200
        assert "'other'" in await refusal(client, protocol.GENERATE, {**token_body(1), "model": "other"}, 404)
        (card,) = (await client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("mine", 400)
        assert (await client.get("/health")).status_code == 200


async def test_with_a_key_everything_but_the_health_check_asks_for_it():
    async with asking(scripted(), api_key="sk-canary") as client:
        assert (await client.get("/health")).status_code == 200
        for path in (protocol.GENERATE, CHAT, protocol.WEIGHTS, protocol.PROMPT_LOGPROBS):
            assert "canary" not in await refusal(client, path, {}, 401)
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer sk-canary"})).status_code == 200


@pytest.mark.slow
async def test_weights_need_a_key_wherever_the_request_comes_from():
    sampler = scripted()
    async with asking(sampler) as client:
        assert "with an api key" in await refusal(client, protocol.WEIGHTS, {"path": "/", "version": 1}, 403)
    async with asking(sampler, api_key="k") as client:
        key = {"Authorization": "Bearer k"}
        answer = await client.post(protocol.WEIGHTS, json={"path": "/w", "version": 1}, headers=key)
        assert answer.json()["policy_version"] == 1


async def test_an_address_that_is_taken_is_a_mistake_of_whoever_gave_it():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port}.*give another port"):
            async with serve_sampler(scripted(), port=port):
                pass


async def test_an_address_may_be_one_of_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with serve_sampler(scripted(), host="::1") as server, httpx.AsyncClient(timeout=HANGS) as client:
        assert server.url.startswith("http://[::1]:")
        assert (await client.get(f"{server.url}/health")).status_code == 200


# ---- the client of the `renderers` package, which verifiers trains through


class PackageRenderer:
    """As much of that package's renderer as its client uses."""

    def get_stop_token_ids(self) -> list[int]:
        return [END]

    def parse_response(self, token_ids, prompt_ids=None, tools=None):
        return renderers.base.ParsedResponse(
            content=ByteRenderer().decode(token_ids), reasoning_content=None, tool_calls=[]
        )


async def test_the_client_of_the_renderers_package_gets_exact_ids_and_logprobs():
    sampler = scripted()
    async with serve_sampler(sampler) as server:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        async with client:
            result = await renderers.client.generate(
                client=client,
                renderer=PackageRenderer(),
                messages=[],
                model="policy",
                prompt_ids=[1, 2],
                sampling_params={"temperature": 0.7, "max_tokens": 9, "routed_experts_prompt_start": 1},
            )
            with pytest.raises(renderers.client.OverlongPromptError):  # it read the context's length from /v1/models
                await renderers.client.generate(
                    client=client, renderer=PackageRenderer(), messages=[], model="policy", prompt_ids=[1] * 401
                )
    assert result["completion_ids"] == say("yo")
    assert result["completion_logprobs"] == [float(np.float32(default_logprob(i))) for i in say("yo")]
    assert (result["content"], result["finish_reason"], result["prompt_ids"]) == ("yo", "stop", [1, 2])
    (seen,) = sampler.requests
    assert (seen.params.temperature, seen.params.max_tokens, seen.params.stop_token_ids) == (0.7, 9, (END,))


# ---- chat completions


async def test_messages_become_ids_and_ids_a_message():
    sampler = scripted()
    async with asking(sampler) as client:
        answer = (await client.post(CHAT, json={"model": "policy", "messages": HELLO, "return_token_ids": True})).json()
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "yo"}
    assert choice["finish_reason"] == "stop"
    assert answer["prompt_token_ids"] == [257, *text("hi"), END, 258] == sampler.requests[0].prompt_ids.tolist()
    assert choice["token_ids"] == say("yo")
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    assert sampler.requests[0].params.max_tokens == 395


async def test_a_call_comes_as_a_call_and_goes_back_as_what_the_template_renders():
    said = call("add", a=1, b=2)
    sampler = scripted([said, say("3")])
    async with (
        serve_sampler(sampler, renderer=ByteRenderer()) as server,
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        first = await client.chat.completions.create(model="policy", messages=HELLO, tools=[ADD], seed=7)
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls"
        (made,) = choice.message.tool_calls
        assert (made.function.name, json.loads(made.function.arguments)) == ("add", {"a": 1, "b": 2})
        tool = {"role": "tool", "tool_call_id": made.id, "content": "3"}
        messages = [*HELLO, choice.message.model_dump(exclude_none=True), tool]
        second = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD], logprobs=True)
    assert second.choices[0].message.content == "3"
    assert sampler.requests[0].seed == 7
    extended = [*sampler.requests[0].prompt_ids.tolist(), *said, 259, *text("3"), END, 258]
    assert sampler.requests[1].prompt_ids.tolist() == extended
    content = second.choices[0].logprobs.content
    assert [(entry.token, entry.bytes) for entry in content] == [("3", [51]), ("", [])]
    assert [entry.logprob for entry in content] == [float(np.float32(default_logprob(i))) for i in say("3")]


async def test_a_call_that_cannot_be_read_is_still_seen_to_be_one():
    broken = [261, *text('{"name": "add", '), 262, END]
    async with asking(scripted([broken])) as client:
        (choice,) = (await client.post(CHAT, json={"messages": HELLO, "tools": [ADD]})).json()["choices"]
    (made,) = choice["message"]["tool_calls"]
    assert made["function"] == {"name": "", "arguments": '{"name": "add", '}
    assert choice["finish_reason"] == "tool_calls"


async def test_a_completion_that_was_cut_off_says_length():
    async with asking(scripted()) as client:
        for name in ("max_tokens", "max_completion_tokens"):
            (choice,) = (await client.post(CHAT, json={"messages": HELLO, name: 1})).json()["choices"]
            assert (choice["finish_reason"], choice["message"]["content"]) == ("length", "y")


async def test_text_in_parts_is_text():
    sampler = scripted()
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    async with asking(sampler) as client:
        await client.post(CHAT, json={"messages": [{"role": "user", "content": parts}]})
    assert sampler.requests[0].prompt_ids.tolist() == [257, *text("hi"), END, 258]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"messages": []}, "messages: expected a list"),
        ({"messages": [{"content": "x"}]}, "messages[0]: expected an object with a role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only text is accepted"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "expected calls of functions"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}]}, "tool_calls: expected a list"),
        ({"tools": [{"name": "add"}]}, "tools: expected functions"),
    ],
)
async def test_what_chat_cannot_do_here_is_refused_by_name(change, said):
    async with asking(scripted()) as client:
        assert said in await refusal(client, CHAT, {"messages": HELLO, **change})


async def test_without_a_renderer_chat_points_to_the_endpoint_that_takes_ids():
    async with asking(scripted(), renderer=None) as client:
        assert protocol.GENERATE in await refusal(client, CHAT, {"messages": HELLO}, 404)


@pytest.mark.parametrize("path", [protocol.GENERATE, CHAT])
async def test_a_client_that_hangs_up_frees_its_place(path):
    sampler = scripted(trouble={0: "hang"})
    body = token_body(1) if path == protocol.GENERATE else {"messages": HELLO}
    async with asking(sampler) as client:
        asking_it = asyncio.create_task(client.post(path, json=body))
        await until(lambda: sampler.num_in_flight)
        asking_it.cancel()
        await until(lambda: not sampler.num_in_flight)
        assert sampler.num_cancelled == 1


@pytest.mark.parametrize("path", [protocol.GENERATE, CHAT])
async def test_a_fault_of_the_engine_is_a_500_that_says_so(path):
    async with asking(scripted(trouble={0: "fail"})) as client:
        body = token_body(1) if path == protocol.GENERATE else {"messages": HELLO}
        assert await refusal(client, path, body, 500) == "sampler_fault: request 0 fails: the script says so"


@pytest.mark.parametrize("port", [-1, 65536])
async def test_a_port_that_is_none_is_refused(port: int):
    with pytest.raises(UsageError, match=f"port {port}; expected 0 .* to 65535"):
        async with serve_sampler(scripted(), port=port):
            pass


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (protocol.GENERATE, '{"token_ids": [1], "sampling_params": {"stop_token_ids": [2147483648]}}'),
        (protocol.GENERATE, '{"token_ids": [1], "sampling_params": {"top_k": 1' + 30 * "0" + "}}"),
        (protocol.GENERATE, '{"token_ids": [1], "sampling_params": {"temperature": 1' + 400 * "0" + "}}"),
        (protocol.GENERATE, '{"token_ids": [1], "sampling_params": {"temperature": 1e999}}'),
        (protocol.GENERATE, '{"token_ids": [1], "\\ud800": 1}'),
        (protocol.PROMPT_LOGPROBS, '{"token_ids": [1], "temperature": 1' + 400 * "0" + "}"),
        (protocol.PROMPT_LOGPROBS, '{"token_ids": [1], "temperature": 1e-300}'),
        (protocol.WEIGHTS, '{"path": "/tmp", "version": 2147483648}'),
    ],
)
async def test_what_no_number_or_text_can_be_is_the_clients_mistake(path: str, body: str):
    async with asking(scripted([[5]]), weights_folder=Path("/")) as client:
        answer = await client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
        assert (await client.post(protocol.GENERATE, json=token_body(1, max_tokens=1))).status_code == 200


@pytest.mark.slow
async def test_a_client_that_reads_nothing_is_let_go_of_when_the_server_ends(monkeypatch):
    monkeypatch.setattr(connections, "_GRACE", 0.1)

    async def at_once(seconds: float) -> None:
        """Draws all tokens in one turn of the event loop."""

    sampler = ScriptedSampler(script=[[5] * 100_000], vocab_size=10, context_length=500_000, pause=at_once)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve_sampler(sampler))
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        reader, writer = await asyncio.open_connection(sock=narrow, limit=1024)
        body = json.dumps(token_body(1, max_tokens=100_000, logprobs=1)).encode()
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
            b"\r\n%b" % (protocol.GENERATE.encode(), len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        promised = int(next(line for line in head.split(b"\r\n") if line.startswith(b"content-length")).split()[1])
        await stack.aclose()
        received = 0
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(2**20):
                received += len(chunk)
        assert received < promised
        writer.close()
