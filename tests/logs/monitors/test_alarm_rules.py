"""Each alarm on series worked out by hand: raised just above its bound, and not just below."""

from __future__ import annotations

import doctest
import itertools

import pytest

from logs.monitors.alarm_series import findings, level, steps_of, told, window_of
from verbatim import Trajectory, Turn
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.logs.monitors.alarms import ALARMS, Finding, StepFigures, Window, rule
from verbatim.logs.monitors.alarms.change import chance_of_rise, falls, rises
from verbatim.logs.monitors.alarms.rule import TRAINING, TRAINING_ERROR
from verbatim.run.evaluation.intervals import wilson

UP = [0.30, 0.31, 0.29, 0.30, 0.32, 0.28, 0.30, 0.31]
"""Eight values around 0.30."""
HIGHER = [0.40, 0.42, 0.39, 0.41, 0.40, 0.43, 0.38, 0.41]
"""Eight values around 0.405, all above those of UP."""


def test_the_examples_of_the_docstrings_hold():
    assert doctest.testmod(rule) == (0, 10)


# -- changes


def test_the_chance_of_a_rise_is_the_share_of_the_orders_that_rise_as_much():
    assert chance_of_rise([1, 2], [3, 4]) == pytest.approx(1 / 6)
    assert chance_of_rise([1, 3], [2, 4]) == pytest.approx(2 / 6)  # 3 of 4 pairs: 1234 and 1324 of the six orders
    assert chance_of_rise([3, 4], [1, 2]) == 1
    assert chance_of_rise(UP, HIGHER) == pytest.approx(1 / 12870)  # 16 choose 8


def test_equal_values_count_against_a_change():
    assert chance_of_rise([1, 1], [1, 1]) == 1
    assert not rises([0.0] * 8, [0.0] * 8) and not falls([0.0] * 8, [0.0] * 8)


def test_one_outlier_neither_makes_nor_hides_a_change():
    assert not rises(UP, [0.3, 0.31, 0.29, 0.3, 0.3, 0.28, 0.3, 9.0])
    assert rises(UP, [*HIGHER[:7], 0.31])


def test_a_change_is_sure_in_at_most_one_of_a_thousand_orders():
    orders = list(itertools.combinations(range(14), 7))  # the ranks of the seven values after
    sure = sum(rises([rank for rank in range(14) if rank not in after], after) for after in orders)
    assert 0 < sure / len(orders) <= 1e-3


# -- the window


def test_recent_and_earlier_steps_never_overlap_and_need_both():
    steps = steps_of({"x": [float(n) for n in range(1, 41)]})
    window = window_of(steps)
    assert window.recent("x", 4) == [37, 38, 39, 40]
    assert window.earlier("x", 4) == [[1, 2, 3, 4], [17, 18, 19, 20]]  # 16 steps lie between 20 and 37
    assert window_of(steps[:7]).earlier("x", 4) == []
    assert window_of(steps[:8]).earlier("x", 4) == [[1, 2, 3, 4]]
    assert window_of(steps[:8]).recent("x", 4) == [5, 6, 7, 8]


def test_a_series_with_gaps_is_read_where_half_of_it_is_there():
    assert window_of(steps_of({"x": [1, None, 3, None]})).recent("x", 4) == [1, 3]
    assert window_of(steps_of({"x": [1, None, None, None]})).recent("x", 4) == []


def test_advice_names_a_key_with_its_value():
    window = Window(steps=[], config={"a": {"on": True, "b": 3}})
    assert [window.now(key) for key in ("a.b", "a.on", "a.c", "a.b.c")] == [
        "a.b (now 3)",
        "a.on (now true)",
        "a.c (not set)",
        "a.b.c (not set)",
    ]


# -- mismatch_kl, masked_tokens, staleness


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.049] * 8, False),
        ([0.051] * 8, True),
        ([0.9] * 3 + [0.001] * 5, False),
        ([0.9] * 5 + [0.001] * 3, True),
        ([0.9] * 7, False),
        ([None] * 4 + [0.9] * 4, True),
        ([None] * 5 + [0.9] * 3, False),
    ],
)
def test_mismatch_kl_is_the_median_of_eight_steps(values: list[float], expected: bool):
    assert (level("mismatch_kl", steps_of({"mismatch_kl": values})) >= 1) is expected


