"""Turns of exact ids, for environments that render by themselves: recorded like any other, limits and all."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from byte_renderer import END, VOCAB_SIZE, ByteRenderer, call, say, text
from verbatim.core.errors import RecordError
from verbatim.core.types import KeptSets, StopReason
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler, default_logprob
from verbatim.rollouts import AgentLoop, EpisodeLimits, EpisodeOver
from verbatim.rollouts.recorder import Recorder

PARAMS = SamplingParams(max_tokens=50, temperature=0.5, stop_token_ids=(END,))


def loop_over(*script: list[int], limits: EpisodeLimits | None = None, **fields: Any) -> AgentLoop:
    sampler = ScriptedSampler(script=script, vocab_size=VOCAB_SIZE, context_length=100, **fields)
    return AgentLoop(
        sampler=sampler,
        renderer=ByteRenderer(),
        params=SamplingParams(),
        seed=3,
        limits=limits or EpisodeLimits(max_context=100),
        recorder=Recorder(VOCAB_SIZE),
    )


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


async def test_a_turn_of_exact_ids_is_recorded_as_it_was_sampled():
    loop = loop_over(call("add", a=1), policy_version=4)
    completion = await loop.complete(ids(1, 2, 3), PARAMS, "solver")
    (turn,) = loop.turns
    assert turn.prompt_ids.tolist() == [1, 2, 3]
    assert turn.completion_ids.tolist() == completion.ids.tolist() == call("add", a=1)
    assert turn.logprobs.tolist() == [float(np.float32(default_logprob(i))) for i in call("add", a=1)]
    assert set(turn.policy_versions.tolist()) == {4}
    assert (turn.temperature, turn.agent, turn.tool_calls[0].name) == (0.5, "solver", "add")


async def test_one_that_is_not_to_be_trained_is_recorded_whole_and_says_so():
    loop = loop_over(say("no"), say("yes"))
    completion = await loop.complete(ids(1), PARAMS, trained=False)
    await loop.complete(ids(1), PARAMS)
    assert [turn.trained for turn in loop.turns] == [False, True]
    assert loop.turns[0].logprobs.tolist() == completion.logprobs.tolist()
    assert len(loop.turns[0].completion_ids) == 3


async def test_a_completion_that_was_cut_off_is_returned_and_the_next_may_follow():
    loop = loop_over(text("abcdef"), say("x"))
    first = await loop.complete(ids(1), SamplingParams(max_tokens=2, stop_token_ids=(END,)))
    assert (first.stop_reason, len(first.ids)) == (StopReason.LENGTH, 2)
    await loop.complete(ids(1, 2), PARAMS)
    assert len(loop.turns) == 2


async def test_the_room_that_is_left_bounds_a_completion_and_none_ends_the_episode():
    loop = loop_over(text("a" * 90), say("x"), limits=EpisodeLimits(max_context=10))
    assert len((await loop.complete(ids(*[1] * 8), PARAMS)).ids) == 2
    with pytest.raises(EpisodeOver) as over:
        await loop.complete(ids(*[1] * 10), PARAMS)
    assert over.value.stop_reason is StopReason.LENGTH


async def test_turns_of_exact_ids_count_against_max_turns():
    loop = loop_over(say("a"), say("b"), limits=EpisodeLimits(max_turns=1, max_context=100))
    await loop.complete(ids(1), PARAMS)
    with pytest.raises(EpisodeOver) as over:
        await loop.complete(ids(1), PARAMS)
    assert over.value.stop_reason is StopReason.MAX_TURNS


async def test_each_turn_of_an_agent_draws_with_a_seed_of_its_own():
    loop = loop_over(say("a"), say("b"), say("c"))
    await loop.complete(ids(1), PARAMS)
    await loop.complete(ids(1), PARAMS)
    await loop.complete(ids(1), PARAMS, "other")
    assert len({request.seed for request in loop.sampler.requests}) == 3


async def test_what_the_sampler_returned_is_checked_here_too():
    loop = loop_over(say("ab"), trouble={0: "wrong_length"})
    with pytest.raises(RecordError):
        await loop.complete(ids(1), PARAMS)


class Cutting(ScriptedSampler):
    """Says of each token that it was drawn among these ids."""

    kept: list[list[int]] | None = None

    async def generate_watched(self, request, watch):
        completion = await super().generate_watched(request, watch)
        return dataclasses.replace(completion, kept_sets=None if self.kept is None else KeptSets.of(self.kept))

    async def generate(self, request):
        return await self.generate_watched(request, lambda _: False)


CUT = dataclasses.replace(PARAMS, top_k=2, return_kept_sets=True)


async def cut_turn(kept: list[list[int]] | None, params: SamplingParams = CUT) -> AgentLoop:
    loop = loop_over(say("ab"))
    loop.sampler = Cutting(script=[say("ab")], vocab_size=VOCAB_SIZE, context_length=100)
    loop.sampler.kept = kept
    await loop.complete(ids(1), params)
    return loop


async def test_a_turn_of_a_cut_distribution_has_the_ids_that_were_kept():
    a, b, end = say("ab")
    loop = await cut_turn([[a, 7], [], [end]])
    kept = loop.turns[0].kept_sets
    assert [kept[place].tolist() for place in range(3)] == [[7, a], [], [end]]
    stopped = await cut_turn([[a, 7], [b, 9], [end]], dataclasses.replace(CUT, stop=("a",)))
    assert stopped.turns[0].completion_ids.tolist() == [a] and len(stopped.turns[0].kept_sets) == 1


@pytest.mark.parametrize(
    ("kept", "said"),
    [
        (None, "a completion of 3 ids came without its kept sets"),
        ([[5], [6], [7]], "do not include the id"),
        ([[5]], "kept_sets: 1 for 3 completion ids"),
        ([[ord("a"), VOCAB_SIZE], [], []], "kept_sets: an id is outside the vocabulary"),
    ],
)
async def test_kept_sets_that_are_missing_or_wrong_fail_the_turn_and_its_tokens_are_counted(kept, said):
    counted: list[int] = []
    loop = AgentLoop(
        sampler=Cutting(script=[say("ab")], vocab_size=VOCAB_SIZE, context_length=100),
        renderer=ByteRenderer(),
        params=SamplingParams(),
        seed=3,
        limits=EpisodeLimits(max_context=100),
        recorder=Recorder(VOCAB_SIZE, counted.append),
    )
    loop.sampler.kept = kept
    with pytest.raises(RecordError, match=said):
        await loop.complete(ids(1), CUT)
    assert counted == [3] and loop.recorder.num_unrecorded_tokens == 3 and not loop.turns


async def test_without_a_cut_or_where_the_bias_is_accepted_no_kept_sets_are_needed():
    for params in (dataclasses.replace(CUT, top_k=0), dataclasses.replace(CUT, return_kept_sets=False)):
        assert (await cut_turn(None, params)).turns[0].kept_sets is None


async def test_messages_are_those_that_were_told():
    loop = loop_over(say("a"))
    await loop.complete(ids(1), PARAMS)
    assert loop.messages() == ()
    loop.tell([{"role": "user", "content": "hi"}])
    assert loop.messages() == ({"role": "user", "content": "hi"},)
