"""Episodes: exact ids, bounded, and whatever goes wrong stays on the trajectory."""

import asyncio
import copy
import math
from collections import Counter as Tokens

import numpy as np
import pytest

from byte_renderer import CALL, END, ROLES, VOCAB_SIZE, ByteRenderer, call, say, text
from run.orchestrator.virtual_runs import virtual_time
from verbatim import Example, RolloutIdentity, build_samples
from verbatim.core.errors import RecordError, SamplerFault
from verbatim.core.trajectories import build
from verbatim.environments.environment import Episode, Reply, succeeded
from verbatim.environments.tools import FunctionTool, ToolResult
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import AgentLoop, EpisodeLimits, GroupRun, Recorder, RolloutSetup, derive_seed, run_episode


class Counter(Episode):
    """Adds up what `add` is given; `finish` ends the episode; speaking gets a nudge."""

    def __init__(self, **faults):
        self.messages = [{"role": "user", "content": "go"}]
        self.total, self.closed, self.faults = 0, 0, faults
        self.tools = (FunctionTool(self.add, inline=True), FunctionTool(self.finish, inline=True))

    def add(self, number: int) -> ToolResult:
        """Add a number."""
        if "tool" in self.faults:
            raise RuntimeError("tool broke")
        self.total += number
        return ToolResult(content=str(self.total), reward=float(number))

    def finish(self) -> ToolResult:
        """End."""
        return ToolResult(content="bye", done=True)

    async def reply(self, message):
        if "reply" in self.faults:
            raise KeyError("reply broke")
        if message["content"] == "stop":
            return Reply(done=True, reward=0.5)
        return Reply(messages=[{"role": "user", "content": "more"}], reward=0.5)

    async def score(self, trajectory):
        if "score" in self.faults:
            value = self.faults["score"]
            if isinstance(value, BaseException):
                raise value
            return value
        return float(self.total)

    async def close(self):
        self.closed += 1
        if "close" in self.faults:
            raise OSError("close broke")


class Counters:
    def __init__(self, **faults):
        self.faults, self.started = faults, []

    def examples(self, split):
        return [Example(id="a"), Example(id="b")]

    async def start(self, example, seed):
        if "start" in self.faults:
            raise ValueError("start broke")
        episode = Counter(**self.faults)
        self.started.append(episode)
        return episode


def sampler_of(*completions, **options):
    options = {"vocab_size": VOCAB_SIZE, "context_length": 1000, **options}
    left = list(completions)
    return ScriptedSampler(script=lambda request: left.pop(0), **options)


async def play(sampler, environment=None, renderer=None, **limits):
    environment = environment or Counters()
    limits = EpisodeLimits(**limits)
    recorder = Recorder(VOCAB_SIZE)
    loop = AgentLoop(
        sampler=sampler,
        renderer=renderer or ByteRenderer(),
        params=SamplingParams(),
        limits=limits,
        recorder=recorder,
        seed=7,
    )
    return await run_episode(
        environment=environment,
        example=Example(id="a"),
        seed=7,
        loop=loop,
        identity=RolloutIdentity(example_id="a", trajectory_id="t", group_id="g", env="counters", seed=7),
    )


