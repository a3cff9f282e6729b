"""Every way in which a trained token can differ from what was sampled is counted."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from verbatim import Trajectory, Turn, build_samples
from verbatim.inference import SampleRequest, SamplingParams
from verbatim.inspection.envcheck.exactness import TellingSampler, num_differences


def played():
    """Two turns, the second after the first."""
    sampler = TellingSampler(script=[[5, 5, 2], [6, 2]], vocab_size=10, context_length=99)

    async def generate(prompt):
        params = SamplingParams(max_tokens=9, stop_token_ids=(2,))
        return await sampler.generate(SampleRequest(prompt_ids=np.array(prompt, np.int32), params=params, seed=0))

    first = asyncio.run(generate([1, 3]))
    second = asyncio.run(generate([1, 3, 5, 5, 2, 4]))
    turns = [
        Turn(
            prompt_ids=request.prompt_ids, completion_ids=c.ids, logprobs=c.logprobs, policy_versions=c.policy_versions
        )
        for request, c in sampler.returned
    ]
    assert np.unique([*first.logprobs, *second.logprobs]).size == 5
    return sampler, turns


def but(turn, **changes):
    """The turn with something else in it."""
    names = ("prompt_ids", "completion_ids", "logprobs", "policy_versions")
    return Turn(**{**{name: getattr(turn, name) for name in names}, **changes})


def samples_of(turns):
    return build_samples(Trajectory(example_id="x", turns=tuple(turns), advantage=1.0))


def test_what_is_trained_as_it_was_returned_does_not_differ():
    sampler, turns = played()
    (sample,) = samples_of(turns)
    assert num_differences(sampler.returned, [sample]) == 0
    assert (
        num_differences(sampler.returned, build_samples(Trajectory(example_id="x", turns=tuple(turns)), "branching"))
        == 0
    )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: [t[0]], 2),  # the second is lost
        (lambda t: [*t, t[1]], 2),  # the second is trained twice
        (lambda t: [t[0], but(t[1], prompt_ids=np.array([1, 4], np.int32))], 2),  # in another context
        (lambda t: [but(t[0], completion_ids=np.array([5, 7, 2], np.int32)), t[1]], 1),  # another id
        (lambda t: [t[0], but(t[1], policy_versions=np.array([1, 2], np.int32))], 1),
        (lambda t: [t[0], but(t[1], logprobs=-np.ones(2, np.float32))], 4),  # unknown twice, lost twice
    ],
)
def test_differences(change, expected):
    sampler, turns = played()
    assert num_differences(sampler.returned, samples_of(change(turns))) == expected


def test_tokens_known_to_be_cut_off_are_no_difference():
    sampler, turns = played()
    cut = but(turns[1], completion_ids=[6], logprobs=turns[1].logprobs[:1], policy_versions=[2])
    samples = samples_of([turns[0], cut])
    assert (num_differences(sampler.returned, samples), num_differences(sampler.returned, samples, num_cut=1)) == (1, 0)
