"""Five planted faults in one run of the real loop: each is named by its alarm, with what shows it; a healthy run has
no alarm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from faults.five_faults import HEALTHY, NAMED_BY, play
from faults.planted_run import ANSWERS, Written, write_run
from verbatim.inspection.viewer.query import Filters
from verbatim.inspection.viewer.run_view import RunView

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("planted") / "run"


@pytest.fixture(scope="module")
def notes(folder: Path) -> Written:
    """The run of `planted_run`, whose environments have names that say nothing of the faults."""
    return write_run(folder, steps=24, kinds=tuple(NAMED_BY))


LATEST = {"dead_parser": 4, "stripped_thinking": 4, "stale_sampler": 10, "hackable_reward": 21, "always_fails": 2}
"""The step by which each is named; the policy finds out how to earn more at step 12."""


@pytest.mark.parametrize("fault", NAMED_BY)
def test_a_planted_fault_is_named(notes: Written, fault: str):
    name, env = NAMED_BY[fault], None if fault == "stale_sampler" else ANSWERS[fault]
    (alarm,) = [alarm for alarm, _ in notes.alarms if alarm.name == name and alarm.env == env]
    assert alarm.state == "raised" and alarm.step <= LATEST[fault]
    groups = [group for step, _, groups in notes.steps if step == alarm.step for group in groups]
    own = {t.trajectory_id for group in groups if group.env == ANSWERS[fault] for t in group.trajectories}
    assert alarm.trajectory_ids and set(alarm.trajectory_ids) <= own
    assert re.search(r"\((now |not set)|verbatim env check", alarm.advice)


def test_nothing_else_is_said_but_what_follows_from_them(notes: Written):
    """An environment whose rollouts all fail, or are all too old, starves."""
    named = {(name, None if fault == "stale_sampler" else ANSWERS[fault]) for fault, name in NAMED_BY.items()}
    others = {(alarm.name, alarm.env) for alarm, _ in notes.alarms} - named
    assert others <= {("environment_starves", ANSWERS[fault]) for fault in ("always_fails", "stale_sampler")}


def test_the_stale_sampler_is_told_from_slow_episodes(notes: Written):
    (alarm,) = [alarm for alarm, _ in notes.alarms if alarm.name == "staleness"]
    assert alarm.cause == (
        f"rollouts of {ANSWERS['stale_sampler']} are still sampled by version 0 at step {alarm.step}: new weights do "
        "not reach its sampler"
    )


def test_a_run_without_a_fault_has_no_alarm(tmp_path: Path):
    assert [alarm for alarm, _ in play(tmp_path, HEALTHY).alarms] == []


def test_each_fault_is_shown_on_the_page_of_the_run_by_trajectories_that_have_it(folder: Path, notes: Written):
    page = RunView(folder)
    page.read_all()
    raised = {alarm["name"]: alarm for alarm in page.metrics(None)["alarms"] if alarm["state"] == "raised"}
    shown = {fault: page.trajectory(raised[name]["trajectory_ids"][0]) for fault, name in NAMED_BY.items()}
    assert {fault: t["env"] for fault, t in shown.items()} == {fault: ANSWERS[fault] for fault in NAMED_BY}
    assert "<tool_call>" in str(shown["dead_parser"]["messages"]) and not shown["dead_parser"]["turns"][0]["tool_calls"]
    assert "thinking_stripped" in str(shown["stripped_thinking"]["turns"][1])
    assert shown["stale_sampler"]["step"] > 5 and set(shown["stale_sampler"]["turns"][0]["policy_versions"]) == {0}
    first = page.rows(Filters(env=(ANSWERS["hackable_reward"],)), sort="step", limit=8)["rows"]
    assert shown["hackable_reward"]["num_sampled_tokens"] > 1.3 * max(row["num_sampled_tokens"] for row in first)
    assert "score raised KeyError" in shown["always_fails"]["error"]