async def test_two_turns_with_a_tool_are_recorded_id_for_id():
    first, second = call("add", number=3), say("stop")
    trajectory = await play(sampler_of(first, second))
    opening = [ROLES["user"], *text("go"), END, ROLES["assistant"]]
    answer = [ROLES["tool"], *text("3"), END, ROLES["assistant"]]
    assert trajectory.turns[0].prompt_ids.tolist() == opening
    assert trajectory.turns[0].completion_ids.tolist() == first
    assert trajectory.turns[1].prompt_ids.tolist() == [*opening, *first, *answer]
    assert trajectory["input_ids"] == [*opening, *first, *answer, *second]
    assert [m["role"] for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[1]["tool_calls"][0]["id"] == trajectory.messages[2]["tool_call_id"] == "call_0"
    assert (trajectory.reward, trajectory.stop_reason, trajectory.truncated) == (3.0, "stop", False)
    assert [t.reward for t in trajectory.turns] == [3.0, 0.5]
    assert trajectory.error is None


async def test_the_sample_of_an_unbroken_episode_is_the_samplers_own_token_stream():
    trajectory = await play(sampler_of(call("add", number=1), say("hm"), call("finish")))
    (sample,) = build_samples(trajectory)
    last = trajectory.turns[-1]
    assert sample.token_ids.tolist() == [*last.prompt_ids.tolist(), *last.completion_ids.tolist()]
    assert sample.num_trained_tokens == trajectory.num_sampled_tokens


async def test_a_renderer_that_cannot_bridge_only_costs_samples():
    trajectory = await play(sampler_of([*text("hm<x>"), END], say("stop")), renderer=ByteRenderer(bridges=False))
    assert trajectory.error is None
    assert sum(s.num_trained_tokens for s in build_samples(trajectory)) == trajectory.num_sampled_tokens


async def test_a_prompt_that_is_rendered_again_is_noted_with_its_reason():
    class Forgetful(ByteRenderer):
        def _one(self, message):
            return super()._one({**message, "content": message["content"].removeprefix("<x>")})

    trajectory = await play(sampler_of(say("<x>hm"), say("so"), say("stop")), renderer=Forgetful(bridges=False))
    # The second prompt leaves "<x>" out; the third one is rendered too, and goes on with the second as it was sampled.
    assert trajectory.info["rendered_again"] == [{"turn": 1, "after": 0, "reason": "format_unknown"}]
    assert trajectory.num_breaks == 1
    trajectory = await play(sampler_of(say("<x>hm"), say("stop")), renderer=Forgetful())
    assert "rendered_again" not in trajectory.info
    assert trajectory.num_breaks == 0


async def test_done_ends_the_episode_and_nothing_is_sampled_after_it():
    sampler = sampler_of(call("finish")[:-1] + call("add", number=5), say("never"))
    environment = Counters()
    trajectory = await play(sampler, environment)
    assert len(trajectory.turns) == 1
    assert environment.started[0].total == 0  # the call after `finish` is not run
    assert trajectory.stop_reason == "stop"


async def test_calls_that_are_pending_at_the_last_turn_are_not_run():
    environment = Counters()
    trajectory = await play(sampler_of(call("add", number=1), call("add", number=10)), environment, max_turns=2)
    assert environment.started[0].total == 1
    assert (trajectory.stop_reason, trajectory.truncated, len(trajectory.turns)) == ("max_turns", True, 2)


async def test_running_out_of_turns_while_talking_is_max_turns():
    trajectory = await play(sampler_of(say("a"), say("b")), max_turns=2)
    assert (trajectory.stop_reason, len(trajectory.turns)) == ("max_turns", 2)


async def test_a_completion_without_room_to_end_is_cut_and_scored():
    trajectory = await play(sampler_of(text("a long speech")), max_context=10)
    assert (trajectory.stop_reason, trajectory.truncated) == ("length", True)
    assert len(trajectory.turns[0].prompt_ids) + len(trajectory.turns[0].completion_ids) == 10
    assert trajectory.messages[-1]["content"] == "a long"[: len(trajectory.turns[0].completion_ids)]
    assert trajectory.reward == 0.0


async def test_a_prompt_that_fills_the_context_is_not_sent():
    sampler = sampler_of(say("x"))
    trajectory = await play(sampler, max_context=5)
    assert (trajectory.stop_reason, trajectory.turns) == ("length", ())


async def test_a_call_that_cannot_be_read_is_answered_and_bounded():
    broken = [CALL, *text("{not json"), END]
    trajectory = await play(sampler_of(*[broken] * 9))
    assert len(trajectory.turns) == 3  # one and two retries
    assert trajectory.turns[0].parse_status in ("invalid_json", "unclosed_block")
    assert "could not be read" in trajectory.messages[2]["content"]
    assert sum(trajectory.info["tool_errors"].values()) == 3
    assert (trajectory.stop_reason, trajectory.truncated, trajectory.error) == ("malformed", True, None)
    assert trajectory.reward == 0.0  # it is scored, and learned from


async def test_an_episode_that_ends_in_unreadable_calls_is_no_success_whatever_it_earned():
    broken = [CALL, *text("{not json"), END]
    trajectory = await play(sampler_of(call("add", number=1), *[broken] * 3))
    assert (trajectory.reward, trajectory.stop_reason) == (1.0, "malformed")
    assert not succeeded(Counters(), trajectory)
    assert succeeded(Counters(), trajectory.replace(stop_reason="stop"))


async def test_a_readable_call_resets_the_retries():
    broken = [CALL, *text("{"), END]
    script = [broken, broken, call("add", number=1), broken, broken, say("stop")]
    assert len((await play(sampler_of(*script))).turns) == 6


@pytest.mark.parametrize(
    ("completion", "kind"),
    [
        (call("subtract", number=1), "unknown_tool"),
        (call("add", number="one"), "invalid_arguments"),
    ],
)
async def test_a_call_that_fits_no_tool_is_answered_counted_and_marked(completion, kind):
    trajectory = await play(sampler_of(completion, say("stop")))
    assert trajectory.info["tool_errors"] == {kind: 1}
    assert [t.parse_status for t in trajectory.turns] == [kind, "ok"]
    assert trajectory.error is None


async def test_a_tool_that_raises_is_a_message_to_the_model():
    trajectory = await play(sampler_of(call("add", number=1), say("stop")), Counters(tool=True))
    assert "tool broke" in trajectory.messages[2]["content"]
    assert trajectory.info["tool_errors"] == {"exception": 1}
    assert trajectory.error is None


@pytest.mark.parametrize(
    ("faults", "message", "turns"),
    [
        ({"start": 1}, "environment: start raised ValueError: start broke", 0),
        ({"reply": 1}, "environment: reply raised KeyError", 1),
        ({"score": RuntimeError("score broke")}, "environment: score raised RuntimeError: score broke", 1),
        ({"score": math.nan}, "environment: score returned nan", 1),
        ({"score": {"a": math.inf}}, "finite", 1),
        ({"score": "good"}, "environment: score returned 'good'", 1),
        ({"score": "1"}, "score returned '1'; expected a number or {part: number} ('1' is a string: write float(", 1),
        ({"score": {"a": "1"}}, "score returned {'a': '1'}; expected a number or {part: number} ('1' is a string", 1),
        ({"score": 10**400}, "it is larger than any float", 1),
        ({"close": 1}, "environment: close raised OSError: close broke", 1),
        ({"score": TimeoutError("slow judge")}, "environment: score raised TimeoutError", 1),
        ({"score": {"a": None}}, "environment: score returned", 1),
        ({"score": asyncio.CancelledError()}, "environment: score awaited something that was cancelled", 1),
    ],
)
async def test_a_failing_environment_fails_its_episode_alone(faults, message, turns):
    trajectory = await play(sampler_of(say("stop")), Counters(**faults))
    assert message in trajectory.error
    assert len(trajectory.turns) == turns


@pytest.mark.parametrize(
    ("seconds", "message"),
    [
        (0.0, "environment: close awaited something that was cancelled"),
        (30.0, "environment: close took more than 0.1 s"),
    ],
)
@virtual_time
async def test_an_episode_that_closes_badly_fails_alone(monkeypatch, seconds, message):
    monkeypatch.setattr("verbatim.rollouts.episode.CLOSING", 0.1)

    async def close(self):
        await asyncio.sleep(seconds)
        raise asyncio.CancelledError

    monkeypatch.setattr(Counter, "close", close)
    trajectory = await play(sampler_of(say("stop")), Counters())
    assert (trajectory.error, len(trajectory.turns)) == (message, 1)


async def test_an_episode_is_closed_once_whatever_happens():
    for faults in ({}, {"reply": 1}, {"score": math.nan}):
        environment = Counters(**faults)
        await play(sampler_of(say("stop")), environment)
        assert environment.started[0].closed == 1


async def test_reward_parts_are_added_up():
    trajectory = await play(sampler_of(say("stop")), Counters(score={"right": 1.0, "short": 0.25}))
    assert trajectory.reward == 1.25
    assert trajectory.reward_parts == {"right": 1.0, "short": 0.25}


async def test_an_engine_that_fails_fails_its_episode_and_keeps_its_turns():
    def script(request):
        if len(request.prompt_ids) > 5:
            raise SamplerFault("engine died")
        return say("a")

    sampler = ScriptedSampler(script=script, vocab_size=VOCAB_SIZE, context_length=1000)
    trajectory = await play(sampler)
    assert "sampler: engine died" in trajectory.error
    assert (len(trajectory.turns), trajectory.stop_reason) == (1, "api_error")


async def test_an_id_outside_the_vocabulary_is_refused_where_it_enters():
    sampler = ScriptedSampler(script=lambda r: [1, VOCAB_SIZE, END], vocab_size=VOCAB_SIZE + 1, context_length=99)
    trajectory = await play(sampler)
    assert trajectory.num_sampled_tokens == 3  # counted, although they cannot be recorded
    assert f"turn 0: completion_ids: id {VOCAB_SIZE} at position 1" in trajectory.error


async def test_an_episode_past_its_deadline_is_an_error_of_its_own():
    class Slow(Counters):
        async def start(self, example, seed):
            await asyncio.Event().wait()

    trajectory = await play(sampler_of(say("x")), Slow(), timeout=0.02)
    assert trajectory.error.startswith("timeout: ")


async def test_an_environment_with_its_own_control_flow_records_every_agent():
    class Delegating(Counter):
        async def run(self, agent):
            main = [{"role": "user", "content": "plan"}]
            main.append(await agent.sample(main))
            await agent.sample([{"role": "user", "content": "work"}], agent="sub/1")
            main.append({"role": "user", "content": "result"})
            await agent.sample(main)

    class Environment(Counters):
        async def start(self, example, seed):
            return Delegating()

    trajectory = await play(sampler_of(say("p"), say("w"), say("done")), Environment())
    assert [t.agent for t in trajectory.turns] == ["main", "sub/1", "main"]
    samples = build_samples(trajectory)
    assert [s.num_trained_tokens for s in samples] == [2 + 5, 2]  # "p"+END and "done"+END, then "w"+END
    assert trajectory.messages[-1]["content"] == "done"


async def test_seeds_are_a_function_of_what_they_are_for():
    assert derive_seed(1, "a", 2) == derive_seed(1, "a", 2)
    assert len({derive_seed(1, 23), derive_seed(12, 3), derive_seed(123), derive_seed("1", 23)}) == 4
    assert 0 <= derive_seed(5) < 2**63


async def test_every_turn_has_its_own_seed_and_an_episode_its_own_sessions():
    sampler = sampler_of(say("a"), say("stop"))
    await play(sampler)
    assert len({r.seed for r in sampler.requests}) == 2
    assert len({r.session for r in sampler.requests}) == 1


def setup(sampler, environment):
    return RolloutSetup(
        env="counters",
        environment=environment,
        sampler=sampler,
        renderer=ByteRenderer(),
        params=SamplingParams(),
        limits=EpisodeLimits(),
        slots=asyncio.Semaphore(8),
        run_id="today",
    )


async def test_a_group_counts_every_sampled_token_as_it_appears():
    seen = []
    sampler = ScriptedSampler(script=lambda r: say("stop"), vocab_size=VOCAB_SIZE, context_length=1000)
    run = GroupRun(setup(sampler, Counters()), Example(id="a"), index=4, size=3, run_seed=0, on_sampled=seen.append)
    group = await run.run()
    assert seen == [5, 5, 5]
    assert run.num_sampled_tokens == 15
    assert len({t.seed for t in group.trajectories}) == 3
    assert group.index == 4
    assert [t.identity for t in group.trajectories] == [
        RolloutIdentity(
            run_id="today",
            env="counters",
            example_id="a",
            group_id="train-4",
            sample_index=i,
            trajectory_id=f"train-4-{i}",
            seed=group.trajectories[i].seed,
        )
        for i in range(3)
    ]


async def test_group_level_rewards_replace_single_ones_and_a_failing_judge_fails_its_group():
    class Judged(Counters):
        async def score_group(self, trajectories):
            if "judge" in self.faults:
                raise RuntimeError("judge broke")
            return [float(i) for i in range(len(trajectories))]

    sampler = ScriptedSampler(script=lambda r: say("stop"), vocab_size=VOCAB_SIZE, context_length=1000)
    good = await GroupRun(setup(sampler, Judged()), Example(id="a"), index=0, size=3, run_seed=0).run()
    assert [t.reward for t in good.trajectories] == [0.0, 1.0, 2.0]
    bad = await GroupRun(setup(sampler, Judged(judge=1)), Example(id="a"), index=0, size=2, run_seed=0).run()
    assert all("judge broke" in t.error for t in bad.trajectories)


async def test_bridged_prompts_share_storage():
    trajectory = await play(sampler_of(*[say("aaaa")] * 5, say("stop")))
    total = len(trajectory.turns[-1].prompt_ids) + len(trajectory.turns[-1].completion_ids)
    assert trajectory.num_stored_tokens == total
    before, after = trajectory.turns[1].prompt_ids, trajectory.turns[2].prompt_ids
    assert np.array_equal(after[: len(before)], before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"messages": None}, "the episode's messages: None"),
        ({"messages": [{"content": "no role"}]}, "the episode's messages"),
        ({"tools": (FunctionTool(say), FunctionTool(say))}, "the episode's tools: two tools are called"),
        ({"state_key": lambda: 1 / 0}, "state_key raised ZeroDivisionError"),
        ({"reply": None}, "reply raised TypeError"),
    ],
)
async def test_an_episode_of_the_wrong_shape_fails_alone(changes, message):
    class Environment(Counters):
        async def start(self, example, seed):
            episode = Counter()
            for name, value in changes.items():
                setattr(episode, name, value)
            return episode

    assert message in (await play(sampler_of(say("stop")), Environment())).error


