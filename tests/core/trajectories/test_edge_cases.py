"""Whatever an episode comes to, it is known which tokens are trained, in what context, and why the others are not."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from byte_renderer import VOCAB_SIZE, ByteRenderer, say
from drawn import drawn, is_found
from properties.episodes import random_batch
from verbatim import Example, RolloutIdentity, Trajectory, Turn
from verbatim.algorithms.credit import assign_advantages
from verbatim.algorithms.credit.baselines import default_advantage
from verbatim.core.errors import RecordError, RunStopped
from verbatim.core.trajectories import build, build_samples
from verbatim.core.trajectories.extension import OpenSamples
from verbatim.core.types import Group
from verbatim.environments.environment import Episode, Reply
from verbatim.inference import SamplingParams
from verbatim.inference.scripted import ScriptedSampler
from verbatim.rollouts import AgentLoop, EpisodeLimits, Recorder, run_episode


def turn(prompt, completion, **fields):
    fields.setdefault("logprobs", [-0.5] * len(completion))
    return Turn(prompt_ids=prompt, completion_ids=completion, **fields)


def built(*turns, strategy="interleaved", advantage=1.0, **options):
    """Samples as (token_ids, loss_mask as 0 and 1, chunk_ids), and what is dropped."""
    whole = Trajectory(example_id="x", turns=turns, advantage=advantage, trajectory_id="t7")
    found = build(whole, strategy=strategy, **options)
    return [
        (s.token_ids.tolist(), s.loss_mask.astype(int).tolist(), s.chunk_ids.tolist()) for s in found.samples
    ], found.dropped


def branches(*turns, **options):
    return built(*turns, strategy="branching", **options)


# ---- the documents' worked examples

U1, A1, U2, A2, U3, A3 = 1, 11, 2, 12, 3, 13
THREE = (turn([U1], [A1]), turn([U1, A1, U2], [A2]), turn([U1, A1, U2, A2, U3], [A3]))


def test_three_turns_interleaved_are_one_sample_and_branching_three():
    assert built(*THREE) == ([([U1, A1, U2, A2, U3, A3], [0, 1, 0, 1, 0, 1], [-1, 0, -1, 1, -1, 2])], {})
    assert branches(*THREE) == (
        [
            ([U1, A1], [0, 1], [-1, 0]),
            ([U1, A1, U2, A2], [0, 0, 0, 1], [-1, -1, -1, 1]),
            ([U1, A1, U2, A2, U3, A3], [0, 0, 0, 0, 0, 1], [-1, -1, -1, -1, -1, 2]),
        ],
        {},
    )


def test_a_prompt_that_has_the_answer_in_other_words_is_not_merged():
    """U1, A1', U2 after U1, A1: whichever of the two were kept, one turn's logprobs would be of another context."""
    turns = (turn([1], [11, 99]), turn([1, 11, 2], [12]))
    assert built(*turns) == (
        [
            ([1, 11, 99], [0, 1, 1], [-1, 0, 0]),
            ([1, 11, 2, 12], [0, 0, 0, 1], [-1, -1, -1, 1]),
        ],
        {},
    )


def test_thinking_stripped_at_the_fourth_of_five_turns_makes_two_samples():
    """R is thinking; from the fourth turn on the history is without it."""
    r = 90
    five = (
        turn([1], [r, 11]),
        turn([1, r, 11, 2], [r, 12]),
        turn([1, r, 11, 2, r, 12, 3], [r, 13]),
        turn([1, 11, 2, 12, 3, 13, 4], [r, 14]),
        turn([1, 11, 2, 12, 3, 13, 4, r, 14, 5], [15]),
    )
    assert built(*five) == (
        [
            ([1, r, 11, 2, r, 12, 3, r, 13], [0, 1, 1, 0, 1, 1, 0, 1, 1], [-1, 0, 0, -1, 1, 1, -1, 2, 2]),
            ([1, 11, 2, 12, 3, 13, 4, r, 14, 5, 15], [0] * 7 + [1, 1, 0, 1], [-1] * 7 + [3, 3, -1, 4]),
        ],
        {},
    )
    samples, dropped = branches(*five)
    assert [sum(mask) for _, mask, _ in samples] == [2, 2, 2, 2, 1]
    assert [ids for ids, _, _ in samples] == [[*t.prompt_ids.tolist(), *t.completion_ids.tolist()] for t in five]
    assert dropped == {}


def test_a_sub_agent_between_two_turns_of_its_parent_is_a_sample_of_its_own():
    """The parent gets a summary back, not the sub-agent's conversation."""
    turns = (
        turn([1, 2], [3]),
        turn([50, 51], [52], agent="sub/1"),
        turn([50, 51, 52, 53], [54], agent="sub/1"),
        turn([1, 2, 3, 60], [4]),
    )
    assert built(*turns) == (
        [
            ([1, 2, 3, 60, 4], [0, 0, 1, 0, 1], [-1, -1, 0, -1, 3]),
            ([50, 51, 52, 53, 54], [0, 0, 1, 0, 1], [-1, -1, 1, -1, 2]),
        ],
        {},
    )
    assert branches(*turns) == (
        [
            ([1, 2, 3], [0, 0, 1], [-1, -1, 0]),
            ([50, 51, 52], [0, 0, 1], [-1, -1, 1]),
            ([50, 51, 52, 53, 54], [0, 0, 0, 0, 1], [-1, -1, -1, -1, 2]),
            ([1, 2, 3, 60, 4], [0, 0, 0, 0, 1], [-1, -1, -1, -1, 3]),
        ],
        {},
    )


