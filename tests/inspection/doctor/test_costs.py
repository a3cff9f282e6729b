"""What a break costs is what training computes a second time, worked out by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verbatim import Trajectory, Turn, build_samples
from verbatim.inspection.doctor import Doctor, LoggedTrajectory
from verbatim.inspection.doctor.samples import find_samples


def turns_of(*pairs, agent="main"):
    return Trajectory(example_id="x", turns=[Turn(prompt_ids=p, completion_ids=c, agent=agent) for p, c in pairs]).turns


def test_a_deletion_costs_the_history_that_is_left():
    # Recorded 1 2 | 3 4 5 6 7; the 3 is gone from the next prompt, 8 9 are new, 10 is sampled.
    turns = turns_of(([1, 2], [3, 4, 5, 6, 7]), ([1, 2, 4, 5, 6, 7, 8, 9], [10]))
    doctor = Doctor()
    (found,) = doctor.examine(LoggedTrajectory(trajectory=Trajectory(example_id="x", turns=turns), line=1))
    assert found.position == 2
    assert found.repeated == 6  # 1 2 4 5 6 7
    assert found.repeated_in_tree == 4  # 4 5 6 7
    assert found.share == 6 / 16
    summary = doctor.summary
    assert (summary.trajectories, summary.turns, summary.samples) == (1, 2, 2)
    assert (summary.row_tokens, summary.tree_tokens) == (7 + 9, 7 + 7)
    assert summary.share(summary.repeated) == 6 / 16


def test_had_the_prompt_extended_rows_would_compute_that_much_less():
    broken = find_samples(turns_of(([1, 2], [3, 4, 5, 6, 7]), ([1, 2, 9, 4, 5, 6, 7, 8], [10])))
    whole = find_samples(turns_of(([1, 2], [3, 4, 5, 6, 7]), ([1, 2, 3, 4, 5, 6, 7, 8], [10])))
    assert broken.row_tokens - whole.row_tokens == 7  # the history of the prompt: all of it but the 8


def test_a_sub_agent_costs_only_the_opening_it_shares():
    turns = (*turns_of(([1, 2, 3, 4, 5, 6], [7])), *turns_of(([1, 2, 8, 4, 5, 6, 7], [9]), agent="sub"))
    logged = LoggedTrajectory(trajectory=Trajectory(example_id="x", turns=turns), line=1)
    (found,) = Doctor().examine(logged)
    assert (found.repeated, found.repeated_in_tree) == (2, 0)


def test_the_share_of_an_empty_file_is_nothing():
    summary = Doctor().summary
    assert (summary.breaks, summary.share(0)) == (0, 0.0)


short = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(st.lists(st.tuples(short, short, st.booleans()), min_size=1, max_size=6))
def test_the_samples_are_those_that_training_makes(steps):
    before: list[int] = []
    pairs = []
    for prompt, completion, extends in steps:
        prompt = [*before, *prompt] if extends else prompt
        pairs.append((prompt, completion))
        before = [*prompt, *completion]
    turns = [Turn(prompt_ids=p, completion_ids=c, logprobs=[-1.0] * len(c)) for p, c in pairs]
    trajectory = Trajectory(example_id="x", turns=turns)
    samples = build_samples(trajectory)
    found = find_samples(trajectory.turns)
    assert len(found.samples) == len(samples) == len(found.openings) + 1
    assert found.row_tokens == sum(len(sample) for sample in samples)
    prefixes = {tuple(sample.token_ids[: n + 1]) for sample in samples for n in range(len(sample))}
    assert found.tree_tokens == len(prefixes)
    doctor = Doctor()
    diagnoses = doctor.examine(LoggedTrajectory(trajectory=trajectory, line=1))
    assert [d.turn for d in diagnoses] == [opening.turn for opening in found.openings]
    for d in diagnoses:
        assert 0 <= d.repeated_in_tree <= d.repeated <= turns[d.turn].num_prompt_tokens