@pytest.mark.parametrize(
    ("metrics", "config", "cause", "key"),
    [
        (
            {"weights/canary": 0.6, "weights/canary_allowed": 1.0},
            {"inference.canary_tolerance": 1.0},
            "does not have",
            "inference.canary_tolerance (now 1.0)",
        ),
        ({"weights/canary": 0.04, "weights/canary_allowed": 0.2, "truncation_mismatch": 0.5}, {}, "top_p", "top_p"),
        (
            {"truncation_mismatch": 0.5},
            {"orchestrator.sampling.accept_truncation_mismatch": True},
            "top_p",
            "orchestrator.sampling.accept_truncation_mismatch (now true)",
        ),
        (
            {"staleness/mean": 2.6},
            {"orchestrator.max_async_level": 2},
            "2.60 steps old",
            "orchestrator.max_async_level (now 2)",
        ),
        (
            {"staleness/mean": 2.4},
            {"orchestrator.max_async_level": 2, "trainer.dtype": "bfloat16"},
            "before any update",
            "trainer.dtype (now bfloat16)",
        ),
    ],
)
def test_mismatch_kl_names_the_cause_that_other_metrics_point_to(metrics, config, cause, key):
    (found,) = findings("mismatch_kl", steps_of({"mismatch_kl": 0.2, **metrics}, count=8), config)
    assert cause in found.cause and key in found.advice


@pytest.mark.parametrize(("cut", "expected"), [(0.9, False), (1.0, True)])
def test_kept_sets_of_more_than_a_kilobyte_a_token_are_an_alarm(cut: float, expected: bool):
    """270 ids of 4 bytes, of so many of the tokens: 972 and 1080 bytes."""
    steps = steps_of({"kept_ids/mean": 270.0, "kept_ids/cut": cut}, count=8)
    assert (level("kept_set_bytes", steps) >= 1) is expected
    (found,) = findings("kept_set_bytes", steps, {"orchestrator.sampling.top_k": 0})
    assert f"{1080 * cut:,.0f} bytes" in found.message and "orchestrator.sampling.top_k (now 0)" in found.advice


def test_mismatch_kl_that_grows_later_is_a_matter_of_the_learning_rate():
    steps = steps_of({"mismatch_kl": [0.001] * 15 + [0.2] * 8})
    (found,) = findings("mismatch_kl", steps, {"trainer.optim.lr": 0.0008})
    assert "trainer.optim.lr (now 0.0008)" in found.advice and "0.2" in found.message
    (found,) = findings("mismatch_kl", steps, {"trainer.optimizer_steps_per_batch": 4})
    assert "trainer.optimizer_steps_per_batch (now 4)" in found.advice


@pytest.mark.parametrize(("masked", "expected"), [(99, False), (101, True)])
def test_masked_tokens_are_a_share_of_the_trained_ones(masked: int, expected: bool):
    steps = steps_of({"masked_by_loss": masked, "trained_tokens": 1000}, count=8)
    assert (level("masked_tokens", steps) >= 1) is expected


def test_steps_without_a_trained_token_mask_nothing():
    assert level("masked_tokens", steps_of({"masked_by_loss": 0, "trained_tokens": 0}, count=8)) == 0


@pytest.mark.parametrize(
    ("mean", "dropped", "asynchronous", "expected"),
    [
        (1.99, 0, 1, False),
        (2.01, 0, 1, True),
        (2.5, 0, 2, False),
        (0.9, 0, 0, False),
        (1.1, 0, 0, True),
        (1.0, 10, 1, False),
        (1.0, 12, 1, True),
    ],
)
def test_staleness_is_a_step_more_than_asked_for_or_a_tenth_dropped(mean, dropped, asynchronous, expected):
    steps = steps_of({"staleness/mean": mean, "staleness/dropped": dropped, "rollouts": 100}, count=5)
    assert (level("staleness", steps, {"orchestrator.max_async_level": asynchronous}) >= 1) is expected


# -- entropy_collapse


@pytest.mark.parametrize(
    ("entropy", "success", "reward", "expected"),
    [
        (0.0101, 0.5, 0.5, False),  # above a twentieth of 0.2
        (0.0099, 0.5, 0.5, True),
        (0.0099, 0.9, 0.9, False),  # solved
    ],
)
def test_entropy_collapse_is_a_twentieth_of_the_first_steps_without_success(entropy, success, reward, expected):
    steps = steps_of({"entropy": [0.2] * 8 + [entropy] * 8, "success": success, "reward/mean": reward})
    assert (level("entropy_collapse", steps) >= 1) is expected


def test_dropped_rollouts_are_compared_with_those_of_the_same_step():
    """Two of five steps count 20 dropped of 100. The first step counts none at all: its 400 belong to no other one."""
    columns = {
        "staleness/mean": 1.0,
        "staleness/dropped": [None, 20.0, 0.0, 20.0, 0.0],
        "rollouts": [400.0, 80.0, 100.0, 80.0, 100.0],
    }
    (found,) = findings("staleness", steps_of(columns, count=5), {"orchestrator.max_async_level": 1})
    assert found.level == pytest.approx(1.0)  # the median of 0.2, 0, 0.2 and 0 is 0.1


