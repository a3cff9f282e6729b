"""`alphabet_sort` as verifiers has it: prompts, right answers and scores worked out by hand."""

import json

import pytest

from byte_renderer import VOCAB_SIZE, ByteRenderer, say
from verbatim import Example, RolloutIdentity, build_samples
from verbatim.core.errors import UsageError
from verbatim.environments.alphabet_sort_tags import AlphabetSortTags, similarity
from verbatim.environments.resolve import create_environment
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import AgentLoop, EpisodeLimits, Recorder, run_episode

PRIME_RL = {
    "min_turns": 3,
    "max_turns": 3,
    "min_names_per_turn": 1,
    "max_names_per_turn": 4,
    "similarity_power": 8,
    "power_per_turn": False,
}
"""The settings of prime-rl's example."""
TASK = {"asked": ["first?", "second?"], "answers": [["AdaByron", "ZoeAdler"], ["AdaByron", "BenXu // new name!"]]}


async def play(environment, task, said):
    sampler = ScriptedSampler(script=[say(text) for text in said], vocab_size=VOCAB_SIZE, context_length=9000)
    loop = AgentLoop(
        sampler=sampler,
        renderer=ByteRenderer(),
        params=SamplingParams(max_tokens=4000),
        limits=EpisodeLimits(max_context=9000),
        recorder=Recorder(VOCAB_SIZE),
        seed=0,
    )
    example = Example(id="x", payload=task)
    return await run_episode(
        environment=environment, example=example, seed=0, loop=loop, identity=RolloutIdentity(example_id="x")
    )


def first(*names):
    return "<alphabetical_sorted>\n" + "\n".join(names) + "\n</alphabetical_sorted>"


def later(*names):
    return "<combined_alphabetical_sorted>\n" + "\n".join(names) + "\n</combined_alphabetical_sorted>"


RIGHT = [first("AdaByron", "ZoeAdler"), later("AdaByron", "BenXu // new name!")]


@pytest.mark.parametrize("power_per_turn", [True, False])
async def test_right_answers_earn_1_whatever_the_case_and_the_space(power_per_turn):
    environment = AlphabetSortTags(power_per_turn=power_per_turn)
    trajectory = await play(environment, TASK, RIGHT)
    assert trajectory.reward == 1.0
    assert [m["content"] for m in trajectory.messages if m["role"] == "user"] == ["first?", "second?"]
    assert len(build_samples(trajectory)) == 1
    spaced = ["I think: " + first(" adabyron", "", "ZOEADLER "), RIGHT[1]]
    assert (await play(environment, TASK, spaced)).reward == 1.0


async def test_the_power_is_taken_of_each_turn_or_of_their_mean():
    """The first answer is right and the second has no list: similarities 1 and 0."""
    said = [RIGHT[0], first("AdaByron")]  # the first turn's tag does not count in the second
    assert (await play(AlphabetSortTags(similarity_power=4), TASK, said)).reward == 0.5
    mean = AlphabetSortTags(similarity_power=4, power_per_turn=False)
    assert (await play(mean, TASK, said)).reward == 0.0625


async def test_of_several_lists_the_last_counts_if_each_is_better():
    environment = AlphabetSortTags(similarity_power=1)
    better = [first("Q") + first("AdaByron", "ZoeAdler"), RIGHT[1]]
    worse = [first("AdaByron", "ZoeAdler") + first("Q"), RIGHT[1]]
    same = [first("AdaByron", "ZoeAdler") * 2, RIGHT[1]]
    assert [(await play(environment, TASK, said)).reward for said in (better, worse, same)] == [1.0, 0.5, 0.5]


def test_similarity_is_twice_the_matching_characters_over_all():
    assert similarity("ab", ["abcd"]) == 2 * 2 / 6
    assert similarity("b\na", ["a", "b"]) == 2 * 1 / 6  # of "b\na" and "a\nb" one character matches at a time
    assert (similarity("  ", ["a"]), similarity("A", ["a"])) == (0.0, 1.0)


def test_prime_rls_settings_give_three_turns_of_one_to_four_names_marked_and_sorted():
    environment = create_environment("alphabet_sort_tags", PRIME_RL)
    train, held_out = environment.examples("train"), environment.examples("eval")
    assert (len(train), len(held_out)) == (500, 100)
    assert not {json.dumps(e.payload) for e in train} & {json.dumps(e.payload) for e in held_out}
    counts = set()
    for example in train:
        asked, answers = example.payload["asked"], example.payload["answers"]
        assert len(asked) == len(answers) == 3
        by_first = " by FIRST name: " in asked[0]
        known: list[str] = []
        for turn, (question, answer) in enumerate(zip(asked, answers, strict=True)):
            new = question.splitlines()[0].split("name: ")[1].split(", ")
            counts.add(len(new))
            known += new
            plain = [line.removesuffix(" // new name!") for line in answer]
            parts = [_split(name)[0 if by_first else 1] for name in plain]
            assert parts == sorted(parts) and sorted(plain) == sorted(known)
            marked = [line.removesuffix(" // new name!") for line in answer if line.endswith("new name!")]
            assert sorted(marked) == (sorted(new) if turn else [])
        assert asked[0].endswith("</alphabetical_sorted>") and asked[1].endswith("</combined_alphabetical_sorted>")
        assert asked[2].endswith("Follow the same format as before.")
    assert counts == {1, 2, 3, 4}


def _split(name):
    capitals = [i for i, letter in enumerate(name) if letter.isupper()]
    return name[: capitals[1]], name[capitals[1] :]


def test_the_names_may_come_from_a_file(tmp_path):
    (tmp_path / "names.jsonl").write_text('{"names": ["Zoe Byron", "Ada Xu", "Zoe Byron"]}\n{"names": ["Bo Li"]}\n')
    environment = AlphabetSortTags(
        names=str(tmp_path / "names.jsonl"),
        min_turns=1,
        max_turns=1,
        min_names_per_turn=2,
        max_names_per_turn=2,
        num_train=3,
        num_eval=1,
    )
    for example in environment.examples("train"):  # the second list is too short
        ordered = ["AdaXu", "ZoeByron"] if " FIRST " in example.payload["asked"][0] else ["ZoeByron", "AdaXu"]
        assert example.payload["answers"] == [ordered]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"min_turns": 3, "max_turns": 2}, "min_turns = 3, max_turns = 2; expected 1 <= min_turns <= max_turns"),
        ({"min_names_per_turn": 0}, "min_names_per_turn = 0"),
        ({"min_names_per_turn": 20, "max_names_per_turn": 20, "min_turns": 3}, "no list of names is long enough"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(args, said):
    with pytest.raises(UsageError) as raised:
        AlphabetSortTags(**args)
    assert said in str(raised.value)
