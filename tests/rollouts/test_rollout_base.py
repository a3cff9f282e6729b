"""`Rollout` as a base class: what a subclass has to write, and what it is given."""

import asyncio

import pytest

from verbatim import Trajectory
from verbatim.rollouts import Rollout


class Unwritten(Rollout):
    pass


class Echo(Rollout):
    def __call__(self, trajectories, **overrides):
        return [Trajectory(example_id="e", messages=t["messages"], info=overrides) for t in trajectories]


def test_a_subclass_that_writes_no_call_says_so():
    with pytest.raises(NotImplementedError, match=r"Unwritten must implement `__call__\(self, trajectories"):
        Unwritten()([])
    with pytest.raises(NotImplementedError, match="Unwritten"):
        asyncio.run(Unwritten().run([]))


def test_a_subclass_that_writes_the_call_can_be_awaited():
    given = [{"messages": [{"role": "user", "content": "hi"}]}]
    (result,) = asyncio.run(Echo().run(given, max_turns=3))
    assert (result["messages"], result.info) == (given[0]["messages"], {"max_turns": 3})
    assert isinstance(Echo(), Rollout)
