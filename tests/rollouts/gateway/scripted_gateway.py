"""A gateway over a script: the model's words are a function of its prompt."""

import asyncio
import contextlib
import json

import numpy as np

from byte_renderer import CALL, ROLES, VOCAB_SIZE, ByteRenderer, call, say
from verbatim.inference.proxy import SamplerProxy
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts.gateway import Gateway


def last_text(request) -> str:
    """The text of the last message of a prompt, as the model sees it."""
    ids = request.prompt_ids.tolist()[:-2]
    start = max(place for place, token in enumerate(ids) if token in ROLES.values())
    return bytes(i for i in ids[start + 1 :] if i < 256).decode()


def play(request):
    """Calls `add` when it is asked for a sum, else says how many tokens it has read and what came last."""
    text = last_text(request)
    if text.startswith("sum"):
        return np.array(call("add", a=1, b=2), np.int32)
    if text.startswith("think"):
        return np.array(say("<think>hm</think>yes"), np.int32)
    return np.array(say(f"{len(request.prompt_ids)}:{text[:40]}"), np.int32)


def scripted(script=play, **options) -> ScriptedSampler:
    return ScriptedSampler(script=script, vocab_size=VOCAB_SIZE, context_length=100_000, **options)


class GrowingRenderer(ByteRenderer):
    """Says what a completion begins with, for streams."""

    thread_safe = True

    def stable_text(self, completion_ids, prompt_ids=None):
        ids = completion_ids.tolist()
        ids = ids[: ids.index(CALL)] if CALL in ids else ids
        return "", self.decode(ids).rstrip("\ufffd")


class Whole(SamplerProxy):
    """A sampler that shows no tokens before the end."""

    async def generate(self, request):
        return await self._sampler.generate(request)


class Held(Whole):
    """Answers its first requests once they are released."""

    def __init__(self, sampler, count):
        super().__init__(sampler)
        self.num_asked, self._count, self.released = 0, count, asyncio.Event()

    def hold(self, count):
        """Hold so many more."""
        self._count = self.num_asked + count

    async def generate(self, request):
        self.num_asked += 1
        if self.num_asked <= self._count:
            await self.released.wait()
        return await super().generate(request)


@contextlib.asynccontextmanager
async def gateway_over(sampler=None, **options):
    async with Gateway(sampler or scripted(), ByteRenderer(), **options) as gateway:
        yield gateway


class Client:
    """Asks as a plain HTTP client would, and keeps the last status."""

    def __init__(self, http, episode, **headers):
        self.http, self.episode = http, episode
        self.headers = {"authorization": f"Bearer {episode.api_key}", **headers}
        self.status = None

    async def post(self, route, body, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"content-type": "application/json", **self.headers, **headers}
        async with self.http.post(f"{self.episode.base_url}/{route}", data=data, headers=sent) as answer:
            self.status = answer.status
            return await answer.json()

    async def chat(self, messages, headers=None, **fields):
        return await self.post("chat/completions", {"model": "m", "messages": messages, **fields}, **(headers or {}))

    async def say(self, messages, headers=None, **fields):
        """The assistant's message."""
        answer = await self.chat(messages, headers, **fields)
        assert self.status == 200, answer
        return answer["choices"][0]["message"]