async def test_a_turn_reward_that_is_no_number_fails_its_rollout():
    class Paid(Counter):
        async def reply(self, message):
            return Reply(done=True, reward=math.nan)

    class Environment(Counters):
        async def start(self, example, seed):
            return Paid()

    assert "reply gave the reward nan" in (await play(sampler_of(say("x")), Environment())).error


async def test_agents_that_speak_at_the_same_time_have_seeds_of_their_own():
    class Parallel(Counter):
        async def run(self, agent):
            ask = [{"role": "user", "content": "same"}]
            await asyncio.gather(*(agent.sample(ask, agent=f"sub/{i}") for i in range(3)))

    class Environment(Counters):
        async def start(self, example, seed):
            return Parallel()

    sampler = sampler_of(say("a"), say("b"), say("c"))
    trajectory = await play(sampler, Environment())
    assert len({request.seed for request in sampler.requests}) == 3
    assert len(trajectory.turns) == 3


# ---- what an environment does to the messages it has shown


class EditsInPlace(Episode):
    """Shows a secret, and later changes what it has shown, in the very objects."""

    def __init__(self, edit):
        self.edit = edit

    async def start(self, example, seed):
        return self

    async def run(self, agent):
        messages = [{"role": "user", "content": "secret"}]
        messages.append(await agent.sample(messages))
        messages.append({"role": "user", "content": "again", "details": [{"n": 1}]})
        messages.append(await agent.sample(messages))
        self.edit(messages)
        messages.append({"role": "user", "content": "last"})
        await agent.sample(messages)

    async def score(self, trajectory):
        return 1.0


