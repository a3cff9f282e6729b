"""What the gateway and `verbatim serve` refuse in one way: half a character, a key twice, compressed bodies, begun
answers."""

from __future__ import annotations

import contextlib
import doctest
import gzip
import itertools
import json
import zlib

import aiohttp
import pytest
from scripted_gateway import scripted

from byte_renderer import ByteRenderer
from lost_messages import renderer_of, sampler_for
from verbatim.core.errors import UsageError
from verbatim.inference.chat.protocol import Options
from verbatim.inference.http import lone_surrogates
from verbatim.inference.http.lone_surrogates import refuse_lone_surrogates
from verbatim.inference.http.refused import Refused
from verbatim.inference.http.request_body import read_json
from verbatim.inference.http.server import serve_sampler
from verbatim.rollouts.gateway import Gateway

pytestmark = pytest.mark.realtime
SERVERS = ["gateway", "serve"]
HELLO = {"role": "user", "content": "hi"}
CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"
ROUTES = [CHAT, RESPONSES, MESSAGES, "messages/count_tokens"]
ERROR_TYPE = "invalid_request_error"
OTHER_ENCODINGS = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")


@contextlib.asynccontextmanager
async def poster(server, renderer=None, options=None):
    """Sends bytes to a route: (status, content type, JSON of the answer). By default messages are bytes."""
    sampler, renderer = (scripted(), ByteRenderer()) if renderer is None else (sampler_for(renderer), renderer)
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        if server == "gateway":
            episode = (await stack.enter_async_context(Gateway(sampler, renderer, options=options))).episode()
            stack.push_async_callback(episode.finish)
            url, key = episode.base_url, episode.api_key
        else:
            serving = await stack.enter_async_context(
                serve_sampler(sampler, renderer=renderer, options=options or Options())
            )
            url, key = f"{serving.url}/v1", "none"

        async def post(route, data, **headers):
            sent = {"authorization": f"Bearer {key}", "content-type": "application/json", **headers}
            async with http.post(f"{url}/{route}", data=data, headers=sent) as answer:
                return answer.status, answer.content_type, json.loads(await answer.read())

        yield post


def body_of(route, text="hi", **fields):
    messages = [{"role": "user", "content": text}]
    own = {"input": messages} if route == RESPONSES else {"messages": messages, "max_tokens": 9}
    return {"model": "policy", **own, **fields}


def error_of(route, answer):
    """The error in an answer of the route's own form."""
    if route.startswith(MESSAGES):
        assert answer["type"] == "error"
    return answer["error"]


@pytest.mark.parametrize("server", SERVERS)
async def test_half_a_character_is_told_with_its_field_and_place(server):
    async with poster(server) as post:
        for route in ROUTES:
            holder = "input" if route == RESPONSES else "messages"
            status, kind, answer = await post(route, json.dumps(body_of(route, "so \ud83d")).encode())
            error = error_of(route, answer)
            assert (status, kind) == (400, "application/json")
            assert error["message"] == (
                f"{holder}[0].content contains the lone surrogate U+D83D at position 3, half of a character; send both "
                r'halves (as in "\ud83d\ude42"), or leave it out'
            )
            if not route.startswith(MESSAGES):  # Anthropic's errors have no place for a field
                assert error["param"] == f"{holder}.content"


@pytest.mark.parametrize("server", SERVERS)
async def test_a_whole_character_is_read_however_it_is_written(server):
    async with poster(server) as post:
        for route in ROUTES:
            for as_escapes in (True, False):
                data = json.dumps(body_of(route, "🙂"), ensure_ascii=as_escapes)
                status, _, answer = await post(route, data.encode())
                assert status == 200, answer


KEYS_TWICE = {
    '{{"model": "policy", "max_tokens": 9, "{0}": [{1}], "{0}": [{1}]}}': "the body has the key '{0}' twice",
    '{{"model": "policy", "max_tokens": 9, "{0}": [{1}], "max_tokens": 8}}': "the body has the key 'max_tokens' twice",
    '{{"model": "policy", "max_tokens": 9, "max\\u005ftokens" : 8, "{0}": [{1}]}}': (
        "the body has the key 'max_tokens' twice"
    ),
    '{{"model": "policy", "max_tokens": 9, "{0}": [{{"role": "user", "content": "a", "content": "b"}}]}}': (
        "{0}[0] has the key 'content' twice"
    ),
    '{{"model": "policy", "max_tokens": 9, "{0}": [{1}], "tools": [{{"name": {{"\\\\": 1, "\\\\": {{}}}}}}]}}': (
        "tools[0].name has the key '\\\\' twice"
    ),
}
"""Bodies with a key twice by what is said of them; {0} is the field of the messages, {1} a message."""


@pytest.mark.parametrize("server", SERVERS)
async def test_a_key_that_stands_twice_is_refused_by_its_name_and_place(server):
    async with poster(server) as post:
        for route in ROUTES:
            holder = "input" if route == RESPONSES else "messages"
            for body, said in KEYS_TWICE.items():
                status, kind, answer = await post(route, body.format(holder, json.dumps(HELLO)).encode())
                error = error_of(route, answer)
                assert (status, kind, error["type"]) == (400, "application/json", ERROR_TYPE)
                sentence = f"{said.format(holder)}, and one of the values would be lost; send each key once"
                assert error["message"] == sentence


