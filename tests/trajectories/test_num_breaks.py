"""`num_breaks` counts turns that open a sample although their agent had spoken before."""

from verbatim import Trajectory, Turn


def breaks(*turns):
    made = [Turn(prompt_ids=prompt, completion_ids=done, logprobs=[-1.0] * len(done), agent=agent)
            for agent, prompt, done in turns]  # fmt: skip
    return Trajectory(example_id="x", turns=made).num_breaks


def test_the_return_from_a_sub_agent_extends_its_own_sample():
    assert breaks(("main", [1], [2]), ("sub/1", [7], [8]), ("main", [1, 2, 3], [4])) == 0


def test_interleaved_agents_that_each_go_on_have_no_break():
    assert breaks(("a", [1], [2]), ("b", [7], [8]), ("a", [1, 2, 3], [4]), ("b", [7, 8, 9], [5])) == 0


def test_a_history_that_was_rewritten_is_a_break_also_behind_a_sub_agent():
    assert breaks(("main", [1], [2]), ("main", [1, 9, 3], [4])) == 1
    assert breaks(("main", [1], [2]), ("sub/1", [7], [8]), ("main", [1, 9, 3], [4])) == 1