def redact(messages):
    messages[0]["content"] = "redacted"


def reword_the_model(messages):
    messages[1]["content"] = "other"


def change_a_nested_type(messages):
    messages[2]["details"][0]["n"] = True


@pytest.mark.parametrize("edit", [redact, reword_the_model, change_a_nested_type])
async def test_a_message_that_was_edited_in_place_is_shown_as_it_is_now_and_breaks_the_history(edit):
    trajectory = await play(sampler_of(say("one"), say("two"), say("three")), EditsInPlace(edit))
    assert trajectory.error is None
    now = [
        {"role": "user", "content": "secret"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "again", "details": [{"n": 1}]},
        {"role": "assistant", "content": "two"},
    ]
    edit(now)
    rendered = ByteRenderer(bridges=False).render_ids([*now, {"role": "user", "content": "last"}])
    assert trajectory.turns[2].prompt_ids.tolist() == rendered.tolist()
    assert trajectory.messages[: len(now)] == tuple(now)


async def test_messages_that_stay_as_they_are_are_bridged_whoever_holds_them():
    """Copies, other orders of keys and other lists are the same messages."""

    def copy_all(messages):
        messages[:] = [dict(reversed(copy.deepcopy(m).items())) for m in messages]

    class Counts(ByteRenderer):
        def bridge_to_next_turn(self, *args):
            bridged.add(len(args[0]))
            return super().bridge_to_next_turn(*args)

    bridged = set()  # by the length of the prompt that is bridged
    trajectory = await play(sampler_of(say("one"), say("two"), say("three")), EditsInPlace(copy_all), Counts())
    assert (trajectory.error, len(bridged), trajectory.num_breaks) == (None, 2, 0)


