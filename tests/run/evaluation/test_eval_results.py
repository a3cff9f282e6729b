"""What evaluated episodes come to: by example, as a whole, and compared in pairs."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verbatim import Trajectory, Turn
from verbatim.core.errors import UsageError
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.core.trajectory_json import plain, trajectory_to_json
from verbatim.core.types import StopReason, ToolCall
from verbatim.environments.environment import succeeded
from verbatim.environments.guess_number import GuessNumber
from verbatim.logs.monitors import MetricsLog
from verbatim.logs.outcomes.files import OutcomeFolder
from verbatim.run.evaluation.as_json import difference_to_json
from verbatim.run.evaluation.evaluated_episode import (
    EvaluatedEpisode,
    evaluated_episode_from_json,
    evaluated_episode_of,
)
from verbatim.run.evaluation.pairs import difference
from verbatim.run.evaluation.results import env_result
from verbatim.run.evaluation.rows import Compared, difference_rows
from verbatim.run.evaluation.stored import evaluation_files, read_evaluated_episodes
from verbatim.run.summary import summary_of


def outcome(example: str, number: int, reward: float | None, error: str | None = None, **fields) -> EvaluatedEpisode:
    return EvaluatedEpisode(
        env="game",
        example_id=example,
        sample_index=number,
        seed=number,
        success=error is None and reward == 1,
        reward=None if error else reward,
        error=error,
        stop_reason="stop",
        **fields,
    )


def played() -> list[Trajectory]:
    """Four episodes: one of two turns with a call each, one that is malformed, one that failed, one without tools."""
    call = ToolCall(name="guess", arguments={"number": 3}, status="ok", raw='{"number": 3}', id="1")
    broken = ToolCall(name=None, arguments=None, status="invalid_json", raw="{", id="2")
    turns = (
        Turn(prompt_ids=[1], completion_ids=[2, 3], logprobs=[-0.5, -0.5], tool_calls=(call,)),
        Turn(prompt_ids=[1, 2, 3, 4], completion_ids=[5], logprobs=[-0.5], tool_calls=(call,)),
    )
    bad = Turn(prompt_ids=[1], completion_ids=[9], tool_calls=(broken,), parse_status="invalid_json")
    shared = {"env": "game", "group_id": "eval-0"}
    return [
        Trajectory(
            example_id="a",
            turns=turns,
            reward=1.0,
            reward_parts={"right": 1.0},
            stop_reason="stop",
            seed=1,
            trajectory_id="eval-0-0",
            info={"judge_usage": {"requests": 2, "cost": 0.5}},
            **shared,
        ),
        Trajectory(
            example_id="a",
            turns=(bad,),
            reward=0.25,
            stop_reason=StopReason.MALFORMED,
            truncated=True,
            seed=2,
            sample_index=1,
            trajectory_id="eval-0-1",
            info={"tool_errors": {"invalid_json": 1}},
            **shared,
        ),
        Trajectory(
            example_id="b",
            turns=(bad,),
            error="environment: score raised KeyError: 'x'",
            seed=3,
            trajectory_id="eval-1-0",
            stop_reason="api_error",
            info={"judge_usage": {"requests": 1}},
            **shared,
        ),
        Trajectory(
            example_id="b",
            turns=(Turn(prompt_ids=[1], completion_ids=[7, 8]),),
            reward=0.5,
            seed=4,
            sample_index=1,
            trajectory_id="eval-1-1",
            stop_reason="stop",
            **shared,
        ),
    ]


def test_figures_are_those_that_are_worked_out_by_hand():
    """Of the three that did not fail: rewards 1, 1/4 and 1/2, so a variance of 7/72; 2, 1 and 1 turns, 2, 1 and 0
    calls, 3, 1 and 2 tokens. Two of the three turns with tools have readable calls. All four episodes are counted in
    the success, and in what judges spent."""
    trajectories, game = played(), GuessNumber()
    found = env_result("game", [evaluated_episode_of(t, succeeded(game, t)) for t in trajectories]).metrics()
    expected = {
        "reward/mean": 7 / 12,
        "reward/std": math.sqrt(7 / 72),
        "success": 1 / 4,
        "turns": 4 / 3,
        "tool_calls": 1.0,
        "valid_format": 2 / 3,
        "tool_errors": 1 / 3,
        "truncated": 1 / 3,
        "malformed": 1 / 3,
        "completion_tokens": 2.0,
        "reward_part/right/mean": 1.0,
        "reward_part/right/std": 0.0,
        "judge/requests": 3,
        "judge/cost": 0.5,
        "episodes": 4,
        "failed": 1,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_an_outcome_is_the_same_of_a_trajectory_and_of_its_json():
    for trajectory in played():
        written = json.loads(json.dumps(plain(trajectory_to_json(trajectory))))
        assert evaluated_episode_of(trajectory, success=True) == evaluated_episode_from_json(written, success=True)


def test_failed_episodes_count_as_no_success_and_have_no_reward():
    found = env_result(
        "game",
        [outcome("a", 0, 1.0), outcome("a", 1, 1.0), outcome("b", 0, 1.0), outcome("b", 1, None, "timeout: too long")],
    )
    assert (found.num_episodes, found.num_failed, found.failures) == (4, 1, {"timeout": 1})
    assert (found.success.value, found.reward.value) == (0.75, 1.0)
    assert found.success.num_values == 4 and found.reward.num_values == 3
    first, second = found.examples
    assert (first.example_id, first.success, second.success, second.num_failed) == ("a", 1.0, 0.5, 1)
    assert second.first_error == "timeout: too long"
    assert second.mean_reward == 1.0


def test_pass_at_k_is_the_mean_over_examples():
    """By hand: 1, 2 and 0 successes of 4; pass@2 is 1/2, 5/6 and 0, pass^2 is 0, 1/6 and 0."""
    outcomes = [
        outcome(example, number, float(number < wins))
        for example, wins in (("a", 1), ("b", 2), ("c", 0))
        for number in range(4)
    ]
    found = env_result("game", outcomes)
    assert list(found.pass_at) == [1, 2, 4] == list(found.pass_hat)
    assert found.pass_at[1].value == pytest.approx(3 / 12) == found.success.value
    assert found.pass_at[2].value == pytest.approx((1 / 2 + 5 / 6) / 3)
    assert found.pass_hat[2].value == pytest.approx((1 / 6) / 3)
    assert found.pass_at[4].value == pytest.approx(2 / 3)
    assert found.pass_at[2].num_examples == 3 and 0 <= found.pass_at[2].low < found.pass_at[2].high <= 1
    assert list(env_result("game", outcomes, ks=[3, 8]).pass_at) == [3]
    assert found.examples[1].pass_at[2] == pytest.approx(5 / 6)
    assert found.episodes_each == "4"
    assert env_result("game", outcomes[1:]).episodes_each == "3-4"


def test_an_evaluation_without_episodes_is_unknown():
    found = env_result("game", [])
    assert found.num_episodes == 0 and math.isnan(found.success.value) and not found.pass_at


def test_pairs_are_of_the_same_example_number_and_seed():
    """By hand: a gains one pair, b loses none and gains two; the differences of rewards are 1, 0, 1, 1."""
    before = [outcome("a", 0, 0.0), outcome("a", 1, 1.0), outcome("b", 0, 0.0), outcome("b", 1, 0.0)]
    after = [
        outcome("b", 1, 1.0),
        outcome("b", 0, 1.0),
        outcome("a", 1, 1.0),
        outcome("a", 0, 1.0),
        outcome("c", 0, 1.0),
    ]
    found = difference("game", before, after)
    assert found.is_paired and (found.num_pairs, found.num_unpaired) == (4, (0, 1))
    assert (found.gained, found.lost) == (3, 0)
    assert found.success.value == found.reward.value == 0.75
    assert found.reward == found.success  # rewards are 0 or 1
    # With one reward of 0.5 in place of 0 the differences are 1, 0, 1, 0.5. The examples' deviations from 0.625 sum to
    # -0.25 and 0.25: variance 2 / 1 * 0.125 / 16 = 1 / 64, t = 12.706.
    found = difference("game", [*before[:3], outcome("b", 1, 0.5)], after)
    assert found.reward.value == 0.625
    assert found.reward.high == pytest.approx(0.625 + 12.7062 / 8, abs=1e-3)


def test_a_failed_episode_leaves_its_pair_out_of_rewards_only():
    before = [outcome("a", 0, 1.0), outcome("b", 0, 0.5), outcome("c", 0, 0.0)]
    after = [outcome("a", 0, None, "api: 500"), outcome("b", 0, 1.0), outcome("c", 0, 1.0)]
    found = difference("game", before, after, max_failed=0.5)
    assert (found.num_pairs, found.success.num_values, found.reward.num_values) == (3, 3, 2)
    assert (found.gained, found.lost) == (2, 1)
    assert found.reward.value == pytest.approx(0.75)


def test_other_seeds_have_no_pairs():
    before = [outcome("a", 0, 0.0), outcome("b", 0, 0.0)]
    after = [
        EvaluatedEpisode(
            env="game", example_id=e, sample_index=0, seed=99, success=True, reward=1.0, error=None, stop_reason="stop"
        )
        for e in "ab"
    ]
    found = difference("game", before, after)
    assert not found.is_paired and found.num_unpaired == (2, 2)
    assert found.success.value == 1.0 and found.reward == found.success


# ---- logs


def test_outcomes_are_read_from_the_files_of_evaluations_by_step(tmp_path: Path):
    game = GuessNumber()
    files = OutcomeFolder(tmp_path / "evaluations")
    for step in (0, 5, 10):
        files.write(step, [TrajectoryOutcome.of_evaluated(trajectory) for trajectory in played()])
    assert list(evaluation_files(tmp_path)) == [0, 5, 10]
    found = list(read_evaluated_episodes(tmp_path, {5}))
    assert [step for step, _ in found] == [5] * 4
    assert [one for _, one in found] == [evaluated_episode_of(t, succeeded(game, t)) for t in played()]
    assert len(list(read_evaluated_episodes(tmp_path))) == 12
    (tmp_path / "evaluations" / "step-000010.parquet").write_bytes(b"PAR1")
    assert len(list(read_evaluated_episodes(tmp_path, {0, 5}))) == 8
    with pytest.raises(UsageError, match=r"step-000010\.parquet cannot be read as a file of Verbatim's trajectories"):
        list(read_evaluated_episodes(tmp_path))
    assert not evaluation_files(tmp_path / "nothing") and list(read_evaluated_episodes(tmp_path / "nothing")) == []


def test_an_environments_own_verdict_stands_in_the_log(tmp_path: Path):
    played = [
        Trajectory(example_id="a", reward=0.2, info={"is_success": True}),
        Trajectory(example_id="b", reward=5.0, info={"is_success": False}),
        Trajectory(example_id="c", reward=1.0),
        Trajectory(example_id="d", reward=np.nan),
    ]
    OutcomeFolder(tmp_path / "evaluations").write(
        0, [TrajectoryOutcome.of_evaluated(trajectory) for trajectory in played]
    )
    found = [one for _, one in read_evaluated_episodes(tmp_path)]
    assert [one.success for one in found] == [True, False, True, False]
    assert found[3].reward is None


# ---- the summary of a run


def write_run(folder: Path, wins: dict[int, int], env: str = "a", log_env: str = "a") -> tuple[Path, Path]:
    """Evaluations of 10 examples with 2 episodes each; `wins` of the 20 succeed, by step."""
    metrics, episodes = folder / "metrics.jsonl", folder / "evaluations"
    lines, files = MetricsLog(metrics), OutcomeFolder(episodes)
    for step, count in wins.items():
        lines.on_eval(step, env, {"success": count / 20, "episodes": 20})
        played = [
            Trajectory(
                example_id=str(index // 2),
                sample_index=index % 2,
                seed=index,
                env=log_env,
                reward=float(index < count),
            )
            for index in range(20)
        ]
        files.write(step, [TrajectoryOutcome.of_evaluated(trajectory) for trajectory in played])
    lines.close()
    return metrics, episodes


def test_a_summary_says_what_was_gained_in_pairs(tmp_path: Path):
    metrics, episodes = write_run(tmp_path, {0: 4, 5: 1, 9: 14})
    found = summary_of(metrics, {}, episodes.parent)
    assert found["gain"] == 0.5
    # Examples 2 to 6 gain both of their episodes, and none loses one.
    pairs = {str(example): [float(2 <= example <= 6)] * 2 for example in range(10)}
    from verbatim.run.evaluation.intervals import paired_share

    low, high = found["gain_interval_95"]
    assert (low, high) == pytest.approx((paired_share(pairs).low, paired_share(pairs).high), abs=1e-4)
    assert low < 0.5 < high


def summary_with(tmp_path: Path, *evaluations: tuple[int, dict[str, float]], forked_at: int = -1) -> dict[str, Any]:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step, metrics in evaluations:
        log.on_eval(step, "essays", {"success": 0.0, "examples": 5, "episodes": 10, "failed": 0, **metrics})
    log.close()
    return summary_of(tmp_path / "metrics.jsonl", {}, forked_at=forked_at)


def test_a_summary_has_the_reward_and_its_parts_where_success_is_not_the_whole_story(tmp_path: Path):
    before, after = ({"reward/mean": mean, "reward_part/style/mean": mean / 2} for mean in (0.5, 0.75))
    found = summary_with(tmp_path, (0, before), (9, after))
    assert (found["success_before_rl"], found["success_after_rl"]) == (0.0, 0.0)
    assert (found["reward_before_rl"], found["reward_after_rl"]) == (0.5, 0.75)
    assert (found["reward_parts_before_rl"], found["reward_parts_after_rl"]) == ({"style": 0.25}, {"style": 0.375})
    assert (found["evaluated_examples"], found["evaluated_episodes"]) == (5, 10)


def test_a_reward_that_is_the_success_is_not_said_twice(tmp_path: Path):
    found = summary_with(tmp_path, (0, {"reward/mean": 0.0}), (9, {"reward/mean": 0.5, "success": 0.5}))
    assert found["success_after_rl"] == 0.5 and not [name for name in found if name.startswith("reward")]


def test_a_forks_summary_takes_no_evaluation_of_the_run_before_for_its_own(tmp_path: Path):
    mine = {"success": 1.0}
    assert summary_with(tmp_path, (0, {}), (4, mine))["success_after_rl"] == 1.0
    (tmp_path / "metrics.jsonl").unlink()
    found = summary_with(tmp_path, (0, {}), (4, mine), forked_at=4)
    assert (found["success_before_rl"], found["success_after_rl"], found.get("gain")) == (0.0, None, None)
    (tmp_path / "metrics.jsonl").unlink()
    assert summary_with(tmp_path, (0, {}), (4, mine), (6, {"success": 0.5}), forked_at=4)["gain"] == 0.5


def test_without_the_episodes_a_gain_has_no_interval(tmp_path: Path, caplog):
    metrics, episodes = write_run(tmp_path, {0: 4, 9: 14}, log_env="another")
    for log in (None, tmp_path / "missing", tmp_path):
        found = summary_of(metrics, {}, log)
        assert found["gain"] == 0.5 and "gain_interval_95" not in found
    assert not caplog.records
    (episodes / "step-000009.parquet").write_text("nonsense\n")
    assert summary_of(metrics, {}, tmp_path)["gain"] == 0.5
    assert "the summary lacks the confidence interval" in caplog.text
    metrics.write_text(
        '{"format": 1, "step": 0, "kind": "eval", "env": "a", "metrics": {"success": 0.6, "episodes": 8}}\n'
    )
    assert "gain" not in summary_of(metrics, {}, None), "one evaluation is no gain"


def test_a_gain_with_several_environments_stands_with_each(tmp_path: Path):
    metrics, _ = write_run(tmp_path, {0: 4, 9: 14})
    lines = metrics.read_text()
    metrics.write_text(lines + lines.replace('"env": "a"', '"env": "b"'))
    found = summary_of(metrics, {}, tmp_path)
    assert "gain" not in found and found["environments"]["b"]["gain"] == 0.5
    assert "gain_interval_95" in found["environments"]["a"] and "gain_interval_95" not in found["environments"]["b"]


@pytest.mark.parametrize(("failed", "is_compared"), [((0, 1), True), ((2, 0), False), ((0, 7), False)])
def test_two_evaluations_are_compared_where_few_episodes_failed(failed, is_compared):
    """Of ten, in pairs. 3 survivors that all succeed say nothing of the other seven."""
    before, after = (
        [outcome("a", n, 1.0, "timeout: slow" if n < many else None) for n in range(10)] for many in failed
    )
    found = difference("game", before, after)
    assert any(found.too_many_failed) is not is_compared
    assert math.isnan(found.reward.value) is not is_compared
    clauses = tuple(f"{many} of 10 episodes failed" if many > 1 else None for many in failed)
    assert found.too_many_failed == clauses
    (row,) = difference_rows([Compared(before="A", after="B", environments={"game": found})], "game")
    expected = "not compared: " + ", ".join(f"{n}: {c}" for n, c in zip("AB", clauses, strict=True) if c)
    assert row[3] == ("0 gained, 1 lost of 10" if is_compared else expected)
    said = difference_to_json(found)
    assert said["too_many_failed"] == list(clauses) and (said["gained"] is None) is not is_compared
    assert difference("game", before, after, 0.7).too_many_failed == (None, None)


def test_a_summary_does_not_compare_survivors(tmp_path: Path):
    metrics, episodes = write_run(tmp_path, {0: 4, 9: 14})
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([lines[0], lines[1].replace('"episodes"', '"failed": 3, "episodes"')]) + "\n")
    found = summary_of(metrics, {}, episodes.parent)
    assert found["not_compared"] == "after training, 3 of 20 episodes failed" and "gain" not in found
    assert summary_of(metrics, {}, episodes.parent, 0.2)["gain"] == 0.5
