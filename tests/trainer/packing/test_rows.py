from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawn import drawn, is_found
from verbatim import Trajectory, Turn, build_samples
from verbatim.core.errors import UsageError
from verbatim.core.types import TrainingSample
from verbatim.trainer.packing import PACKERS, pack_rows


def make_sample(ids, mask, trajectory_id="t", *, base=0.0, teacher=False):
    """A sample whose every number tells where it came from: token id i at index k has advantage base + k / 100."""
    mask = np.array(mask, dtype=bool)
    index = np.arange(len(ids))
    return TrainingSample(
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -0.5 - index, np.nan).astype(np.float32),
        advantages=np.where(mask, base + index / 100, 0).astype(np.float32),
        chunk_ids=np.where(mask, index // 3, -1).astype(np.int32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.where(mask, 0.7, 1.0).astype(np.float32),
        teacher_logprobs=(-1.0 - index).astype(np.float32) if teacher else None,
        trajectory_id=trajectory_id,
    )


def test_a_sample_becomes_the_row_of_the_docstring():
    (batch,) = pack_rows([make_sample([1, 2, 3, 4, 5], [0, 0, 1, 0, 1])], micro_batch_tokens=8, keep_whole=False)
    assert batch.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4]
    assert batch.targets.source_positions.tolist() == [1, 3]
    assert batch.targets.target_ids.tolist() == [3, 5]
    assert batch.targets.offsets.tolist() == [2, 4]
    assert batch.targets.inference_logprobs.tolist() == [-2.5, -4.5]
    assert batch.targets.chunk_ids.tolist() == [0, 1]
    assert batch.targets.temperatures.tolist() == pytest.approx([0.7, 0.7])
    assert (batch.trajectory_ids, batch.trajectory_lengths.tolist()) == (("t",), [5])


def test_rows_start_at_position_0_and_end_where_the_next_begins():
    samples = [make_sample([7, 8, 9], [0, 1, 1], "a"), make_sample([5, 6], [0, 1], "b")]
    (batch,) = pack_rows(samples, micro_batch_tokens=5, keep_whole=False)
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.starts.tolist() == [0, 1, 2, 3, 4]
    assert batch.ends.tolist() == [3, 3, 3, 5, 5]
    assert batch.row_lengths.tolist() == [3, 2]
    assert batch.targets.source_positions.tolist() == [0, 1, 3]


def test_first_fit_decreasing_fills_the_first_micro_batch_with_room():
    # Sizes 6, 5, 4, 3, 2 into 10: [6, 4], [5, 3, 2].
    sizes = [3, 6, 2, 5, 4]
    samples = [make_sample(range(n), [0] + [1] * (n - 1), str(n)) for n in sizes]
    batches = pack_rows(samples, micro_batch_tokens=10, keep_whole=False)
    assert [batch.row_lengths.tolist() for batch in batches] == [[6, 4], [5, 3, 2]]


def test_a_sample_above_the_budget_is_alone():
    samples = [make_sample(range(n), [0] + [1] * (n - 1), str(n)) for n in (12, 2)]
    batches = pack_rows(samples, micro_batch_tokens=10, keep_whole=False)
    assert [batch.row_lengths.tolist() for batch in batches] == [[12], [2]]


def test_samples_of_a_trajectory_stay_together_where_they_fit():
    # 4 + 5 of "a" are placed as one item of 9, so "b" of 6 opens its own; singly 6 + 4 would go together.
    samples = [
        make_sample(range(4), [0, 1, 1, 1], "a"),
        make_sample(range(5), [0, 1, 1, 1, 1], "a"),
        make_sample(range(6), [0, 1, 1, 1, 1, 1], "b"),
    ]
    whole = pack_rows(samples, micro_batch_tokens=10, keep_whole=True)
    single = pack_rows(samples, micro_batch_tokens=10, keep_whole=False)
    assert [batch.row_lengths.tolist() for batch in whole] == [[4, 5], [6]]
    assert [batch.row_lengths.tolist() for batch in single] == [[6, 4], [5]]


def test_a_trajectory_that_fits_to_the_last_token_stays_together():
    # 4 + 5 of "a" are placed as one item of 9; singly, "b" of 4 would take the place beside the 5.
    samples = [make_sample(range(n), [0] + [1] * (n - 1), name) for n, name in ((4, "b"), (4, "a"), (5, "a"))]
    batches = pack_rows(samples, micro_batch_tokens=9, keep_whole=True)
    assert [batch.trajectory_ids for batch in batches] == [("a",), ("b",)]


