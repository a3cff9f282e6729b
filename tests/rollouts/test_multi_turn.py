"""The rollout engine as a function: what goes in comes out, in order, and nobody's trouble is anybody else's."""

import asyncio
import copy
import json
import threading
import time

import pytest

from byte_renderer import END, VOCAB_SIZE, ByteRenderer, call, say
from verbatim import Example, Trajectory
from verbatim.core.errors import UsageError
from verbatim.environments import Episode
from verbatim.environments.tools import ToolManager
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import MultiTurnRollout
from waiting import HANGS, until


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def slow(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "done"


def broken() -> str:
    """Fail."""
    raise RuntimeError("no")


def talk(text):
    return {"messages": [{"role": "user", "content": text}]}


def last_text(request):
    """What was said last to the model."""
    return bytes(i for i in request.prompt_ids.tolist() if i < 256).decode()


def script(request):
    """Calls what the user names once, then says what the tool answered."""
    said = last_text(request)
    turns = request.prompt_ids.tolist().count(END)
    if turns > 1 or " " not in said:
        return say("ok")
    name, *numbers = said.split()
    arguments = {"add": ("a", "b"), "slow": ("seconds",)}.get(name, ())
    return call(name, **dict(zip(arguments, map(float if name == "slow" else int, numbers), strict=False)))


def make(**options):
    sampler = ScriptedSampler(script=script, vocab_size=VOCAB_SIZE, context_length=200)
    options = {"tool_manager": ToolManager([add, slow, broken]), **options}
    return MultiTurnRollout(sampler=sampler, template=ByteRenderer(), **options), sampler


def test_a_call_and_its_answer_make_the_documented_keys():
    rollout, _ = make()
    (result,) = rollout([talk("add 2 3")])
    assert (result["turns"], result["stop_reason"], result["truncated"], result["reward"]) == (2, "stop", False, None)
    assert [m["role"] for m in result["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert result["messages"][2]["content"] == "5"
    sampled = [*call("add", a=2, b=3), *say("ok")]
    assert [label for label in result["labels"] if label != -100] == sampled
    assert [i for i, label in zip(result["input_ids"], result["labels"], strict=True) if label != -100] == sampled
    assert sum(logprob is not None for logprob in result["logprobs"]) == len(sampled)
    assert result.error is None
    assert [turn.prompt_ids.tolist() for turn in result.turns][1][: len(result.turns[0].path)] == (
        result.turns[0].path.ids().tolist()
    )


def test_fields_beside_the_messages_stay_where_they_were_and_a_result_can_be_fed_back():
    """Also as its dict: the model is shown the tools that came with the conversation."""
    rollout, _ = make()
    schema = {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Mine.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
    shown = []

    class Watches(ByteRenderer):
        def render_ids(self, messages, tools=None, add_generation_prompt=True):
            shown.append(tools)
            return super().render_ids(messages, tools, add_generation_prompt)

    given = {**talk("add 2 3"), "tools": [schema], "id": 7, "answer": 5, "info": {"hard": True}}
    before = copy.deepcopy(given)
    (first,) = rollout([given], template=Watches(bridges=False))
    assert given == before
    for result in (first, dict(first), json.loads(json.dumps(dict(first)))):
        assert (result["answer"], result["tools"], result["id"]) == (5, [schema], "7")
        assert result["info"]["task"] == {"answer": 5, "info": {"hard": True}}
        shown.clear()
        (again,) = rollout([result], template=Watches(bridges=False))
        assert shown[0] == [schema]
        assert (again["answer"], again["tools"], again["info"]["task"]) == (5, [schema], first["info"]["task"])
        assert (again.example_id, again.trajectory_id) == ("7", "7-0")
        assert again["messages"][: len(first["messages"])] == first["messages"]


@pytest.mark.parametrize("info", ["easy", None, 3])
def test_fields_with_a_trajectorys_names_are_the_callers_own_where_they_cannot_be_a_trajectorys(info):
    rollout, _ = make()
    (result,) = rollout([{**talk("hello"), "trajectory_id": 12, "turns": 4, "info": info}])
    assert (result.trajectory_id, result.info["task"]) == ("12", {"turns": 4, "info": info})


@pytest.mark.parametrize("info", [{"task": None}, {}])
def test_a_trajectory_without_a_task_can_be_fed_back(info):
    rollout, _ = make()
    given = Trajectory(example_id="0", messages=talk("hello")["messages"], info=info)
    assert [r.example_id for r in rollout([given, dict(given)])] == ["0", "0"]


def test_several_samples_of_one_conversation_have_ids_of_their_own():
    rollout, _ = make()
    (one,) = rollout([talk("hello")])
    for given in (
        [one] * 3,
        [dict(one)] * 3,
        [Trajectory(example_id="0", messages=one.messages)] * 3,
        [{**talk("hello"), "trajectory_id": "0-0", "id": 0}] * 3,
    ):
        results = rollout(given)
        assert [(r.trajectory_id, r.sample_index) for r in results] == [("0-0", 0), ("0-1", 1), ("0-2", 2)]
    mixed = rollout(
        [
            {**talk("hello"), "id": "m"},
            {**talk("hello"), "id": "m", "sample_index": 5},
            {**talk("hello"), "id": "m"},
            {**talk("hello"), "trajectory_id": "m-0"},
        ]
    )
    assert [r.trajectory_id for r in mixed] == ["m-0", "m-5", "m-2", "3-0"]


def test_the_same_number_comes_out_in_the_same_order_and_the_inputs_stay_as_they_were():
    rollout, _ = make()
    given = [
        talk("add 1 1"),
        Example(id="seven", env="sums", messages=(talk("add 3 4")["messages"][0],)),
        talk("hello"),
        Trajectory(example_id="nine", group_id="g", messages=tuple(talk("add 4 5")["messages"])),
        {**talk("add 5 6"), "id": "ten", "answer": 11},
    ]
    before = copy.deepcopy([given[0], given[2]])
    results = rollout(given)
    assert [r["messages"][0]["content"] for r in results] == ["add 1 1", "add 3 4", "hello", "add 4 5", "add 5 6"]
    assert [r["messages"][-2]["content"] for r in results] == ["2", "7", "hello", "9", "11"]
    assert (results[1].example_id, results[1].env) == ("seven", "sums")
    assert (results[3].example_id, results[3].group_id) == ("nine", "g")
    assert (results[4].example_id, results[4].info["task"]) == ("ten", {"answer": 11})
    assert [given[0], given[2]] == before
    assert given[3].turns == ()


def test_it_also_works_inside_a_running_event_loop():
    rollout, _ = make()

    async def notebook():
        return rollout([talk("add 2 2")]), await rollout.run([talk("add 2 2")])

    (blocking,), (awaited,) = asyncio.run(notebook())
    assert blocking["messages"][-2]["content"] == awaited["messages"][-2]["content"] == "4"


@pytest.mark.realtime
async def test_a_slow_tool_delays_no_other_episode():
    together, other_ended = threading.Barrier(5), threading.Event()

    def slow(seconds: float) -> str:
        """Wait for the four others, and for the end of the conversation that does not call this."""
        together.wait(HANGS)
        return "done" if other_ended.wait(HANGS) else "late"

    def finished(index, trajectory):
        ends[index] = [trajectory["stop_reason"], trajectory["messages"][2]["content"]]
        if index == 5:
            other_ended.set()

    rollout, _ = make(tool_manager=ToolManager([add, slow]), tool_timeout=2 * HANGS)
    ends = {}
    await rollout.run_each([talk("slow 1")] * 5 + [talk("add 1 2")], finished)
    assert ends == {**{index: ["stop", "done"] for index in range(5)}, 5: ["stop", "3"]}


@pytest.mark.parametrize(
    ("options", "text", "reason", "truncated", "turns"),
    [
        ({}, "hello", "stop", False, 1),
        ({"max_turns": 1}, "add 1 2", "max_turns", True, 1),
        ({"max_trajectory_tokens": 9}, "hello", "length", True, 1),  # 8 of the prompt
        ({"sampling_params": SamplingParams(max_tokens=3)}, "add 1 2", "length", True, 1),
        ({"max_trajectory_tokens": 8}, "hello", "length", True, 0),
        ({"tool_error": "stop"}, "broken x", "api_error", True, 1),
        ({"tool_error": "stop", "tool_timeout": 0.02}, "slow 600", "api_error", True, 1),
        ({}, "broken x", "stop", False, 2),
    ],
)
def test_stop_reasons_are_those_of_the_table(options, text, reason, truncated, turns):
    rollout, _ = make()
    (result,) = rollout([talk(text)], **options)
    assert (result["stop_reason"], result["truncated"], result["turns"]) == (reason, truncated, turns)


def test_calls_that_are_pending_at_the_last_turn_are_not_run():
    seen = []

    def note(a: int) -> str:
        """Note a number."""
        seen.append(a)
        return "noted"

    rollout, sampler = make(tool_manager=ToolManager([note]), max_turns=1)
    sampler.script = lambda request: call("note", a=1)
    (result,) = rollout([talk("go on")])
    assert (result["stop_reason"], seen) == ("max_turns", [])


def test_each_trajectory_may_have_its_own_tools():
    def seven() -> str:
        """Seven."""
        return "7"

    def eight() -> str:
        """Eight."""
        return "8"

    managers = [ToolManager([seven]), ToolManager([eight])]
    rollout, _ = make()
    results = rollout([talk("seven x"), talk("seven x")], tool_manager=managers)
    assert results[0]["messages"][2]["content"] == "7"
    assert "there is no tool seven; available: eight" in results[1]["messages"][2]["content"]
    with pytest.raises(UsageError, match="2 tool managers for 1 trajectories; give one for each"):
        rollout([talk("x")], tool_manager=managers)


def test_tools_that_an_input_describes_are_shown_and_run_by_the_manager():
    schema = {"type": "function", "function": {"name": "add", "description": "my own", "parameters": {}}}
    ghost = {"type": "function", "function": {"name": "ghost", "parameters": {}}}
    rollout, _ = make()
    shown = []
    real = rollout.template.render_ids

    def render_ids(messages, tools=None, **rest):
        shown.append(tools)
        return real(messages, tools, **rest)

    rollout.template.render_ids = render_ids
    results = rollout([{**talk("add 2 3"), "tools": [schema, ghost]}, {**talk("ghost x"), "tools": [schema, ghost]}])
    assert shown[0] == [schema, ghost]
    assert results[0]["messages"][2]["content"] == "5"
    assert "nothing runs it here" in results[1]["messages"][2]["content"]


def test_a_trajectory_that_fails_is_returned_with_its_error_and_the_others_as_if_it_was_not_there():
    rollout, sampler = make()
    texts = [talk("add 1 2"), talk("add 3 4"), talk("add 5 6")]
    expected = rollout(texts)
    rollout, sampler = make()
    sampler.trouble = lambda index, request: "fail" if "3 4" in last_text(request) else None
    results = rollout(texts)
    assert [r["stop_reason"] for r in results] == ["stop", "api_error", "stop"]
    assert results[1].error == "sampler: request 1 fails: the script says so"
    for place in (0, 2):
        assert results[place]["input_ids"] == expected[place]["input_ids"]


def test_every_call_and_every_place_draws_differently():
    rollout, sampler = make()
    rollout([talk("a"), talk("a")])
    rollout([talk("a")])
    seeds = [request.seed for request in sampler.requests]
    assert len(set(seeds)) == 3
    again, sampler = make()
    again([talk("a"), talk("a")])
    again([talk("a")])
    assert [request.seed for request in sampler.requests] == seeds


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"messages": []}, r"trajectories\[1\] has messages = .* expected a list with at least one"),
        ({"prompt": "x"}, r"trajectories\[1\] has messages = .* expected a list with at least one"),
        ({"messages": ["hi"]}, r"trajectories\[1\]\.messages\[0\] is 'hi'"),
        ("hi", r"trajectories\[1\] is a str; expected an Example"),
        ({**talk("x"), "tools": [{"name": "f"}]}, r"trajectories\[1\]\.tools\[0\] is .* expected a schema"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_place(given, message):
    rollout, sampler = make()
    with pytest.raises(UsageError, match=message):
        rollout([talk("fine"), given])
    assert sampler.requests == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_turn": 3}, "no setting 'max_turn'; did you mean \"max_turns\""),
        ({"max_turns": 0}, "max_turns = 0; expected a number above 0"),
        ({"tool_error": "ignore"}, 'expected "message" or "stop"'),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    rollout, _ = make()
    with pytest.raises(UsageError, match=message):
        rollout([talk("x")], **options)


def test_every_trajectory_is_stored_as_it_ends(tmp_path):
    rollout, _ = make(trace_dir=tmp_path, success_callback=lambda t: t["messages"][-1]["content"] == "ok")
    rollout([talk("add 1 2")] * 2 + [talk("hello")], max_turns=6)
    rollout([talk("add 1 2")], max_turns=1)
    kinds = sorted(path.name.partition("-")[0] for path in tmp_path.iterdir())
    assert kinds == ["fail", "ok", "ok", "ok"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sampling_params": {"max_tokens": 4}}, "sampling_params: .*expected SamplingParams"),
        ({"tool_manager": [add, add]}, "tool_manager: .*expected a ToolManager"),
        ({"tool_manager": add}, "tool_manager: .*expected a ToolManager"),
        ({"max_turns": "1"}, "max_turns = '1'; expected a number above 0"),
        ({"sampler": "http://x"}, "sampler: 'http://x' has no `generate`.*HttpSampler"),
        ({"template": "qwen3"}, "template: 'qwen3' has no `render_ids`.*create_renderer"),
    ],
)
def test_a_setting_of_another_type_is_refused_with_what_it_should_be(wrong, message):
    settings = {"sampler": make()[1], "template": ByteRenderer(), **wrong}
    with pytest.raises(UsageError, match=message):
        MultiTurnRollout(**settings)


@pytest.mark.parametrize("tools", ["add", {"a": 1}, [add], [{"function": 3}]])
def test_tools_of_a_conversation_that_are_no_schemas_are_refused(tools):
    rollout, _ = make()
    with pytest.raises(UsageError, match=r"trajectories\[1\].*tools.*expected"):
        rollout([talk("hi"), {**talk("hi"), "tools": tools}])


async def test_what_is_cancelled_is_traced_with_what_had_been_sampled(tmp_path):
    called = []

    async def slow(seconds: float) -> str:
        """Wait."""
        called.append(seconds)
        await asyncio.sleep(seconds)
        return "done"

    rollout, _ = make(trace_dir=tmp_path, tool_manager=ToolManager([slow]))
    running = asyncio.create_task(rollout.run([talk("slow 600"), talk("slow 600")]))
    await until(lambda: len(called) == 2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    stored = [json.loads(file.read_text())["trajectory"] for file in tmp_path.glob("fail-*.json")]
    assert sorted(t["trajectory_id"] for t in stored) == ["0-0", "1-0"]
    for trajectory in stored:
        assert (trajectory["stop_reason"], trajectory["truncated"]) == ("cancelled", True)
        assert [turn["completion_ids"] for turn in trajectory["turns"]] == [call("slow", seconds=600.0)]


async def test_seeds_of_episodes_may_be_others_than_those_of_the_sampling():
    seeds = []

    class Silent(Episode):
        messages = ({"role": "user", "content": "go"},)

    class Noting:
        def examples(self, split):
            return [Example(id="a"), Example(id="b")]

        async def start(self, example, seed):
            seeds.append(seed)
            return Silent()

    pairs = [(example, 0) for example in Noting().examples("eval")]
    for own, given in ((1, 5), (2, 5), (5, None), (1, None)):
        rollout, _ = make(seed=own)
        await rollout.run_environment(Noting(), pairs, lambda index, trajectory: None, seed=given)
    assert seeds[:2] == seeds[2:4] == seeds[4:6] != seeds[6:]


async def test_each_is_handed_over_with_its_place_as_soon_as_it_ends():
    other_ended = asyncio.Event()

    async def slow(seconds: float) -> str:
        """Wait for the end of the other one."""
        async with asyncio.timeout(seconds):
            await other_ended.wait()
        return "done"

    def finished(index, trajectory):
        ends.append((index, trajectory["turns"], trajectory["messages"][-2]["content"]))
        other_ended.set()

    rollout, _ = make(tool_manager=ToolManager([slow]))
    ends = []
    await rollout.run_each([talk("slow 60"), talk("hello")], finished)
    assert ends == [(1, 1, "hello"), (0, 2, "done")]


async def test_a_listener_that_raises_ends_the_call_and_is_given_the_others_as_cancelled():
    rollout, _ = make()
    ends = {}

    def finished(index, trajectory):
        ends[index] = trajectory["stop_reason"]
        if index == 1:
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        await rollout.run_each([talk("slow 600"), talk("hello")], finished)
    assert ends == {0: "cancelled", 1: "stop"}
