"""Streams of the gateway have what is sampled while it is sampled; and who goes away ends the sampling."""

import asyncio
import json
import threading

import numpy as np
import pytest
from scripted_gateway import Client, GrowingRenderer, Whole, gateway_over, scripted

from byte_renderer import VOCAB_SIZE, ByteRenderer, call, say
from verbatim.inference.http.sampler import HttpSampler
from verbatim.inference.http.server import serve_sampler
from verbatim.inference.pool.pool import ReplicaPool
from verbatim.inference.proxy import SamplerProxy
from verbatim.models.renderers.renderer import ReadsGrowingText
from verbatim.rollouts.gateway import Gateway
from verbatim.rollouts.gateway.session import INFO
from waiting import until

pytestmark = pytest.mark.realtime

TEXT = "one two three four five six"
BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "responses": {"input": "hi"},
    "messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100},
}


def user(text):
    return {"role": "user", "content": text}


async def events(http, episode, route, body, then=None):
    """The JSON of each event of a stream."""
    found = []
    headers = {"authorization": f"Bearer {episode.api_key}"}
    async with http.post(
        f"{episode.base_url}/{route}", json={"model": "m", **body, "stream": True}, headers=headers
    ) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                found.append(json.loads(line[6:]))
                if then is not None and then(found):
                    break
    return found


def text_in(event):
    """The text that an event of any protocol adds."""
    if "choices" in event:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if event.get("type") == "response.output_text.delta":
        return event["delta"]
    return event["delta"].get("text", "") if event.get("type") == "content_block_delta" else ""


def speaking(text=TEXT, **options):
    return scripted(lambda request: np.array(say(text), np.int32), **options)


def test_the_renderer_reads_growing_text():
    assert isinstance(GrowingRenderer(), ReadsGrowingText)


@pytest.mark.parametrize("route", BODIES)
async def test_a_stream_has_the_text_as_it_is_sampled(http, route, monkeypatch):
    """Also what is sampled while the stream is busy with what came before, and pauses."""
    monkeypatch.setattr("verbatim.inference.chat.live.QUIET_SECONDS", 600)
    texts = []

    class ShowsAndWaits(SamplerProxy):
        """Draws the next five tokens once the client has the text of the last five."""

        async def generate_watched(self, request, watch):
            completion = await self._sampler.generate(request)
            for number, token in enumerate(completion.ids[:-1].tolist(), start=1):
                watch([token])
                if number % 5 == 0:
                    await until(lambda number=number: len("".join(texts)) == number)
            return completion

    def note(found):
        texts.append(text_in(found[-1]))

    async with Gateway(ShowsAndWaits(speaking()), GrowingRenderer()) as gateway:
        episode = gateway.episode()
        await events(http, episode, route, BODIES[route], note)
        trajectory = await episode.finish()
    assert "".join(texts) == TEXT
    (turn,) = trajectory.turns
    assert turn.completion_ids.tolist() == say(TEXT)


@pytest.mark.parametrize("route", BODIES)
async def test_a_sampler_that_shows_nothing_is_streamed_at_its_end(http, route):
    async with Gateway(Whole(speaking()), GrowingRenderer()) as gateway:
        found = await events(http, gateway.episode(), route, BODIES[route])
    texts = [text for event in found if (text := text_in(event))]
    assert "".join(texts) == TEXT


async def test_several_replies_are_streamed_side_by_side(http):
    sampler = scripted(lambda r: np.array(say(f"{r.seed % 10**9} and more"), np.int32), seconds_per_token=0.01)
    async with Gateway(sampler, GrowingRenderer()) as gateway:
        episode = gateway.episode()
        found = await events(http, episode, "chat/completions", {**BODIES["chat/completions"], "n": 3})
        trajectory = await episode.finish()
    texts = ["", "", ""]
    for event in found:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert sorted(map(say, texts)) == sorted(t.completion_ids.tolist() for t in trajectory.turns)
    assert len(set(texts)) == 3