def test_a_step_that_says_nothing_of_the_loss_hides_no_masked_tokens():
    columns = {"masked_by_loss": [None] + [20.0] * 7, "trained_tokens": 100.0}
    (found,) = findings("masked_tokens", steps_of(columns, count=8))
    assert found.level == pytest.approx(2.0)


def test_entropy_may_fall_while_the_reward_rises():
    rising = [0.3 + n / 100 for n in range(16)]
    steps = steps_of({"entropy": [0.2] * 8 + [0.001] * 8, "success": 0.5, "reward/mean": rising})
    assert level("entropy_collapse", steps) == 0
    flat = steps_of({"entropy": [0.2] * 8 + [0.001] * 8, "success": 0.5, "reward/mean": [*UP, *reversed(UP)]})
    assert level("entropy_collapse", flat) >= 1
    assert level("entropy_collapse", flat, {"orchestrator.training_mode": "opd"}) == 0


# -- tool_format, prompt_breaks


TOOLS = {"offered": 100, "completed": 100, "rollouts": 100}


@pytest.mark.parametrize(("like", "expected"), [(0.29, False), (0.31, True)])
def test_text_that_looks_like_calls_is_a_parser_that_does_not_match(like: float, expected: bool):
    steps = steps_of(env={**TOOLS, "call_like": like, "called": 0.0, "unread": 0.0}, count=3)
    found = findings("tool_format", steps, {"orchestrator.renderer.name": "auto"})
    assert (found[0].level >= 1) is expected
    assert "orchestrator.renderer.name (now auto)" in found[0].advice and found[0].env == "game"


@pytest.mark.parametrize(("unread", "expected"), [(0.29, False), (0.31, True)])
def test_calls_that_cannot_be_read_are_a_lost_format(unread: float, expected: bool):
    steps = steps_of(env={**TOOLS, "call_like": 0.0, "called": 0.9, "unread": unread}, count=3)
    assert (level("tool_format", steps) >= 1) is expected


def test_a_model_that_answers_without_tools_from_the_start_is_left_alone():
    assert level("tool_format", steps_of(env={**TOOLS, "call_like": 0.0, "called": 0.0, "unread": 0.0}, count=20)) == 0


def test_calls_that_have_gone_are_an_alarm_unless_the_reward_has_risen():
    env = {**TOOLS, "call_like": 0.0, "unread": 0.0, "called": [0.9] * 8 + [0.39] * 3}
    assert level("tool_format", steps_of(env={**env, "reward": [0.5] * 8 + [0.4] * 3})) >= 1
    assert level("tool_format", steps_of(env={**env, "reward": [0.5] * 8 + [0.6] * 3})) == 0
    assert level("tool_format", steps_of(env={**env, "called": [0.9] * 8 + [0.41] * 3, "reward": 0.4})) < 1


@pytest.mark.parametrize(
    ("broken", "rewritten", "expected"),
    [
        ([0.21] * 12, 0.0, True),  # from the first step on
        ([0.19] * 12, 0.0, False),
        ([0.0] * 9 + [0.9] * 3, 0.0, False),  # later, at the end of a completion: the policy's doing
        ([0.0] * 9 + [0.9] * 3, [0.0] * 9 + [0.21] * 3, True),  # later, and the completion has gone
        ([0.9] * 10 + [0.0] * 2, 0.0, False),
    ],
)
def test_prompt_breaks_are_those_of_a_template(broken, rewritten, expected):
    steps = steps_of(env={"later_turns": 50, "broken": broken, "rewritten": rewritten})
    assert (level("prompt_breaks", steps) >= 1) is expected
    assert level("prompt_breaks", steps, {"orchestrator.trajectory_strategy": "branching"}) == 0


def test_prompt_breaks_read_the_notes_that_are_notes_and_leave_what_else_the_environment_wrote():
    notes = [
        {"turn": 1, "after": 0, "reason": "tools_changed"},
        {"turn": 1, "reason": ["tools_changed"]},
        {"turn": "1", "reason": "other_end"},
        {"turn": 9, "reason": "other_end"},
        {"reason": "other_end"},
        "other_end",
    ]
    turns = [Turn(prompt_ids=[1, 2, 3], completion_ids=[4]), Turn(prompt_ids=[1, 2, 3, 9, 9], completion_ids=[4])]
    trajectory = Trajectory(example_id="x", env="game", turns=turns, info={"rendered_again": notes})
    outcomes = [TrajectoryOutcome(trajectory=trajectory, turns=("trained", "trained"))]
    steps = steps_of(env={"later_turns": 50, "broken": 0.5, "rewritten": 0.0}, count=3)
    (found,) = ALARMS["prompt_breaks"](window_of(steps, outcomes=outcomes))
    assert found.cause == "the environment's tools differ from those shown before (tools_changed: 1 turns)"
    assert "saves up to 5 prompt tokens" in found.advice


