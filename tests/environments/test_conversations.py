"""The bundled conversations: several user turns, tools in one turn, and two agents with contexts of their own."""

import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer, call, say
from verbatim import RolloutIdentity, build_samples
from verbatim.core.errors import UsageError
from verbatim.environments import ENVIRONMENTS, Demonstrates, Environment
from verbatim.environments.alphabet_sort import AlphabetSort
from verbatim.environments.calculator import Calculation, Calculator
from verbatim.environments.delegate import Delegate
from verbatim.environments.resolve import create_environment
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import AgentLoop, EpisodeLimits, Recorder, run_episode

ALL = ["alphabet_sort", "calculator", "delegate"]


async def play(environment, example, said):
    """One episode in which these completions are sampled, in order."""
    sampler = ScriptedSampler(script=said, vocab_size=VOCAB_SIZE, context_length=2000)
    recorder, limits = Recorder(VOCAB_SIZE), EpisodeLimits()
    loop = AgentLoop(
        sampler=sampler, renderer=ByteRenderer(), params=SamplingParams(), limits=limits, recorder=recorder, seed=0
    )
    identity = RolloutIdentity(example_id=example.id)
    return await run_episode(environment=environment, example=example, seed=0, loop=loop, identity=identity)


def example_of(environment, **payload):
    example = environment.examples("train")[0]
    return type(example)(id=example.id, payload=payload or example.payload)


# ---- alphabet_sort

NAMES = ["Vera", "Ada", "Finn", "Zoe", "Ben", "Kira"]
RIGHT = ["Ada, Vera", "Ada, Finn, Vera, Zoe", "Ada, Ben, Finn, Kira, Vera, Zoe"]


async def test_every_right_list_earns_its_share_and_the_next_names_come_as_a_user_turn():
    environment = AlphabetSort()
    trajectory = await play(environment, example_of(environment, names=NAMES), [say(text) for text in RIGHT])
    assert trajectory.reward == pytest.approx(1.0)
    assert [m["role"] for m in trajectory.messages] == ["system", *("user", "assistant") * 3]
    assert [m["content"] for m in trajectory.messages if m["role"] == "user"] == [
        "Sort: Vera, Ada",
        "Also: Finn, Zoe",
        "Also: Ben, Kira",
    ]
    assert len(build_samples(trajectory)) == 1


async def test_a_wrong_list_loses_its_share_and_the_conversation_goes_on():
    environment = AlphabetSort()
    said = [RIGHT[0], "Ada, Vera, Finn, Zoe", RIGHT[2]]
    trajectory = await play(environment, example_of(environment, names=NAMES), [say(text) for text in said])
    assert trajectory.reward_parts == {"round_1": pytest.approx(1 / 3), "round_2": 0.0, "round_3": pytest.approx(1 / 3)}
    assert [turn.reward for turn in trajectory.turns] == [pytest.approx(1 / 3), 0.0, pytest.approx(1 / 3)]
    assert trajectory.info["turn_rewards_sum_to_reward"] is True  # credit per turn counts them once


# ---- calculator


@pytest.mark.parametrize(
    ("kind", "calls", "answer"),
    [
        ("sum", [("add", 3, 4, 7), ("multiply", 7, 5, 35)], 35),
        ("product", [("multiply", 3, 4, 12), ("add", 12, 5, 17)], 17),
    ],
)
async def test_tools_work_out_the_answer_within_one_user_turn(kind, calls, answer):
    environment = Calculator()
    said = [*(call(name, a=a, b=b) for name, a, b, _ in calls), say(str(answer))]
    trajectory = await play(environment, example_of(environment, kind=kind, numbers=[3, 4, 5]), said)
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == [str(value) for *_, value in calls]
    assert trajectory.messages[0]["content"] == {"sum": "What is (3 + 4) * 5?", "product": "What is 3 * 4 + 5?"}[kind]
    assert trajectory.reward_parts == {"correct": pytest.approx(0.9), "used_tools": pytest.approx(0.1)}


@pytest.mark.parametrize(
    ("said", "reward"),
    [([say("35")], 0.9), ([say("34")], 0.0), ([call("add", a=1, b=1), say("2")], 0.1), ([say("thirty")], 0.0)],
)
async def test_a_guess_and_a_wrong_answer_earn_less(said, reward):
    environment = Calculator()
    trajectory = await play(environment, example_of(environment, kind="sum", numbers=[3, 4, 5]), said)
    assert trajectory.reward == pytest.approx(reward)


