"""What a break is: one function says it, and all who count breaks agree."""

import numpy as np
import pytest

from verbatim import Trajectory, Turn
from verbatim.core.errors import NoFlatList, RunStopped
from verbatim.core.trajectories import build
from verbatim.core.trajectories.openings import breaks
from verbatim.inspection.doctor import Doctor, LoggedTrajectory
from verbatim.inspection.viewer.breaks import BreakReader
from verbatim.logs.monitors.alarms.figures import own_breaks


def spoken(*turns, name="x"):
    made = [
        Turn(
            prompt_ids=prompt,
            completion_ids=done,
            logprobs=[-1.0] * len(done),
            policy_versions=[0] * len(done),
            agent=agent,
        )
        for agent, prompt, done in turns
    ]
    return Trajectory(example_id="x", trajectory_id=name, turns=made, reward=1.0)


RETURN = (("main", [1], [2]), ("sub/1", [7], [8]), ("main", [1, 2, 3], [4]))
INTERLEAVED = (("a", [1], [2]), ("b", [7], [8]), ("a", [1, 2, 3], [4]), ("b", [7, 8, 9], [5]))
REWRITTEN = (("main", [1], [2]), ("main", [1, 9, 3], [4]))
BEHIND_A_SUB_AGENT = (("main", [1], [2]), ("sub/1", [7], [8]), ("main", [1, 9, 3], [4]))
PARALLEL = (("main", [1], [2]), ("main", [1], [3]))
OLDER_BRANCH = (("main", [1], [2]), ("main", [1, 5], [6]), ("main", [1, 2, 3], [4]))
NOTHING_SAMPLED = (("main", [1], [2]), ("main", [9], []), ("main", [1, 2, 3], [4]))


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        (RETURN, []),
        (INTERLEAVED, []),
        (REWRITTEN, [1]),
        (BEHIND_A_SUB_AGENT, [2]),
        (PARALLEL, [1]),
        (OLDER_BRANCH, [1]),
        (NOTHING_SAMPLED, []),
        ((), []),
    ],
)
def test_a_break_opens_a_sample_though_its_agent_had_spoken(turns, expected):
    trajectory = spoken(*turns)
    assert breaks(trajectory.turns) == expected
    assert trajectory.num_breaks == len(expected)


def drawn(rng):
    """A random tree of prompts by up to three agents: extensions, rewritten histories, returns, empty answers."""
    contexts, turns = [[1]], []
    for _ in range(int(rng.integers(1, 9))):
        base = contexts[int(rng.integers(len(contexts)))]
        cut = len(base) if rng.random() < 0.7 else int(rng.integers(1, len(base) + 1))
        prompt = [*base[:cut], *rng.integers(1, 4, int(rng.integers(1, 3))).tolist()]
        done = rng.integers(1, 4, int(rng.integers(0, 3))).tolist()
        contexts.append(prompt + done)
        turns.append((("main", "sub/1", "sub/2")[int(rng.integers(3))], prompt, done))
    return spoken(*turns)


def test_all_who_count_breaks_count_the_same():
    rng = np.random.default_rng(0)
    seen = 0
    for _ in range(300):
        trajectory = drawn(rng)
        found = breaks(trajectory.turns)
        seen += len(found)
        assert trajectory.num_breaks == len(found)
        diagnoses = Doctor().examine(LoggedTrajectory(trajectory=trajectory, line=0))
        spoke = [{t.agent for t in trajectory.turns[: d.turn] if len(t.completion_ids)} for d in diagnoses]
        assert [d.turn for d, agents in zip(diagnoses, spoke, strict=True) if d.agent in agents] == found
        assert sorted(BreakReader(None).explain(trajectory)) == found
        first = trajectory.turns[0].agent
        assert own_breaks(trajectory)[1] == sum(trajectory.turns[place].agent == first for place in found)
        if found:
            with pytest.raises(RunStopped, match=rf"turn {found[0]} "):
                build(trajectory, on_break="error")
        else:
            build(trajectory, on_break="error")
    assert seen > 100


def test_turns_of_several_agents_are_no_flat_list_though_nothing_breaks():
    trajectory = spoken(*RETURN)
    assert trajectory.num_breaks == 0 and "input_ids" not in trajectory
    with pytest.raises(NoFlatList, match="turns of several agents"):
        trajectory["input_ids"]
    assert spoken(("main", [1], [2]), ("main", [1, 2, 3], [4]))["input_ids"] == [1, 2, 3, 4]