# -- everything_filtered, pools_dry, environment_starves


@pytest.mark.parametrize(
    ("dropped", "success", "expected"), [(94, 0.1, False), (95, 0.1, True), (100, 0.1, True), (100, 0.91, False)]
)
def test_everything_filtered_unless_it_is_solved(dropped: int, success: float, expected: bool):
    env = {
        "rollouts": 100,
        "completed": 100,
        "trained": 100 - dropped,
        "success": success,
        "untrained/filter:zero_advantage": dropped,
    }
    found = findings("everything_filtered", steps_of(env=env, count=3), {"orchestrator.group_size": 4})
    assert any(finding.level >= 1 for finding in found) is expected
    if found:
        assert "filter:zero_advantage" in found[0].message and "orchestrator.group_size (now 4)" in found[0].advice


@pytest.mark.parametrize(
    ("reward", "left", "is_quiet"), [(0.5, 0.0, True), (0.5, 0.024, True), (0.5, 0.026, False), (0.39, 0.0, False)]
)
def test_a_task_is_mastered_where_all_earn_the_most_though_that_is_not_1(reward: float, left: float, is_quiet: bool):
    """From 0.3 with a deviation of 0.1; a quarter of that is 0.025."""
    rewards, deviations = [0.3] * 8 + [reward] * 48, [0.1] * 8 + [left] * 48
    env = {
        "rollouts": 100,
        "completed": 100,
        "success": 0.0,
        "reward": rewards,
        "reward_std": deviations,
        "untrained/filter:zero_advantage": [0.0] * 8 + [100.0] * 48,
    }
    metrics = {"reward/mean": rewards, "reward/std": deviations, "success": 0.0, "entropy": [0.2] * 8 + [0.001] * 48}
    steps = steps_of(metrics, env)
    assert (level("everything_filtered", steps) >= 1) is not is_quiet
    assert (level("entropy_collapse", steps) >= 1) is not is_quiet


def test_failed_and_stale_rollouts_are_not_filtered_ones():
    env = {"rollouts": 100, "completed": 60, "success": 0.0, "untrained/error": 40, "untrained/stale": 60}
    assert level("everything_filtered", steps_of(env=env, count=3)) == 0


def test_three_steps_and_a_hundred_rollouts_are_counted():
    env = {"rollouts": 20, "completed": 20, "success": 0.1}
    assert level("everything_filtered", steps_of(env={**env, "untrained/difficulty": 20}, count=4)) == 0
    assert level("everything_filtered", steps_of(env={**env, "untrained/difficulty": 20}, count=5)) >= 1
    assert level("everything_filtered", steps_of(env={**env, "untrained/difficulty": [14.0] + [20.0] * 4})) < 1
    assert level("everything_filtered", steps_of(env={**env, "untrained/difficulty": [0.0] + [20.0] * 5})) >= 1
    many = {**env, "completed": 200, "untrained/difficulty": 200}
    assert level("everything_filtered", steps_of(env=many, count=2)) == 0


@pytest.mark.parametrize(("normal", "expected"), [(0.06, False), (0.05, True), (0.0, True)])
def test_pools_are_dry_where_a_twentieth_is_left(normal: float, expected: bool):
    metrics = {"pool/game/normal": normal, "pool/game/easy": 0.1, "pool/game/hard": 0.9 - normal}
    (found,) = findings("pools_dry", steps_of(metrics, count=1), {"orchestrator.buffer.hard_threshold": 0.1})
    assert (found.level >= 1) is expected
    assert "orchestrator.buffer.hard_threshold (now 0.1)" in found.advice


MIXTURE = {
    "orchestrator.group_size": 4,
    "orchestrator.train.env": [{"id": "quick", "ratio": 3.0}, {"id": "slow", "ratio": 1.0}],
}


def mixture(quick: int, slow: int, steps: int = 8, **of_slow: float) -> list[StepFigures]:
    """Rollouts of two environments in each step."""
    return [
        StepFigures(
            step=n + 1,
            metrics={},
            envs={
                "quick": {"rollouts": quick, "completed": quick},
                "slow": {"rollouts": slow, "completed": slow, **of_slow},
            },
        )
        for n in range(steps)
    ]