def test_a_trajectory_that_does_not_fit_is_cut_between_samples_and_keeps_its_length():
    samples = [make_sample(range(6), [0, 1, 1, 1, 1, 1], "a"), make_sample(range(5), [0, 0, 1, 1, 1], "a")]
    first, second = pack_rows(samples, micro_batch_tokens=8, keep_whole=True)
    assert first.trajectory_lengths.tolist() == second.trajectory_lengths.tolist() == [11]
    assert first.targets.offsets.tolist() == [1, 2, 3, 4, 5]
    assert second.targets.offsets.tolist() == [8, 9, 10]


def test_a_sample_without_a_trained_token_costs_nothing_but_keeps_its_place():
    samples = [make_sample([1, 2, 3], [0, 0, 0], "a"), make_sample([4, 5], [0, 1], "a"), make_sample([6], [0], "b")]
    (batch,) = pack_rows(samples, micro_batch_tokens=10, keep_whole=True)
    assert batch.input_ids.tolist() == [4, 5]
    assert batch.targets.offsets.tolist() == [4]
    assert (batch.trajectory_ids, batch.trajectory_lengths.tolist()) == (("a",), [5])


def test_nothing_to_train_is_no_micro_batch():
    assert pack_rows([], micro_batch_tokens=10, keep_whole=True) == []
    assert pack_rows([make_sample([1, 2], [0, 0])], micro_batch_tokens=10, keep_whole=False) == []


def test_teacher_logprobs_travel_with_their_tokens():
    sample = make_sample([1, 2, 3], [0, 1, 1], teacher=True)
    (batch,) = pack_rows([sample], micro_batch_tokens=10, keep_whole=False)
    assert batch.targets.logprob_streams["teacher"].tolist() == [-2.0, -3.0]


@st.composite
def batches_of_samples(draw):
    samples = []
    for i in range(draw(st.integers(0, 8))):
        length = draw(st.integers(1, 12))
        mask = [False, *draw(st.lists(st.booleans(), min_size=length - 1, max_size=length - 1))]
        ids = draw(st.lists(st.integers(0, 50), min_size=length, max_size=length))
        samples.append(make_sample(ids, mask, draw(st.sampled_from("abc")), base=i))
    return samples


def contents(batches):
    """Every target with all that is known of it, and the context it is predicted in."""
    found = []
    for batch in batches:
        t = batch.targets
        for i in range(len(t)):
            source = int(t.source_positions[i])
            row_start = source - int(batch.position_ids[source])
            found.append(
                (
                    tuple(batch.input_ids[row_start : source + 1].tolist()),
                    int(t.target_ids[i]),
                    float(t.inference_logprobs[i]),
                    float(t.advantages[i]),
                    int(t.chunk_ids[i]),
                    float(t.temperatures[i]),
                    batch.trajectory_ids[t.trajectories[i]],
                )
            )
    return sorted(found)


def expected_contents(samples):
    return sorted(
        (
            tuple(s.token_ids[:i].tolist()),
            int(s.token_ids[i]),
            float(s.logprobs[i]),
            float(s.advantages[i]),
            int(s.chunk_ids[i]),
            float(s.temperatures[i]),
            s.trajectory_id,
        )
        for s in samples
        for i in range(len(s))
        if s.loss_mask[i]
    )


@given(samples=batches_of_samples(), budget=st.integers(1, 30), keep_whole=st.booleans(), data=st.data())
@drawn("targets of rows", 50, 5000)
def test_every_trained_token_is_a_target_once_in_its_context(samples, budget, keep_whole, data):
    batches = pack_rows(samples, micro_batch_tokens=budget, keep_whole=keep_whole)
    assert contents(batches) == expected_contents(samples)
    shuffled = data.draw(st.permutations(samples))
    assert contents(pack_rows(shuffled, micro_batch_tokens=budget, keep_whole=keep_whole)) == contents(batches)


def test_a_sample_that_is_left_out_is_found():
    """The campaign can fail."""

    def case(samples):
        batches = pack_rows(samples[:-1], micro_batch_tokens=9, keep_whole=False) if len(samples) > 1 else []
        assert contents(batches) == expected_contents(samples)

    assert is_found(case, batches_of_samples())