@pytest.mark.parametrize("server", SERVERS)
async def test_texts_that_look_like_keys_are_none(server):
    """Escaped quotes and colons, a text that begins with a colon, a space before a colon, an empty key."""
    texts = [":smile:", '{"content": 1, "content": 2}', '"a":"a":', '\\":', "\\", " :", '":', '{"a" : "\\\\":1}']
    async with poster(server) as post:
        for route, separators in itertools.product(
            ROUTES, [(",", ":"), (", ", ": "), (" , ", " : "), (",\n", "\t:\r\n")]
        ):
            holder = "input" if route == RESPONSES else "messages"
            body = {**body_of(route), holder: [{"role": "user", "content": text} for text in texts]}
            status, _, answer = await post(route, json.dumps(body, separators=separators).encode())
            assert status == 200, answer


@pytest.mark.parametrize("server", SERVERS)
async def test_a_name_that_the_format_does_not_write_is_refused_by_its_field(server):
    named = {**HELLO, "name": "ann"}
    async with poster(server, renderer_of("qwen2_5")) as post:
        body = {"model": "policy", "messages": [{"role": "system", "content": "be brief"}, named]}
        status, _, answer = await post(CHAT, json.dumps(body).encode())
        assert (status, answer["error"]["type"]) == (400, ERROR_TYPE)
        assert "messages[1].name: the model's chat template does not write who sent" in answer["error"]["message"]
        body["messages"][1] = {**HELLO, "name": ""}
        status, _, answer = await post(CHAT, json.dumps(body).encode())
        assert status == 200, answer
    async with poster(server, renderer_of("qwen2_5"), Options(unenforced=frozenset({"name"}))) as post:
        status, _, answer = await post(CHAT, json.dumps({"model": "policy", "messages": [named]}).encode())
        assert status == 200, answer


@pytest.mark.parametrize("server", SERVERS)
async def test_a_tool_that_cannot_be_called_is_refused_by_its_name(server):
    schema = {"type": "object", "properties": {"at": {"type": "string"}}}
    async with poster(server, renderer_of("qwen3_5_think")) as post:
        for route in ROUTES:
            function = {"name": "get weather", "parameters": schema}
            tool = {
                CHAT: {"type": "function", "function": function},
                RESPONSES: {"type": "function", **function},
            }.get(route, {"name": "get weather", "input_schema": schema})
            status, _, answer = await post(route, json.dumps(body_of(route, tools=[tool])).encode())
            assert (status, error_of(route, answer)["type"]) == (400, ERROR_TYPE)
            assert "a call of the tool 'get weather' could not be read back" in error_of(route, answer)["message"]


@pytest.mark.parametrize("server", SERVERS)
async def test_a_compressed_body_is_refused_in_the_protocols_form(server):
    data = {route: json.dumps(body_of(route)).encode() for route in ROUTES}
    ways = {
        "gzip": gzip.compress,
        "deflate": zlib.compress,
        "zstd": lambda body: b"\x28\xb5\x2f\xfd" + body,
        "br": lambda body: b"\x8b" + body,
        "gzip, zstd": gzip.compress,
    }
    async with poster(server) as post:
        for route in ROUTES:
            for encoding, made in ways.items():
                status, kind, answer = await post(route, made(data[route]), **{"content-encoding": encoding})
                assert (status, kind) == (415, "application/json")
                error = error_of(route, answer)
                assert error["type"] == ERROR_TYPE
                assert error["message"] == (
                    f"content-encoding = '{encoding}': compressed bodies are not accepted; send "
                    "the body uncompressed, without content-encoding"
                )
            status, _, answer = await post(route, data[route], **{"content-encoding": "identity"})
            assert status == 200, answer


@pytest.mark.parametrize("server", SERVERS)
async def test_an_answer_that_was_begun_and_a_late_result_are_refused(server):
    begun = [HELLO, {"role": "assistant", "content": "It is"}]
    async with poster(server) as post:
        for route in ROUTES:
            body = body_of(route)
            body["input" if route == RESPONSES else "messages"] = begun
            status, _, answer = await post(route, json.dumps(body).encode())
            assert status == 400
            assert "continuing it is not supported" in error_of(route, answer)["message"]
        late = [
            HELLO,
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {}}]},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "see"},
                    {"type": "tool_result", "tool_use_id": "c", "content": "3"},
                ],
            },
        ]
        status, _, answer = await post(MESSAGES, json.dumps({"max_tokens": 9, "messages": late}).encode())
        assert status == 400
        said = "messages[2].content: the result of a call comes after"
        assert error_of(MESSAGES, answer)["message"].startswith(said)


async def test_half_a_character_in_a_reward_is_told_too():
    async with poster("gateway") as post:
        status, _, answer = await post("reward", rb'{"reward": {"a\udc00": 1.0}}')
        assert (status, answer["error"]["message"].partition(";")[0]) == (
            400,
            "a key of reward contains the lone surrogate U+DC00 at position 1, half of a character",
        )
        status, _, answer = await post("reward", rb'{"reward": "\ud83d" NaN}')
        assert (status, answer["error"]["message"][:20]) == (400, "the body is not JSON")