# ---- how an episode may end, and what it may hold


def test_a_trailing_observation_without_a_completion_is_a_normal_end():
    """The environment spoke last; the model was asked and said nothing."""
    turns = (turn([1], [2]), turn([1, 2, 3, 4], [], stop_reason="stop"))
    assert built(*turns) == branches(*turns) == ([([1, 2], [0, 1], [-1, 0])], {})


def test_an_aborted_generation_leaves_the_turns_on_both_sides_of_it_together():
    turns = (turn([1], [2]), turn([1, 2, 3], [], stop_reason="cancelled", logprobs=None), turn([1, 2, 3], [4]))
    assert built(*turns) == ([([1, 2, 3, 4], [0, 1, 0, 1], [-1, 0, -1, 2])], {})
    assert branches(*turns) == ([([1, 2], [0, 1], [-1, 0]), ([1, 2, 3, 4], [0, 0, 0, 1], [-1, -1, -1, 2])], {})


def test_an_over_long_prompt_before_generation_costs_nothing():
    turns = (turn([1], [2]), turn([1, 2, *range(3, 50)], [], stop_reason="length"))
    assert built(*turns, max_length=10) == branches(*turns, max_length=10) == ([([1, 2], [0, 1], [-1, 0])], {})


def test_a_turn_beyond_the_length_is_dropped_whole_and_a_compacted_one_after_it_is_not():
    turns = (turn([1], [2]), turn([1, 2, 3, 4], [5, 6]), turn([1, 9], [7]))
    assert built(*turns, max_length=5) == (
        [([1, 2], [0, 1], [-1, 0]), ([1, 9, 7], [0, 0, 1], [-1, -1, 2])],
        {"over_length": 2},
    )
    assert branches(*turns, max_length=5) == built(*turns, max_length=5)
    assert built(*turns, max_length=6)[1] == {}


@pytest.mark.parametrize("strategy", ["interleaved", "branching"])
@pytest.mark.parametrize("turns", [(), (turn([1, 2], []),), (turn([1], []), turn([1, 3], [], logprobs=None))])
def test_an_episode_without_a_turn_or_without_a_sampled_token_is_nothing_to_train(turns, strategy):
    assert built(*turns, strategy=strategy) == ([], {})


def test_a_turn_without_logprobs_is_context_for_the_others_and_counted():
    turns = (turn([1], [2]), turn([1, 2, 3], [4, 5], logprobs=None), turn([1, 2, 3, 4, 5, 6], [7]))
    assert built(*turns) == (
        [([1, 2, 3, 4, 5, 6, 7], [0, 1, 0, 0, 0, 0, 1], [-1, 0, -1, -1, -1, -1, 2])],
        {"missing_logprobs": 2},
    )
    assert branches(*turns) == (
        [
            ([1, 2], [0, 1], [-1, 0]),
            ([1, 2, 3, 4, 5, 6, 7], [0, 0, 0, 0, 0, 0, 1], [-1, -1, -1, -1, -1, -1, 2]),
        ],
        {"missing_logprobs": 2},
    )


