"""A budget of sampled tokens for an episode: turns are cut to what is left of it, and it is never exceeded."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from byte_renderer import END, VOCAB_SIZE, ByteRenderer, say, text
from verbatim import Trajectory
from verbatim.config.orchestrator import OrchestratorConfig
from verbatim.core.types import StopReason
from verbatim.inference import SamplingParams
from verbatim.inference.chat.answer import ChatAnswer
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import EpisodeLimits
from verbatim.rollouts.agent_loop import AgentLoop
from verbatim.rollouts.chat_loop import ChatLoop
from verbatim.rollouts.loop import EpisodeOver
from verbatim.rollouts.recorder import Recorder
from verbatim.run.orchestrator.assemble import length_limit_metrics
from verbatim.run.rollouts import limits_of

ASK = {"role": "user", "content": "go"}


def loop_over(*script, budget, max_tokens=50, **params):
    sampler = ScriptedSampler(script=script, vocab_size=VOCAB_SIZE, context_length=500)
    loop = AgentLoop(
        sampler=sampler,
        renderer=ByteRenderer(),
        seed=3,
        params=SamplingParams(max_tokens=max_tokens, **params),
        limits=EpisodeLimits(max_context=500, max_total_completion_tokens=budget),
        recorder=Recorder(VOCAB_SIZE),
    )
    return loop, sampler


async def test_a_turn_is_cut_to_what_is_left_and_ends_the_episode():
    loop, sampler = loop_over(say("abc"), say("defgh"), say("no"), budget=7)
    first = await loop.sample([ASK])
    with pytest.raises(EpisodeOver) as over:
        await loop.sample([ASK, first, ASK])
    assert [request.params.max_tokens for request in sampler.requests] == [7, 3]  # "abc" and its end are 4 tokens
    assert over.value.message["content"] == "def"
    assert [turn.stop_reason for turn in loop.turns] == [StopReason.STOP, StopReason.LENGTH]
    assert (loop.stop_reason, loop.recorder.num_sampled_tokens, loop.tokens_left) == (StopReason.LENGTH, 7, 0)
    with pytest.raises(EpisodeOver):
        await loop.sample([ASK])
    assert len(sampler.requests) == 2


async def test_a_budget_that_a_turn_uses_up_exactly_leaves_none_for_the_next():
    loop, sampler = loop_over(say("abc"), say("no"), budget=4)
    message = await loop.sample([ASK])
    assert (message["content"], loop.turns[0].stop_reason) == ("abc", StopReason.STOP)
    with pytest.raises(EpisodeOver) as over:
        await loop.sample([ASK, message, ASK])
    assert (over.value.stop_reason, len(sampler.requests)) == (StopReason.LENGTH, 1)


async def test_turns_at_the_same_time_never_exceed_it():
    loop, sampler = loop_over(*[say("abcdefgh")] * 5, budget=20, max_tokens=8)
    answers = await asyncio.gather(*(loop.sample([ASK], agent=f"sub/{k}") for k in range(5)), return_exceptions=True)
    assert sum(request.params.max_tokens for request in sampler.requests) == 20
    assert [request.params.max_tokens for request in sampler.requests] == [8, 8, 4]
    assert [answer.stop_reason for answer in answers if isinstance(answer, EpisodeOver)] == [StopReason.LENGTH] * 5
    assert loop.recorder.num_sampled_tokens == 20


async def test_tokens_behind_a_stop_string_are_in_no_turn_and_take_nothing_of_it():
    loop, _ = loop_over(say("ab;cdef"), say("ghij"), budget=6, stop=(";",))
    await loop.complete(np.array([1], np.int32), loop.params)
    assert loop.tokens_left == 3
    completion = await loop.complete(np.array([1], np.int32), loop.params)
    assert (completion.ids.tolist(), completion.stop_reason) == (text("ghi"), StopReason.LENGTH)


class Server:
    """A chat server that counts four tokens for each answer."""

    api = SimpleNamespace(model="m", processed_logprobs=False)

    def __init__(self):
        self.bodies = []

    async def complete(self, body, errors):
        self.bodies.append(body)
        return ChatAnswer(
            content="yes",
            reasoning=None,
            tool_calls=(),
            stop_reason=StopReason.STOP,
            prompt_ids=None,
            usage={"completion_tokens": 4},
            completion_ids=None,
            logprobs=None,
        )


async def test_a_chat_server_counts_by_itself():
    server = Server()
    loop = ChatLoop(
        connection=server,
        params=SamplingParams(max_tokens=50),
        recorder=Recorder(VOCAB_SIZE),
        limits=EpisodeLimits(max_total_completion_tokens=7),
        seed_of=lambda number: None,
    )
    messages = [ASK]
    for _ in range(2):
        messages = [*messages, await loop.sample(messages), ASK]
    with pytest.raises(EpisodeOver):
        await loop.sample(messages)
    assert [body["max_tokens"] for body in server.bodies] == [7, 3]
    assert loop.stop_reason is StopReason.LENGTH


def ended(reason):
    return Trajectory(example_id="x", stop_reason=reason, truncated=reason.truncated, trajectory_id=str(reason))


def test_each_reason_of_truncated_episodes_has_its_share():
    reasons = (StopReason.STOP, StopReason.LENGTH, StopReason.LENGTH, StopReason.MAX_TURNS)
    episodes = [ended(reason) for reason in reasons]
    assert length_limit_metrics(episodes) == {"truncated/length": 0.5, "truncated/max_turns": 0.25}
    assert length_limit_metrics(episodes[:1]) == {}


def test_an_environments_table_has_the_budget():
    orchestrator = OrchestratorConfig.model_validate(
        {"train": {"env": [{"id": "guess_number", "max_total_completion_tokens": 300}, {"id": "calculator"}]}}
    )
    limits = [limits_of(orchestrator, env).max_total_completion_tokens for env in orchestrator.train.env]
    assert limits == [300, None]


async def test_without_a_budget_turns_have_max_tokens():
    loop, sampler = loop_over(say("abc"), budget=None)
    await loop.sample([ASK])
    assert (sampler.requests[0].params.max_tokens, loop.tokens_left) == (50, None)
    assert sampler.requests[0].params.stop_token_ids == (END,)
