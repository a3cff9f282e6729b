"""What a teacher says in text becomes turns in the student's ids, every one of them, in order."""

import asyncio

import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer, call, say
from rollouts.chat_server import Raw, chat_server
from verbatim import Example
from verbatim.core.trajectories import build
from verbatim.environments.environment import Episode
from verbatim.environments.tools import FunctionTool
from verbatim.inference import SamplingParams
from verbatim.inference.openai import OpenAI
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import EpisodeLimits, GroupRun, RolloutSetup

pytestmark = pytest.mark.realtime


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("verbatim.inference.http.client.FIRST_PAUSE", 0.002)


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


class Sums:
    """The teacher is asked for a sum and has a tool; with `sub`, a second agent is asked for another one in between."""

    def __init__(self, sub=False):
        self.sub = sub

    def examples(self, split):
        return [Example(id="x")]

    async def start(self, example, seed):
        episode = _WithSub() if self.sub else _Sum()
        episode.seed = seed
        return episode


class _Sum(Episode):
    messages = ({"role": "user", "content": "3 4 5"},)
    tools = (FunctionTool(add),)

    async def score(self, trajectory):
        return 1.0


class _WithSub(_Sum):
    async def run(self, agent):
        messages = [*self.messages, await agent.sample(self.messages, self.tools)]
        other = [{"role": "user", "content": "8"}]
        await agent.sample(other, agent="sub")
        asked = messages[-1]["tool_calls"][0]
        messages.append({"role": "tool", "content": "7", "tool_call_id": asked["id"], "name": "add"})
        await agent.sample(messages, self.tools)


def play(environment=None, size=1, limits=None, fault=None):
    """One group, played by the teacher of a fresh server."""

    async def run(server):
        api = OpenAI(model="teacher", base_url=server.url, max_retries=2)
        async with api.connect() as connection:
            setup = RolloutSetup(
                env="sums",
                environment=environment or Sums(),
                renderer=ByteRenderer(),
                params=SamplingParams(),
                sampler=ScriptedSampler(script=[], vocab_size=VOCAB_SIZE, context_length=500),
                limits=limits or EpisodeLimits(),
                slots=asyncio.Semaphore(8),
                teacher=connection,
            )
            counted = []
            group = GroupRun(setup, Example(id="x"), index=0, size=size, run_seed=0, on_sampled=counted.append)
            return await group.run(), sum(counted)

    with chat_server(**({} if fault is None else {"fault": fault})) as server:
        return asyncio.run(run(server))


def trained(trajectory):
    built = build(trajectory, needs_logprobs=False)
    return [[int(i) for i, m in zip(s.token_ids, s.loss_mask, strict=True) if m] for s in built.samples]


def test_every_answer_is_a_turn_in_the_students_own_ids():
    group, counted = play()
    (trajectory,) = group.trajectories
    assert trajectory.error is None
    assert trajectory.reward == 1.0
    expected = [call("add", a=3, b=4), call("add", a=7, b=5), say("12")]
    assert [turn.completion_ids.tolist() for turn in trajectory.turns] == expected
    assert all(turn.logprobs is None and turn.policy_versions is None for turn in trajectory.turns)
    assert trajectory.num_breaks == 0
    assert trained(trajectory) == [[i for turn in expected for i in turn]]
    assert counted == sum(map(len, expected)) == trajectory.num_sampled_tokens
    assert [call.name for turn in trajectory.turns for call in turn.tool_calls] == ["add", "add"]
    assert all(turn.timing.tools > 0 for turn in trajectory.turns[:2])


def test_agents_are_written_apart_and_their_turns_stand_in_the_order_in_which_they_were_said():
    group, _ = play(Sums(sub=True))
    (trajectory,) = group.trajectories
    assert trajectory.error is None
    assert [turn.agent for turn in trajectory.turns] == ["main", "sub", "main"]
    assert trained(trajectory) == [[*call("add", a=3, b=4), *call("add", a=7, b=5)], say("8")]


def test_turns_run_out_as_for_a_policy():
    group, _ = play(limits=EpisodeLimits(max_turns=2))
    (trajectory,) = group.trajectories
    assert (trajectory.stop_reason, len(trajectory.turns), trajectory.error) == ("max_turns", 2, None)


def test_a_server_that_fails_for_good_fails_its_episode_and_no_other():
    failed = []

    def fault(body, number):
        if failed:
            return None
        failed.append(number)
        return Raw(status=400, body='{"error": {"message": "no"}}')

    group, _ = play(size=3, fault=fault)
    assert sorted(t.error is None for t in group.trajectories) == [False, True, True]
    (bad,) = [t for t in group.trajectories if t.error]
    assert bad.error.startswith("sampler: ") and bad.stop_reason == "api_error"


class Rewriting(Sums):
    class Episode(_Sum):
        async def run(self, agent):
            await agent.sample([{"role": "user", "content": "3"}])
            await agent.sample([{"role": "user", "content": "4"}])

    async def start(self, example, seed):
        return self.Episode()


def test_a_conversation_that_is_not_what_it_was_is_refused_on_its_trajectory():
    group, _ = play(Rewriting())
    (trajectory,) = group.trajectories
    assert trajectory.error.startswith("record: agent main: its history or its tools have changed")


class RewritingInPlace(Sums):
    """Changes what the teacher was shown: an earlier message, or an argument of the tool, in the very objects."""

    def __init__(self, of_the_tool):
        self.of_the_tool = of_the_tool

    class Episode(_Sum):
        async def run(self, agent):
            messages, tool = [{"role": "user", "content": "3"}], FunctionTool(add)
            messages.append(await agent.sample(messages, [tool]))
            if self.of_the_tool:
                tool.schema["function"]["description"] = "Subtract."
            else:
                messages[0]["content"] = "4"
            messages.append({"role": "user", "content": "5"})
            await agent.sample(messages, [tool])

    async def start(self, example, seed):
        episode = self.Episode()
        episode.of_the_tool = self.of_the_tool
        return episode


@pytest.mark.parametrize("of_the_tool", [False, True])
def test_a_conversation_that_was_edited_in_place_is_not_what_it_was_either(of_the_tool):
    group, _ = play(RewritingInPlace(of_the_tool))
    (trajectory,) = group.trajectories
    assert trajectory.error.startswith("record: agent main: its history or its tools have changed")


class SideBySide(Sums):
    """Asks one agent twice at a time."""

    class Episode(_Sum):
        async def run(self, agent):
            await asyncio.gather(*(agent.sample([{"role": "user", "content": text}]) for text in ("3", "4")))

    async def start(self, example, seed):
        return self.Episode()


def test_turns_of_one_agent_side_by_side_are_refused_on_their_trajectory_and_the_group_goes_on():
    group, counted = play(SideBySide(), size=2)
    for trajectory in group.trajectories:
        assert trajectory.error.startswith("record: agent main: its history or its tools have changed")
    assert counted == 0


def test_a_teachers_requests_are_accounted_for_on_its_trajectory():
    group, _ = play(fault=lambda body, tries: None if tries else Raw(status=500))
    (trajectory,) = group.trajectories
    assert (trajectory.info["model"], trajectory.info["request_errors"]) == ("teacher", {"status_500": 3})
    assert set(trajectory.info["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert (trajectory["turns"], trajectory.num_unrecorded_turns) == (3, 0)


@pytest.mark.parametrize("size", [4])
def test_every_request_has_a_seed_of_its_own(size):
    seeds = []
    play(size=size, fault=lambda body, number: seeds.append(body["seed"]))
    assert len(seeds) == 3 * size == len(set(seeds))
