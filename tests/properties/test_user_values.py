"""Values that recurse, cannot be written or say nothing of themselves, at every place where a user's value enters: the
episode that has one fails or is told, the healthy one beside it goes on, and both are written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from byte_renderer import VOCAB_SIZE, ByteRenderer, call, say
from drawn import drawn
from verbatim import Example, Trajectory
from verbatim.core.errors import RecordError, UsageError
from verbatim.core.trajectory_json import plain, trajectory_to_json
from verbatim.core.user_values import DEEPEST, MOST_VALUES, why_refused
from verbatim.environments.environment import AgentScores, Demonstration, Episode, Reply
from verbatim.environments.resolve import demonstrations_of, examples_of
from verbatim.environments.sources import ListExamples
from verbatim.environments.tools import FunctionTool, ToolResult
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.models.renderers.special_token_escaping import SpecialTokenEscaper
from verbatim.rollouts import EpisodeLimits, GroupRun, RolloutSetup
from verbatim.rollouts.rollout import read_openings

GUARD = SpecialTokenEscaper(["<|im_end|>"])


class GuardedBytes(ByteRenderer):
    """Walks through messages and schemas, and knows them again by their text, as a renderer of a model does."""

    def render_ids(self, messages, tools=None, add_generation_prompt=True):
        repr((messages, tools))
        GUARD.messages(messages)
        GUARD.tools(tools)
        return super().render_ids(messages, tools, add_generation_prompt)


class Endless(Mapping):
    """Holds another one of its kind, which is made when it is asked for."""

    def __getitem__(self, key):
        return Endless()

    def __iter__(self):
        return iter(["more"])

    def __len__(self):
        return 1


def wrapped(value, kinds, again=1):
    """The value inside of lists and dicts, each of which holds it `again` times."""
    for kind in kinds:
        value = {str(n): value for n in range(again)} if kind else [value] * again
    return value


@dataclass(frozen=True, kw_only=True)
class Recurses:
    """How a value recurses: it holds itself, is too deep, is too large where what is shared is written twice, or makes
    what it holds. Its own text is short, which the value's is not."""

    how: str
    kinds: tuple[bool, ...]
    size: int

    def value(self):
        if self.how == "cycle":
            first: dict | list = {} if self.kinds[0] else []
            value = wrapped(first, self.kinds)
            first.update(self=value) if isinstance(first, dict) else first.append(value)
            return value
        if self.how == "deep":
            return wrapped("x", self.kinds * (DEEPEST + 1 + 30 * self.size))
        if self.how == "shared":
            return wrapped("x", (self.kinds * 60)[: 20 + self.size], again=2)
        return wrapped(Endless(), self.kinds)


RECURSING = st.builds(
    Recurses,
    how=st.sampled_from(["cycle", "deep", "shared", "endless"]),
    size=st.integers(0, 40),
    kinds=st.lists(st.booleans(), min_size=1, max_size=4).map(tuple),
)


class Tooled:
    """A tool with a schema of its own."""

    name = "look"

    def __init__(self, parameters):
        self.schema = {"type": "function", "function": {"name": "look", "parameters": parameters}}

    async def __call__(self, arguments):
        return ToolResult(content="seen")


class Ending(Episode):
    """Calls nothing, says "ok" and earns 1; `place` says where the value stands."""

    def __init__(self, place="", value=None):
        self.place, self.value, self.replies = place, value, 0
        self.messages = [{"role": "user", "content": "go", **({"more": value} if place == "opening" else {})}]
        if place == "info":
            self.info = {"found": value}
        if place == "schema":
            self.tools = [Tooled({"type": "object", "deep": value})]
        if place in ("tool result", "tool reward"):
            self.tools = [FunctionTool(self.look, inline=True)]
        if place == "run":
            self.run = self._run

    def look(self):
        """Look."""
        return self.value if self.place == "tool result" else ToolResult(content="seen", reward=self.value)

    async def _run(self, agent):
        await agent.sample([{"role": "user", "content": "go", "more": self.value}])

    async def reply(self, message):
        self.replies += 1
        if self.place == "changed":
            self.messages[0]["more"] = self.value
        if self.place == "reply":
            return Reply(messages=[{"role": "user", "content": "go", "more": self.value}])
        if self.place == "reply reward":
            return Reply(reward=self.value)
        return Reply(done=self.replies > 1, messages=[{"role": "user", "content": "go"}])

    async def score(self, trajectory):
        if self.place == "info after the score":
            self.info = {"found": self.value}
        return {"score": self.value, "parts": {"part": self.value}}.get(self.place, 1.0)


