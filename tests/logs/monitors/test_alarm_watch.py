"""What the alarms measure of rollouts, and how their watch raises, clears, remembers and survives."""

from __future__ import annotations

import json
import math

import pytest

from logs.monitors.alarm_series import steps_of
from verbatim import Trajectory, Turn
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.core.types import StopReason, ToolCall
from verbatim.logs.monitors.alarms import ALARMS, AlarmWatch, Finding, Window
from verbatim.logs.monitors.alarms.figures import (
    Groups,
    error_counts,
    looks_like_a_call,
    own_breaks,
    repetition,
    rollout_figures,
)
from verbatim.logs.monitors.alarms.rule import TRAINING, TRAINING_ERROR
from verbatim.rollouts.loop import TOOLS_OFFERED


def turn(completion: list[int], prompt: list[int] | None = None, **fields: object) -> Turn:
    return Turn(prompt_ids=prompt or [1], completion_ids=completion, **fields)  # type: ignore[arg-type]


def outcome(name: str, turns: list[Turn], of: str = "trained", **fields: object) -> TrajectoryOutcome:
    trajectory = Trajectory(example_id="x", trajectory_id=name, turns=turns, env="game", **fields)  # type: ignore[arg-type]
    if of == "trained":
        return TrajectoryOutcome(trajectory=trajectory, turns=("trained",) * len(turns))
    return TrajectoryOutcome.of_dropped(trajectory, of)


CALL = ToolCall(name="look", arguments={})
UNREADABLE = ToolCall(name=None, arguments=None, status="invalid_json", raw="{")


# -- figures


def test_the_figures_of_a_step_by_hand():
    offered = {TOOLS_OFFERED: True}
    outcomes = [
        outcome(
            "a",
            [turn([1, 2, 3], tool_calls=[CALL, CALL]), turn([4], [1, 1, 2, 3, 9])],
            reward=1.0,
            group_id="g",
            info=offered,
        ),
        outcome(
            "b",
            [turn([1, 2, 3, 4], tool_calls=[UNREADABLE])],
            "filter:zero_advantage",
            reward=0.0,
            group_id="g",
            info=offered,
            stop_reason=StopReason.LENGTH,
            messages=[{"role": "assistant", "content": "<tool_call>{"}],
        ),
        outcome("c", [turn([5] * 4)], "difficulty", reward=0.5, group_id="h", info=offered),
        outcome("d", [], "error", error="environment: score raised KeyError: 'question 17'"),
    ]
    figures = rollout_figures({"success/game": 0.25}, outcomes)["game"]
    assert figures.pop("credit/tokens_per_turn") == pytest.approx(-1)  # 2 tokens a turn earn 1, 4 earn 0
    assert figures.pop("credit/tool/look") == pytest.approx(1)
    assert figures == pytest.approx(
        {
            "rollouts": 4,
            "failed": 1,
            "completed": 3,
            "trained": 1,
            "untrained/filter:zero_advantage": 1,
            "untrained/difficulty": 1,
            "untrained/error": 1,
            "success": 0.25,
            "full_reward": 0.5,
            "reward": 0.5,
            "reward_std": math.sqrt(1 / 6),
            "turns": 4 / 3,
            "completion_tokens": 4,
            "tokens_per_turn": 10 / 3,
            "truncated": 1 / 3,
            "repetition": 0.0,
            "tool/look": 2 / 3,
            "offered": 3,
            "called": 1 / 3,
            "unread": 1 / 4,
            "call_like": 1 / 3,
            "later_turns": 1,
            "broken": 0,
            "rewritten": 0,
        }
    )
    assert error_counts(outcomes) == {"game": {"environment: score raised KeyError": 1}}


def test_repetition_is_the_share_of_4_grams_that_occurred_before_in_their_turn():
    trajectories = [
        Trajectory(example_id="x", turns=[turn([1, 2, 3, 4, 1, 2, 3, 4])]),  # 5, of which 1234 twice
        Trajectory(example_id="x", turns=[turn([1, 2, 3, 4]), turn([1, 2, 3, 4])]),  # each turn for itself
        Trajectory(example_id="x", turns=[turn([1, 2, 3])]),
        Trajectory(example_id="x", turns=[turn([7] * 10)]),  # 7, of which one is new
    ]
    assert [*map(repetition, trajectories)] == [pytest.approx(0.2), 0.0, None, pytest.approx(6 / 7)]


