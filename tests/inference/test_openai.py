"""The chat-completions client: what is sent, what is read, what is tried again and after how long."""

from __future__ import annotations

import asyncio
import email.utils
import json
import pickle
import random
import re
import sys
import time
from collections import Counter
from typing import Any

import pytest

from rollouts.chat_server import ChatServer, Raw, call, chat_server, completion
from verbatim.core.errors import SamplerFault, UsageError
from verbatim.core.types import StopReason
from verbatim.inference import SamplingParams
from verbatim.inference.chat.answer import BadAnswer, read_answer, read_arguments
from verbatim.inference.chat.request import chat_body, samples_as_modelled
from verbatim.inference.http.connection_settings import key_variable
from verbatim.inference.openai import OpenAI, pause
from waiting import HANGS

HELLO = [{"role": "user", "content": "5"}]


def body_of(**changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {"extra_body": {}, "params": SamplingParams(), "messages": HELLO, "tools": [], **changes}
    return chat_body("m", settings.pop("messages"), settings.pop("tools"), settings.pop("params"), **settings)


# ---- the request


def test_a_request_holds_what_every_server_knows_and_no_more():
    assert body_of() == {"model": "m", "messages": HELLO, "temperature": 1.0, "max_tokens": 512}


def test_settings_that_only_some_servers_know_are_sent_where_they_are_set():
    params = SamplingParams(temperature=0.5, max_tokens=9, top_p=0.9, top_k=4, min_p=0.1, stop_token_ids=(7,))
    assert body_of(params=params, seed=3) == {
        "model": "m",
        "messages": HELLO,
        "temperature": 0.5,
        "max_tokens": 9,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "stop_token_ids": [7],
        "seed": 3,
    }


def test_extra_body_has_the_last_word_and_none_leaves_a_key_out():
    body = body_of(extra_body={"max_tokens": None, "max_completion_tokens": 9, "temperature": 0.0})
    assert body == {"model": "m", "messages": HELLO, "temperature": 0.0, "max_completion_tokens": 9}


def test_asking_for_ids_asks_for_logprobs_and_leaves_nothing_to_the_servers_defaults():
    body = body_of(extra_body={"return_token_ids": True})
    assert {name: body[name] for name in ("top_p", "top_k", "min_p", "repetition_penalty", "logprobs")} == {
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }


@pytest.mark.parametrize(
    ("params", "extra", "same"),
    [
        ({}, {}, True),
        ({"temperature": 0.7}, {}, False),
        ({"temperature": 0.0}, {}, False),
        ({"top_p": 0.9}, {}, False),
        ({"top_k": 20}, {}, False),
        ({"min_p": 0.1}, {}, False),
        ({}, {"repetition_penalty": 1.1}, False),
        ({}, {"presence_penalty": 0.5}, False),
        ({}, {"logit_bias": {"5": 1}}, False),
        ({}, {"top_k": None}, False),  # whatever the server's default is
    ],
)
def test_only_untouched_sampling_is_the_models_own(params: dict[str, Any], extra: dict[str, Any], same: bool):
    body = body_of(params=SamplingParams(**params), extra_body={"return_token_ids": True, **extra})
    assert samples_as_modelled(body) is same


def test_without_asking_for_ids_nobody_knows_the_servers_defaults():
    assert samples_as_modelled(body_of()) is False


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"a": "é"}, '{"a": "é"}'),
        ('{"a": 1}', '{"a": 1}'),
        ("", "{}"),
        (" ", "{}"),
        (None, "{}"),
        ("{}", "{}"),
        ("{broken", '{"unreadable_arguments": "{broken"}'),
        ("[1, 2]", '{"unreadable_arguments": "[1, 2]"}'),
        ("5", '{"unreadable_arguments": "5"}'),
        ("null", '{"unreadable_arguments": "null"}'),
        ('"é"', '{"unreadable_arguments": "\\"é\\""}'),
        ('{"a": 1, "a": 2}', '{"unreadable_arguments": "{\\"a\\": 1, \\"a\\": 2}"}'),
        ('{"a": 1e400}', '{"unreadable_arguments": "{\\"a\\": 1e400}"}'),
        ([1], '{"unreadable_arguments": "[1]"}'),
    ],
)
def test_arguments_are_sent_as_the_text_of_an_object(given: Any, sent: str):
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}]
    message = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls}
    before = json.dumps(message)
    (wire,) = body_of(messages=[message])["messages"]
    assert wire["tool_calls"][0]["function"] == {"name": "f", "arguments": sent}
    assert "reasoning_content" not in wire
    assert json.dumps(message) == before