def test_what_follows_the_last_trained_turn_is_not_in_the_sample():
    turns = (turn([1], [2]), turn([1, 2, 3], [4, 5], logprobs=None))
    assert built(*turns) == branches(*turns) == ([([1, 2], [0, 1], [-1, 0])], {"missing_logprobs": 2})


def test_what_is_both_too_long_and_without_logprobs_is_counted_once():
    turns = (turn([1], [2, 3], logprobs=None), turn([1, 2, 3, 4], [5, 6], logprobs=None))
    for strategy in ("interleaved", "branching"):
        assert built(*turns, strategy=strategy, max_length=3) == ([], {"missing_logprobs": 2, "over_length": 2})


def test_an_empty_prompt_is_refused_where_it_enters():
    for make in (lambda: turn([], [1]), lambda: Recorder(9).record(prompt_ids=[], completion_ids=[1])):
        with pytest.raises(RecordError, match="prompt_ids: empty; nothing would predict the first completion id"):
            make()


def test_completions_right_after_one_another_stay_their_own_chunks():
    turns = (turn([1], [2, 3]), turn([1, 2, 3], [4]), turn([1, 2, 3, 4], [5, 6]))
    assert built(*turns) == ([([1, 2, 3, 4, 5, 6], [0, 1, 1, 1, 1, 1], [-1, 0, 0, 1, 2, 2])], {})


def test_of_all_exact_prefixes_the_longest_wins_wherever_it_stands():
    """[1, 2], [1, 2, 3] and [1, 2, 3, 4] are open, the longest one first."""
    turns = (turn([1], [2, 3, 4]), turn([1], [2]), turn([1], [2, 3]), turn([1, 2, 3, 4, 5], [6]))
    assert built(*turns)[0] == [
        ([1, 2, 3, 4, 5, 6], [0, 1, 1, 1, 0, 1], [-1, 0, 0, 0, -1, 3]),
        ([1, 2], [0, 1], [-1, 1]),
        ([1, 2, 3], [0, 1, 1], [-1, 2, 2]),
    ]


def test_of_equal_samples_the_one_that_was_opened_first_wins():
    """[1, 2, 3] twice: the second sample was opened so, the first one grew to it."""
    turns = (turn([1], [2]), turn([1], [2, 3]), turn([1, 2], [3]), turn([1, 2, 3, 9], [4]))
    assert built(*turns)[0] == [
        ([1, 2, 3, 9, 4], [0, 1, 1, 0, 1], [-1, 0, 2, -1, 3]),
        ([1, 2, 3], [0, 1, 1], [-1, 1, 1]),
    ]


def test_a_completion_that_three_turns_share_is_trained_once():
    turns = (turn([1], [2, 3]), *(turn([1, 2, 3, i], [9]) for i in (4, 5, 6)))
    assert built(*turns)[0] == [
        ([1, 2, 3, 4, 9], [0, 1, 1, 0, 1], [-1, 0, 0, -1, 1]),
        ([1, 2, 3, 5, 9], [0, 0, 0, 0, 1], [-1, -1, -1, -1, 2]),
        ([1, 2, 3, 6, 9], [0, 0, 0, 0, 1], [-1, -1, -1, -1, 3]),
    ]


def test_the_same_answer_to_the_same_prompt_is_two_samples():
    """They were sampled twice, so they are trained twice."""
    turns = (turn([1], [2]), turn([1], [2]))
    assert built(*turns)[0] == branches(*turns)[0] == [([1, 2], [0, 1], [-1, 0]), ([1, 2], [0, 1], [-1, 1])]


# ---- rewards


def test_without_a_reward_or_an_advantage_every_advantage_is_zero():
    (sample,) = build(Trajectory(example_id="x", turns=THREE, reward=None)).samples
    assert sample.advantages.tolist() == [0.0] * 6