@given(samples=batches_of_samples(), budget=st.integers(1, 30), keep_whole=st.booleans())
@drawn("budgets of rows", 50, 5000)
def test_no_micro_batch_exceeds_its_tokens_and_no_row_is_cut(samples, budget, keep_whole):
    batches = pack_rows(samples, micro_batch_tokens=budget, keep_whole=keep_whole)
    trained = [s for s in samples if s.num_trained_tokens]
    assert sorted(n for batch in batches for n in batch.row_lengths) == sorted(len(s) for s in trained)
    assert all(batch.num_tokens <= budget or len(batch.row_lengths) == 1 for batch in batches)


@given(samples=batches_of_samples(), budget=st.integers(1, 30))
@drawn("offsets of rows", 50, 5000)
def test_offsets_are_places_in_the_trajectory_as_given(samples, budget):
    laid = {}
    for sample in samples:
        laid.setdefault(sample.trajectory_id, []).append(sample)
    ids = {k: np.concatenate([s.token_ids for s in v]) for k, v in laid.items()}
    masks = {k: np.concatenate([s.loss_mask for s in v]) for k, v in laid.items()}
    seen = {k: [] for k in laid}
    for batch in pack_rows(samples, micro_batch_tokens=budget, keep_whole=True):
        for number, trajectory_id in enumerate(batch.trajectory_ids):
            mine = batch.targets.trajectories == number
            assert batch.trajectory_lengths[number] == len(ids[trajectory_id])
            assert (ids[trajectory_id][batch.targets.offsets[mine]] == batch.targets.target_ids[mine]).all()
            seen[trajectory_id].extend(batch.targets.offsets[mine].tolist())
    assert {k: sorted(v) for k, v in seen.items()} == {k: np.flatnonzero(m).tolist() for k, m in masks.items()}


@given(samples=batches_of_samples(), budget=st.integers(1, 60))
@drawn("trajectories of rows", 50, 5000)
def test_whole_means_one_micro_batch_where_the_budget_allows(samples, budget):
    tokens = {}
    for sample in samples:
        if sample.num_trained_tokens:
            tokens[sample.trajectory_id] = tokens.get(sample.trajectory_id, 0) + len(sample)
    batches = pack_rows(samples, micro_batch_tokens=budget, keep_whole=True)
    for trajectory_id, count in tokens.items():
        homes = [batch for batch in batches if trajectory_id in batch.trajectory_ids]
        assert len(homes) == 1 or count > budget


# ---- two trajectories of one id


def samples_of(*, trajectory_id, breaks, group_id="g"):
    prompts = [[1], [7, 8, 9]] if breaks else [[1], [1, 2, 3]]
    turns = tuple(Turn(prompt_ids=ids, completion_ids=[2], logprobs=[-0.5]) for ids in prompts)
    return build_samples(Trajectory(example_id="x", turns=turns, trajectory_id=trajectory_id, group_id=group_id))


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("keep_whole", [False, True])
@pytest.mark.parametrize("breaks", [False, True])
def test_two_trajectories_of_one_id_are_refused(packer, keep_whole, breaks):
    one, other = (samples_of(trajectory_id=name, breaks=breaks) for name in ("a", "b"))
    pack = partial(PACKERS[packer], micro_batch_tokens=100, keep_whole=keep_whole)
    assert sorted(pack([*one, *other])[0].trajectory_ids) == ["a", "b"]
    for again in (one, samples_of(trajectory_id="a", breaks=not breaks, group_id="h")):
        with pytest.raises(UsageError, match=r"two trajectories of one batch have the trajectory_id 'a'"):
            pack([*one, *other, *again])


@pytest.mark.parametrize("packer", PACKERS)
def test_without_ids_they_are_refused_where_a_trajectory_is_seen_whole(packer):
    one, other = (samples_of(trajectory_id="", breaks=True) for _ in range(2))
    assert sum(len(b.targets) for b in PACKERS[packer]([*one, *other], micro_batch_tokens=100, keep_whole=False)) == 4
    with pytest.raises(UsageError, match="give each an id of its own"):
        PACKERS[packer]([*one, *other], micro_batch_tokens=100, keep_whole=True)