# ---- the answer


def answer_of(message: dict[str, Any], **changes: Any) -> str:
    body = {"model": "m", "messages": HELLO, "return_token_ids": True, "logprobs": True}
    return json.dumps(completion(body, message, **changes))


def test_an_answer_is_read_with_its_ids():
    answer = read_answer(answer_of({"content": "hi"}))
    assert (answer.content, answer.reasoning, answer.tool_calls) == ("hi", None, ())
    assert answer.stop_reason is StopReason.STOP
    assert answer.prompt_ids == [258, 53, 256, 259]
    assert answer.completion_ids == [*b"hi", 256]
    assert answer.logprobs == [-0.125, -0.25, -0.375]
    assert answer.usage == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}


def test_our_own_servers_say_which_weights_sampled_each_token():
    body = {
        "choices": [{"message": {"content": "4"}, "finish_reason": "stop", "token_ids": [52, 7]}],
        "prompt_token_ids": [50],
        "verbatim": {"policy_versions": [3, 4]},
    }
    assert read_answer(json.dumps(body)).policy_versions == [3, 4]
    for versions in ([3], [3, -1], [3, 4.5], "34", 3):
        with pytest.raises(BadAnswer, match="policy version"):
            read_answer(json.dumps({**body, "verbatim": {"policy_versions": versions}}))


def test_a_logprob_that_vllm_does_not_know_is_none_of_the_sampled_distribution():
    """It writes -9999 for it; trained on, that would be a ratio of e to the 9999th."""
    for last, expected in ((-0.25, [-0.125, -0.25]), (-9999.0, None)):
        content = [{"token": "4", "logprob": -0.125}, {"token": "2", "logprob": last}]
        choice = {
            "message": {"content": "42"},
            "finish_reason": "stop",
            "token_ids": [52, 50],
            "logprobs": {"content": content},
        }
        assert read_answer(json.dumps({"choices": [choice], "prompt_token_ids": [50]})).logprobs == expected


def test_a_logprob_that_no_float_holds_is_a_bad_answer():
    content = [{"token": "4", "logprob": -(10**400)}]
    choice = {"message": {"content": "4"}, "finish_reason": "stop", "logprobs": {"content": content}}
    with pytest.raises(BadAnswer, match="expected a logprob for each token"):
        read_answer(json.dumps({"choices": [choice]}))


def test_the_least_that_a_server_may_say_is_read():
    answer = read_answer('{"choices": [{"message": {}, "finish_reason": "stop"}]}')
    assert (answer.content, answer.reasoning, answer.tool_calls, answer.usage) == ("", None, (), {})
    assert (answer.prompt_ids, answer.completion_ids, answer.logprobs) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected JSON"),
        ("<html>", "expected JSON, found '<html>'"),
        ('{"choices": [', "expected JSON"),
        ("[" * 100_000, "expected JSON"),
        ("[]", "with one choice, found '\\[\\]'"),
        ('{"error": {"message": "overloaded"}}', "overloaded"),
        ('{"choices": []}', "found 0 choices"),
        ('{"choices": [{}, {}]}', "found 2 choices"),
        ('{"choices": [{"finish_reason": "stop"}]}', "expected a message in the choice, found None"),
        ('{"choices": [{"message": {}, "finish_reason": "content_filter"}]}', "finish_reason 'content_filter'"),
        ('{"choices": [{"message": {}, "finish_reason": null}]}', "finish_reason None"),
        ('{"choices": [{"message": {}, "finish_reason": ["stop"]}]}', "finish_reason"),
        ('{"choices": [{"message": {"content": 5}, "finish_reason": "stop"}]}', "expected text"),
        ('{"choices": [{"message": {"tool_calls": 5}, "finish_reason": "stop"}]}', "expected a list of tool calls"),
        ('{"choices": [{"message": {}, "finish_reason": "stop", "logprobs": {"content": [{}]}}]}', "logprob for each"),
    ],
)
def test_what_is_no_completion_is_refused(text: str, said: str):
    with pytest.raises(BadAnswer, match=said):
        read_answer(text)