async def test_calls_come_whole_behind_the_text_of_a_stream(http):
    sampler = scripted(lambda r: np.array([*say("so")[:-1], *call("add", a=1)], np.int32), seconds_per_token=0.005)
    async with Gateway(sampler, ByteRenderer()) as gateway:
        found = await events(http, gateway.episode(), "chat/completions", BODIES["chat/completions"])
    calls = [c for e in found for choice in e["choices"] for c in choice["delta"].get("tool_calls") or ()]
    assert json.loads("".join(c["function"].get("arguments") or "" for c in calls)) == {"a": 1}


async def test_a_stream_that_was_cut_off_is_repeated_from_its_beginning(http):
    """The sampler stands still in the middle of the text until the second client is there."""
    returned = asyncio.Event()

    async def pause(seconds):
        if sampler.num_drawn == 10:
            await returned.wait()
        await asyncio.sleep(0)

    sampler = speaking(pause=pause)
    async with Gateway(sampler, GrowingRenderer(), patience=600) as gateway:
        episode = gateway.episode()
        route = "chat/completions"
        first = await events(http, episode, route, BODIES[route], lambda found: text_in(found[-1]))
        await until(lambda: not episode.session.exchanges.num_waiting)
        asking = asyncio.create_task(events(http, episode, route, BODIES[route]))
        await until(lambda: episode.session.exchanges.num_waiting)
        returned.set()
        again = await asking
        trajectory = await episode.finish()
    assert TEXT.startswith("".join(text_in(event) for event in first))
    assert "".join(text_in(event) for event in again) == TEXT
    assert (len(trajectory.turns), len(sampler.requests), sampler.num_cancelled) == (1, 1, 0)


async def test_a_failure_within_a_stream_is_its_last_event(http):
    sampler = speaking("x" * 20_000, seconds_per_token=0.02)
    async with Gateway(sampler, GrowingRenderer()) as gateway:
        episode = gateway.episode()

        def stop_soon(found):
            if len(found) == 4:
                asyncio.get_running_loop().create_task(sampler.close())
            return False

        found = await events(http, episode, "messages", BODIES["messages"], stop_soon)
    assert found[-1]["type"] == "error"


async def served(sampler):
    """The sampler behind our HTTP server."""
    async with serve_sampler(sampler) as server:
        yield await HttpSampler.connect(server.url, context_length=1000, vocab_size=VOCAB_SIZE)


class Replica(Whole):
    """The least that a pool asks of a replica."""

    name, url, num_unverified = "one", "here", 0

    async def health(self):
        return None


async def alone(sampler):
    yield sampler


async def pooled(sampler):
    yield ReplicaPool([Replica(sampler)])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("around", [alone, served, pooled])
async def test_a_client_that_goes_ends_the_sampling_whatever_the_sampler_is(http, around, stream):
    sampler = speaking("x" * 900, seconds_per_token=0.1)
    async for outer in around(sampler):
        async with gateway_over(outer, patience=0.05) as gateway:
            episode = gateway.episode()
            client = Client(http, episode)
            asking = asyncio.create_task(client.chat([user("hi")], stream=stream))
            await until(lambda: sampler.num_drawn)
            asking.cancel()
            await until(lambda: sampler.num_cancelled)
            assert asking.cancelled()
            trajectory = await episode.finish()
        assert sampler.num_drawn < 900
        assert (len(trajectory.turns), trajectory.info[INFO]["counts"]["left"]) == (0, 1)
        if around is alone:
            assert trajectory.num_unrecorded_tokens == sampler.num_drawn
        await outer.close()


async def test_tokens_of_a_long_prompt_are_counted_beside_the_event_loop(http):
    threads = []

    class Slow(GrowingRenderer):
        def render_ids(self, messages, tools=None, *, add_generation_prompt=True):
            threads.append(threading.current_thread())
            return super().render_ids(messages, tools, add_generation_prompt=add_generation_prompt)

    async with Gateway(scripted(), Slow()) as gateway:
        episode = gateway.episode()
        client = Client(http, episode)
        body = {"model": "m", "messages": [user("x" * 60_000)]}
        counted = await client.post("messages/count_tokens", body)
        trajectory = await episode.finish()
    assert counted == {"input_tokens": 60_003}
    assert threads and threading.main_thread() not in threads
    assert trajectory.info[INFO]["counts"] == {"token_counts": 1}