@pytest.mark.parametrize(("quick", "slow", "expected"), [(37, 3, False), (38, 2, True), (30, 10, False)])
def test_an_environment_starves_below_a_quarter_of_its_ratio(quick: int, slow: int, expected: bool):
    """A quarter of 40 is 10 a step; a quarter of that is 2.5."""
    assert (level("environment_starves", mixture(quick, slow), MIXTURE) >= 1) is expected


def test_an_environment_whose_rollouts_all_fail_starves():
    steps = mixture(30, 10, completed=0, failed=10)
    (found,) = [f for f in findings("environment_starves", steps, MIXTURE) if f.level >= 1]
    assert found.env == "slow" and "80 of its 80 rollouts failed" in found.cause


def test_few_groups_and_a_single_environment_say_nothing():
    assert level("environment_starves", mixture(4, 0), MIXTURE) == 0  # 8 groups, of which 2 were expected
    assert level("environment_starves", mixture(38, 2), {**MIXTURE, "orchestrator.train.env": [{"id": "quick"}]}) == 0


# -- repeated_error


@pytest.mark.parametrize(
    ("count", "rollouts", "expected"), [(3, 16, False), (3, 15, True), (2, 10, False), (10, 10, True)]
)
def test_an_error_repeats_in_a_fifth_of_the_rollouts_and_eight_of_them(count: int, rollouts: int, expected: bool):
    kind = "environment: score raised KeyError"
    steps = steps_of(env={"rollouts": rollouts}, errors=[{kind: count}] * 3, count=3)
    (found,) = findings("repeated_error", steps)
    assert (found.level >= 1) is expected
    assert kind in found.message and "verbatim env check" in found.advice


def test_errors_of_different_kinds_are_not_one():
    kinds = {f"environment: tool {letter} raised": 5 for letter in "abcde"}
    assert level("repeated_error", steps_of(env={"rollouts": 30}, errors=[kinds] * 3, count=3)) < 1


# -- sampler_idle, trainer_idle


BUSY = {"time/step": 20.0, "seconds": 2.0, "trained_tokens": 1000, "rollouts": 100, "completion_tokens": 10.0}


@pytest.mark.parametrize(
    ("name", "idle", "step", "expected"),
    [
        ("sampler_idle", 15.9, 20.0, False),
        ("sampler_idle", 16.1, 20.0, True),
        ("sampler_idle", 9.9, 10.0, False),
        ("trainer_idle", 15.9, 20.0, False),
        ("trainer_idle", 16.1, 20.0, True),
        ("trainer_idle", 9.9, 10.0, False),
    ],
)
def test_a_side_is_idle_for_four_fifths_of_a_step_and_ten_seconds(name: str, idle: float, step: float, expected: bool):
    steps = steps_of({**BUSY, f"time/{name}": idle, "time/step": step}, count=8)
    config = {"orchestrator.max_async_level": 1}
    assert (level(name, steps, config) >= 1) is expected
    assert level(name, steps, {"orchestrator.max_async_level": 0}) == 0  # they take turns


def test_where_both_sides_wait_one_alarm_says_for_what():
    config = {"orchestrator.max_async_level": 1}
    both = steps_of({**BUSY, "time/trainer_idle": 17.0, "time/sampler_idle": 18.0}, count=8)
    assert level("sampler_idle", both, config) == 0
    (found,) = findings("trainer_idle", both, config)
    assert found.level >= 1 and "episodes wait for their tools" in found.cause
    assert found.advice.startswith("make these faster, raise orchestrator.max_concurrent")
    one = steps_of({**BUSY, "time/trainer_idle": 17.0, "time/sampler_idle": 2.0}, count=8)
    (found,) = findings("trainer_idle", one, config)
    assert found.level >= 1 and found.cause.startswith("the sampler is the slower side")


def test_a_trainer_that_is_given_little_is_counted_as_if_it_had_everything():
    """2 s for a quarter of the tokens would be 8 s for all: it would wait 12 of 20 s."""
    steps = steps_of({**BUSY, "trained_tokens": 250, "time/trainer_idle": 18.0}, count=8)
    (found,) = findings("trainer_idle", steps, {"orchestrator.max_async_level": 1})
    assert found.level == pytest.approx(0.6 / 0.8) and "60%" in found.message


# -- reward_success_gap


