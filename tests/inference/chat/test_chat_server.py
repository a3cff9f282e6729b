"""Real clients, unmodified, against the server: whole answers, streams, tools, refusals, and clients that hang up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from chat_records import events_of

from byte_renderer import END, VOCAB_SIZE, ByteRenderer, call, say, text
from verbatim.core.sampling import SamplingParams
from verbatim.inference.chat import live
from verbatim.inference.chat.anthropic_stream import AnthropicStream
from verbatim.inference.chat.protocol import Options
from verbatim.inference.http import connections
from verbatim.inference.http.limits import ServerLimits
from verbatim.inference.http.server import SamplerServer, serve_sampler
from verbatim.inference.sampler import SampleRequest, generate_watched
from verbatim.inference.scripted import ScriptedSampler, default_logprob
from waiting import HANGS, until

pytestmark = pytest.mark.realtime
HELLO: Any = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADD: Any = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
STRICT: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "strict": True,
        "parameters": {**PARAMETERS, "required": ["a"], "additionalProperties": False},
    },
}
ADD_FLAT: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": True}
ADD_ANTHROPIC: Any = {"name": "add", "input_schema": PARAMETERS}
SPOKEN = "Köln is 20 °C 🙂 warm.\nBye"


class GrowingByteRenderer(ByteRenderer):
    """Says what of a growing text is settled: all before the first call, but for a part of a character."""

    def stable_text(self, completion_ids, prompt_ids=None):
        ids = completion_ids.tolist()
        end = next((k for k, i in enumerate(ids) if i > 255), len(ids))
        return "", bytes(ids[:end]).decode(errors="replace").rstrip("\ufffd")


class Whole:
    """A sampler that does not show its tokens."""

    def __init__(self, sampler: ScriptedSampler) -> None:
        self.sampler = sampler

    def __getattr__(self, name: str) -> Any:
        if name == "generate_watched":
            raise AttributeError(name)
        return getattr(self.sampler, name)


class WordByWord(Whole):
    """Draws a word once the client has the text of the words before it, in `texts`; each request has one of them."""

    def __init__(self, sampler: ScriptedSampler, texts: list[str]) -> None:
        super().__init__(sampler)
        self._texts, self._numbers = texts, itertools.count()

    async def generate_watched(self, request, watch):
        number, completion = next(self._numbers), await self.sampler.generate(request)
        shown: list[int] = []
        for token in completion.ids[:-1].tolist():
            watch([token])
            shown.append(token)
            if token == ord(" "):
                await until(lambda: self._texts[number] == bytes(shown).decode())
        return completion


def scripted(*completions: list[int], **fields: Any) -> ScriptedSampler:
    script = list(completions) if completions else (lambda request: say(SPOKEN))
    return ScriptedSampler(script=script, vocab_size=VOCAB_SIZE, context_length=400, **fields)


@contextlib.asynccontextmanager
async def serving(sampler: Any, **settings: Any) -> AsyncIterator[SamplerServer]:
    async with serve_sampler(sampler, **{"renderer": GrowingByteRenderer(), **settings}) as server:
        yield server


def chat_client(server: SamplerServer) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def plain_client(server: SamplerServer) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=HANGS, verify=False)


def messages_client(server: SamplerServer, key: str = "none") -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=server.url, api_key=key, max_retries=0)


# ---- streams


@pytest.mark.slow
@pytest.mark.parametrize("shows", [True, False])
async def test_openai_streams_what_is_sampled_as_it_is_sampled(shows):
    sampler = scripted()
    texts, tokens, chunks = ["", ""], [[], []], []
    outer = WordByWord(sampler, texts) if shows else Whole(sampler)
    async with serving(outer) as server, chat_client(server) as client:
        stream = await client.chat.completions.create(
            model="policy",
            messages=HELLO,
            stream=True,
            n=2,
            logprobs=True,
            seed=3,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            chunks.append(chunk)
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                tokens[choice.index] += choice.logprobs.content if choice.logprobs else []
        whole = await client.chat.completions.create(model="policy", messages=HELLO, n=2, logprobs=True, seed=3)
    assert texts == [SPOKEN, SPOKEN] == [choice.message.content for choice in whole.choices]
    assert tokens == [choice.logprobs.content for choice in whole.choices]
    assert [token.logprob for token in tokens[0]] == [float(np.float32(default_logprob(i))) for i in say(SPOKEN)]
    assert chunks[-1].usage == whole.usage
    with_text = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert len(with_text) > 10 if shows else len(with_text) == 2
    assert [request.seed for request in sampler.requests[:2]] == [request.seed for request in sampler.requests[2:]]
    assert sampler.requests[0].seed == 3 != sampler.requests[1].seed


@pytest.mark.slow
async def test_the_helpers_of_the_sdks_put_streams_together():
    said = [*text("so "), *call("add", a=1)]
    async with serving(scripted(said, said, said)) as server:
        async with chat_client(server) as client:
            async with client.chat.completions.stream(model="policy", messages=HELLO, tools=[STRICT]) as stream:
                chat = (await stream.get_final_completion()).choices[0]
            async with client.responses.stream(model="policy", input="hi", tools=[ADD_FLAT]) as stream:
                response = await stream.get_final_response()
        async with (
            messages_client(server) as other,
            other.messages.stream(model="policy", max_tokens=99, messages=HELLO, tools=[ADD_ANTHROPIC]) as stream,
        ):
            message = await stream.get_final_message()
    assert (chat.message.content, chat.finish_reason) == ("so ", "tool_calls")
    assert json.loads(chat.message.tool_calls[0].function.arguments) == {"a": 1}
    assert response.output_text == "so "
    assert (response.output[1].name, json.loads(response.output[1].arguments)) == ("add", {"a": 1})
    assert (response.status, response.usage.output_tokens) == ("completed", len(said))
    assert [block.type for block in message.content] == ["text", "tool_use"]
    assert (message.content[1].input, message.stop_reason) == ({"a": 1}, "tool_use")
    assert (message.usage.input_tokens, message.usage.output_tokens) == (5, len(said))


@pytest.mark.slow
def test_synchronous_clients_are_served_too():
    ready, end, found = threading.Event(), threading.Event(), {}

    async def serve() -> None:
        async with serving(scripted()) as server:
            found["url"] = server.url
            ready.set()
            await asyncio.to_thread(end.wait, HANGS)

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(HANGS)
    try:
        with openai.OpenAI(base_url=f"{found['url']}/v1", api_key="none", max_retries=0) as client:
            chunks = client.chat.completions.create(model="policy", messages=HELLO, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SPOKEN
            assert client.responses.create(model="policy", input="hi").output_text == SPOKEN
            assert [model.id for model in client.models.list()] == ["policy"]
        with anthropic.Anthropic(base_url=found["url"], api_key="none", max_retries=0) as other:
            with other.messages.stream(model="policy", max_tokens=99, messages=HELLO) as stream:
                assert "".join(stream.text_stream) == SPOKEN
            assert [model.id for model in other.models.list()] == ["policy"]
            assert other.models.retrieve("policy").display_name == "policy"
            beta = other.beta.messages.create(model="policy", max_tokens=99, messages=HELLO)
            assert beta.content[0].text == SPOKEN
            assert other.messages.count_tokens(model="policy", messages=HELLO).input_tokens == 5
    finally:
        end.set()
        thread.join(HANGS)


async def test_tools_go_round_in_every_protocol():
    said = call("add", a=1)
    sampler = scripted(*[said, say("2")] * 3)
    async with serving(sampler) as server:
        async with chat_client(server) as client:
            first = (await client.chat.completions.create(model="policy", messages=HELLO, tools=[ADD])).choices[0]
            tool: Any = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "2"}
            await client.chat.completions.create(model="policy", messages=[*HELLO, first.message, tool], tools=[ADD])
            response = await client.responses.create(model="policy", input=HELLO, tools=[ADD_FLAT])
            output = {"type": "function_call_output", "call_id": response.output[0].call_id, "output": "2"}
            await client.responses.create(model="policy", input=[*HELLO, *response.output, output], tools=[ADD_FLAT])
        async with messages_client(server) as other:
            message = await other.messages.create(model="policy", max_tokens=99, messages=HELLO, tools=[ADD_ANTHROPIC])
            result: Any = {"type": "tool_result", "tool_use_id": message.content[0].id, "content": "2"}
            await other.messages.create(
                model="policy",
                max_tokens=99,
                tools=[ADD_ANTHROPIC],
                messages=[
                    *HELLO,
                    {"role": "assistant", "content": message.content},
                    {"role": "user", "content": [result]},
                ],
            )
    first_prompt = sampler.requests[0].prompt_ids.tolist()
    for request in sampler.requests[1::2]:  # each history is the tokens that were sampled, and the answer behind them
        assert request.prompt_ids.tolist() == [*first_prompt, *said, 259, *text("2"), END, 258]


@pytest.mark.parametrize("shows", [True, False])
async def test_a_stop_string_ends_sampling_where_the_sampler_can_be_told(shows):
    sampler = scripted()
    async with serving(sampler if shows else Whole(sampler)) as server, chat_client(server) as client:
        chat = (
            await client.chat.completions.create(
                model="policy", messages=HELLO, stop=["C 🙂", " w"], extra_body={"return_token_ids": True}
            )
        ).choices[0]
        stream = await client.chat.completions.create(model="policy", messages=HELLO, stop="🙂", stream=True)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        async with messages_client(server) as other:
            message = await other.messages.create(
                model="policy", max_tokens=99, messages=HELLO, stop_sequences=["warm"]
            )
    assert (chat.message.content, chat.finish_reason) == ("Köln is 20 °", "stop")
    assert chat.token_ids == text("Köln is 20 °C 🙂")
    assert streamed == "Köln is 20 °C "
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (
        "Köln is 20 °C 🙂 ",
        "stop_sequence",
        "warm",
    )
    drawn = [len(text(end)) for end in ("Köln is 20 °C 🙂", "Köln is 20 °C 🙂", "Köln is 20 °C 🙂 warm")]
    assert sampler.num_drawn == (sum(drawn) if shows else 3 * len(say(SPOKEN)))


# ---- refusals


async def test_what_cannot_be_honoured_reaches_each_client_as_its_own_error_and_is_counted():
    async with serving(scripted()) as server, plain_client(server) as plain:
        async with chat_client(server) as client:
            with pytest.raises(openai.BadRequestError, match="logit_bias") as chat:
                await client.chat.completions.create(model="policy", messages=HELLO, logit_bias={"1": 2})
            assert chat.value.param == "logit_bias"
            with pytest.raises(openai.BadRequestError, match="cannot be forced"):
                await client.chat.completions.create(
                    model="policy", messages=HELLO, tools=[ADD], tool_choice="required"
                )
            with pytest.raises(openai.BadRequestError, match="not stored here"):
                await client.responses.create(model="policy", input="hi", previous_response_id="resp_1")
            with pytest.raises(openai.NotFoundError, match="no model 'other'"):
                await client.chat.completions.create(model="other", messages=HELLO)
            with pytest.raises(openai.NotFoundError, match="there is nothing at"):
                await client.embeddings.create(model="policy", input="x")
        async with messages_client(server) as other:
            with pytest.raises(anthropic.BadRequestError, match="chat template") as refused:
                await other.messages.create(model="policy", max_tokens=9, messages=HELLO, thinking={"type": "disabled"})
            assert refused.value.body["error"]["type"] == "invalid_request_error"
            with pytest.raises(anthropic.NotFoundError, match="there is nothing at"):
                await other.messages.batches.list()
            with pytest.raises(anthropic.NotFoundError, match="no model 'x'"):
                await other.messages.create(model="x", max_tokens=9, messages=HELLO)
        for k in range(3):
            await plain.post("/v1/chat/completions", json={"messages": HELLO, f"mine_{k}": 1})
        counts = (await plain.get("/verbatim/v1/refused")).json()
    assert counts == {
        "openai_chat/logit_bias": 1,
        "openai_chat/tool_choice": 1,
        "openai_chat/model": 1,
        "openai_chat/other": 3,
        "openai_responses/previous_response_id": 1,
        "anthropic_messages/thinking": 1,
        "anthropic_messages/model": 1,
    }


async def test_a_server_may_be_told_to_let_fields_pass():
    options = Options(unenforced=frozenset({"tool_choice"}))
    async with serving(scripted(), options=options) as server, plain_client(server) as plain:
        body = {"messages": HELLO, "tools": [ADD], "tool_choice": "required"}
        answer = (await plain.post("/v1/chat/completions", json=body)).json()
        counts = (await plain.get("/verbatim/v1/refused")).json()
    assert answer["choices"][0]["message"]["content"] == SPOKEN
    assert counts == {"openai_chat/unenforced/tool_choice": 1}


@pytest.mark.parametrize(
    ("method", "path", "status", "is_anthropics"),
    [
        ("GET", "/v1/chat/completions", 405, False),
        ("POST", "/v1/embeddings", 404, False),
        ("GET", "/nowhere", 404, False),
        ("GET", "/v1/messages", 405, True),
        ("POST", "/v1/messages/batches", 404, True),
        ("GET", "/v1/responses/resp_1", 404, False),
        ("GET", "/v1/models/other", 404, False),
    ],
)
async def test_unknown_routes_are_answered_in_the_protocols_form(method, path, status, is_anthropics):
    async with serving(scripted()) as server, plain_client(server) as plain:
        answer = await plain.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]
    assert (answer.json().get("type") == "error") == is_anthropics


async def test_a_key_is_taken_the_way_each_sdk_sends_it():
    async with serving(scripted(), api_key="sk-canary") as server:
        async with messages_client(server, "sk-canary") as client:
            message = await client.messages.create(model="policy", max_tokens=99, messages=HELLO)
            assert message.content[0].text == SPOKEN
        async with messages_client(server, "wrong") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(model="policy", max_tokens=99, messages=HELLO)


# ---- faults


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_fault_in_a_stream_is_an_error_of_the_protocol(path):
    body = {"messages": HELLO, "max_tokens": 9} if path != "/v1/responses" else {"input": "hi"}
    async with serving(scripted(trouble={0: "fail"})) as server, plain_client(server) as plain:
        answer = await plain.post(path, json={**body, "stream": True})
    name, data = events_of(answer.content)[-1]
    assert answer.status_code == 200
    assert "fails: the script says so" in json.dumps(data)
    assert name == {"/v1/chat/completions": None, "/v1/messages": "error", "/v1/responses": "response.failed"}[path]


async def test_a_client_that_leaves_a_stream_frees_its_places():
    sampler = scripted(trouble={0: "hang", 1: "hang"})
    async with serving(sampler) as server, plain_client(server) as plain:
        body = {"messages": HELLO, "stream": True, "n": 2}
        async with plain.stream("POST", "/v1/chat/completions", json=body) as answer:
            first = await anext(answer.aiter_bytes())
        await until(lambda: not sampler.num_in_flight)
    assert first.startswith(b"data: {")  # the stream begins before anything is drawn, not with a sign of life
    assert sampler.num_cancelled == 2


@pytest.mark.slow
async def test_a_stream_that_waits_shows_that_it_lives(monkeypatch):
    """Nothing is drawn before the stream has shown it twice."""
    monkeypatch.setattr(live, "QUIET_SECONDS", 0.05)
    pings, ping = itertools.count(), AnthropicStream.ping
    enough = asyncio.Event()

    def counted(self):
        if next(pings) == 1:
            enough.set()
        return ping

    monkeypatch.setattr(AnthropicStream, "ping", property(counted))
    sampler = scripted(say("yo"), say("yo"), pause=lambda _: enough.wait())
    async with serving(Whole(sampler)) as server, messages_client(server) as client:
        async with plain_client(server) as plain:
            body = {"messages": HELLO, "max_tokens": 9, "stream": True}
            raw = (await plain.post("/v1/messages", json=body)).content
        pings = itertools.count()
        enough.clear()
        async with client.messages.stream(model="policy", max_tokens=9, messages=HELLO) as stream:
            assert (await stream.get_final_text()) == "yo"
    assert raw.count(b"event: ping") >= 2


async def test_a_stream_in_flight_when_the_server_stops_ends_with_an_error(monkeypatch):
    monkeypatch.setattr(connections, "_GRACE", HANGS)
    sampler = scripted(trouble={0: "hang"})
    async with httpx.AsyncClient(timeout=HANGS, verify=False) as plain, contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(serving(sampler))
        body = {"messages": HELLO, "stream": True}
        asking = asyncio.ensure_future(plain.post(f"{server.url}/v1/chat/completions", json=body))
        await until(lambda: sampler.num_in_flight)
        await stack.aclose()
        data = events_of((await asking).content)[-1][1]
    assert "stopping" in data["error"]["message"]


@pytest.mark.slow
async def test_processes_render_read_and_stream_as_a_thread_does():
    limits = ServerLimits(render_seconds=HANGS)
    made = serving(scripted(), renderer=ByteRenderer(), limits=limits, chat_processes=1)
    async with made as server, chat_client(server) as client:
        stream = await client.chat.completions.create(model="policy", messages=HELLO, stream=True, stop="🙂")
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Köln is 20 °C "
        with pytest.raises(openai.BadRequestError, match="n = 0") as refused:
            await client.chat.completions.create(model="policy", messages=HELLO, n=0)
        assert refused.value.param == "n"


async def test_a_sampler_that_is_watched_stops_at_the_token_it_is_told():
    sampler = scripted()
    seen: list[int] = []

    def watch(ids: Any) -> bool:
        seen.extend(ids)
        return len(seen) == 3

    request = SampleRequest(prompt_ids=np.array([257], np.int32), params=SamplingParams(stop_token_ids=(END,)), seed=0)
    completion = await generate_watched(sampler, request, watch)
    assert completion.ids.tolist() == seen == say(SPOKEN)[:3]
    assert (str(completion.stop_reason), sampler.num_drawn) == ("stop", 3)
    whole = await generate_watched(sampler, request, lambda ids: False)
    assert whole.ids.tolist() == say(SPOKEN)
