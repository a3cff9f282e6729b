"""What histograms are drawn of: every completed rollout of a batch, whether it is trained or not."""

import dataclasses

from verbatim import Group, Trajectory, Turn
from verbatim.run.orchestrator.assemble import rollout_distributions


def rollout(reward, num_tokens, *, version=0, advantage=None, turn_advantages=(), error=None, num=0) -> Trajectory:
    """Two turns."""
    first, second = turn_advantages or (None, None)
    turns = (
        Turn(
            prompt_ids=[1],
            completion_ids=[2] * (num_tokens - 1),
            policy_versions=[version] * (num_tokens - 1),
            advantage=first,
        ),
        Turn(prompt_ids=[1], completion_ids=[3], policy_versions=[version + 1], advantage=second),
    )
    return Trajectory(example_id="x", turns=turns, reward=reward, advantage=advantage, error=error, sample_index=num)


def test_every_completed_rollout_is_in_every_distribution():
    trained = Group(
        group_id="a",
        example_id="x",
        env="e",
        trajectories=(
            rollout(1.0, 3, version=2, advantage=0.5),
            rollout(0.0, 5, version=1, turn_advantages=(-0.5, 0.25)),
            rollout(None, 9, error="raised"),
        ),
    )
    filtered = dataclasses.replace(trained, group_id="b", trajectories=(rollout(1.0, 2, version=3),))
    assert rollout_distributions([*trained.trajectories, *filtered.trajectories], 3) == {
        "distribution/reward": [1.0, 0.0, 1.0],
        "distribution/advantage": [0.5, -0.5, 0.25],  # none was computed for the group that was filtered out online
        "distribution/completion_tokens": [3, 5, 2],
        "distribution/turns": [2, 2, 2],
        "distribution/staleness": [1, 2, 0],
    }