async def test_what_is_edited_while_it_is_sampled_from_is_recorded_as_it_was_shown():
    class EditsMeanwhile(EditsInPlace):
        async def run(self, agent):
            messages = [{"role": "user", "content": "secret"}]
            speaking = asyncio.ensure_future(agent.sample(messages))
            await asyncio.sleep(0)  # the prompt is rendered
            redact(messages)
            messages += [await speaking, {"role": "user", "content": "last"}]
            await agent.sample(messages)

    trajectory = await play(sampler_of(say("one"), say("two")), EditsMeanwhile(None))
    assert trajectory.error is None
    assert b"secret" in bytes(i for i in trajectory.turns[0].prompt_ids if i < 256)
    assert b"secret" not in bytes(i for i in trajectory.turns[1].prompt_ids if i < 256)


# ---- tokens whose completion nobody gets


class Runs(Episode):
    messages = ({"role": "user", "content": "go"},)

    def __init__(self, run):
        self.tasks = []
        self.run = lambda agent: run(agent, self.tasks)

    async def start(self, example, seed):
        return self

    async def score(self, trajectory):
        return 1.0


async def ticks(count):
    for _ in range(count):
        await asyncio.sleep(0)


def speak(agent, name):
    return agent.sample([{"role": "user", "content": name}], agent=name)


