"""Groups of recorded rollouts, from their rewards."""

from verbatim import Group, Trajectory, Turn
from verbatim.algorithms.credit import AdvantageInputs


def turn(tokens=1, reward=None, state=None):
    """A turn that sampled so many tokens."""
    return Turn(prompt_ids=[1], completion_ids=[2] * tokens, logprobs=[-1.0] * tokens, reward=reward, state_key=state)


def rollout(reward, *turns, index=0, **fields):
    return Trajectory(example_id="x", sample_index=index, reward=reward, turns=turns or (turn(),), **fields)


def group(*rewards):
    """Rollouts of one turn each; a reward of None is one that broke."""
    rollouts = [
        rollout(reward, index=i, error="environment: broke" if reward is None else None)
        for i, reward in enumerate(rewards)
    ]
    return group_of(*rollouts)


def group_of(*rollouts):
    return Group(group_id="g7", example_id="x", env="e", trajectories=rollouts)


def advantages(function, *rollouts, **parameters):
    """What the function says of these rollouts."""
    return list(function(AdvantageInputs(rollouts=rollouts), **parameters).advantages)
