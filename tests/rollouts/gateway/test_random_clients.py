"""Random clients: conversations forked, retried, compacted, edited, interleaved, re-serialised, streamed and cut off.

Whatever they do, every token that the sampler returned is recorded once, behind the prompt that it was sampled after,
in the session that it was sampled for; and whatever a client was answered was sampled behind the very messages that it
had sent.
"""

import asyncio
import random
import re
from collections import Counter
from dataclasses import replace

import aiohttp
import numpy as np
import pytest
from random_client import RandomClient, reads
from scripted_gateway import GrowingRenderer, scripted

from byte_renderer import call, say
from campaigns import sized
from verbatim import build_samples
from verbatim.rollouts import EpisodeLimits
from verbatim.rollouts.gateway import Gateway, canonical
from verbatim.rollouts.gateway.session import INFO

pytestmark = pytest.mark.realtime


def draw(request):
    """Words, calls and long answers, by the request's seed."""
    rng = random.Random(request.seed)
    kind = rng.random()
    if kind < 0.3:
        return np.array(call("add", b=rng.randint(0, 99), a=rng.choice([1.0, 2, "x", None, True])), np.int32)
    if kind < 0.4:
        return np.array([*say(f"{rng.randint(0, 9)} and ")[:-1], *call("add", a=rng.randint(0, 9))], np.int32)
    return np.array(say("".join(rng.choices("ab \n", k=rng.randint(0, 30)))), np.int32)


class Told:
    """Notes what the sampler is asked and what it returns, by the session that it is asked for."""

    def __init__(self, seed):
        def trouble(index, request):
            return "fail" if random.Random(f"{seed}/{index}").random() < 0.02 else None

        self.sampler = scripted(draw, trouble=trouble)
        self.returned = {}
        self.sampler.generate = self._noted(self.sampler.generate)
        self.sampler.generate_watched = self._noted(self.sampler.generate_watched)

    def _noted(self, sample):
        async def sample_and_note(request, *watch):
            completion = await sample(request, *watch)
            session = request.session.partition("/")[0]
            self.returned.setdefault(session, []).append((request.prompt_ids.tobytes(), completion.ids.tobytes()))
            return completion

        return sample_and_note


async def play(seed, num_requests, num_sessions=8, num_agents=2):
    """The trajectories of all sessions, which are checked, and the number of requests."""
    rng = random.Random(seed)
    told = Told(seed)
    limits = EpisodeLimits(max_turns=10**6, max_context=100_000)
    options = {"patience": 0.01, "seed": seed, "limits": limits}
    async with Gateway(told.sampler, GrowingRenderer(), **options) as gateway, aiohttp.ClientSession() as http:
        episodes = [gateway.episode() for _ in range(num_sessions)]
        clients = {
            episode: [RandomClient(http, episode, random.Random(rng.random()), f"agent {k}") for k in range(num_agents)]
            for episode in episodes
        }

        async def act(client):
            while client.num_requests < num_requests / (num_sessions * num_agents):
                await client.act()

        await asyncio.gather(*(act(client) for found in clients.values() for client in found))
        trajectories = [await episode.finish(reward=0.0) for episode in episodes]
    for trajectory, found in zip(trajectories, clients.values(), strict=True):
        check(trajectory, told.returned.get(trajectory.trajectory_id, []), found)
    num_recorded = sum(len(turn.completion_ids) for t in trajectories for turn in t.turns)
    assert num_recorded + sum(t.num_unrecorded_tokens for t in trajectories) == told.sampler.num_drawn
    return trajectories, sum(client.num_requests for found in clients.values() for client in found)


def check(trajectory, returned, clients):
    """One session against what the sampler returned for it, and what its clients sent and got."""
    # A client may have given up just as the sampler failed.
    assert trajectory.error is None or (gave_up(clients) and "the script says so" in trajectory.error)
    # A completion that was returned just as its client was given up is in no turn, and counted. Of one that a stop
    # string cuts, the turn has the beginning.
    recorded = Counter((t.prompt_ids.tobytes(), t.completion_ids.tobytes()) for t in trajectory.turns)
    assert not recorded - Counter(returned)
    trained = [
        index
        for sample in build_samples(replace(trajectory, error=None))
        for index in np.unique(sample.chunk_ids[sample.loss_mask]).tolist()
    ]
    assert sorted(trained) == [n for n, t in enumerate(trajectory.turns) if len(t.completion_ids) and t.trained]
    undelivered = trajectory.info[INFO]["counts"].get("undelivered", 0)
    assert sum(not t.trained for t in trajectory.turns) == undelivered and (gave_up(clients) or not undelivered)
    for turn in trajectory.turns:
        np.testing.assert_array_equal(turn.logprobs, np.float32(-1.0 / (1 + turn.completion_ids)))
    turns = [reads([*t.prompt_ids.tolist(), *t.completion_ids.tolist()]) for t in trajectory.turns]
    sampled = Counter((tuple(said[:-1]), said[-1]) for said in turns)
    contexts = Counter(sent for sent, _ in sampled.elements())
    answered = [entry for client in clients for entry in client.received]
    assert not Counter((sent, said) for sent, said, is_cut in answered if not is_cut) - sampled
    assert not Counter(sent for sent, _, _ in answered) - contexts


def gave_up(clients):
    return any(client.num_given_up for client in clients)


@pytest.mark.campaign
def test_every_token_is_recorded_once_in_its_context_and_session(campaign):
    """What clients may do has all been done, too."""
    row, num_requests, num_turns, counts = campaign("random clients of the gateway"), 0, 0, Counter()

    async def four(first):
        return await asyncio.gather(*(play(seed, sized(64, 200)) for seed in range(first, first + 4)))

    for first in range(0, sized(20, 100), 4):
        for trajectories, requests in asyncio.run(four(first)):
            row.add()
            num_requests += requests
            for trajectory in trajectories:
                num_turns += len(trajectory.turns)
                counts.update(trajectory.info["gateway"]["counts"])
    row.note = f"{num_requests} requests, {num_turns} turns"
    assert set(counts) >= {"repeated", "branches/history_edited", "branches/same_prompt", "branches/compaction"}


def test_a_gateway_that_takes_messages_for_others_is_found_out(monkeypatch):
    """It reads over digits: a history with another number in it continues the conversation of the first."""
    text_of = canonical.text_of
    monkeypatch.setattr(canonical, "text_of", lambda content: re.sub(r"\d", "", text_of(content)))

    def is_well(seed):
        try:
            asyncio.run(play(seed, 64))
        except AssertionError:
            return False
        return True

    assert not all(map(is_well, range(20)))
