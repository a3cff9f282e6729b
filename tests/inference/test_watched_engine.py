"""The embedded engine shows tokens as it draws them, and stops at the token it is told to; nothing else changes."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from test_torch_engine import make, request

from byte_renderer import ByteRenderer
from verbatim.core.errors import SamplerFault
from verbatim.core.sampling import SamplingParams
from verbatim.core.types import StopReason
from verbatim.inference.sampler import ShowsTokens, generate_watched
from verbatim.models.renderers.renderer import ParsedResponse
from verbatim.rollouts import EpisodeLimits
from verbatim.rollouts.agent_loop import AgentLoop
from verbatim.rollouts.recorder import Recorder

pytestmark = pytest.mark.realtime


@pytest.fixture
async def sampler(models):
    sampler = make(models["tied"])
    yield sampler
    await sampler.close()


async def test_a_watched_completion_is_the_same_and_every_token_but_the_last_is_shown(models):
    sampler = make(models["tied"], deterministic=True)
    assert isinstance(sampler, ShowsTokens)
    alone = await sampler.generate(request(max_tokens=20, seed=3))
    shown: list[list[int]] = []
    threads: set[str] = set()

    def watch(ids):
        shown.append(list(ids))
        threads.add(threading.current_thread().name)
        return False

    watched = await generate_watched(sampler, request(max_tokens=20, seed=3), watch)
    await sampler.close()
    assert watched.ids.tolist() == alone.ids.tolist()
    assert watched.logprobs.tolist() == alone.logprobs.tolist()
    assert shown == [[token] for token in alone.ids.tolist()[:-1]]
    assert (watched.stop_reason, threads) == (StopReason.LENGTH, {"verbatim-sampler"})


async def test_a_rollouts_stop_string_ends_its_turn_in_the_engine(sampler):
    """The text of an id is a letter: the stop string is of three tokens that the model samples one after the other."""

    class Letters(ByteRenderer):
        stop_token_ids = ()

        def decode(self, ids):
            return "".join(chr(0x4E00 + int(i)) for i in ids)

        def parse_response(self, completion_ids, prompt_ids=None, tools=None):
            return ParsedResponse(content=self.decode(completion_ids))

    async def turn(**params):
        loop = AgentLoop(
            sampler=sampler,
            renderer=Letters(),
            params=SamplingParams(**params),
            seed=3,
            limits=EpisodeLimits(max_context=128),
            recorder=Recorder(97),
        )
        return await loop.complete(np.array([1, 2, 3], np.int32), loop.params), loop

    alone, _ = await turn(max_tokens=20)
    stop = Letters().decode(alone.ids[5:8])
    size = next(n for n in range(1, 21) if stop in Letters().decode(alone.ids[:n]))
    before = sampler.stats().sampled_tokens
    ended, loop = await turn(max_tokens=20, stop=(stop,))
    assert ended.ids.tolist() == alone.ids[:size].tolist()
    assert (ended.stop_reason, len(ended.logprobs), len(ended.policy_versions)) == (StopReason.STOP, size, size)
    assert (sampler.stats().sampled_tokens - before, loop.recorder.num_unrecorded_tokens) == (size, 0)


async def test_nothing_is_drawn_after_the_token_that_ends_a_completion(sampler):
    alone = await sampler.generate(request(max_tokens=20, seed=3))
    before = sampler.stats().sampled_tokens
    seen: list[int] = []

    def watch(ids):
        seen.extend(ids)
        return len(seen) == 7

    others = [asyncio.ensure_future(sampler.generate(request(max_tokens=20, seed=k))) for k in (4, 5)]
    ended = await sampler.generate_watched(request(max_tokens=20, seed=3), watch)
    assert ended.ids.tolist() == seen == alone.ids.tolist()[:7]
    assert (ended.stop_reason, len(ended.logprobs), len(ended.policy_versions)) == (StopReason.STOP, 7, 7)
    assert [len(completion.ids) for completion in await asyncio.gather(*others)] == [20, 20]
    assert sampler.stats().sampled_tokens - before == 7 + 40
    assert sampler.stats().num_running == 0


async def test_the_next_turn_finds_the_prefix_of_a_completion_that_was_ended(sampler):
    ended = await sampler.generate_watched(request(max_tokens=20, seed=3, session="a"), lambda ids: True)
    before = sampler.stats().prefix_hit_tokens
    prompt = [1, 2, 3, *ended.ids.tolist(), 9]
    again = await sampler.generate(request(prompt=prompt, max_tokens=5, seed=3, session="a"))
    assert sampler.stats().prefix_hit_tokens - before == 3
    fresh = await sampler.generate(request(prompt=prompt, max_tokens=5, seed=3, session="b"))
    assert np.allclose(again.logprobs, fresh.logprobs, atol=1e-5)


async def test_whoever_watches_badly_fails_alone_and_the_tokens_are_counted(sampler):
    def watch(ids):
        raise LookupError("no such word")

    other = asyncio.ensure_future(sampler.generate(request(max_tokens=20)))
    with pytest.raises(SamplerFault, match="no such word") as fault:
        await sampler.generate_watched(request(max_tokens=20), watch)
    assert fault.value.num_tokens == 1
    assert len((await other).ids) == 20
    assert (await sampler.generate(request(max_tokens=3))).stop_reason is StopReason.LENGTH