def test_credit_is_a_correlation_within_groups():
    trajectories = [
        Trajectory(example_id="x", group_id=group, reward=reward)
        for group, reward in [("a", 0.0), ("a", 1.0), ("b", 4.0), ("b", 5.0), ("c", None), ("c", 3.0)]
    ]
    groups = Groups(trajectories)
    assert groups.credit([2, 4, 9, 7, 100, 0]) == pytest.approx(0)
    assert groups.credit([2, 4, 7, 9, 100, 0]) == pytest.approx(1)
    assert groups.credit([2, 4, None, 9, 0, 0]) == pytest.approx(1)  # the second group has one value
    assert math.isnan(groups.credit([3] * 6)) and math.isnan(Groups([]).credit([]))


def test_breaks_count_for_the_agent_that_spoke_first_and_say_whether_the_completion_has_gone():
    def breaks(*turns: Turn) -> tuple[int, int, int]:
        return own_breaks(Trajectory(example_id="x", turns=turns))

    first = turn([5, 6, 7, 8], [1])
    assert breaks(first, turn([9], [1, 5, 6, 7, 8, 2])) == (1, 0, 0)
    assert breaks(first, turn([9], [1, 5, 6, 7, 2])) == (1, 1, 0)  # its last token has gone
    assert breaks(first, turn([9], [1, 5, 6, 2])) == (1, 1, 1)  # half of it has
    assert breaks(first, turn([9], [1, 3], agent="sub"), turn([9], [1, 5, 6, 7, 8, 2])) == (1, 0, 0)
    assert breaks() == (0, 0, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>\n{"name": "look"}</tool_call>', True),
        ("<function=look><parameter=at>3", True),
        ('{"name": "look", "parameters": {"at": 3}}', True),
        ("[TOOL_CALLS] [...]", True),
        ("<|python_tag|>look(3)", True),
        ("I look around.", False),
        ('{"answer": 3}', False),
        ("", False),
    ],
)
def test_what_looks_like_a_call(text: str, expected: bool):
    said = Trajectory(example_id="x", messages=[{"role": "assistant", "content": text}])
    heard = Trajectory(example_id="x", messages=[{"role": "tool", "content": text}])
    assert looks_like_a_call(said) is expected
    assert not looks_like_a_call(heard)


# -- the watch


def rising(window: Window, bound: float = 10.0) -> Finding | None:
    """Raised at the bound, held from 0.7 of it on."""
    value = window.metric("x")
    return None if value is None else Finding(level=value / bound, message=f"x is {value:g}", cause="x", advice="y")


def heard(watch: AlarmWatch, values: list[float]) -> list[tuple[int, str]]:
    return [(a.step, a.state) for figures in steps_of({"x": values}) for a in watch.observe(figures)]


def test_an_alarm_is_held_between_its_bound_and_seven_tenths():
    assert heard(AlarmWatch({"x": rising}), [9, 10, 7, 8, 6, 6, 6, 6, 7, 6, 6, 6, 6, 6, 12]) == [
        (2, "raised"),
        (14, "cleared"),
        (15, "raised"),
    ]


def test_alarms_of_environments_are_separate():
    def each(window: Window) -> list[Finding]:
        own = window.steps[-1].envs
        return [Finding(env=env, message="m", cause="c", advice="a") for env in own if own[env]["bad"]]

    watch, found = AlarmWatch({"each": each}), []
    for step in range(1, 9):
        figures = steps_of(env={"bad": 1.0}, count=1)[0]
        envs = {"one": {"bad": float(step == 1)}, "two": {"bad": float(step >= 3)}}
        found += [(a.step, a.env, a.state) for a in watch.observe(type(figures)(step=step, metrics={}, envs=envs))]
    assert found == [(1, "one", "raised"), (3, "two", "raised"), (6, "one", "cleared")]


def test_what_ends_the_run_is_called_once_as_it_is_raised():
    watch, ended = AlarmWatch({"x": rising, "y": rising}, stop=["x"]), []
    watch.on_stop = ended.append
    assert [state for _, state in heard(watch, [10, 10, 0, 0, 0, 0, 0])] == ["raised", "raised", "cleared", "cleared"]
    assert [(alarm.name, alarm.step) for alarm in ended] == [("x", 1)]


