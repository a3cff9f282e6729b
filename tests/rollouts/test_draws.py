"""One call at a time needs no task of its own: its tokens are counted whatever ends it."""

import asyncio

import numpy as np
import pytest

from byte_renderer import VOCAB_SIZE, say
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.cancelled import cancelled
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import Recorder
from verbatim.rollouts.draws import Draws

REQUEST = SampleRequest(prompt_ids=np.array([1], np.int32), params=SamplingParams(), seed=0)


class Slow(ScriptedSampler):
    """Draws for ever; once it is cancelled it says some turns of the loop later that it had drawn four tokens."""

    def __init__(self):
        super().__init__(script=lambda r: say("ab"), vocab_size=VOCAB_SIZE, context_length=100)
        self.begun = asyncio.Event()

    async def generate(self, request):
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            for _ in range(10):
                await asyncio.sleep(0)
            raise cancelled(4) from None


def recording():
    recorder = Recorder(VOCAB_SIZE)
    return recorder, Draws(recorder)


async def test_a_call_alone_runs_on_its_callers_task():
    recorder, draws = recording()
    tasks = []

    class Notes(ScriptedSampler):
        async def generate(self, request):
            tasks.append(asyncio.current_task())
            return await super().generate(request)

    sampler = Notes(script=lambda r: say("ab"), vocab_size=VOCAB_SIZE, context_length=100)
    completion = await draws.draw_alone(sampler, REQUEST)
    await draws.draw(sampler, REQUEST)
    assert tasks[0] is asyncio.current_task()
    assert tasks[1] is not asyncio.current_task()
    assert recorder.num_sampled_tokens == 2 * len(completion.ids) == 6


async def test_when_all_is_over_a_call_alone_is_cut_off_and_counted_before_the_end_returns():
    recorder, draws = recording()
    sampler = Slow()
    call = asyncio.create_task(draws.draw_alone(sampler, REQUEST))
    await sampler.begun.wait()
    assert await draws.end()
    assert recorder.num_sampled_tokens == draws.num_tokens == 4
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not await draws.end()
    with pytest.raises(asyncio.CancelledError):
        await draws.draw_alone(sampler, REQUEST)
    assert recorder.num_sampled_tokens == 4


async def test_a_call_alone_whose_caller_is_cancelled_is_counted_before_it_ends():
    recorder, draws = recording()
    sampler = Slow()
    call = asyncio.create_task(draws.draw_alone(sampler, REQUEST))
    await sampler.begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert recorder.num_sampled_tokens == 4
    assert not await draws.end()