def slow_sampler():
    """Ten tokens, one with each turn of the event loop."""
    return ScriptedSampler(script=lambda request: say("x" * 9), vocab_size=VOCAB_SIZE, context_length=1000)


async def cancels_a_sibling(agent, tasks):
    sibling = asyncio.ensure_future(speak(agent, "sub"))
    await ticks(6)
    sibling.cancel()
    await asyncio.gather(sibling, return_exceptions=True)
    await speak(agent, "main")


async def gives_up_in_time(agent, tasks):
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await speak(agent, "sub")
    await speak(agent, "main")


@pytest.mark.parametrize("run", [cancels_a_sibling, gives_up_in_time])
@virtual_time
async def test_a_completion_that_an_environment_cuts_off_is_counted_and_dropped_as_cancelled(run):
    sampler = slow_sampler()
    sampler.seconds_per_token = 0.0 if run is cancels_a_sibling else 0.04
    trajectory = await play(sampler, Runs(run))
    assert (trajectory.error, len(trajectory.turns)) == (None, 1)
    assert 0 < trajectory.num_unrecorded_tokens == sampler.num_drawn - 10 < 10
    assert run is cancels_a_sibling or trajectory.num_unrecorded_tokens == 2
    assert build(trajectory).dropped == {"cancelled": trajectory.num_unrecorded_tokens}
    assert sum(s.num_trained_tokens for s in build_samples(trajectory)) == 10


async def test_what_is_in_flight_when_an_episode_ends_is_cut_off_counted_and_the_episode_set_aside():
    async def leaves(agent, tasks):
        tasks.append(asyncio.ensure_future(speak(agent, "behind")))
        await ticks(4)

    sampler, environment = slow_sampler(), Runs(leaves)
    trajectory = await play(sampler, environment)
    assert trajectory.error.startswith("record: turn 0: sampled or recorded after the episode had ended")
    assert (trajectory.turns, trajectory.num_unrecorded_tokens) == ((), sampler.num_drawn)
    assert 0 < sampler.num_drawn < 10  # the engine has its place back
    (end,) = await asyncio.gather(*environment.tasks, return_exceptions=True)
    assert "after the episode had ended" in str(end)


