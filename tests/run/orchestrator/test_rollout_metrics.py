"""What a batch's rollouts are said to have been like, worked out by hand."""

from __future__ import annotations

import pytest

from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.core.types import Group, ToolCall, Trajectory, Turn
from verbatim.rollouts.loop import TOOLS_OFFERED
from verbatim.run.evaluation.evaluated_episode import evaluated_episode_of
from verbatim.run.evaluation.results import env_result
from verbatim.run.orchestrator.assemble import AssembledGroup, rollout_metrics


def episode(reward: float | None, env: str = "a", **fields) -> Trajectory:
    turns = fields.pop("turns", (Turn(prompt_ids=[1], completion_ids=[2, 3], logprobs=[-1.0, -1.0]),))
    return Trajectory(example_id="x", env=env, turns=turns, reward=reward, **fields)


def metrics_of(*trajectories: Trajectory) -> dict[str, float]:
    """Of one batch, each environment a group."""
    numbered = [t.replace(trajectory_id=str(i)) for i, t in enumerate(trajectories)]
    groups = []
    for env in dict.fromkeys(t.env for t in numbered):
        group = Group(group_id=env, example_id="x", env=env, trajectories=tuple(t for t in numbered if t.env == env))
        trajectory_outcomes = tuple(
            TrajectoryOutcome.of_dropped(t, "error")
            if t.error
            else TrajectoryOutcome(trajectory=t, turns=("trained",) * len(t.turns))
            for t in group.trajectories
        )
        groups.append(AssembledGroup(group=group, samples=(), outcomes=trajectory_outcomes))
    return rollout_metrics(groups, 0, {t.trajectory_id: (t.reward or 0) >= 1 for t in numbered})


def test_the_share_of_episodes_that_ended_in_unreadable_calls_is_a_metric():
    ends = ["malformed", "stop", "max_turns", "stop"]
    assert metrics_of(*(episode(0.0, stop_reason=end) for end in ends))["malformed"] == pytest.approx(0.25)


def turn(*statuses: str, trained: bool = True) -> Turn:
    """With a tool call for each status."""
    calls = tuple(ToolCall(name="look", arguments={}, status=status, id=str(i)) for i, status in enumerate(statuses))
    wrong = next((status for status in statuses if status != "ok"), "ok")
    return Turn(
        prompt_ids=[1], completion_ids=[2], logprobs=[-1.0], tool_calls=calls, parse_status=wrong, trained=trained
    )


CALLING = [
    ((turn("ok"), turn(), turn("ok", "ok"), turn("unknown_tool"), turn()), 2 / 3),  # plain answers are not counted
    ((turn(), turn("ok")), 1.0),
    ((turn("invalid_json"),), 0.0),
    ((turn("ok"), turn("invalid_json", trained=False)), 1.0),  # a frozen opponent's
    ((turn(), turn()), None),  # a chat in which no tool was called says nothing of its format
]


@pytest.mark.parametrize(("turns", "expected"), CALLING)
def test_the_valid_format_is_a_share_of_the_turns_that_try_a_call(turns, expected):
    chat = episode(1.0, turns=turns, trajectory_id="0", info={TOOLS_OFFERED: True})
    found = [metrics_of(chat), env_result("a", [evaluated_episode_of(chat, True)]).metrics()]
    assert [metrics.get("valid_format") for metrics in found] == [pytest.approx(expected), pytest.approx(expected)]


def test_breaks_are_counted_by_the_reasons_that_were_noted():
    noted = [{"turn": 1, "after": 0, "reason": "thought_dropped"}, {"turn": 2, "after": 1, "reason": "other_end"}]
    found = metrics_of(
        episode(1.0, info={"rendered_again": noted}),
        episode(0.0, info={"rendered_again": noted[:1]}),
        episode(0.0),
        episode(0.0, info={"rendered_again": "an environment's own"}),
        episode(0.0, info={"rendered_again": [{"reason": "made up"}, 7]}),
    )
    counted = {name: value for name, value in found.items() if name.startswith("breaks/")}
    assert counted == {"breaks/thought_dropped": 2.0, "breaks/other_end": 1.0}


def test_what_judges_spent_is_added_up_and_an_environments_own_info_of_any_shape_is_let_be():
    spent = {"judge_usage": {"requests": 2, "cost": 0.5}}
    found = metrics_of(
        episode(1.0, info=spent),
        episode(None, info=spent, error="judge: no verdict"),
        episode(1.0, info={"judge": "gpt", "judge_usage": "two"}),
        episode(1.0, info={"judge_usage": {"requests": "?"}}),
    )
    assert {name: value for name, value in found.items() if name.startswith("judge")} == {
        "judge/requests": 4.0,
        "judge/cost": 1.0,
    }