PLACES = (
    "opening",
    "reply",
    "run",
    "changed",
    "schema",
    "info",
    "info after the score",
    "score",
    "parts",
    "tool reward",
    "reply reward",
)


class Both:
    """The first episode has the value, the second is healthy."""

    def __init__(self, *episodes):
        self.left = list(episodes)

    def examples(self, split):
        return [Example(id="e")]

    async def start(self, example, seed):
        return self.left.pop(0)


async def play(place, value, bad=None):
    calls = place.startswith("tool")
    sampler = ScriptedSampler(
        script=lambda request: call("look") if calls and len(request.prompt_ids) < 10 else say("ok"),
        vocab_size=VOCAB_SIZE,
        context_length=100_000,
    )
    setup = RolloutSetup(
        env="both",
        environment=Both(bad or Ending(place, value), Ending()),
        sampler=sampler,
        renderer=GuardedBytes(),
        params=SamplingParams(max_tokens=1000),
        slots=asyncio.Semaphore(1),
        limits=EpisodeLimits(max_turns=4, max_context=100_000),
    )
    group = await GroupRun(setup, Example(id="e"), index=0, size=2, run_seed=0).run()
    for trajectory in group.trajectories:
        json.dumps(plain(trajectory_to_json(trajectory)), allow_nan=False)
    return group.trajectories


@pytest.mark.parametrize("place", PLACES)
@given(recurses=RECURSING)
@drawn("values that recurse, in an episode", 15, 1000)
def test_an_episode_with_a_value_that_recurses_fails_alone(place, recurses):
    bad, healthy = asyncio.run(play(place, recurses.value()))
    assert bad.error.startswith("environment: ") and "RecursionError" not in bad.error
    assert len(bad.error) < 5000
    assert (healthy.error, healthy.reward, len(healthy.turns)) == (None, 1.0, 3 if place == "tool reward" else 2)


def refuse(*_):
    raise OSError("nothing is said")


class SilentText(str):
    __repr__ = __str__ = __eq__ = __len__ = __iter__ = __getitem__ = refuse
    __hash__ = str.__hash__


class SilentNumber(int):
    __repr__ = __str__ = __eq__ = __int__ = __float__ = __bool__ = refuse
    __hash__ = int.__hash__


class SilentMapping(dict):
    __repr__ = __str__ = __eq__ = __deepcopy__ = copy = refuse


class SilentItems(dict):
    items = keys = __iter__ = refuse


UNWRITABLE = {
    "an array": lambda: np.zeros(3),
    "a large array": lambda: np.zeros((50, 50)),
    "a long number": lambda: 10**5000,
    "a long number below": lambda: [{"a": -(10**5000)}],
    "a key that is a tuple": lambda: {("a", 1): 2},
    "a key that is bytes": lambda: {b"a": 2},
    "a key that is a long number": lambda: {10**5000: 2},
    "a complex number": lambda: np.complex64(1j),
    "a date": lambda: np.array(["2020-01-01"], dtype="datetime64[D]"),
    "a mapping that cannot be read": lambda: SilentItems(a=1),
}
SILENT = {
    "a text": lambda: SilentText("told"),
    "a number": lambda: SilentNumber(7),
    "a mapping": lambda: SilentMapping(a=[SilentText("told")]),
    "a key": lambda: {SilentText("told"): 1},
    "a number of numpy": lambda: np.float64(0.5),
}
IN_MESSAGES = ("opening", "reply", "run", "changed", "schema")
ELSEWHERE = tuple(place for place in PLACES if place not in IN_MESSAGES)


@pytest.mark.parametrize("place", IN_MESSAGES)
@pytest.mark.parametrize("kind", UNWRITABLE)
def test_an_episode_with_a_message_that_cannot_be_written_fails_alone(place, kind):
    bad, healthy = asyncio.run(play(place, UNWRITABLE[kind]()))
    assert bad.error.startswith("environment: ") and len(bad.error) < 5000
    assert (healthy.error, healthy.reward, len(healthy.turns)) == (None, 1.0, 2)