class Speaks(Episode):
    """Ends at the first thing that is said."""

    messages = ({"role": "user", "content": "go"},)
    tools = ()

    def __init__(self, *, reward=None, score=0.0):
        self._reward, self._score = reward, score

    async def start(self, example, seed):
        return self

    async def reply(self, message):
        return Reply(done=True, reward=self._reward)

    async def score(self, trajectory):
        return self._score


async def episode_of(environment):
    sampler = ScriptedSampler(script=lambda request: say("hi"), vocab_size=VOCAB_SIZE, context_length=100)
    limits, recorder = EpisodeLimits(), Recorder(VOCAB_SIZE)
    loop = AgentLoop(
        sampler=sampler, renderer=ByteRenderer(), params=SamplingParams(), limits=limits, recorder=recorder, seed=0
    )
    return await run_episode(
        environment=environment, example=Example(id="x"), seed=0, loop=loop, identity=RolloutIdentity(example_id="x")
    )


@pytest.mark.parametrize("reward", [[1.0, 2.0], [], "1.0", float("inf")])
async def test_a_step_reward_that_is_no_number_is_refused_where_it_enters(reward):
    failed = await episode_of(Speaks(reward=reward))
    assert failed.error == f"environment: reply gave the reward {reward!r}; expected a finite number"
    assert failed.turns[0].completion_ids.tolist() == say("hi")  # the tokens are there to be counted as dropped


async def test_a_step_without_a_reward_has_none_and_a_number_is_kept():
    assert (await episode_of(Speaks(reward=None))).turns[0].reward is None
    for number in (2, 2.0, np.float32(2), np.int64(2)):
        assert (await episode_of(Speaks(reward=number))).turns[0].reward == 2.0


def test_a_missing_reward_fails_its_rollout_alone_and_is_in_nobodys_baseline():
    rollouts = [Trajectory(example_id="x", turns=THREE, reward=reward) for reward in (1.0, None, 0.0)]
    credited = assign_advantages(Group(group_id="g", example_id="x", env="e", trajectories=rollouts), default_advantage)
    assert [t.advantage for t in credited.trajectories] == [0.5, None, -0.5]
    assert [t.error for t in credited.trajectories] == [None, "reward: missing", None]


async def test_an_episode_that_is_not_scored_has_no_reward_and_no_error():
    unscored = await episode_of(Speaks(score=None))
    assert (unscored.reward, unscored.error, unscored.num_sampled_tokens) == (None, None, len(say("hi")))


@pytest.mark.parametrize("score", [[1.0], float("nan"), {"right": None}])
async def test_a_score_that_is_no_number_fails_its_rollout(score):
    failed = await episode_of(Speaks(score=score))
    assert failed.reward is None
    assert failed.error.startswith(f"environment: score returned {score!r}; expected a")


# ---- breaks that are not wanted


def refused(*turns, **options):
    with pytest.raises(RunStopped) as stopped:
        built(*turns, on_break="error", **options)
    return str(stopped.value)


def test_a_break_is_refused_with_trajectory_turn_and_position():
    said = refused(turn([1], [2]), turn([1, 2, 3], [4]), turn([1, 2, 8, 9], [5]))
    assert said.startswith(
        "trajectory 't7': turn 2 (main) does not extend turn 1: of its 4 prompt ids the first 2 are the same; at "
        "position 2 it has [8, 9], turn 1 has [3, 4]."
    )
    assert 'on_break = "error"' in said and '"split"' in said


def test_the_index_that_is_named_counts_turns_that_are_not_trained():
    said = refused(turn([1], []), turn([1], [2]), turn([1, 2], []), turn([7], [3]))
    assert "turn 3 (main) does not extend turn 1" in said and "position 0 it has [7], turn 1 has [1, 2]" in said


def test_an_agents_first_turn_is_no_break():
    turns = (turn([1], [2]), turn([50], [51], agent="sub/1"), turn([1, 2, 3], [4]), turn([60], [61], agent="sub/2"))
    assert built(*turns, on_break="error") == built(*turns)
    assert "turn 4 (sub/1)" in refused(*turns, turn([50, 52], [53], agent="sub/1"))