@pytest.mark.parametrize("server", SERVERS)
async def test_a_body_is_utf8_with_or_without_a_mark_and_nothing_else(server):
    """Both servers, all protocols: the same statuses and the same words."""
    other = "the body is in UTF-16 or UTF-32; send JSON in UTF-8"
    async with poster(server) as post:
        for route in ROUTES:
            text = json.dumps(body_of(route, "grüße"), ensure_ascii=False)
            told = {}
            for encoding in ("utf-8", "utf-8-sig", *OTHER_ENCODINGS, "latin-1"):
                status, kind, answer = await post(route, text.encode(encoding))
                assert kind == "application/json"
                told[encoding] = (status, "" if status == 200 else error_of(route, answer)["message"])
            place = text.encode("latin-1").index(b"\xfc")
            assert told == {
                "utf-8": (200, ""),
                "utf-8-sig": (200, ""),
                **dict.fromkeys(OTHER_ENCODINGS, (400, other)),
                "latin-1": (400, f"the body is not UTF-8: byte 0xfc at position {place}; send JSON in UTF-8"),
            }
            status, _, answer = await post(route, b"\xef\xbb\xbf" + text.encode("utf-8-sig"))  # two marks
            assert (status, error_of(route, answer)["message"][:20]) == (400, "the body is not JSON")


def test_the_first_lone_surrogate_of_a_value_is_found():
    assert doctest.testmod(lone_surrogates).failed == 0
    refuse_lone_surrogates({"a": ["🙂", {"b": "ö"}], "c": 1, "d": None, "e": 2**70})
    with pytest.raises(Refused) as found:
        refuse_lone_surrogates({"tools": [{}, {"function": {"description": "\udfff"}}], "e": "\ud800"})
    assert found.value.field == "tools.function.description"
    said = "tools[1].function.description contains the lone surrogate U+DFFF at position 0"
    assert found.value.message.startswith(said)
    with pytest.raises(Refused, match=r"^the body contains the lone surrogate U\+D800 at position 1"):
        refuse_lone_surrogates("x\ud800")


def deep(levels):
    """An object whose values are nested so deep, as JSON text."""
    return '{"a": ' + "[" * (levels - 1) + "1" + "]" * (levels - 1) + "}"


def with_arguments(route, arguments):
    """A conversation in which a call was made with these arguments, given as JSON text."""
    tool = {"name": "add", "parameters": {"type": "object"}}
    if route == CHAT:
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
        messages = [
            HELLO,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "3"},
        ]
        return {"model": "policy", "messages": messages, "tools": [{"type": "function", "function": tool}]}
    if route == RESPONSES:
        items = [
            HELLO,
            {"type": "function_call", "call_id": "c", "name": "add", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
        ]
        return {"model": "policy", "input": items, "tools": [{"type": "function", **tool}]}
    call = {"type": "tool_use", "id": "c", "name": "add", "input": json.loads(arguments)}
    messages = [
        HELLO,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "3"}]},
    ]
    return {
        "model": "policy",
        "max_tokens": 9,
        "messages": messages,
        "tools": [{"name": "add", "input_schema": {"type": "object"}}],
    }


@pytest.mark.slow
@pytest.mark.parametrize("template", ["qwen3_5_think", "llama3_1"])
async def test_arguments_that_are_nested_too_deep_are_refused_by_their_field(template):
    """On every route of both servers, streamed or not, however deep: also deeper than Python reads JSON."""
    for server in SERVERS:
        async with poster(server, renderer_of(template)) as post:
            for route, levels, stream in itertools.product(ROUTES, (64, 800, 20_000), (False, True)):
                if route.startswith(MESSAGES) and levels > 800:
                    continue  # its arguments are no text, and the body is none
                body = {**with_arguments(route, deep(levels)), "stream": stream}
                status, _, answer = await post(route, json.dumps(body).encode())
                error = error_of(route, answer)
                assert (status, error["type"]) == (400, ERROR_TYPE), (server, route, levels)
                in_block = "messages is nested deeper than 64 levels, at messages[1].content[0].input.a"
                in_call = "nested deeper than 64 levels", "message 1 ", "tool_calls[0].function.arguments"
                for told in (in_block,) if route.startswith(MESSAGES) else in_call:
                    assert told in error["message"]
            for route in ROUTES:
                status, _, answer = await post(route, json.dumps(with_arguments(route, deep(55))).encode())
                assert status == 200, answer


@pytest.mark.parametrize("number", [2**53 + 1, 2**64 - 1, 2**64 + 1, -(2**63) - 1])
def test_an_integer_is_the_one_that_was_sent(number):
    assert read_json(b'{"input": {"at": [%d]}}' % number) == {"input": {"at": [number]}}


def test_an_integer_of_more_digits_than_python_reads_is_refused():
    with pytest.raises(UsageError, match="the body is not JSON"):
        read_json(b'{"input": %s}' % (b"9" * 5000))