@pytest.mark.parametrize("place", IN_MESSAGES)
@pytest.mark.parametrize("kind", SILENT)
def test_a_message_of_classes_that_say_nothing_is_a_message_like_any_other(place, kind):
    for trajectory in asyncio.run(play(place, SILENT[kind]())):
        assert (trajectory.error, trajectory.reward) == (None, 1.0)
        assert len(trajectory.turns) >= 1


@pytest.mark.parametrize("place", (*ELSEWHERE, "tool result"))
@pytest.mark.parametrize("kind", (*UNWRITABLE, *SILENT))
def test_such_a_value_elsewhere_leaves_the_healthy_episode_alone(place, kind):
    bad, healthy = asyncio.run(play(place, {**UNWRITABLE, **SILENT}[kind]()))
    assert bad.error is None or bad.error.startswith("environment: ")
    assert (healthy.error, healthy.reward) == (None, 1.0)


ONE_TEXT = {1: 2.0, "1": 3.0}, {None: 2.0, "None": 3.0}, {True: 2.0, "True": 3.0}, {np.int64(1): 2.0, "1": 3.0}


@pytest.mark.parametrize("place", ["score", "agents", "info", "info after the score", *IN_MESSAGES])
@pytest.mark.parametrize("value", ONE_TEXT, ids=str)
def test_names_that_are_one_text_are_told_and_none_is_lost(place, value):
    given = AgentScores(agents=value) if place == "agents" else value
    bad, healthy = asyncio.run(play("score" if place == "agents" else place, given))
    assert bad.error.startswith("environment: ")
    assert ("are equal as strings" if place in ("score", "agents") else "have the same text") in bad.error
    assert (bad.reward, bad.reward_parts, bad.agent_rewards) == (None, {}, {})
    assert (healthy.error, healthy.reward) == (None, 1.0)


def test_a_trajectory_with_such_names_is_refused():
    for name in ("reward_parts", "agent_rewards"):
        with pytest.raises(RecordError, match="two names have the same text"):
            Trajectory(example_id="e", **{name: ONE_TEXT[0]})


def test_a_masked_array_keeps_its_mask():
    value = {"some": np.ma.array([1.0, 2.0, 3.0], mask=[False, True, False]), "none": np.ma.masked, "all": np.arange(2)}
    found, _ = asyncio.run(play("info", value))
    assert found.error is None
    written = json.loads(json.dumps(plain(trajectory_to_json(found))))
    assert written["info"]["found"] == {"some": [1.0, None, 3.0], "none": None, "all": [0, 1]}