def test_a_reward_that_rises_while_success_falls():
    before = {"reward": UP, "success": [0.5, 0.52, 0.48, 0.5, 0.51, 0.49, 0.5, 0.5]}
    after = {"reward": HIGHER, "success": [0.38, 0.4, 0.36, 0.39, 0.38, 0.4, 0.37, 0.38]}
    env = {name: before[name] + after[name] for name in before} | {"reward_std": 0.4}
    (found,) = findings("reward_success_gap", steps_of(env=env))
    assert found.level == pytest.approx(min(0.105 / 0.4 / 0.2, 0.12 / 0.1))  # medians 0.3 and 0.405, 0.5 and 0.38
    assert found.level >= 1
    less = env | {"success": before["success"] + [s + 0.03 for s in after["success"]]}
    assert level("reward_success_gap", steps_of(env=less)) < 1
    assert level("reward_success_gap", steps_of(env=env | {"reward_std": 0.6})) < 1
    assert level("reward_success_gap", steps_of(env=env | {"success": 0.5})) == 0
    assert level("reward_success_gap", steps_of(env=env | {"reward": 0.3})) == 0


def test_a_reward_and_a_success_are_compared_with_the_same_earlier_steps():
    """The success is first measured at step 9, and both are as ever since then; the reward was lower before."""
    env = {
        "reward": [0.1] * 8 + [0.3] * 8 + [0.3] * 40,
        "success": [None] * 8 + [0.9] * 8 + [0.5] * 40,
        "reward_std": 0.2,
    }
    assert level("reward_success_gap", steps_of(env=env)) == 0


# -- reward_hacking


def hacked(**columns: object) -> dict[str, object]:
    """Sixteen steps: in the later eight the reward is higher, and turns are longer."""
    return {
        "reward": UP + HIGHER,
        "reward_std": 0.4,
        "tokens_per_turn": [20.0 + n % 3 for n in range(8)] + [41.0 + n % 4 for n in range(8)],
        "credit/tokens_per_turn": 0.5,
        "rollouts": 100,
        **columns,
    }


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({}, True),
        # from 21 to 41
        ({"tokens_per_turn": [20.0 + n % 3 for n in range(8)] + [40.0 + n % 3 for n in range(8)]}, False),
        ({"credit/tokens_per_turn": 0.29}, False),  # longer ones do not earn more
        ({"reward": UP + UP}, False),
        ({"reward_std": 0.43}, False),  # 0.105 is less than a quarter of it
        ({"success": UP + HIGHER, "full_reward": 0.0}, False),  # the environment's own success has risen too
        ({"success": UP + HIGHER, "full_reward": UP + HIGHER}, True),  # it is the reward
    ],
)
def test_reward_hacking_is_a_paid_explosion(columns: dict[str, object], expected: bool):
    assert (level("reward_hacking", steps_of(env=hacked(**columns))) >= 1) is expected


def test_reward_hacking_names_repetition_and_tools():
    calm = {"tokens_per_turn": 20.0, "credit/tokens_per_turn": 0.0}
    shares = [0.05 + n / 1000 for n in range(8)] + [0.26 + n / 1000 for n in range(8)]
    repeated = {"repetition": shares, "credit/repetition": 0.6}
    (found,) = findings("reward_hacking", steps_of(env=hacked(**calm, **repeated)))
    assert found.level >= 1 and "4-grams went from 5% to 26%" in found.message
    calls = {"tool/search": [1.0, 1.1] * 4 + [4.5, 4.6] * 4, "credit/tool/search": 0.6}
    (found,) = findings("reward_hacking", steps_of(env=hacked(**calm, **calls)))
    assert found.level >= 1 and "search went from 1.1 to 4.5" in found.message
    few = {"tool/search": [0.5, 0.6] * 4 + [2.5, 2.6] * 4, "credit/tool/search": 0.6}  # five times as many: two more
    assert level("reward_hacking", steps_of(env=hacked(**calm, **few))) < 1


def test_a_tool_that_was_never_called_counts_as_called_nought_times():
    spam = {"tool/spam": [None] * 8 + [4.0 + n for n in range(8)], "credit/tool/spam": [None] * 8 + [0.9] * 8}
    env = hacked(tokens_per_turn=20.0, **spam)
    (found,) = findings("reward_hacking", steps_of(env=env))
    assert found.level >= 1 and "spam went from 0.0 to 7.5" in found.message


def test_length_that_comes_back_after_a_dip_is_no_explosion():
    lengths = [40.0 + n % 3 for n in range(8)] + [15.0 + n % 2 for n in range(30)] + [43.0 + n % 3 for n in range(8)]
    rewards = [0.3 + n / 1000 for n in range(8)] + [0.1 + n / 1000 for n in range(30)] + HIGHER
    env = hacked(tokens_per_turn=lengths, reward=rewards)
    assert level("reward_hacking", steps_of(env=env)) < 1


# -- evaluation_flat