def test_held_out_tasks_are_not_demonstrated():
    """`verbatim` evaluates on them before and after: a warm start must not show them either."""
    environment = Calculator(largest=3, num_train=27, num_eval=27)
    held_out = {
        Calculation(example.payload["kind"], *example.payload["numbers"]).messages[0]["content"]
        for example in environment.examples("eval")
    }
    shown = {demonstration.messages[0]["content"] for demonstration in environment.demonstrations(300, 0)}
    assert len(shown) == 27
    assert not shown & held_out


# ---- delegate

TASK = {"notes": {"red": 3, "blue": 7}, "box": "blue"}


async def test_two_agents_have_two_contexts_and_the_main_agent_goes_on_in_its_own_sample():
    environment = Delegate(num_boxes=2)
    trajectory = await play(environment, example_of(environment, **TASK), [call("ask", box="blue"), say("7"), say("7")])
    assert trajectory.reward_parts == {"correct": pytest.approx(0.9), "delegated": pytest.approx(0.1)}
    assert [turn.agent for turn in trajectory.turns] == ["main", "sub/1", "main"]
    assert trajectory.num_breaks == 0  # the main agent goes on where it was
    main, sub = build_samples(trajectory)
    notes = b"Notes: red 3, blue 7."
    texts = [bytes(i for i in sample.token_ids.tolist() if i < 256) for sample in (main, sub)]
    assert notes in texts[1] and notes not in texts[0]
    assert [sample.num_trained_tokens for sample in (main, sub)] == [
        len(call("ask", box="blue")) + len(say("7")),
        len(say("7")),
    ]
    assert [m["role"] for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]


async def test_each_question_is_a_sub_agent_of_its_own():
    environment = Delegate(num_boxes=2)
    said = [call("ask", box="red"), say("3"), call("ask", box="blue"), say("7"), say("7")]
    trajectory = await play(environment, example_of(environment, **TASK), said)
    assert [turn.agent for turn in trajectory.turns] == ["main", "sub/1", "main", "sub/2", "main"]
    assert len(build_samples(trajectory)) == 3
    assert trajectory.reward == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ([say("7")], 0.9),
        ([say("4")], 0.0),
        ([call("ask", box="blue"), say("4"), say("4")], 0.1),
        ([call("ask", box=5), say("7")], 1.0),
    ],
)
async def test_answers_are_judged_whoever_was_asked(said, reward):
    environment = Delegate(num_boxes=2)
    trajectory = await play(environment, example_of(environment, **TASK), said)
    assert trajectory.reward == pytest.approx(reward)


# ---- all of them


@pytest.mark.parametrize("name", ALL)
def test_the_splits_come_from_a_seed_and_share_nothing(name):
    environment = create_environment(name)
    assert isinstance(environment, Environment) and isinstance(environment, Demonstrates)
    train, held_out = environment.examples("train"), environment.examples("eval")
    assert [e.payload for e in train] == [e.payload for e in create_environment(name).examples("train")]
    assert len({e.id for e in train}) == len(train) >= 100 and len({e.id for e in held_out}) == len(held_out) == 100
    assert not {repr(e.payload) for e in train} & {repr(e.payload) for e in held_out}
    with pytest.raises(UsageError, match="has no split 'test'"):
        environment.examples("test")


@pytest.mark.parametrize("name", ALL)
def test_demonstrations_talk_well_and_sometimes_err(name):
    environment = create_environment(name)
    shown = environment.demonstrations(200, seed=3)
    assert len(shown) == 200
    assert [d.messages for d in shown] == [d.messages for d in environment.demonstrations(200, seed=3)]
    assert all(d.messages[-1]["role"] == "assistant" for d in shown)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("alphabet_sort", {"num_rounds": 9, "names_per_round": 9}, "at most 25 names"),
        ("calculator", {"largest": 3}, "largest = 3 gives only 54"),
        ("delegate", {"num_boxes": 0}, "expected 1 to 6"),
    ],
)
def test_sizes_that_cannot_be_are_refused(name, args, message):
    with pytest.raises(UsageError, match=message):
        create_environment(name, args)


def test_every_bundled_environment_can_be_imported():
    assert set(ALL) < set(ENVIRONMENTS)
