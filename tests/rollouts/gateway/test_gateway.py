"""The gateway from outside: what clients ask is answered, and recorded as exact ids."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from scripted_gateway import Client, Held, Whole, gateway_over, last_text, scripted

from byte_renderer import END, ByteRenderer, call, say
from verbatim import Example, build_samples
from verbatim.core.errors import EnvironmentFault
from verbatim.inference import SamplingParams
from verbatim.rollouts import EpisodeLimits
from verbatim.rollouts.gateway import Gateway
from verbatim.rollouts.gateway.session import INFO
from waiting import HANGS, until

pytestmark = pytest.mark.realtime

SYSTEM = {"role": "system", "content": "You help."}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def user(text):
    return {"role": "user", "content": text}


def reasons(trajectory):
    return [(b["turn"], b["reason"]) for b in trajectory.info[INFO]["branches"]]


def check_against(trajectory, sampler):
    """Every completion of the sampler is one turn, in the context that it was sampled in."""
    turns = sorted((t.prompt_ids.tobytes(), t.completion_ids.tobytes()) for t in trajectory.turns)
    sent = sorted(r.prompt_ids.tobytes() for r in sampler.requests)
    assert [prompt for prompt, _ in turns] == sent
    for turn in trajectory.turns:
        np.testing.assert_array_equal(turn.logprobs, np.float32(-1.0 / (1 + turn.completion_ids)))


async def test_a_conversation_is_one_sample_whatever_the_client_makes_of_its_answers(http):
    sampler = scripted()
    async with gateway_over(sampler) as gateway:
        episode = gateway.episode(Example(id="sum"))
        client = Client(http, episode)
        first = await client.say([SYSTEM, user("sum")], tools=TOOLS)
        arguments = json.loads(first["tool_calls"][0]["function"]["arguments"])
        assert arguments == {"a": 1, "b": 2}
        again = {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "tool_calls": [
                {"id": "renamed", "type": "function", "function": {"name": "add", "arguments": '{"b":2,  "a":1}'}}
            ],
        }
        history = [SYSTEM, user("sum"), again, {"role": "tool", "tool_call_id": "renamed", "content": "3"}]
        second = await client.say(history, tools=TOOLS)
        await client.say(
            [*history, {**second, "content": [{"type": "text", "text": second["content"]}]}, user("so?")],
            tools=[dict(reversed(TOOLS[0].items()))],
        )
        trajectory = await episode.finish(reward=1.0)
    check_against(trajectory, sampler)
    (sample,) = build_samples(trajectory)
    assert (
        sample.loss_mask.sum()
        == sum(len(t.completion_ids) for t in trajectory.turns)
        == len(call("add", a=1, b=2)) + len(say("58:3")) + len(say("68:so?"))
    )
    assert (trajectory.reward, trajectory.stop_reason, trajectory.error) == (1.0, "stop", None)
    assert trajectory.num_breaks == 0
    assert reasons(trajectory) == []
    assert trajectory.example_id == "sum"
    assert [m["role"] for m in trajectory.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]


async def test_each_branch_has_its_reason(http):
    sampler = scripted()
    async with gateway_over(sampler) as gateway:
        episode = gateway.episode()
        client = Client(http, episode)
        said = await client.say([SYSTEM, user("one")])
        await client.say([SYSTEM, user("one"), said, user("two")])
        await client.say([SYSTEM, user("one"), said, user("three")])
        await client.say([SYSTEM, user("one")], {"x-stainless-retry-count": "0"})
        await client.say([{"role": "system", "content": "You search."}, user("find")])
        await client.say([SYSTEM, user("other")])
        trajectory = await episode.finish()
    check_against(trajectory, sampler)
    assert reasons(trajectory) == [(2, "history_edited"), (3, "same_prompt"), (4, "sub_agent"), (5, "new_conversation")]
    assert [t.agent for t in trajectory.turns] == ["main"] * 4 + ["sub/1", "main"]
    # Turn 2 follows turn 0 by its exact ids, too.
    assert trajectory.turns[2].extends(trajectory.turns[0])


@pytest.mark.parametrize(("header", "first"), [("thread-id", {"thread-id": "1"}), ("x-claude-code-agent-id", {})])
async def test_agents_are_told_apart_by_their_clients_own_headers(http, header, first):
    async with gateway_over() as gateway:
        episode = gateway.episode()
        client = Client(http, episode)
        await client.say([SYSTEM, user("one")], first)
        await client.say([SYSTEM, user("two")], {header: "2"})
        await client.say([SYSTEM, user("three")], {header: "3"})
        await client.say([SYSTEM, user("four")], {header: "2"})
        trajectory = await episode.finish()
    assert [turn.agent for turn in trajectory.turns] == ["main", "sub/1", "sub/2", "sub/1"]
    assert reasons(trajectory) == [(1, "sub_agent"), (2, "sub_agent"), (3, "new_conversation")]


async def test_a_break_that_the_renderer_makes_has_its_reason(http):
    """One that leaves out a thought which the client has sent back, as templates leave out an empty one."""

    class Forgetful(ByteRenderer):
        def _one(self, message):
            return super()._one({**message, "content": message["content"].removeprefix("<think></think>")})

    async with Gateway(scripted(lambda r: np.array(say("<think></think>ok"), np.int32)), Forgetful(False)) as gateway:
        episode = gateway.episode()
        client = Client(http, episode)
        history = [user("one")]
        for text in ("two", "three"):
            history += [await client.say(history), user(text)]
        await client.chat(history, n=2)
        trajectory = await episode.finish()
    anew = "the prompt was rendered from scratch (format_unknown), and does not extend turn {}"
    branches = [(b["turn"], b["reason"], b["after"], b["found"]) for b in trajectory.info[INFO]["branches"]]
    assert branches[:2] == [(1, "rendered_again", 0, anew.format(0)), (2, "rendered_again", 1, anew.format(1))]
    assert [branch[:3] for branch in branches[2:]] == [(3, "same_prompt", 1)]
    assert trajectory.num_breaks == len(branches)


async def test_a_prompt_that_is_rendered_again_with_the_same_ids_is_no_branch(http):
    async with Gateway(scripted(), ByteRenderer(bridges=False)) as gateway:
        episode = gateway.episode()
        client = Client(http, episode)
        said = await client.say([user("one")])
        await client.say([user("one"), said, user("two")])
        trajectory = await episode.finish()
    assert (reasons(trajectory), trajectory.num_breaks) == ([], 0)


async def test_several_replies_to_one_request_are_turns_of_one_prompt(http):
    def draw(request):
        return np.array(say(f"{request.seed % 1000}"), np.int32)

    sampler = scripted(draw)
    async with gateway_over(sampler) as gateway:
        episode = gateway.episode()
        client = Client(http, episode)
        answer = await client.chat([user("hi")], n=3)
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        await client.say([user("hi"), {"role": "assistant", "content": texts[1]}, user("go on")])
        trajectory = await episode.finish()
    assert len(set(texts)) == 3
    assert len(trajectory.turns) == 4
    assert reasons(trajectory) == [(1, "same_prompt"), (2, "same_prompt")]
    chosen = next(t for t in trajectory.turns if t.completion_ids.tolist() == say(texts[1]))
    assert trajectory.turns[3].extends(chosen)


class TestRepeats:
    async def test_a_retry_gets_the_same_answer_and_is_recorded_once(self, http):
        async with gateway_over(scripted(lambda r: np.array(say(str(r.seed)), np.int32))) as gateway:
            episode = gateway.episode()
            client = Client(http, episode)
            first = await client.chat([user("hi")])
            again = await client.chat([user("hi")], {"x-stainless-retry-count": "1"})
            keyed = await client.chat([user("hi")], {"idempotency-key": "k"})
            keyed_again = await client.chat([user("hi")], {"idempotency-key": "k"})
            other = await client.chat([user("ho")], {"idempotency-key": "k"})
            trajectory = await episode.finish()
        assert first == again and keyed == keyed_again and first != keyed
        assert (client.status, other["error"]["message"]) == (
            422,
            "this idempotency key was used for a different request before",
        )
        assert len(trajectory.turns) == 2
        assert trajectory.info[INFO]["counts"]["repeated"] == 2

    async def test_a_request_repeated_after_a_time_out_joins_the_first(self, http):
        sampler = scripted()
        held = Held(sampler, 1)
        async with gateway_over(held, patience=600) as gateway:
            episode = gateway.episode()
            client = Client(http, episode)
            first = asyncio.create_task(client.say([user("hello")]))
            await until(lambda: held.num_asked)
            first.cancel()
            await until(lambda: not episode.session.exchanges.num_waiting)
            second = asyncio.create_task(client.say([user("hello")]))
            await until(lambda: episode.session.exchanges.num_waiting)
            held.released.set()
            said = await second
            trajectory = await episode.finish()
        assert first.cancelled()
        assert said["content"] == "8:hello"
        assert (len(trajectory.turns), len(sampler.requests), sampler.num_cancelled) == (1, 1, 0)

    async def test_what_a_client_left_is_cancelled_and_counted(self, http):
        def say_much(request):
            return np.array(say("x" * 20_000 if "longer" in last_text(request) else "well"), np.int32)

        sampler = scripted(say_much, seconds_per_token=0.02)
        async with gateway_over(sampler, patience=0.05) as gateway:
            episode = gateway.episode()
            client = Client(http, episode)
            first = asyncio.create_task(client.say([user("hello, this takes longer than the client waits")]))
            await until(lambda: sampler.num_drawn)
            first.cancel()
            await until(lambda: sampler.num_cancelled)
            await client.say([user("hello again")])
            trajectory = await episode.finish()
        assert len(trajectory.turns) == 1
        assert trajectory.num_unrecorded_tokens == sampler.num_drawn - len(trajectory.turns[0].completion_ids) > 0
        assert trajectory.info[INFO]["counts"]["left"] == 1
        assert reasons(trajectory) == []


class TestEqualRequests:
    """Requests that are equal byte for byte, without a key."""

    async def test_at_the_same_time_they_are_samples_of_their_own(self, http):
        held = Held(scripted(lambda r: np.array(say(str(r.seed)), np.int32)), 4)
        async with gateway_over(held) as gateway:
            episode = gateway.episode()
            client = Client(http, episode)
            asking = [asyncio.create_task(client.chat([user("hi")])) for _ in range(4)]
            await until(lambda: held.num_asked == 4)
            held.released.set()
            answers = await asyncio.gather(*asking)
            trajectory = await episode.finish()
        assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 4
        assert len(trajectory.turns) == 4
        assert reasons(trajectory) == [(n, "same_prompt") for n in (1, 2, 3)]

    @pytest.mark.parametrize("headers", [{}, {"x-stainless-retry-count": "1"}])
    async def test_the_retry_of_one_gets_the_answer_of_the_one_that_it_repeats(self, http, headers):
        sampler = scripted(lambda r: np.array(say(str(r.seed)), np.int32))
        held = Held(sampler, 2)
        async with gateway_over(held, patience=600) as gateway:
            episode = gateway.episode()
            client, waiting = Client(http, episode), episode.session.exchanges
            first = asyncio.create_task(client.chat([user("hi")]))
            await until(lambda: held.num_asked == 1)
            second = asyncio.create_task(client.chat([user("hi")]))
            await until(lambda: held.num_asked == 2)
            first.cancel()
            await until(lambda: waiting.num_waiting == 1)
            repeating = asyncio.create_task(client.chat([user("hi")], headers))
            await until(lambda: waiting.num_waiting == 2)
            held.released.set()
            again, other = await repeating, await second
            trajectory = await episode.finish()
        assert again != other
        assert [f"{say(a['choices'][0]['message']['content'])}" for a in (again, other)] == [
            f"{t.completion_ids.tolist()}" for t in trajectory.turns
        ]
        assert (sampler.num_cancelled, trajectory.info[INFO]["counts"]["repeated"]) == (0, 1)

    async def test_the_retry_of_one_that_failed_is_answered_anew(self, http):
        held = Held(scripted(lambda r: np.array(say(str(r.seed)), np.int32), trouble={0: "fail"}), 1)
        async with gateway_over(held) as gateway:
            episode = gateway.episode()
            client = Client(http, episode)
            first = asyncio.create_task(client.chat([user("hi")]))
            await until(lambda: held.num_asked)
            await client.chat([user("hi")])
            assert client.status == 500
            again = await client.chat([user("hi")], {"x-stainless-retry-count": "1"})
            held.released.set()
            assert again != await first
            trajectory = await episode.finish()
        assert (len(trajectory.turns), trajectory.error) == (2, None)

    async def test_a_retry_whose_first_connection_seems_to_be_there_joins_it(self, http):
        """As behind a proxy that does not say that its client has gone."""
        held = Held(scripted(), 1)
        async with gateway_over(held) as gateway:
            episode = gateway.episode()
            client = Client(http, episode)
            first = asyncio.create_task(client.chat([user("hello")]))
            await until(lambda: held.num_asked)
            again = asyncio.create_task(client.chat([user("hello")], {"x-stainless-retry-count": "1"}))
            await until(lambda: episode.session.exchanges.num_waiting == 2)
            held.released.set()
            assert await again == await first
            trajectory = await episode.finish()
        assert len(trajectory.turns) == held.num_asked == 1


class TestLimits:
    async def test_a_conversation_without_room_is_refused_and_a_shorter_one_is_not(self, http):
        limits = EpisodeLimits(max_turns=10, max_context=60)
        async with gateway_over(limits=limits) as gateway:
            episode = gateway.episode()
            client = Client(http, episode)
            refused = await client.chat([user("x" * 80)])
            assert client.status == 400 and "maximum context length is 60" in refused["error"]["message"]
            await client.say([user("short")])
            trajectory = await episode.finish()
        assert (len(trajectory.turns), trajectory.stop_reason) == (1, "stop")

    async def test_no_turn_is_left(self, http):
        async with gateway_over(limits=EpisodeLimits(max_turns=1, max_context=1000)) as gateway:
            episode = gateway.episode()
            client = Client(http, episode)
            await client.say([user("a")])
            await client.chat([user("b")])
            assert client.status == 403
            trajectory = await episode.finish()
        assert (len(trajectory.turns), trajectory.stop_reason, trajectory.truncated) == (1, "max_turns", True)

    async def test_no_token_of_the_episode_is_left(self, http):
        limits = EpisodeLimits(max_turns=9, max_context=1000, max_total_completion_tokens=5)
        async with gateway_over(limits=limits) as gateway:
            episode = gateway.episode()
            client = Client(http, episode)
            answer = await client.chat([user("hello")])
            assert answer["choices"][0]["finish_reason"] == "length"
            refused = await client.chat([user("b")])
            assert client.status == 403 and "5 sampled tokens are used up" in refused["error"]["message"]
            trajectory = await episode.finish()
        assert [len(turn.completion_ids) for turn in trajectory.turns] == [5]
        assert (trajectory.stop_reason, trajectory.truncated) == ("length", True)

    async def test_a_completion_that_was_cut_off_can_be_continued(self, http):
        async with gateway_over() as gateway:
            episode = gateway.episode()
            client = Client(http, episode)
            answer = await client.chat([user("hello")], max_tokens=3)
            assert answer["choices"][0]["finish_reason"] == "length"
            await client.say([user("hello"), answer["choices"][0]["message"], user("more")])
            trajectory = await episode.finish()
        assert [t.stop_reason for t in trajectory.turns] == ["length", "stop"]
        assert trajectory.stop_reason == "stop"


class TestSampling:
    async def test_the_run_says_how_and_what_requests_ask_is_counted(self, http):
        sampler = scripted()
        async with gateway_over(sampler, params=SamplingParams(temperature=0.7, max_tokens=50)) as gateway:
            episode = gateway.episode()
            await Client(http, episode).say([user("hi")], temperature=0, top_p=0.5, max_tokens=20, seed=3)
            trajectory = await episode.finish()
        (request,) = sampler.requests
        assert (request.params.temperature, request.params.top_p, request.params.max_tokens) == (0.7, 1.0, 20)
        assert request.params.stop_token_ids == (END,)
        assert trajectory.turns[0].temperature == 0.7
        counts = trajectory.info[INFO]["counts"]
        assert {name for name in counts if name.startswith("overridden/")} == {
            "overridden/temperature",
            "overridden/top_p",
            "overridden/seed",
        }

    async def test_without_a_run_the_request_says_how(self, http):
        sampler = scripted()
        async with gateway_over(sampler) as gateway:
            episode = gateway.episode()
            await Client(http, episode).say([user("hi")], temperature=0, seed=3)
            trajectory = await episode.finish()
        assert (sampler.requests[0].params.temperature, sampler.requests[0].seed) == (0.0, 3)
        assert not trajectory.turns[0].trained

    async def test_replies_to_a_request_with_a_seed_differ_and_the_first_has_it(self, http):
        sampler = scripted()
        async with gateway_over(sampler) as gateway:
            episode = gateway.episode()
            await Client(http, episode).chat([user("hi")], n=3, seed=3)
            await episode.finish()
        seeds = [request.seed for request in sampler.requests]
        assert len(set(seeds)) == 3 and 3 in seeds

    @pytest.mark.parametrize(("shows", "num_behind"), [(True, 0), (False, len(say(" made up")))])
    async def test_a_stop_string_ends_the_turn_and_what_is_behind_it_is_counted(self, http, shows, num_behind):
        sampler = scripted(lambda r: np.array(say("Thought\nObservation: made up"), np.int32))
        async with gateway_over(sampler if shows else Whole(sampler)) as gateway:
            episode = gateway.episode()
            client = Client(http, episode)
            said = await client.say([user("hi")], stop=["\nObservation:"])
            await client.say([user("hi"), said, user("real")], stop=["none"])
            trajectory = await episode.finish()
        assert said["content"] == "Thought"
        assert bytes(trajectory.turns[0].completion_ids.tolist()) == b"Thought\nObservation:"
        assert trajectory.num_unrecorded_tokens == num_behind
        assert sampler.num_drawn == sum(len(t.completion_ids) for t in trajectory.turns) + num_behind

    @pytest.mark.parametrize(
        ("asked", "said"), [({}, "Thought"), ({"stop": ["ght"]}, "Thou"), ({"stop": ["z"]}, "Thought")]
    )
    async def test_the_runs_stop_strings_hold_beside_those_of_requests(self, http, asked, said):
        sampler = scripted(lambda r: np.array(say("Thought\nObs: made up"), np.int32))
        async with gateway_over(sampler, params=SamplingParams(stop=("\nObs:",))) as gateway:
            episode = gateway.episode()
            message = await Client(http, episode).say([user("hi")], **asked)
            trajectory = await episode.finish()
        assert message["content"] == said
        wanted = b"Thought" if asked.get("stop") == ["ght"] else b"Thought\nObs:"
        assert bytes(trajectory.turns[0].completion_ids.tolist()) == wanted
        assert (trajectory.num_unrecorded_tokens, sampler.requests[0].params.stop) == (0, ())

    async def test_a_field_that_cannot_be_honoured_is_refused_and_counted(self, http):
        async with gateway_over() as gateway:
            episode = gateway.episode()
            client = Client(http, episode)
            answer = await client.chat([user("hi")], logit_bias={"5": 1})
            assert client.status == 400 and "logit_bias" in answer["error"]["message"]
            trajectory = await episode.finish()
        assert trajectory.info[INFO]["counts"] == {"refused/logit_bias": 1, "requests": 1}


class TestKeys:
    async def test_a_session_is_reached_by_its_own_key_only(self, http, gateway):
        one, two = gateway.episode(), gateway.episode()
        client = Client(http, one)
        await client.say([user("mine")])
        nearly = two.api_key[:-1] + "x-"[two.api_key[-1] == "x"]
        wrong = nearly, one.api_key[:20] + two.api_key[20:], "vb-" + "0" * 16 + "-"
        for key in ("", "x", "vb--", *wrong):
            client.headers["authorization"] = f"Bearer {key}"
            await client.chat([user("theirs")])
            assert client.status == 401, key
        assert len((await one.finish()).turns) == 1
        assert len((await two.finish()).turns) == 0

    async def test_a_key_can_stand_in_the_path_or_in_another_header(self, http, gateway):
        episode = gateway.episode()
        async with http.post(
            f"{episode.keyed_url}/chat/completions",
            json={"messages": [user("a")]},
            headers={"authorization": "Bearer anything"},
        ) as answer:
            assert answer.status == 200
        async with http.post(
            f"{gateway.url}/v1/chat/completions", json={"messages": [user("b")]}, headers={"x-api-key": episode.api_key}
        ) as answer:
            assert answer.status == 200
        assert len((await episode.finish()).turns) == 2

    async def test_a_finished_session_is_closed(self, http, gateway):
        episode = gateway.episode()
        await episode.finish()
        client = Client(http, episode)
        await client.chat([user("late")])
        assert client.status == 401

    async def test_a_reward_can_be_posted(self, http, gateway):
        episode = gateway.episode()
        client = Client(http, episode)
        wrongs = ({"reward": "much"}, {"reward": None}, [], {"reward": True}, {"reward": float("inf")}, {"reward": {}})
        for wrong in wrongs:
            await client.post("reward", wrong)
            assert client.status == 400, wrong
        await client.post("reward", {"reward": {"right": 1.0, "short": 0.5}})
        assert client.status == 200
        await client.chat([user("hi")])
        trajectory = await episode.finish()
        assert (trajectory.reward, trajectory.reward_parts) == (1.5, {"right": 1.0, "short": 0.5})
        with pytest.raises(EnvironmentFault):
            await gateway.episode().finish(reward="much")


class TestBadRequests:
    @pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"[" * 3000, b'{"messages": []}', b"\xff"])
    async def test_what_is_no_request_is_refused_in_the_protocols_form(self, http, gateway, body):
        client = Client(http, gateway.episode())
        answer = await client.post("chat/completions", body)
        assert client.status == 400 and answer["error"]["message"]

    async def test_an_unknown_route_and_a_large_body(self, http):
        from verbatim.rollouts.gateway.service import ServiceLimits

        async with gateway_over(service_limits=ServiceLimits(max_body=1000)) as gateway:
            client = Client(http, gateway.episode())
            answer = await client.post("completions", {})
            assert client.status == 404 and "POST /v1/chat/completions" in answer["error"]["message"]
            await client.chat([user("x" * 2000)])
            assert client.status == 413

    @pytest.mark.parametrize(
        ("header", "status"), [(b"x-verbatim-agent: \xff", b"200"), (b"x-api-key: vb-a-\xff", b"401")]
    )
    async def test_headers_that_are_no_text(self, gateway, header, status):
        assert await self.status_with(gateway, gateway.episode() if status == b"200" else None, header) == status

    @pytest.mark.parametrize("sent", [b"Zo\xeb", "Zoë".encode()])
    async def test_an_agents_name_is_text_whether_it_is_sent_as_latin_1_or_utf_8(self, gateway, sent):
        episode = gateway.episode()
        assert await self.status_with(gateway, episode, b"x-verbatim-agent: " + sent) == b"200"
        trajectory = await episode.finish()
        assert [turn.agent for turn in trajectory.turns] == ["Zoë"]

    async def status_with(self, gateway, episode, header):
        """The status of a request that has this line, as bytes, among its headers."""
        path = b"/s/" + episode.api_key.encode() if episode is not None else b""
        body = b'{"messages": [{"role": "user", "content": "hi"}]}'
        reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
        writer.write(
            b"POST %s/v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n"
            b"%s\r\n\r\n%s" % (path, len(body), header, body)
        )
        answer = await reader.read()
        writer.close()
        return answer.split()[1]

    async def test_messages_that_cannot_be_rendered_are_the_clients_fault(self, http, gateway):
        client = Client(http, gateway.episode())
        answer = await client.chat([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
        assert client.status == 400 and "content" in answer["error"]["message"]


async def test_a_failing_sampler_is_an_error_for_the_client_and_on_the_trajectory(http):
    async with gateway_over(scripted(trouble={0: "nan"})) as gateway:
        episode = gateway.episode()
        client = Client(http, episode)
        await client.chat([user("hi")])
        assert client.status == 400 or client.status == 500
        trajectory = await episode.finish(reward=1.0)
    assert "NaN" in trajectory.error or "nan" in trajectory.error
    assert trajectory.num_unrecorded_tokens > 0


async def test_an_answer_makes_up_for_the_samplers_failure_at_its_own_prompt_only(http):
    def fails(index, request):
        return "fail" if index in (0, 3) else None

    async with gateway_over(scripted(trouble=fails)) as gateway:
        kept, mended = gateway.episode(), gateway.episode()
        for episode, retried in ((kept, "other"), (mended, "hi")):
            client = Client(http, episode)
            await client.chat([SYSTEM, user("hi")])
            assert client.status == 500
            await client.say([{"role": "system", "content": "Another agent."}, user("hi")])
            await client.say([SYSTEM, user(retried)])
        failed, well = await kept.finish(reward=1.0), await mended.finish(reward=1.0)
    assert "fails: the script says so" in failed.error
    assert well.error is None


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_failure_after_its_client_has_gone_is_no_fault_of_the_episode(http, leaves):
    held = Held(scripted(trouble={0: "fail"}), 1)
    async with gateway_over(held, patience=600) as gateway:
        episode = gateway.episode()
        asking = asyncio.create_task(Client(http, episode).chat([user("hi")]))
        await until(lambda: held.num_asked)
        if leaves:
            asking.cancel()
            await until(lambda: not episode.session.exchanges.num_waiting)
        held.released.set()
        await asyncio.wait([asking])
        await until(lambda: all(task.get_name() != "gateway-exchange" for task in asyncio.all_tasks()))
        trajectory = await episode.finish()
    assert trajectory.error.startswith("no_turns: " if leaves else "sampler: request 0 fails: the script says so")


async def test_an_episode_without_a_sampled_token_has_failed_and_has_no_reward(http, gateway):
    silent, answered = gateway.episode(), gateway.episode()
    await Client(http, answered).chat([user("hi")])
    trajectory = await silent.finish(reward={"right": 1.0})
    assert (trajectory.reward, dict(trajectory.reward_parts)) == (None, {})
    assert trajectory.error.startswith("no_turns: the policy sampled nothing before the episode ended (stop)")
    assert (await answered.finish(reward=1.0)).error is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_sampler_that_times_out_is_an_error_and_no_endless_stream(http, stream):
    def late(request):
        raise TimeoutError("the engine is late")

    async with gateway_over(scripted(late)) as gateway:
        client = Client(http, gateway.episode())
        async with asyncio.timeout(HANGS):
            answer = await client.chat([user("hi")], stream=stream)
    assert client.status == 500 and "the engine is late" in answer["error"]["message"]


async def test_sdks_read_the_variables():
    async with gateway_over() as gateway:
        found = gateway.episode().variables
    assert found["OPENAI_BASE_URL"].endswith("/v1") and not found["ANTHROPIC_BASE_URL"].endswith("/v1")
    assert found["OPENAI_API_KEY"] == found["ANTHROPIC_API_KEY"]


@pytest.mark.slow
async def test_the_openai_sdk_streams_and_runs_tools():
    from openai import AsyncOpenAI

    sampler = scripted()
    async with gateway_over(sampler) as gateway:
        episode = gateway.episode()
        client = AsyncOpenAI(base_url=episode.base_url, api_key=episode.api_key)
        stream = await client.chat.completions.create(model="gpt", messages=[user("sum")], tools=TOOLS, stream=True)
        name = arguments = ""
        async for chunk in stream:
            for delta in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
                name += delta.function.name or ""
                arguments += delta.function.arguments or ""
        assert (name, json.loads(arguments)) == ("add", {"a": 1, "b": 2})
        models = await client.models.list()
        assert [m.id for m in models.data] == ["policy"]
        await client.close()
        trajectory = await episode.finish()
    check_against(trajectory, sampler)


@pytest.mark.slow
@pytest.mark.extras
async def test_anthropics_sdk_goes_on_where_it_was():
    import anthropic

    sampler = scripted()
    tools = [{"name": "add", "input_schema": {"type": "object", "properties": {}}}]
    async with gateway_over(sampler) as gateway:
        episode = gateway.episode()
        client = anthropic.AsyncAnthropic(base_url=episode.anthropic_base_url, api_key=episode.api_key)
        ask = {"model": "claude", "max_tokens": 200, "system": "You help.", "tools": tools}
        first = await client.messages.create(**ask, messages=[user("sum")])
        (used,) = (block for block in first.content if block.type == "tool_use")
        assert used.input == {"a": 1, "b": 2}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "3"}]}
        history = [user("sum"), {"role": "assistant", "content": first.content}, result]
        async with client.messages.stream(**ask, messages=history) as stream:
            final = await stream.get_final_message()
        assert final.content[0].text.endswith(":3")
        counted = await client.messages.count_tokens(model="claude", messages=[user("abc")])
        assert counted.input_tokens == 6
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.create(**ask, messages=[user("x")], extra_body={"logit_bias": {"5": 1}})
        await client.close()
        trajectory = await episode.finish()
    check_against(trajectory, sampler)
    assert (reasons(trajectory), len(build_samples(trajectory))) == ([], 1)


def test_the_package_imports_neither_torch_nor_transformers():
    folder = Path(__file__).parents[3] / "src/verbatim/rollouts/gateway"
    text = "".join(path.read_text() for path in folder.rglob("*.py"))
    assert "import torch" not in text and "import transformers" not in text


async def test_the_doctor_says_which_branch_it_is_and_why(http):
    from verbatim.inspection.doctor.diagnosis import Doctor
    from verbatim.inspection.doctor.logs.log_file import LoggedTrajectory

    held = Held(scripted(), 0)
    async with gateway_over(held) as gateway:
        episode = gateway.episode()
        client = Client(http, episode)
        said = await client.say([SYSTEM, user("one")])
        held.hold(2)
        both = [asyncio.create_task(client.say([SYSTEM, user("one"), said, user(text)])) for text in ("two", "three")]
        await until(lambda: held.num_asked == 3)
        held.released.set()
        await asyncio.gather(*both)
        await client.say([SYSTEM, user("one"), said, user("four")])
        await client.say([SYSTEM, user("something else")])
        trajectory = await episode.finish()
    found = Doctor().examine(LoggedTrajectory(trajectory=trajectory, line=1))
    assert [(d.turn, str(d.kind), d.kind.by_design) for d in found] == [
        (2, "parallel", True),
        (3, "history_rewritten", False),
        (4, "sub_agent", True),
    ]
    assert found[0].found == "parallel call: another request that follows message 2 is in flight"