def evaluated(*successes: tuple[float, float], episodes: int = 300) -> Window:
    """Success of the evaluation and of the training before it, every ten steps."""
    found = [
        (10 * n, {"success": success, "episodes": episodes, TRAINING: training, TRAINING_ERROR: 0.01})
        for n, (success, training) in enumerate(successes)
    ]
    return Window(steps=[], evaluations={"game": found})


@pytest.mark.parametrize(
    ("successes", "expected"),
    [
        ([(0.5, 0.5), (0.5, 0.6), (0.5, 0.65), (0.5, 0.7)], True),
        ([(0.5, 0.5), (0.5, 0.6), (0.6, 0.7)], False),  # three evaluations
        ([(0.5, 0.5), (0.5, 0.6), (0.5, 0.65), (0.6, 0.7)], False),  # it has risen
        ([(0.5, 0.5), (0.5, 0.5), (0.5, 0.5), (0.5, 0.59)], False),  # training rose by 0.09
        ([(0.6, 0.5), (0.6, 0.6), (0.6, 0.65), (0.6, 0.68)], False),  # not above the evaluation by 3 errors
        ([(0.95, 0.5), (0.95, 0.6), (0.95, 0.9), (0.95, 1.0)], False),  # solved
    ],
)
def test_an_evaluation_is_flat_while_training_rises(successes, expected):
    found = list(ALARMS["evaluation_flat"](evaluated(*successes)))
    assert any(finding.level >= 1 for finding in found) is expected


def test_few_episodes_prove_nothing():
    rising = ((0.5, 0.5), (0.5, 0.6), (0.5, 0.65), (0.5, 0.7))
    assert not any(f.level >= 1 for f in ALARMS["evaluation_flat"](evaluated(*rising, episodes=20)))


# -- evaluation_drop


def measured(*successes: float, episodes: int = 300, **more: object) -> Window:
    """Evaluations with Wilson's intervals, every ten steps; `more` are metrics of the last one."""
    found = []
    for n, success in enumerate(successes):
        low, high = wilson(success * episodes, episodes)
        own = {
            "success": success,
            "success/low": low,
            "success/high": high,
            "reward/mean": success,
            "reward/low": low,
            "reward/high": high,
            "reward/std": 0.5,
            "episodes": episodes,
        }
        found.append((10 * n, {**own, **(more if n == len(successes) - 1 else {})}))
    return Window(steps=[], evaluations={"game": found})


def drop(*successes: float, episodes: int = 300, **more: object) -> float:
    found = list(ALARMS["evaluation_drop"](measured(*successes, episodes=episodes, **more)))
    return max((finding.level for finding in found), default=0.0)


@pytest.mark.parametrize(
    ("successes", "episodes", "expected"),
    [
        ([0.5, 0.8, 0.6], 300, True),
        ([0.5, 0.8, 0.71], 300, False),  # a tenth is large enough, and 0.09 is not
        ([0.5, 0.8, 0.69], 300, False),  # 0.11 with an error of 0.035: 3.1, where two before ask for 3.5
        ([0.5, 0.8, 0.69], 2000, True),
        ([0.5, 0.8, 0.6], 20, False),  # an error of 0.15
        ([0.8, 0.5], 300, True),  # below the first one, before training
        ([0.5, 0.6, 0.7, 0.8], 300, False),
        ([0.5], 300, False),
    ],
)
def test_an_evaluation_drops_below_the_best_before_by_more_than_chance(successes, episodes, expected):
    assert (drop(*successes, episodes=episodes) >= 1) is expected


def test_the_best_of_many_evaluations_is_in_part_luck():
    """0.13 is 3.2 standard errors of 0.040, and 0.15 is 3.7: one evaluation before asks for 3.3, and 31 ask for 4.2."""
    assert drop(0.63, 0.50) < 1
    assert drop(0.65, 0.50) >= 1
    assert drop(*[0.5, 0.52, 0.48] * 10, 0.65, 0.5) < 1


def test_a_reward_drops_though_the_success_does_not():
    before = {"reward/mean": 0.9, "reward/low": 0.88, "reward/high": 0.92, "reward/std": 0.2, "success": 0.5}
    after = {**before, "reward/mean": 0.8, "reward/low": 0.78, "reward/high": 0.82}
    window = Window(steps=[], evaluations={"game": [(0, before), (10, after)]})
    (found,) = ALARMS["evaluation_drop"](window)
    # 0.1 is half a deviation; its error is sqrt(2) 0.02 / 1.96 = 0.0144; a chance of 1/2000 is 3.29 of them
    assert found.level == pytest.approx(min(0.1 / (3.2905 * 0.02 * 2**0.5 / 1.95996), 0.1 / 0.04), rel=1e-4)
    assert found.message.startswith(
        "the mean reward in the evaluation of game fell from 0.9 (the best, at step 0) to "
        "0.8 (95% intervals 0.88 to 0.92 and 0.78 to 0.82)"
    )