def test_branching_has_no_breaks():
    turns = (turn([1], [2]), turn([9], [3]))
    assert branches(*turns, on_break="error") == branches(*turns)


# ---- against lists


def naive(turns):
    """Longest exact prefix among all open samples, of equal ones the earliest: the places of each sample's turns."""
    texts, samples = [], []
    for place, (prompt, completion) in enumerate(turns):
        fitting = [i for i, text in enumerate(texts) if prompt[: len(text)] == text]
        best = max(fitting, key=lambda i: (len(texts[i]), -i), default=None)
        if best is None:
            texts.append([])
            samples.append([])
            best = len(texts) - 1
        texts[best] = prompt + completion
        samples[best].append(place)
    return texts, samples


def as_lists(turns):
    return [(t.prompt_ids.tolist(), t.completion_ids.tolist()) for t in turns]


def check_interleaving(turns, built=built):
    """The samples of these turns, all with logprobs, are the naive ones, token for token."""
    recorded = [t for t in turns if len(t.completion_ids)]
    texts, samples = naive(as_lists(recorded))
    places = [place for place, t in enumerate(turns) if len(t.completion_ids)]
    expected = []
    for text, sample in zip(texts, samples, strict=True):
        chunks = [-1] * len(text)
        for place in sample:
            start, end = recorded[place].num_prompt_tokens, recorded[place].path.length
            chunks[start:end] = [places[place]] * (end - start)
        expected.append((text, [int(chunk >= 0) for chunk in chunks], chunks))
    assert built(*turns)[0] == expected


@given(st.randoms(use_true_random=False))
@drawn("interleaving", 60, 5000)
def test_interleaving_is_the_naive_one(random):
    for trajectory in random_batch(random):
        check_interleaving([t.replace(logprobs=[-0.5] * len(t.completion_ids)) for t in trajectory.turns])


@st.composite
def colliding(draw):
    """Turns over two ids, so that samples are equal, nested, or prefixes of each other."""
    ids = st.lists(st.integers(0, 1), min_size=1, max_size=3)
    known, turns = [[]], []
    for _ in range(draw(st.integers(1, 10))):
        base = draw(st.sampled_from(known))
        prompt = base[: draw(st.integers(0, len(base)))] + draw(ids)[: 0 if base and draw(st.booleans()) else 3]
        turns.append(turn(prompt or [0], draw(ids)))
        known.append([*turns[-1].prompt_ids.tolist(), *turns[-1].completion_ids.tolist()])
    return turns


@given(colliding())
@drawn("interleaving, colliding", 60, 10000)
def test_interleaving_is_the_naive_one_where_everything_collides(turns):
    check_interleaving(turns)


def test_a_turn_that_is_left_out_is_found():
    """The campaign can fail."""
    assert is_found(lambda turns: check_interleaving(turns, lambda *turns: built(*turns[1:])), colliding())


def shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def check_find(opened, texts, asked):
    prompt = asked.prompt_ids.tolist()
    found = opened.find(asked)
    fitting = [len(text) for text in texts if prompt[: len(text)] == text]
    common = [shared(prompt, text) for text in texts]
    if fitting:
        assert texts[found.sample] == prompt[: max(fitting)] and found.closest == found.sample
        assert found.shared == max(fitting)
    else:
        assert found.sample is None
        assert found.shared == max(common, default=0)
        assert found.closest is None if not texts else common[found.closest] == found.shared


@given(colliding())
@drawn("shared prefixes", 60, 5000)
def test_what_a_prompt_shares_with_the_closest_sample_is_what_lists_share(turns):
    turns = Trajectory(example_id="x", turns=turns).turns
    opened, texts = OpenSamples(), []
    for each in turns:
        for other in turns:
            check_find(opened, texts, other)
        opened.open(each.path)
        texts.append([*each.prompt_ids.tolist(), *each.completion_ids.tolist()])


