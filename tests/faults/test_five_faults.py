"""Five planted faults in one run of the real loop: each is named by its alarm, with what shows it; a healthy run has
no alarm."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from faults.five_faults import HEALTHY, NAMED_BY, Watched, play


@pytest.fixture(scope="module")
def notes(tmp_path_factory) -> Watched:
    return play(tmp_path_factory.mktemp("run"))


LATEST = {"dead_parser": 4, "stripped_thinking": 4, "stale_sampler": 10, "hackable_reward": 21, "always_fails": 2}
"""The step by which each is named; the policy finds out how to earn more at step 12."""


@pytest.mark.slow
@pytest.mark.parametrize("fault", NAMED_BY)
def test_a_planted_fault_is_named(notes: Watched, fault: str):
    name, env = NAMED_BY[fault], None if fault == "stale_sampler" else fault
    (alarm,) = [alarm for alarm, _ in notes.alarms if alarm.name == name and alarm.env == env]
    assert alarm.state == "raised" and alarm.step <= LATEST[fault]
    groups = [group for step, _, groups in notes.steps if step == alarm.step for group in groups]
    own = {t.trajectory_id for group in groups if group.env == fault for t in group.trajectories}
    assert alarm.trajectory_ids and set(alarm.trajectory_ids) <= own
    assert re.search(r"\((now |not set)|verbatim env check", alarm.advice)


@pytest.mark.slow
def test_nothing_else_is_said_but_what_follows_from_them(notes: Watched):
    """An environment whose rollouts all fail, or are all too old, starves."""
    named = {(name, None if fault == "stale_sampler" else fault) for fault, name in NAMED_BY.items()}
    others = {(alarm.name, alarm.env) for alarm, _ in notes.alarms} - named
    assert others <= {("environment_starves", "always_fails"), ("environment_starves", "stale_sampler")}


@pytest.mark.slow
def test_the_stale_sampler_is_told_from_slow_episodes(notes: Watched):
    (alarm,) = [alarm for alarm, _ in notes.alarms if alarm.name == "staleness"]
    assert alarm.cause == (
        f"rollouts of stale_sampler are still sampled by version 0 at step {alarm.step}: new weights do not reach its "
        "sampler"
    )


@pytest.mark.slow
def test_a_run_without_a_fault_has_no_alarm(tmp_path: Path):
    assert [alarm for alarm, _ in play(tmp_path, HEALTHY).alarms] == []