async def test_siblings_of_a_turn_that_ends_the_episode_are_cut_off_and_it_stays_whole():
    async def together(agent, tasks):
        await asyncio.gather(speak(agent, "long"), speak(agent, "sub"))

    sampler = ScriptedSampler(
        script=lambda request: [*b"no end"] if len(sampler.requests) == 1 else say("x" * 20),
        vocab_size=VOCAB_SIZE,
        context_length=1000,
    )
    trajectory = await play(sampler, Runs(together))
    assert (trajectory.error, trajectory.stop_reason, trajectory.reward) == (None, "length", 1.0)
    assert len(trajectory.turns) == 1
    assert trajectory.num_unrecorded_tokens == sampler.num_drawn - 6 > 0


class Busy:
    """A turn_limiter that lets the second caller wait until the gate is open."""

    def __init__(self):
        self.num_callers, self.gate = 0, asyncio.Event()

    async def enter(self):
        self.num_callers += 1
        if self.num_callers == 2:
            await self.gate.wait()


class ScoresLate(Runs):
    """The turn_limiter's gate opens while it is scored."""

    async def score(self, trajectory):
        self.busy.gate.set()
        await ticks(9)
        return float(len(trajectory.turns))


async def ends_with_a_turn(agent, tasks):
    await asyncio.gather(speak(agent, "long"), speak(agent, "sub"))


async def ends_by_itself(agent, tasks):
    tasks += [asyncio.ensure_future(speak(agent, name)) for name in ("first", "behind")]
    await tasks[0]


@pytest.mark.parametrize("run", [ends_with_a_turn, ends_by_itself])
async def test_a_completion_that_was_not_read_when_the_episode_ended_is_no_turn_of_it(run, monkeypatch):
    """Both agents' completions are there at once, and one waits for its place. If a turn ends the episode, it stays
    whole; an environment that leaves the other agent behind is set aside."""
    environment = ScoresLate(run)
    environment.busy = busy = Busy()
    monkeypatch.setattr("verbatim.rollouts.agent_loop.turn_limiter", lambda: busy)
    ending = [*b"no end"] if run is ends_with_a_turn else say("x" * 5)
    sampler = ScriptedSampler(
        script=lambda request: ending if len(sampler.requests) == 1 else say("x" * 5),
        vocab_size=VOCAB_SIZE,
        context_length=1000,
    )
    trajectory = await play(sampler, environment)
    busy.gate.set()
    await asyncio.gather(*environment.tasks, return_exceptions=True)
    assert (busy.num_callers, sampler.num_drawn) == (2, 12)
    assert (len(trajectory.turns), trajectory.num_unrecorded_tokens) == (1, 6)
    if run is ends_with_a_turn:
        assert (trajectory.error, trajectory.reward) == (None, 1.0)
    else:
        assert trajectory.error.startswith("record: turn 1: sampled or recorded after the episode had ended")


async def test_who_samples_while_an_episode_is_scored_goes_on_after_its_end():
    class Scores(Runs):
        async def score(self, trajectory):
            with pytest.raises(RecordError, match="after the episode had ended"):
                await speak(self.agent, "late")
            return 1.0

    async def run(agent, tasks):
        environment.agent = agent
        await speak(agent, "main")

    environment = Scores(run)
    trajectory = await play(slow_sampler(), environment)
    assert trajectory.error.startswith("record: ") and len(trajectory.turns) == 1


async def test_a_group_s_count_and_drops_are_every_token_that_was_drawn():
    async def insists(agent, tasks):
        async def again_and_again():
            for _ in range(5):
                await asyncio.gather(speak(agent, "behind"), return_exceptions=True)

        tasks.append(asyncio.ensure_future(again_and_again()))
        await speak(agent, "main")

    sampled, dropped, sampler, environment = [], Tokens(), slow_sampler(), Runs(insists)
    run = GroupRun(
        setup(sampler, environment),
        Example(id="a"),
        index=0,
        size=3,
        run_seed=0,
        on_sampled=sampled.append,
        on_dropped=dropped.update,
    )
    group = await run.run()
    await asyncio.gather(*environment.tasks)
    assert sum(sampled) == sampler.num_drawn == run.num_sampled_tokens + dropped.total()
    assert run.num_sampled_tokens == sum(t.num_sampled_tokens for t in group.trajectories)
    assert all(t.error.startswith("record: ") for t in group.trajectories)
