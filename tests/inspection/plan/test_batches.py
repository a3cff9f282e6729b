"""The batch of a plan: as long as the file allows, or that of a run."""

import numpy as np
import pytest

from verbatim.config import make_config
from verbatim.core.errors import UsageError
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.core.types import Trajectory, Turn
from verbatim.inspection.plan.batches import assumed_batch, batch_of_run, kept_set_bytes
from verbatim.logs.outcomes.files import OutcomeFolder


def config(**orchestrator):
    env = [{"id": "guess_number", "max_turns": orchestrator.pop("max_turns", 16)}]
    table = {"batch_size": 4, "group_size": 2, "train": {"env": env}, **orchestrator}
    return make_config({"model": {"name": "x"}, "orchestrator": table})


def test_rollouts_are_as_long_as_seq_len_with_a_prompt_that_their_group_shares():
    batch = assumed_batch(config(seq_len=2048))
    assert [len(sample) for sample in batch.samples] == [2048] * 4
    assert [sample.num_trained_tokens for sample in batch.samples] == [1536] * 4
    first, second, other = (batch.samples[i].token_ids for i in (0, 1, 2))
    assert np.array_equal(first[:512], second[:512]) and not np.array_equal(first[512:], second[512:])
    assert not np.array_equal(first[:512], other[:512])
    assert (batch.sampled_tokens, batch.prompt_tokens, batch.longest_sampled) == (4 * 1536, 4 * 512, 1536)
    assert batch.mean_context == 512 + 1536 / 2
    assert "a prompt of 512 that its group shares, and 3 turns of 512 sampled" in batch.said


def test_turns_that_cannot_fill_a_trajectory_leave_the_rest_to_the_prompt():
    batch = assumed_batch(config(seq_len=1000, max_turns=2, sampling={"max_tokens": 100}))
    assert (batch.longest_sampled, batch.prompt_tokens) == (200, 4 * 800)


def test_branching_has_a_sample_for_each_turn():
    batch = assumed_batch(config(seq_len=2048, trajectory_strategy="branching"))
    assert sorted(map(len, batch.samples)) == [1024] * 4 + [1536] * 4 + [2048] * 4
    assert batch.prompt_tokens == 4 * 512


@pytest.mark.parametrize(("sampling", "each"), [({"top_k": 20, "top_p": 0.9}, 20), ({"top_p": 0.9}, 100), ({}, 0)])
def test_kept_sets_have_top_k_ids_or_a_hundred_of_four_bytes(sampling, each):
    cut = config(seq_len=1000, max_turns=2, sampling={"max_tokens": 100, **sampling})
    assert kept_set_bytes(cut, assumed_batch(cut)) == 4 * 200 * each * 4


def test_kept_sets_of_a_run_are_counted(tmp_path):
    kept = trajectory(9, 3, "a", kept_sets=[[0, 5], [1, 7, 8], [2]])
    OutcomeFolder(tmp_path / "trajectories").write(0, [TrajectoryOutcome(trajectory=kept, turns=("trained",))])
    cut = config(sampling={"top_k": 50})
    assert kept_set_bytes(cut, batch_of_run(cut, tmp_path)) == 4 * 6


def trajectory(prompt, sampled, name, error=None, **fields):
    turn = Turn(
        prompt_ids=list(range(prompt)), completion_ids=list(range(sampled)), logprobs=[-1.0] * sampled, **fields
    )
    return Trajectory(example_id=name, turns=(turn,), reward=1.0, trajectory_id=name, error=error)


def test_the_last_trajectories_of_a_run_are_taken_without_those_that_failed(tmp_path):
    files = OutcomeFolder(tmp_path / "trajectories")
    for step, (prompt, sampled, error) in enumerate([(9, 9, None), (10, 5, None), (20, 6, "x: y"), (30, 7, None)]):
        files.write(
            step, [TrajectoryOutcome(trajectory=trajectory(prompt, sampled, str(step), error), turns=("trained",))]
        )
    batch = batch_of_run(config(batch_size=2), tmp_path)
    assert sorted(map(len, batch.samples)) == [15, 37]
    assert (batch.num_rollouts, batch.sampled_tokens, batch.prompt_tokens) == (2, 12, 40)
    assert batch.mean_context == (5 * 12.5 + 7 * 33.5) / 12
    assert not batch.is_assumed and "the last 2 trajectories" in batch.said
    assert "fewer than the batch_size of 4" in batch_of_run(config(), tmp_path).said


def test_a_run_without_trajectories_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"there is no folder trajectories"):
        batch_of_run(config(), tmp_path)
    OutcomeFolder(tmp_path / "trajectories").write(1, [])
    with pytest.raises(UsageError, match="no trajectory that could be trained"):
        batch_of_run(config(), tmp_path)
