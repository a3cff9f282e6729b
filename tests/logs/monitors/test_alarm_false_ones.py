"""Healthy runs raise no alarm: made-up ones, of noise and of learning, and recorded ones."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from campaigns import Campaign, sized
from logs.monitors.healthy_runs import CONFIG, HealthyRun, alarms_of
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.alarms import ALARMS, AlarmWatch, StepFigures

RECORDED = Path(__file__).parent / "recorded_runs"
"""What the alarms keep of every step of real runs, and of their evaluations."""


def false_alarms(seed: int, *, learns: bool, num_steps: int = 120) -> list[str]:
    watch = AlarmWatch(ALARMS, config=CONFIG)
    return alarms_of(HealthyRun(seed, learns=learns, num_steps=num_steps), watch)


@pytest.mark.parametrize("learns", [True, False], ids=["learns", "stands still"])
def test_a_healthy_run_is_quiet(learns: bool):
    assert {seed: found for seed in range(4) if (found := false_alarms(seed, learns=learns))} == {}


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("learns", [True, False], ids=["learns", "stands still"])
def test_at_most_one_run_in_36_raises_an_alarm(learns: bool, campaign: Callable[[str], Campaign]):
    """Of all alarms together, over 120 steps and 12 evaluations of two environments. That runs which are not healthy
    raise alarms is shown by the tests of each alarm, and by the recorded run below that collapsed."""
    row, found = campaign(f"false alarms of healthy runs, {'learning' if learns else 'standing still'}"), {}
    for seed in range(4, 4 + sized(36, 720)):
        if alarms := false_alarms(seed, learns=learns):
            found[seed] = alarms
        row.add(wrong=bool(alarms))
    assert len(found) <= row.cases / 36, found


def replayed(name: str) -> list[Alarm]:
    """The alarms of a recorded run, of which each step is shown as a checkpoint of the step holds it."""
    run: dict[str, Any] = json.loads(gzip.decompress((RECORDED / f"{name}.json.gz").read_bytes()))
    watch = AlarmWatch(ALARMS, config=run["config"])
    found: list[Alarm] = []
    for step in [0, *run["steps"]["step"]]:
        if step:
            found += watch.observe(figures_at(run["steps"], step))
        for at, env, metrics in run["evaluations"]:
            found += watch.on_eval(at, env, metrics) if at == step else []
    return found


def figures_at(columns: dict[str, Any], step: int) -> StepFigures:
    index = columns["step"].index(step)

    def row(named: dict[str, list[float | None]]) -> dict[str, float]:
        return {name: value for name, values in named.items() if (value := values[index]) is not None}

    envs = {env: row(own) for env, own in columns["envs"].items()}
    return StepFigures(step=step, metrics=row(columns["metrics"]), envs=envs, errors=columns["errors"][index])


@pytest.mark.parametrize(
    "name",
    [
        "guess_number_0",
        "guess_number_1",
        "guess_number_2",
        "parcel_desk_1",
        "smollm2",
        "calculator",
        "delegate",
        "alphabet_sort",
        "terminal_ipa",
        "guess_number_opd",
    ],
)
def test_a_recipe_is_quiet(name: str):
    """guess_number (three seeds), the README's environment, SmolLM2 on the calculator, and the other recipes. Two of
    the seeds fall for some steps on the way, and come back."""
    assert replayed(name) == []


def test_a_sampler_that_a_teacher_stands_in_for_is_not_idle():
    """guess_number_sft on a machine of which others took most: there the teacher's server was slow, and steps longer
    than ten seconds. The sampler has nothing to do between evaluations, as in every run of the mode sft."""
    found = [(alarm.name, alarm.state, alarm.step) for alarm in replayed("guess_number_sft")]
    assert found == [("trainer_idle", "raised", 40), ("trainer_idle", "cleared", 49)]
    assert replayed("guess_number_sft")[0].cause.startswith("the teacher's server is the slower side")


def test_a_run_that_collapsed_is_not():
    """guess_number with adapters: the success fell to 0.03 at step 60, and to 0.01 at step 87."""
    found = [(alarm.name, alarm.state, alarm.step) for alarm in replayed("lora")]
    assert [(name, state) for name, state, _ in found] == [("mismatch_kl", "raised"), ("mismatch_kl", "cleared")] * 2
    assert [step for _, state, step in found if state == "raised"] == [60, 87]