def test_a_resumed_watch_says_what_one_that_never_stopped_says():
    """Interrupted after every one of the steps; NaN and infinities do not survive a checkpoint, and are never read."""
    values = [0.001 * (n % 7) + 0.2 * (12 <= n < 26) + 0.06 * (40 <= n < 44) for n in range(70)]
    steps = [
        ({"mismatch_kl": value, "entropy": math.nan, "grad_norm": math.inf, "x": value * 100}, n)
        for n, value in enumerate(values, start=1)
    ]

    def watch() -> AlarmWatch:
        return AlarmWatch({"mismatch_kl": ALARMS["mismatch_kl"], "x": rising})

    def one_step(watch: AlarmWatch, metrics: dict[str, float], step: int) -> list[str]:
        outcomes = [outcome(f"{step}", [turn([1, 2, 3])], reward=1.0)]
        return [repr(alarm) for alarm in watch.on_step(step, metrics, outcomes)] + [
            repr(alarm) for alarm in watch.on_eval(step, "game", {"success": 0.5}) if step % 10 == 0
        ]

    whole, cut = watch(), watch()
    said, said_again = [], []
    for metrics, step in steps:
        said.append(one_step(whole, metrics, step))
        said_again.append(one_step(cut, metrics, step))
        state = json.loads(json.dumps(cut.state_dict(), allow_nan=False))
        cut = watch()
        cut.load_state_dict(state)
        assert cut.state_dict() == state
    assert said == said_again and sum(map(len, said)) == 4


def test_a_window_is_bounded():
    watch = AlarmWatch({})
    heard(watch, list(range(500)))
    state = watch.state_dict()
    assert (len(state["first"]["step"]), len(state["steps"]["step"])) == (16, 48)
    for step in range(100):
        watch.on_eval(step, "game", {"success": 0.5})
    assert len(watch.state_dict()["evaluations"]["game"]) == 32


def test_an_evaluation_knows_the_success_of_training_before_it():
    watch = AlarmWatch({})
    for step, success in enumerate([0.1, 0.2, 0.4, 0.6, 0.8, 1.0], start=1):
        watch.on_step(step, {"success": 0.0, "success/game": success, "rollouts": 1000}, [])
    watch.on_eval(6, "game", {"success": 0.5})
    ((_, evaluation),) = watch.state_dict()["evaluations"]["game"]
    assert evaluation[TRAINING] == pytest.approx(0.6)  # 0.2, 0.4, 0.6, 0.8, 1.0
    assert evaluation[TRAINING_ERROR] == pytest.approx(math.sqrt(0.08 / 5))


def test_the_error_of_training_is_at_least_that_of_its_rollouts():
    """Two steps of 50 rollouts, by chance at the same success: of a share of (50 + 1) / 102 = 0.5 of 100."""
    watch = AlarmWatch({})
    for step in (1, 2):
        watch.on_step(step, {"success": 0.5, "rollouts": 50}, [])
    watch.on_eval(2, "game", {"success": 0.5})
    ((_, evaluation),) = watch.state_dict()["evaluations"]["game"]
    assert evaluation[TRAINING_ERROR] == pytest.approx(math.sqrt(0.25 / 100))


def test_an_alarm_that_fails_is_told_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture):
    def raises(window: Window) -> None:
        raise KeyError("mine")

    def misshapen(window: Window) -> object:
        return ["text"]

    watch = AlarmWatch({"raises": raises, "misshapen": misshapen, "x": rising})  # type: ignore[dict-item]
    assert heard(watch, [10, 10, 10]) == [(1, "raised")]
    assert [record.getMessage().split(" failed")[0] for record in caplog.records] == ["alarm raises", "alarm misshapen"]
    assert "expected Finding" in caplog.text


def test_an_alarm_is_not_cleared_by_a_rule_that_fails():
    def fails_later(window: Window) -> Finding:
        if window.step > 1:
            raise KeyError("mine")
        return Finding(message="m", cause="c", advice="a")

    assert heard(AlarmWatch({"x": fails_later}), [0] * 9) == [(1, "raised")]


def test_an_alarm_tells_no_secret_of_an_error_that_it_quotes():
    error = "environment: http://me:hunter2secret@host/reset refused it"
    outcomes = [outcome(f"t{number}", [], "error", error=error) for number in range(10)]
    watch = AlarmWatch({"repeated_error": ALARMS["repeated_error"]})
    (alarm,) = watch.on_step(1, {}, outcomes)
    assert "http://[redacted]@host/reset refused it" in alarm.message
    assert "hunter2secret" not in f"{alarm}{watch.state_dict()['raised']}"


def test_an_alarm_of_evaluations_is_cleared_by_the_first_that_does_not_show_it():
    class Low:
        on_evaluations = True

        def __call__(self, window: Window) -> list[Finding]:
            levels = {env: 0.5 / kept[-1][1]["success"] for env, kept in window.evaluations.items()}
            return [Finding(env=env, level=level, message="m", cause="c", advice="a") for env, level in levels.items()]

    watch, found = AlarmWatch({"low": Low()}), []
    for step, env, success in [(1, "one", 0.4), (2, "two", 0.9), (3, "one", 0.9)]:
        found += [(a.step, a.env, a.state) for a in watch.on_eval(step, env, {"success": success})]
    assert found == [(1, "one", "raised"), (3, "one", "cleared")]