@pytest.mark.parametrize(
    ("raw", "arguments", "status"),
    [
        ('{"a": 1}', {"a": 1}, "ok"),
        ("", {}, "ok"),
        ("{", None, "invalid_json"),
        ('{"a": NaN}', None, "invalid_json"),
        ('{"a": "\\ud800"}', None, "invalid_json"),
        ("[" * 100_000, None, "invalid_json"),
        ('{"a": 1, "a": 2}', None, "invalid_json"),
        ('{"a": {"b": 1, "b": 1}}', None, "invalid_json"),
        ('{"a": 1e400}', None, "invalid_json"),
        (f'{{"a": {"[" * 80}{"]" * 80}}}', None, "invalid_json"),
        ('{"a": 9007199254740993}', {"a": 9007199254740993}, "ok"),
        ("[1]", None, "malformed_structure"),
        ("null", None, "malformed_structure"),
    ],
)
def test_arguments_are_read_strictly(raw: str, arguments: Any, status: str):
    assert read_arguments(raw) == (arguments, status)


@pytest.mark.parametrize(
    ("item", "name", "status"),
    [
        (call("f", {"a": 1})["tool_calls"][0], "f", "ok"),
        ({"function": {"name": "f", "arguments": {"a": 1}}}, "f", "ok"),
        ({"function": {"name": "f", "arguments": None}}, "f", "ok"),
        ({"function": {"name": "", "arguments": "{}"}}, None, "missing_name"),
        ({"function": {"name": 5}}, None, "missing_name"),
        ({"function": {"name": "f", "arguments": '{"a": "\ud800"}'}}, "f", "invalid_json"),
        ({"function": {"name": "f\ud800", "arguments": "{}"}}, None, "malformed_structure"),
        ({"function": None}, None, "missing_name"),
        (5, None, "missing_name"),
    ],
)
def test_every_attempted_call_is_kept(item: Any, name: str | None, status: str):
    (read,) = read_answer(
        answer_of({"content": "", "finish_reason": "stop"}).replace(
            '"content": ""', f'"content": "", "tool_calls": [{json.dumps(item)}]', 1
        )
    ).tool_calls
    assert (read.name, read.status) == (name, status)
    assert (read.arguments is None) == (status != "ok")


def test_half_a_surrogate_pair_becomes_a_character_that_can_be_sent():
    answer = read_answer('{"choices": [{"message": {"content": "a\\ud800b"}, "finish_reason": "stop"}]}')
    assert answer.content == "a?b"


# ---- trying again


async def complete(server: ChatServer, failures: Counter[str] | None = None, **settings: Any) -> Any:
    api = OpenAI(model="m", base_url=server.url, **settings)
    async with api.connect() as connection:
        return await connection.complete(body_of(), Counter() if failures is None else failures)


