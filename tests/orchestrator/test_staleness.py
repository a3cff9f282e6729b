"""One definition of staleness, tested at its boundaries."""

import pytest

from verbatim import Trajectory, Turn
from verbatim.orchestrator.staleness import age, first_version, may_start


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
    assert may_start(batch, version, level) is allowed


def sampled_by(*versions):
    turns = [
        Turn(prompt_ids=[1], completion_ids=[2] * len(v), logprobs=[-1.0] * len(v), policy_versions=v)
        for v in versions
    ]
    return Trajectory(example_id="x", turns=turns)


def test_age_counts_from_the_first_sampled_token():
    assert age(sampled_by([3, 4], [9]), step=11) == 8
    assert first_version(sampled_by([], [5])) == 5
    assert age(sampled_by(), step=4) == 0
