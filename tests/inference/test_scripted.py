import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from verbatim.core.errors import ModelError, RecordError, SamplerFault
from verbatim.core.types import StopReason
from verbatim.inference import Sampler, SampleRequest, SamplingParams
from verbatim.inference.scripted import ScriptedSampler


def request(prompt=(1, 2), **params):
    return SampleRequest(prompt_ids=np.array(prompt, np.int32), params=SamplingParams(**params), seed=0)


def make(script=((5, 6, 7),), **fields):
    return ScriptedSampler(script=script, vocab_size=10, context_length=16, **fields)


async def test_it_is_a_sampler():
    assert isinstance(make(), Sampler)


async def test_completions_come_in_order_by_prompt_or_from_a_function():
    in_order = make([[3], [4, 5]])
    assert [(await in_order.generate(request())).ids.tolist() for _ in range(2)] == [[3], [4, 5]]
    by_prompt = make({(1, 2): [3], (1,): [4]})
    assert (await by_prompt.generate(request((1,)))).ids.tolist() == [4]
    called = make(lambda r: [len(r.prompt_ids)])
    assert (await called.generate(request((1, 1, 1)))).ids.tolist() == [3]


async def test_a_script_that_has_nothing_to_say_is_an_error():
    with pytest.raises(RecordError, match="has 1 completions, but request 1 came"):
        sampler = make()
        for _ in range(2):
            await sampler.generate(request())
    with pytest.raises(RecordError, match=r"no completion for the prompt \(1, 2\)"):
        await make({}).generate(request())


async def test_logprobs_tell_which_token_they_belong_to():
    completion = await make([[1, 3, 4]]).generate(request())
    assert completion.logprobs.tolist() == [-0.5, -0.25, pytest.approx(-0.2)]
    assert completion.logprobs.dtype == np.float32
    assert (await make(logprob=None).generate(request())).logprobs is None
    assert (await make(logprob=lambda i: -float(i)).generate(request())).logprobs.tolist() == [-5, -6, -7]


@pytest.mark.parametrize(
    ("prompt", "params", "ids", "reason"),
    [
        ((1,), {}, [5, 6, 7], StopReason.LENGTH),
        ((1,), {"stop_token_ids": (6,)}, [5, 6], StopReason.STOP),
        ((1,), {"stop_token_ids": (7,)}, [5, 6, 7], StopReason.STOP),
        ((1,), {"max_tokens": 2, "stop_token_ids": (7,)}, [5, 6], StopReason.LENGTH),
        ((1,), {"max_tokens": 2, "stop_token_ids": (6,)}, [5, 6], StopReason.STOP),
        ((1,) * 15, {}, [5], StopReason.LENGTH),
    ],
)
async def test_it_stops_where_an_engine_would(prompt, params, ids, reason):
    completion = await make().generate(request(prompt, **params))
    assert (completion.ids.tolist(), completion.stop_reason) == (ids, reason)


async def test_an_empty_completion_is_possible():
    completion = await make([[]]).generate(request())
    assert (len(completion.ids), len(completion.logprobs), completion.stop_reason) == (0, 0, StopReason.LENGTH)


async def test_impossible_prompts_are_refused_and_not_recorded():
    sampler = make()
    for prompt in ([], [10], [1] * 16):
        with pytest.raises(RecordError):
            await sampler.generate(request(np.array(prompt, np.int32)))
    assert sampler.requests == []


async def test_each_token_has_the_version_of_its_own_time():
    async def update_before_the_fifth(_):
        if sampler.num_drawn == 4:
            await sampler.update_weights(Path("weights/1"), 1)

    sampler = make([[1] * 10], pause=update_before_the_fifth)
    assert (await sampler.generate(request())).policy_versions.tolist() == [0] * 4 + [1] * 6
    assert (sampler.updates, sampler.policy_version) == ([(Path("weights/1"), 1)], 1)


async def test_it_waits_as_long_as_it_is_told_before_each_token():
    waited = []

    async def pause(seconds):
        waited.append((seconds, sampler.num_drawn))

    sampler = make(seconds_per_token=0.5, pause=pause)
    await sampler.generate(request())
    assert waited == [(0.5, 0), (0.5, 1), (0.5, 2)]


async def test_an_update_can_be_told_to_fail():
    sampler = make(failing_updates=frozenset({2}))
    with pytest.raises(ModelError):
        await sampler.update_weights(Path("x"), 2)
    assert (sampler.updates, sampler.policy_version) == ([], 0)


async def test_trouble_comes_to_the_requests_it_was_scripted_for():
    script = [[5, 6]] * 5
    sampler = make(script, trouble={1: "fail", 2: "wrong_length", 3: "outside_vocabulary", 4: "nan"})
    assert (await sampler.generate(request())).ids.tolist() == [5, 6]
    with pytest.raises(SamplerFault, match="request 1 fails"):
        await sampler.generate(request())
    assert len((await sampler.generate(request())).logprobs) == 1
    assert (await sampler.generate(request())).ids.tolist() == [5, 10]
    assert np.isnan((await sampler.generate(request())).logprobs).tolist() == [False, True]
    assert len(sampler.requests) == 5


async def test_trouble_can_depend_on_the_request():
    sampler = make([[5]] * 2, trouble=lambda index, r: "fail" if r.session == "bad" else None)
    assert (await sampler.generate(request())).ids.tolist() == [5]
    bad = SampleRequest(prompt_ids=np.array([1], np.int32), params=SamplingParams(), seed=0, session="bad")
    with pytest.raises(SamplerFault):
        await sampler.generate(bad)


async def test_a_hanging_request_ends_when_it_is_cancelled_or_the_sampler_closed():
    sampler = make([[5], [6]], trouble={0: "hang", 1: "hang"})
    first, second = (asyncio.create_task(sampler.generate(request())) for _ in range(2))
    await asyncio.sleep(0)
    assert sampler.num_in_flight == 2
    first.cancel()
    await asyncio.wait([first])
    assert (sampler.num_cancelled, sampler.num_in_flight) == (1, 1)
    await sampler.close()
    await sampler.close()
    completion = await second
    assert (len(completion.ids), completion.stop_reason) == (0, StopReason.CANCELLED)
    with pytest.raises(SamplerFault, match="closed"):
        await sampler.generate(request())


async def test_prompt_logprobs_leave_the_first_token_unknown():
    logprobs = await make().prompt_logprobs(np.array([9, 1, 3], np.int32))
    assert np.isnan(logprobs[0]) and logprobs[1:].tolist() == [-0.5, -0.25]
    with pytest.raises(SamplerFault):
        await make(logprob=None).prompt_logprobs(np.array([1], np.int32))


@pytest.mark.realtime
def test_it_needs_no_torch():
    code = "import sys, verbatim.inference.scripted; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
