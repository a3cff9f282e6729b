"""Random clients: conversations forked, retried, compacted, edited, interleaved, re-serialised, streamed and cut off.

Whatever they do, every token that the sampler returned is recorded once, behind the prompt that it was sampled after,
in the session that it was sampled for; and the prompt of a conversation that only goes on extends the turn before.
"""

import asyncio
import json
import os
import random

import aiohttp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scripted_gateway import Client, gateway_over, scripted

from byte_renderer import call, say
from verbatim import build_samples
from verbatim.rollouts import EpisodeLimits

CAMPAIGN = int(os.environ.get("VERBATIM_GATEWAY_REQUESTS", "300"))
"""Requests of the long campaign: 20000 on demand."""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def draw(request):
    """Words, calls and long answers, by the request's seed."""
    rng = random.Random(request.seed)
    kind = rng.random()
    if kind < 0.3:
        return np.array(call("add", b=rng.randint(0, 99), a=rng.choice([1.0, 2, "x", None, True])), np.int32)
    if kind < 0.4:
        return np.array([*say(f"{rng.randint(0, 9)} and "), *call("add", a=rng.randint(0, 9))][1:], np.int32)
    return np.array(say("".join(rng.choices("ab \n", k=rng.randint(0, 30)))), np.int32)


def rewritten(message, rng):
    """The same message, as some client would write it down."""
    message = json.loads(json.dumps(message))
    if rng.random() < 0.5:
        message = dict(reversed(message.items()))
    for c in message.get("tool_calls") or ():
        c["id"] = c["id"] if rng.random() < 0.5 else f"own_{c['id']}"
        try:
            arguments = json.loads(c["function"]["arguments"])
            c["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=rng.choice([None, 2]))
        except ValueError:
            pass
    if not message["content"] and rng.random() < 0.5:
        message["content"] = None
    elif rng.random() < 0.3:
        message["content"] = [{"type": "text", "text": message["content"]}]
    if rng.random() < 0.5:
        message |= {"refusal": None, "annotations": []}
    return message


class RandomClient:
    """One agent of a session: keeps conversations, and does something to one of them with every request."""

    def __init__(self, http, episode, rng, name):
        self.client, self.rng, self.name = Client(http, episode), rng, name
        self.histories = [[{"role": "system", "content": name}, {"role": "user", "content": f"go {rng.random()}"}]]
        self.num_requests = 0

    async def act(self):
        rng, place = self.rng, self.rng.randrange(len(self.histories))
        history = self.histories[place]
        move = rng.random()
        if move < 0.1 and len(history) > 3:  # compacted
            history = [history[0], {"role": "user", "content": f"so far {rng.random()}"}, *history[-1:]]
        elif move < 0.2 and len(history) > 3:  # edited
            at = rng.randrange(1, len(history))
            history = [*history[:at], {**history[at], "content": f"edited {rng.random()}"}, *history[at + 1 :]]
        elif move < 0.3 and len(history) > 3:  # back to an earlier place
            ends = [n for n, m in enumerate(history) if m["role"] != "assistant" and n]
            history = history[: rng.choice(ends) + 1]
        elif move < 0.35:
            history = [history[0], {"role": "user", "content": f"new {rng.random()}"}]
        body = {"messages": [rewritten(m, rng) if m["role"] == "assistant" else m for m in history], "model": "m",
                "tools": TOOLS, "max_tokens": rng.choice([1, 5, 1000, 1000, 1000])}  # fmt: skip
        data = json.dumps(body).encode()
        self.num_requests += 1
        if rng.random() < 0.1:  # given up
            with_patience = rng.choice([0.0, 0.002, 0.01])
            try:
                async with asyncio.timeout(with_patience):
                    await self.client.post("chat/completions", data)
            except TimeoutError:
                pass
            if rng.random() < 0.5:
                return
        if rng.random() < 0.15:
            said = await self.streamed(body)
        else:
            retries = rng.choice([0, 0, 0, 0, 1])
            answer = await self.client.post("chat/completions", data)
            assert self.client.status == 200, answer
            for _ in range(retries):
                again = await self.client.post("chat/completions", data, **{"x-stainless-retry-count": "1"})
                assert again == answer
            said = answer["choices"][0]["message"]
        after = {"role": "user", "content": f"{rng.choice(['more', 'why', 'ok'])} {rng.randint(0, 5)}"}
        if said.get("tool_calls"):
            after = {"role": "tool", "tool_call_id": said["tool_calls"][-1]["id"], "content": str(rng.randint(0, 9))}
        history = [*history, said, after]
        if rng.random() < 0.2:
            self.histories.append(history)
        else:
            self.histories[place] = history[:40]

    async def streamed(self, body):
        calls, content = {}, ""
        sent = {"content-type": "application/json", **self.client.headers}
        url = f"{self.client.episode.base_url}/chat/completions"
        async with self.client.http.post(url, json={**body, "stream": True}, headers=sent) as answer:
            assert answer.status == 200
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                for choice in json.loads(line[6:])["choices"]:
                    delta = choice["delta"]
                    content += delta.get("content") or ""
                    for c in delta.get("tool_calls") or ():
                        own = calls.setdefault(c["index"], {"id": "", "type": "function", "function": {}})
                        own["id"] += c.get("id") or ""
                        for key, value in c["function"].items():
                            own["function"][key] = own["function"].get(key, "") + value
        message = {"role": "assistant", "content": content}
        return {**message, "tool_calls": [calls[k] for k in sorted(calls)]} if calls else message


class Told:
    """Notes what the sampler is asked and what it returns, by the session that it is asked for."""

    def __init__(self):
        self.sampler = scripted(draw, seconds_per_token=0.0)
        self.returned = {}
        self.num_cut_off = 0
        inner = self.sampler.generate

        async def generate(request):
            completion = await inner(request)
            session = request.session.partition("/")[0]
            self.returned.setdefault(session, []).append((request.prompt_ids.tobytes(), completion))
            return completion

        self.sampler.generate = generate


async def campaign(seed, num_requests, num_sessions=4, num_agents=2):
    rng = random.Random(seed)
    told = Told()
    trajectories = []
    limits = EpisodeLimits(max_turns=100_000, max_context=100_000)
    options = {"patience": 0.01, "seed": seed, "limits": limits}
    async with gateway_over(told.sampler, **options) as gateway, aiohttp.ClientSession() as http:
        episodes = [gateway.episode() for _ in range(num_sessions)]
        clients = [
            RandomClient(http, episode, random.Random(rng.random()), f"agent {k}")
            for episode in episodes for k in range(num_agents)
        ]  # fmt: skip

        async def play(client):
            while client.num_requests < num_requests / len(clients):
                await client.act()

        await asyncio.gather(*map(play, clients))
        trajectories = [await episode.finish(reward=0.0) for episode in episodes]
    num_recorded = 0
    for trajectory in trajectories:
        returned = told.returned.get(trajectory.trajectory_id, [])
        recorded = [(t.prompt_ids.tobytes(), t.completion_ids.tobytes()) for t in trajectory.turns]
        sampled = [(prompt, completion.ids.tobytes()) for prompt, completion in returned]
        assert trajectory.error is None
        # What was returned just as its client was given up is in no turn, and counted.
        assert not set(recorded) - set(sampled)
        assert len(recorded) == len(set(map(id, recorded)))
        num_recorded += sum(len(t.completion_ids) for t in trajectory.turns)
        trained = [
            (index, trajectory.turns[index].completion_ids.tolist()) for sample in build_samples(trajectory)
            for index in np.unique(sample.chunk_ids[sample.loss_mask]).tolist()
        ]  # fmt: skip
        assert sorted(index for index, _ in trained) == [n for n, t in enumerate(trajectory.turns) if t.trained
                                                         and len(t.completion_ids)]  # fmt: skip
        for turn in trajectory.turns:
            np.testing.assert_array_equal(turn.logprobs, np.float32(-1.0 / (1 + turn.completion_ids)))
        names = {b"agent 0", b"agent 1"}
        assert {bytes(t.prompt_ids[1:8].tolist()) for t in trajectory.turns} <= names
    assert num_recorded + sum(t.num_unrecorded_tokens for t in trajectories) == told.sampler.num_drawn
    return trajectories


@settings(max_examples=4, deadline=None, phases=[Phase.generate])
@given(seed=st.integers(0, 2**32))
def test_every_token_is_recorded_once_in_its_context_and_session(seed):
    asyncio.run(campaign(seed, 60))


@pytest.mark.slow
def test_a_long_campaign():
    trajectories = asyncio.run(campaign(7, CAMPAIGN, num_sessions=8))
    counts = [t.info["gateway"]["counts"] for t in trajectories]
    assert sum(c["requests"] for c in counts) >= CAMPAIGN
    seen = {name for c in counts for name in c}
    assert seen >= {"repeated", "branches/edited_history", "branches/same_prompt", "branches/compaction"}
