"""Tokens that are drawn for episodes elsewhere are counted one by one, whatever becomes of whoever asked for them."""

import asyncio
import sys
from collections.abc import Mapping

import numpy as np
import pytest

from byte_renderer import VOCAB_SIZE, say
from run.orchestrator.virtual_runs import virtual_time
from verbatim.core.errors import RecordError, SamplerFault, UsageError
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import MultiTurnRollout, Recorder
from verbatim.rollouts.draws import CountingSampler
from waiting import until


def request(session):
    return SampleRequest(prompt_ids=np.array([1], np.int32), params=SamplingParams(), seed=0, session=session)


def counted(**more):
    engine = ScriptedSampler(script=lambda r: say("abc"), vocab_size=VOCAB_SIZE, context_length=100, **more)
    return CountingSampler(engine), engine


async def test_tokens_go_to_the_count_of_the_try_that_they_are_drawn_for():
    sampler, _ = counted()
    sampled = []
    one, two = Recorder(VOCAB_SIZE, sampled.append), Recorder(VOCAB_SIZE, sampled.append)
    first, second = sampler.open(one), sampler.open(two)
    assert first.session != second.session
    for session in (f"{first.session}/main", f"{second.session}/main", f"{first.session}/sub/1"):
        assert (await sampler.generate(request(session))).ids.tolist() == say("abc")
    assert (first.num_tokens, one.num_sampled_tokens) == (8, 8)
    assert (second.num_tokens, two.num_sampled_tokens) == (4, 4)
    assert sampled == [4, 4, 4]


async def test_nobody_draws_for_a_try_that_is_not_under_way():
    sampler, engine = counted()
    ended = sampler.open(Recorder(VOCAB_SIZE))
    sampler.close_attempt(ended)
    for session in (f"{ended.session}/main", "", "try-99/main"):
        with pytest.raises(SamplerFault, match="no episode has the session"):
            await sampler.generate(request(session))
    assert engine.requests == []


async def test_giving_up_ends_what_is_being_drawn_and_the_count_is_final():
    sampler, engine = counted(trouble={1: "hang"})
    lost: list[Mapping[str, int]] = []
    recorder = Recorder(VOCAB_SIZE, None, lost.append)
    current = sampler.open(recorder)
    await sampler.generate(request(f"{current.session}/main"))
    hanging = asyncio.create_task(sampler.generate(request(f"{current.session}/main")))
    await until(lambda: engine.num_in_flight == 1)
    await current.end()
    assert engine.num_in_flight == 0
    for request_of_a_lost_worker in (hanging, sampler.generate(request(f"{current.session}/main"))):
        completion = await request_of_a_lost_worker
        assert (completion.ids.tolist(), completion.stop_reason) == ([], "cancelled")
    assert len(engine.requests) == 2
    recorder.lose(current.num_tokens)
    assert (current.num_tokens, recorder.num_sampled_tokens, lost) == (4, 0, [{"lost_worker": 4}])


async def test_a_request_that_is_cancelled_is_cancelled_in_the_engine():
    sampler, engine = counted(trouble={0: "hang"})
    current = sampler.open(Recorder(VOCAB_SIZE))
    hanging = asyncio.create_task(sampler.generate(request(f"{current.session}/main")))
    await until(lambda: engine.num_in_flight == 1)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert (engine.num_in_flight, engine.num_cancelled, current.num_tokens) == (0, 1, 0)


@virtual_time
async def test_tokens_that_come_after_the_end_of_an_episode_are_refused_as_everywhere():
    sampler, _ = counted(seconds_per_token=0.01)
    recorder = Recorder(VOCAB_SIZE)
    current = sampler.open(recorder)
    late = asyncio.create_task(sampler.generate(request(f"{current.session}/main")))
    await asyncio.sleep(0.025)  # two of four tokens are drawn
    recorder.close()
    with pytest.raises(RecordError, match="after the episode had ended"):
        await late
    assert recorder.late is not None and recorder.num_sampled_tokens == 0


async def test_only_the_run_itself_changes_the_weights(tmp_path):
    sampler, engine = counted()
    with pytest.raises(SamplerFault, match="only the run updates weights"):
        await sampler.update_weights(tmp_path, 1)
    await sampler.close()
    assert engine.updates == []
    assert (await engine.generate(request(""))).ids.tolist() == say("abc")  # it is still open
    assert (sampler.context_length, sampler.vocab_size, sampler.policy_version) == (100, VOCAB_SIZE, 0)
    assert np.isnan((await sampler.prompt_logprobs(np.array([1, 2], np.int32)))[0])


def test_without_ray_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"pip install 'verbatim-rl\[ray\]'"):
        MultiTurnRollout.remote(sampler=None, template=None)