@pytest.mark.slow
@pytest.mark.parametrize("place", IN_MESSAGES)
@pytest.mark.parametrize("kind", ["text", "key", "parts", "numbers", "dicts"])
def test_the_limits_hold_for_plain_values_too(place, kind):
    """What is plain JSON of few lists and dicts is copied without a look, but not without the limits."""
    value = {
        "text": lambda: "x" * (65 * 2**20),
        "key": lambda: {"x" * (65 * 2**20): 1},
        "parts": lambda: ["x" * 2**20] * 65,
        "numbers": lambda: [1] * (MOST_VALUES + 1),
        "dicts": lambda: [dict.fromkeys(map(str, range(MOST_VALUES // 2 + 1)))] * 2,
    }[kind]()
    bad, healthy = asyncio.run(play(place, value))
    said = "characters" if kind in ("text", "key", "parts") else "values"
    assert f" more than {67_108_864 if said == 'characters' else 1_000_000:,} {said}" in bad.error
    assert len(bad.error) < 5000
    assert (healthy.error, healthy.reward) == (None, 1.0)


def test_an_episode_without_messages_is_told_in_a_sentence_and_no_traceback():
    empty = Ending()
    empty.messages = []
    bad, healthy = asyncio.run(play("", None, empty))
    assert bad.error.startswith("environment: there are no messages for the agent 'main' to answer; expected at least")
    assert "traceback" not in bad.info
    assert (healthy.error, healthy.reward) == (None, 1.0)


@given(recurses=RECURSING)
@drawn("values that recurse, of a tool", 15, 1000)
def test_a_tool_that_returns_one_is_told_to_the_model(recurses):
    bad, healthy = asyncio.run(play("tool result", recurses.value()))
    assert bad.error is None
    assert "look failed: TypeError: its return value has no JSON form: it " in bad.messages[2]["content"]
    assert (healthy.error, healthy.reward) == (None, 1.0)


class Given:
    """An environment with such an example, or such a demonstration."""

    def __init__(self, example=None, messages=()):
        self.example, self.shown = example, [{"role": "user", "content": "go"}, *messages]

    def examples(self, split):
        return [self.example]

    def demonstrations(self, count, seed):
        return [Demonstration(messages=[*self.shown, {"role": "assistant", "content": "ok"}])] * count


BEFORE = {
    "an example's payload": lambda v: examples_of(Given(Example(id="e", payload={"deep": v})), "given", "train"),
    "an example's messages": lambda v: examples_of(
        Given(Example(id="e", messages=({"role": "user", "content": "go", "more": v},))), "given", "train"
    ),
    "an example's tools": lambda v: examples_of(Given(Example(id="e", tools=({"deep": v},))), "given", "train"),
    "a demonstration": lambda v: demonstrations_of(
        Given(messages=[{"role": "user", "content": "go", "more": v}]), "given", 1, 0
    ),
    "a row": lambda v: list(ListExamples([{"prompt": "go", "deep": v}], prompt_field="prompt")),
    "a row's messages": lambda v: list(ListExamples([{"messages": [{"role": "user", "content": "go", "more": v}]}])),
    "messages of a rollout": lambda v: read_openings([{"messages": [{"role": "user", "content": "go", "more": v}]}]),
    "tools of a rollout": lambda v: read_openings(
        [{"messages": [{"role": "user", "content": "go"}], "tools": [{"function": {"name": "look", "deep": v}}]}]
    ),
    "a task of a rollout": lambda v: read_openings([{"messages": [{"role": "user", "content": "go"}], "answer": v}]),
}


OF_MESSAGES = (
    "an example's messages",
    "an example's tools",
    "a demonstration",
    "messages of a rollout",
    "tools of a rollout",
)


@pytest.mark.parametrize("place", OF_MESSAGES)
@pytest.mark.parametrize("kind", UNWRITABLE)
def test_what_cannot_be_written_is_refused_in_a_sentence_before_an_episode(place, kind):
    with pytest.raises(UsageError) as refused:
        BEFORE[place](UNWRITABLE[kind]())
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize("place", sorted(BEFORE.keys() - set(OF_MESSAGES)))
@pytest.mark.parametrize("kind", UNWRITABLE)
def test_rows_and_tasks_are_taken_or_refused_in_a_sentence(place, kind):
    try:
        BEFORE[place](UNWRITABLE[kind]())
    except UsageError as refused:
        assert len(str(refused)) < 2000


@pytest.mark.parametrize("place", BEFORE)
@given(recurses=RECURSING)
@drawn("values that recurse, before an episode", 15, 1000)
def test_what_is_given_before_an_episode_is_refused_in_a_sentence(place, recurses):
    with pytest.raises(UsageError) as refused:
        BEFORE[place](recurses.value())
    assert " it " in str(refused.value) and len(str(refused.value)) < 2000


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


@given(value=JSON_VALUES)
@drawn("values that do not recurse", 20, 5000)
def test_what_json_holds_is_taken(value):
    assert why_refused(value) is None


@pytest.mark.slow
def test_the_limits_are_where_they_are_said_to_be():
    assert why_refused(wrapped("x", [True, False] * (DEEPEST // 2))) is None
    assert why_refused(wrapped("x", [True, *[False] * DEEPEST])).startswith(f"it has more than {DEEPEST} levels")
    assert why_refused([0] * (MOST_VALUES - 1)) is None
    assert why_refused([0] * MOST_VALUES).startswith("it has more than 1,000,000 values")
    assert why_refused(["x" * 2**20] * 64) is None
    assert why_refused(["x" * 2**20] * 65).startswith("its texts have more than 67,108,864 characters")