def test_with_64_open_branches_and_256_turns_it_is_what_lists_share():
    """Conversations of 4 turns each that leave one history at random places."""
    random = Random(0)
    history = [random.randrange(5) for _ in range(300)]
    turns, texts = [], [history[: random.randrange(1, 300)] for _ in range(64)]
    for place in range(256):
        text = texts[place % 64]
        prompt = text + [random.randrange(5) for _ in range(random.randrange(1, 4))]
        completion = [random.randrange(5) for _ in range(random.randrange(1, 6))]
        texts[place % 64] = prompt + completion
        turns.append(turn(prompt, completion))
    turns = Trajectory(example_id="x", turns=turns).turns
    opened, texts, ends = OpenSamples(), [], []
    for each in turns:
        check_find(opened, texts, each)
        sample = opened.find(each).sample
        text = [*each.prompt_ids.tolist(), *each.completion_ids.tolist()]
        if sample is None:
            opened.open(each.path)
            texts.append(text)
            ends.append(each.path)
        else:
            opened.extend(sample, ends[sample], each.path)
            texts[sample], ends[sample] = text, each.path
    assert len(texts) == 64
    check_interleaving(turns)


# ---- what failed, and what was cut off


@pytest.mark.parametrize("strategy", ["interleaved", "branching"])
def test_a_failed_trajectory_trains_nothing_unless_it_is_asked_for(strategy):
    good = Trajectory(example_id="x", turns=THREE, advantage=1.0)
    failed = good.replace(error="environment: broke", num_unrecorded_tokens=5)
    recorded = sum(len(turn.completion_ids) for turn in THREE)
    assert build_samples(failed, strategy) == failed["samples"] == []
    assert build(failed, strategy=strategy).dropped == {"error": recorded + 5}
    asked = build(failed, strategy=strategy, include_failed=True)
    assert asked.dropped == {"error": 5}
    for samples in (asked.samples, build_samples(failed, strategy, include_failed=True)):
        assert [s.token_ids.tolist() for s in samples] == [s.token_ids.tolist() for s in build_samples(good, strategy)]
        assert sum(s.num_trained_tokens for s in samples) == recorded


def test_what_was_cut_off_in_an_episode_that_went_on_is_dropped_as_cancelled():
    found = build(Trajectory(example_id="x", turns=THREE, num_unrecorded_tokens=4))
    assert found.dropped == {"cancelled": 4}
    assert sum(s.num_trained_tokens for s in found.samples) == sum(len(turn.completion_ids) for turn in THREE)


def test_the_arrays_of_a_sample_are_those_of_its_turns_token_by_token():
    """A turn whose weights changed on the way, one of unknown weights and advantage 0, one that may not be trained."""
    turns = [
        turn([1, 2], [3, 4, 5], logprobs=[-1.0, -2.0, -3.0], policy_versions=[6, 7, 7], temperature=0.5),
        turn([1, 2, 3, 4, 5, 6], [7], trained=False),
        turn([1, 2, 3, 4, 5, 6, 7], [8, 9], advantage=-0.0),
    ]
    (sample,) = build_samples(Trajectory(example_id="x", turns=turns, advantage=2.0))
    assert sample.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert sample.loss_mask.tolist() == [False, False, True, True, True, False, False, True, True]
    assert sample.policy_versions.tolist() == [-1, -1, 6, 7, 7, -1, -1, -1, -1]
    assert sample.chunk_ids.tolist() == [-1, -1, 0, 0, 0, -1, -1, 2, 2]
    assert sample.advantages.tolist() == [0, 0, 2, 2, 2, 0, 0, 0, 0] and not np.signbit(sample.advantages).any()
    assert sample.temperatures.tolist() == [1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 1]
    assert np.isnan(sample.logprobs).tolist() == [True, True, False, False, False, True, True, False, False]
    assert sample.logprobs[sample.loss_mask].tolist() == [-1.0, -2.0, -3.0, -0.5, -0.5]
    assert not any(getattr(sample, name).flags.writeable for name in ("loss_mask", "logprobs", "chunk_ids"))
    for name in ("token_ids", "logprobs", "advantages", "chunk_ids", "policy_versions", "temperatures", "loss_mask"):
        assert sample.trained(name).tolist() == getattr(sample, name)[sample.loss_mask].tolist()
    assert sample.trained_places().tolist() == [2, 3, 4, 7, 8] and sample.num_trained_tokens == 5
