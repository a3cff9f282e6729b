"""Tokens that lost replicas had drawn are in the ledger as `lost_replica`, whatever became of the request."""

import asyncio
import dataclasses

import numpy as np
import pytest

from byte_renderer import VOCAB_SIZE, say
from verbatim.core.errors import SamplerFault
from verbatim.core.trajectories import Ledger
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.cancelled import cancelled
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import Recorder
from verbatim.rollouts.draws import Draws

REQUEST = SampleRequest(prompt_ids=np.array([1], np.int32), params=SamplingParams(), seed=0)


class LosesReplicas(ScriptedSampler):
    """Five tokens were drawn by a replica that was lost, before the request ends as it does."""

    end = None

    async def generate(self, request):
        if self.end is not None:
            raise self.end
        return dataclasses.replace(await super().generate(request), num_lost_tokens=5)


@pytest.mark.parametrize(
    ("end", "kept"),
    [(None, 3), (cancelled(2, num_lost_tokens=5), 2), (SamplerFault("gone", num_tokens=2, num_lost_tokens=5), 2)],
)
@pytest.mark.parametrize("closed", [False, True])
async def test_the_tokens_of_lost_replicas_are_sampled_and_dropped_and_are_in_no_trajectory(end, kept, closed):
    ledger = Ledger()
    recorder = Recorder(VOCAB_SIZE, ledger.sampled_tokens, ledger.drop)
    sampler = LosesReplicas(script=lambda r: say("ab"), vocab_size=VOCAB_SIZE, context_length=100)
    sampler.end = end
    if closed:
        recorder.close()
    drawing = Draws(recorder).draw(sampler, REQUEST)
    if end is not None or closed:
        with pytest.raises((SamplerFault, asyncio.CancelledError, ValueError)):
            await drawing
    else:
        assert (await drawing).num_lost_tokens == 5
    assert recorder.num_sampled_tokens == (0 if closed else kept)
    assert dict(ledger.dropped) == {"lost_replica": 5} | ({"error": kept} if closed else {})
    ledger.check(pending=recorder.num_sampled_tokens)


async def test_without_lost_replicas_nothing_is_booked():
    booked = []
    recorder = Recorder(VOCAB_SIZE, booked.append, booked.append)
    sampler = ScriptedSampler(script=lambda r: say("ab"), vocab_size=VOCAB_SIZE, context_length=100)
    await Draws(recorder).draw(sampler, REQUEST)
    assert booked == [3]