@pytest.mark.realtime
@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 529])
async def test_what_may_pass_is_tried_again(status: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verbatim.inference.http.client.FIRST_PAUSE", 0.001)
    failures: Counter[str] = Counter()
    with chat_server(fault=lambda body, tries: Raw(status) if tries < 2 else None) as server:
        answer = await complete(server, failures)
    assert answer.content == "5"
    assert failures == {f"status_{status}": 2}


@pytest.mark.realtime
@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
async def test_what_will_not_pass_is_not(status: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-canary-of-openai")
    hint = (
        (
            " (no key was sent: OPENAI_API_KEY is used for api.openai.com only; for this server set api_key_env "
            "(--api-key-env) to the variable that holds its key)"
        )
        if status == 401
        else ""
    )
    failures: Counter[str] = Counter()
    with chat_server(fault=lambda body, tries: Raw(status, "no")) as server:
        with pytest.raises(SamplerFault, match=f"status {status}: no{re.escape(hint)}$"):
            await complete(server, failures)
        assert len(server.requests) == 1
        assert "authorization" not in server.headers[0]
    assert failures == {f"status_{status}": 1}


@pytest.mark.parametrize(
    ("url", "named", "variable"),
    [
        ("https://api.openai.com/v1", None, "OPENAI_API_KEY"),
        ("https://api.openai.com:443/v1", None, "OPENAI_API_KEY"),
        ("https://api.openai.com/v1", "MINE", "MINE"),
        ("http://localhost:8000/v1", None, None),
        ("http://localhost:8000/v1", "OPENAI_API_KEY", "OPENAI_API_KEY"),
        ("https://api.openai.com.eu/v1", None, None),
    ],
)
def test_openais_key_goes_to_its_own_server_or_where_it_is_sent_by_name(
    url: str, named: str | None, variable: str | None
):
    assert key_variable(url, named) == variable


async def test_a_named_variable_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_KEY", raising=False)
    with pytest.raises(UsageError, match="variable NO_KEY is empty; put the key of http://h/v1 into it"):
        async with OpenAI(model="m", base_url="http://h/v1", api_key_env="NO_KEY").connect():
            pass


@pytest.mark.realtime
async def test_an_address_without_v1_is_asked_about():
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno")
        await writer.drain()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with OpenAI(model="m", base_url=url, max_retries=0).connect() as connection:
            with pytest.raises(SamplerFault, match=r'status 404: no \(most base_urls end with "/v1"\)$'):
                await connection.complete(body_of(), Counter())


@pytest.mark.realtime
@pytest.mark.parametrize("retries", [0, 3])
async def test_tries_are_bounded(retries: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verbatim.inference.http.client.FIRST_PAUSE", 0.001)
    failures: Counter[str] = Counter()
    with chat_server(fault=lambda body, tries: Raw(drop=True)) as server:
        with pytest.raises(SamplerFault, match="Connection error"):
            await complete(server, failures, max_retries=retries)
        assert len(server.requests) == retries + 1
    assert failures == {"connection": retries + 1}


@pytest.mark.realtime
async def test_the_server_says_when_to_come_back(monkeypatch: pytest.MonkeyPatch):
    """The pause is made of what it says: 7 s here, which the test does not wait."""
    asked: list[float] = []

    def no_pause(attempt: int, retry_after: float, jitter: random.Random) -> float:
        asked.append(retry_after)
        return 0.0

    monkeypatch.setattr("verbatim.inference.http.client.pause", no_pause)
    wait = Raw(429, headers={"Retry-After": "7"})
    with chat_server(fault=lambda body, tries: None if tries else wait) as server:
        await complete(server)
    assert asked == [7.0]


@pytest.mark.realtime
async def test_a_date_is_understood_and_a_wait_of_hours_is_a_failure():
    tomorrow = email.utils.formatdate(time.time() + 86_400, usegmt=True)
    with chat_server(fault=lambda body, tries: Raw(429, headers={"Retry-After": tomorrow})) as server:
        with pytest.raises(SamplerFault, match=r"status 429 \(Retry-After is 8\d+\.?\d* s; .* at most 120 s"):
            await complete(server)
        assert len(server.requests) == 1


def test_pauses_double_up_to_a_limit_and_never_agree():
    jitter = random.Random(0)
    for attempt, middle in enumerate([0.5, 1, 2, 4, 8, 16, 30, 30]):
        pauses = [pause(attempt, 0.0, jitter) for _ in range(200)]
        assert middle / 2 <= min(pauses) < max(pauses) <= middle * 1.5
        assert len(set(pauses)) == 200
    assert all(7 < pause(0, 7.0, jitter) <= 7.75 for _ in range(200))


@pytest.mark.realtime
async def test_cancelling_a_request_hangs_up():
    """The server never answers, and sees the end of the connection."""
    asked, hung_up = asyncio.Event(), asyncio.Event()

    async def read_to_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()
        hung_up.set()
        writer.close()

    async with await asyncio.start_server(read_to_the_end, "127.0.0.1", 0) as server, asyncio.timeout(HANGS):
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with OpenAI(model="m", base_url=url, request_timeout=2 * HANGS).connect() as connection:
            task = asyncio.create_task(connection.complete(body_of(), Counter()))
            await asked.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await hung_up.wait()


# ---- the setting


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"base_url": "localhost:8000"}, "base_url 'localhost:8000'; expected an address"),
        ({"base_url": ""}, "expected an address"),
        ({"base_url": "https://me:sk-canary@host/v1"}, "base_url of host contains a password"),
        ({"base_url": "me:sk-canary@host/v1"}, "'host/v1'"),
        ({"base_url": "https://host/v1?key=sk-canary"}, "base_url of host contains a password or a query"),
        ({"model": ""}, "model: found '', expected its name on the server"),
        ({"model": None}, "model: found None"),
        ({"max_retries": -1}, "max_retries = -1"),
        ({"request_timeout": 0}, "request_timeout = 0"),
    ],
)
def test_a_mistake_is_explained_without_secrets(settings: dict[str, Any], said: str):
    with pytest.raises(UsageError, match=said) as caught:
        OpenAI(**{"model": "m", **settings})
    assert "sk-canary" not in str(caught.value)


def test_it_travels_to_other_processes():
    api = OpenAI(model="m", base_url="http://h/v1", api_key="sk-canary-1")
    assert pickle.loads(pickle.dumps(api)) == api  # noqa: S301
    assert "sk-canary" not in repr(api)


async def test_a_missing_client_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(
        UsageError, match=r"needs the package aiohttp, which is not installed; type: pip install 'verbatim-rl\[api\]'"
    ):
        async with OpenAI(model="m").connect():
            pass