@pytest.mark.parametrize(("failed", "named"), [((0, 0), True), ((30, 30), True), ((31, 0), False), ((0, 31), False)])
def test_a_mean_reward_of_survivors_is_not_compared(failed, named):
    """Of 300 episodes."""
    before = {
        "reward/mean": 0.9,
        "reward/low": 0.88,
        "reward/high": 0.92,
        "reward/std": 0.2,
        "success": 0.5,
        "episodes": 300,
        "failed": failed[0],
    }
    after = {**before, "reward/mean": 0.7, "reward/low": 0.68, "reward/high": 0.72, "failed": failed[1]}
    window = Window(steps=[], evaluations={"game": [(0, before), (10, after)]})
    assert any("mean reward" in finding.message for finding in ALARMS["evaluation_drop"](window)) is named


@pytest.mark.parametrize(
    ("best", "last", "episodes", "expected"),
    [
        ((0.9, 0.0), (0.8999, 0.01), 2000, 0.0001 / 0.002),  # 0.2 of the deviation that there is
        ((0.9, 0.0), (0.45, 0.45), 300, 0.45 / 0.09),
        # equal rewards in both: their distance is the scale, a third of which 1 episode, and 10, do not show:
        # z^2 / (n + z^2) is 0.793 for 1, 0.278 for 10; by sqrt(2) / 1.96 * 3.29 of it the fall has to be above chance
        ((0.9, 0.0), (0.5, 0.0), 1, 1 / (3.2905 * 2**0.5 * 0.79346 / 1.95996)),
        ((0.9, 0.0), (0.5, 0.0), 10, 1 / (3.2905 * 2**0.5 * 0.27754 / 1.95996)),
        ((0.9, 0.0), (0.9, 0.0), 300, 0.0),
        ((0.9, 0.0), (0.95, 0.0), 300, 0.0),
    ],
)
def test_a_best_evaluation_whose_rewards_are_all_equal_is_no_measure_by_itself(best, last, episodes, expected):
    """Rewards that are all equal, and not 0 or 1, come without an interval."""
    found = [
        (10 * n, {"reward/mean": mean, "reward/std": std, "success": 0.5, "episodes": episodes})
        for n, (mean, std) in enumerate((best, last))
    ]
    (only,) = ALARMS["evaluation_drop"](Window(steps=[], evaluations={"game": found}))
    assert only.level == pytest.approx(expected, rel=1e-4)
    if expected:
        fell = f"the mean reward in the evaluation of game fell from {best[0]:.3g} (the best, at step 0)"
        assert only.message.startswith(fell)


def test_an_evaluation_that_drops_names_the_cause_that_its_metrics_point_to():
    def found(**more: object) -> Finding:
        (only,) = ALARMS["evaluation_drop"](measured(0.5, 0.8, 0.5, **more))
        return only

    assert "updates have made the policy worse" in found().cause and "the checkpoint at step 10" in found().advice
    assert found(failed=90).cause == "30% of its episodes failed, and 0% of those of the best evaluation"
    window = measured(0.5, 0.8, 0.5)
    for _, metrics in window.evaluations["game"]:
        metrics |= {TRAINING: 0.8, TRAINING_ERROR: 0.02}
    (learned,) = ALARMS["evaluation_drop"](window)
    assert learned.cause.startswith("the policy learns the training examples at the cost of others")


# -- all of them


@pytest.mark.parametrize("name", ALARMS)
def test_nothing_is_found_in_nothing(name: str):
    assert list(ALARMS[name](Window(steps=[]))) == []
    assert list(ALARMS[name](window_of([StepFigures(step=1, metrics={})]))) == []


def test_an_alarm_is_raised_once_and_cleared_once():
    """The median of eight is that of the fourth and the fifth largest."""
    values = [0.001] * 8 + [0.2] * 10 + [0.04] * 8 + [0.001] * 12
    assert told(steps_of({"mismatch_kl": values}), "mismatch_kl") == [
        (12, "mismatch_kl", "raised"),  # four of eight: (0.001 + 0.2) / 2
        (34, "mismatch_kl", "cleared"),  # 0.04 holds it; from step 30 on four of eight are 0.001, for five steps
    ]


def test_a_value_that_swings_about_the_bound_raises_it_once():
    values = [0.001] * 8 + [0.06, 0.04] * 20
    assert [state for _, _, state in told(steps_of({"mismatch_kl": values}), "mismatch_kl")] == ["raised"]
