"""Answers that no client has received are counted, and are context unless they are asked for."""

import asyncio
from types import SimpleNamespace

import pytest
from scripted_gateway import Client, GrowingRenderer, Held, scripted

from verbatim import Trajectory, Turn, build_samples
from verbatim.core.trajectories import build
from verbatim.rollouts.gateway import Gateway
from verbatim.rollouts.gateway.delivery import AnswerProgress, Delivery, Stamp
from verbatim.rollouts.gateway.session import INFO
from waiting import until

pytestmark = pytest.mark.realtime

HELLO = [{"role": "user", "content": "hello"}]


async def left(http, **options):
    """A stream whose client goes away before anything is sampled and does not come back, and the same asked anew,
    without a stream; then one more turn behind that."""
    held = Held(scripted(), 1)
    async with Gateway(held, GrowingRenderer(), patience=600, **options) as gateway:
        episode = gateway.episode()
        client = Client(http, episode)
        first = asyncio.create_task(client.chat(HELLO, stream=True))
        await until(lambda: held.num_asked)
        first.cancel()
        await until(lambda: not episode.session.exchanges.num_waiting)
        held.released.set()
        await until(lambda: episode.session.loop.recorder.turns)
        again = await client.say(HELLO)
        await client.say([*HELLO, again, {"role": "user", "content": "more"}])
        return await episode.finish(reward=1.0)


async def test_an_answer_that_no_client_received_is_counted_and_not_trained(http):
    trajectory = await left(http)
    lost = len(trajectory.turns[0].completion_ids)
    counts = trajectory.info[INFO]["counts"]
    assert (counts["undelivered"], counts["undelivered_tokens"]) == (1, lost)
    assert [turn.trained for turn in trajectory.turns] == [False, True, True]
    built = build(trajectory)
    assert built.dropped == {"untrained": lost}
    assert sum(sample.num_trained_tokens for sample in built.samples) == trajectory.num_sampled_tokens - lost


async def test_a_key_trains_it(http):
    trajectory = await left(http, train_undelivered=True)
    assert trajectory.info[INFO]["counts"]["undelivered"] == 1
    assert sum(sample.num_trained_tokens for sample in build_samples(trajectory)) == trajectory.num_sampled_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_sent_to_its_end_has_arrived(http, stream):
    async with Gateway(scripted(), GrowingRenderer()) as gateway:
        episode = gateway.episode()
        headers = {"authorization": f"Bearer {episode.api_key}"}
        body = {"model": "m", "messages": HELLO, "n": 2, "stream": stream}
        async with http.post(f"{episode.base_url}/chat/completions", json=body, headers=headers) as answer:
            await answer.read()
        trajectory = await episode.finish(reward=1.0)
    assert [turn.trained for turn in trajectory.turns] == [True, True]
    assert "undelivered" not in trajectory.info[INFO]["counts"]


async def test_an_answer_that_a_later_request_goes_on_from_has_arrived(http):
    """Its stream broke after the text."""
    held = Held(scripted(), 1)
    async with Gateway(held, GrowingRenderer(), patience=600) as gateway:
        episode = gateway.episode()
        client = Client(http, episode)
        first = asyncio.create_task(client.chat(HELLO, stream=True))
        await until(lambda: held.num_asked)
        first.cancel()
        await until(lambda: not episode.session.exchanges.num_waiting)
        held.released.set()
        await until(lambda: episode.session.loop.recorder.turns)
        await client.say([*HELLO, {"role": "assistant", "content": "8:hello"}, {"role": "user", "content": "more"}])
        trajectory = await episode.finish(reward=1.0)
    assert [turn.trained for turn in trajectory.turns] == [True, True]
    assert "undelivered" not in trajectory.info[INFO]["counts"]


async def test_an_answer_has_arrived_where_exact_ids_go_on_from_it():
    """A client that renders by itself sends the answer back inside of a prompt."""
    turns = Trajectory(
        example_id="x",
        turns=[
            Turn(prompt_ids=[1], completion_ids=[2, 3]),
            Turn(prompt_ids=[1], completion_ids=[4]),
            Turn(prompt_ids=[1, 2, 3, 5], completion_ids=[6]),
        ],
    ).turns
    delivery, recorder = Delivery(), SimpleNamespace(turns=turns)
    for turn in (0, 1):
        delivery.sends(turn, AnswerProgress(Stamp()))
    delivery.went_on(turns)
    assert delivery.settle(recorder, trained=True) == {"undelivered": 1, "undelivered_tokens": 1}


async def test_a_session_that_ends_twice_counts_once(http):
    trajectory = await left(http)
    assert trajectory.info[INFO]["counts"]["undelivered"] == 1
    delivery = Delivery()
    assert delivery.settle(None, trained=True) == {"undelivered": 0, "undelivered_tokens": 0}
