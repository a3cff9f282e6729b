"""One definition of staleness, tested at its boundaries."""

import pytest

from verbatim import Group, Trajectory, Turn
from verbatim.core.trajectories import age, first_version
from verbatim.run.orchestrator.staleness import age_metrics, newest_batch, too_old


@pytest.mark.parametrize(
    ("batch", "version", "level", "allowed"),
    [
        (0, 0, 0, True),
        (1, 0, 0, False),
        (1, 1, 0, True),
        (1, 0, 1, True),  # pi_max(0, n-1): batch 1 is sampled with pi_0
        (2, 0, 1, False),
        (2, 1, 1, True),
        (5, 2, 3, True),
        (5, 1, 3, False),
        (3, 7, 0, True),
    ],
)
def test_rollouts_for_batch_n_start_with_version_n_minus_k_or_newer(batch, version, level, allowed):
    assert (batch <= newest_batch(version, level)) is allowed


def sampled_by(*versions):
    turns = [
        Turn(prompt_ids=[1], completion_ids=[2] * len(v), logprobs=[-1.0] * len(v), policy_versions=v) for v in versions
    ]
    return Trajectory(example_id="x", turns=turns)


def test_age_counts_from_the_first_sampled_token():
    assert age(sampled_by([3, 4], [9]), batch=11) == 8
    assert first_version(sampled_by([], [5])) == 5
    assert age(sampled_by(), batch=4) == 0


def test_age_counts_from_the_first_sampled_token_of_agents_that_speak_side_by_side():
    """Turns are recorded as they end: a long one that began with version 3 comes after a short one of version 5."""
    assert age(sampled_by([5], [3, 5, 6]), batch=7) == 4


def test_untrained_turns_have_no_age():
    trajectory = sampled_by([3, 4], [9])
    user, agent = trajectory.turns
    assert age(trajectory.replace(turns=(user.replace(trained=False), agent)), batch=11) == 2


def test_a_token_whose_version_is_unknown_has_no_age():
    assert age(sampled_by([-1, -1], [6]), batch=7) == 1
    assert age(sampled_by([-1, 5]), batch=7) == 2
    assert age(sampled_by([-1]), batch=7) == 0
    untold = Turn(prompt_ids=[1], completion_ids=[2], logprobs=[-1.0])
    assert age(Trajectory(example_id="x", turns=[untold, *sampled_by([2]).turns]), batch=7) == 5


def test_a_group_is_too_old_when_all_that_completed_in_it_is():
    def group(*trajectories):
        return Group(group_id="g", example_id="x", env="e", trajectories=trajectories)

    assert not too_old(group(sampled_by([3]), sampled_by([4])), batch=5, max_off_policy_steps=1)
    assert too_old(group(sampled_by([3]), sampled_by([3, 9])), batch=5, max_off_policy_steps=1)
    failed = sampled_by([0]).replace(error="tool: broke")
    assert too_old(group(sampled_by([3]), failed), batch=5, max_off_policy_steps=1)
    assert not too_old(group(failed), batch=5, max_off_policy_steps=1)


def test_ages_are_counted_with_a_column_for_each_that_may_be_trained():
    assert age_metrics([0, 1, 1], 2) == {
        "staleness/mean": pytest.approx(2 / 3),
        "staleness/max": 1,
        "staleness/age/0": 1,
        "staleness/age/1": 2,
        "staleness/age/2": 0,
    }
    assert age_metrics([], 1) == {"staleness/age/0": 0, "staleness/age/1": 0}
    assert age_metrics([40], 100)["staleness/age/40"] == 1
