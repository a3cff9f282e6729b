"""Every metric that a run reports is in the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from algorithms.losses.loss_inputs import inputs, metrics_of
from run.orchestrator import loop_runs
from verbatim.algorithms.losses import LOSSES
from verbatim.logs.monitors.metric_table import METRICS, about, descriptions

FIELD = re.compile(r"\{[^{}]*\}")


def test_no_metric_is_listed_twice():
    names = [FIELD.sub("{}", metric.name) for metric in METRICS]
    assert len(names) == len(set(names)) > 100


def test_a_name_with_a_place_in_it_is_found_by_its_family():
    assert about("errors/timeout") is about("errors/{kind}")
    assert about("reward/my/env/mean").name == "reward/{env}/mean"
    assert about("reward/mean").name == "reward/mean"
    assert about("reward_part/style/std").name == "reward_part/{part}/std"
    assert about("replica/12/kv_usage").unit == "share"
    assert about("nonsense") is None
    assert descriptions(["lr", "nonsense"]) == {
        "lr": {"unit": "", "about": "the learning rate of the last optimizer step", "group": "Training"}
    }


async def test_every_metric_of_a_loop_is_listed(tmp_path: Path):
    loop, notes, _ = loop_runs.make(tmp_path, level=1, steps=3, evaluate=True)
    assert await loop.run()
    reported = {name for _, metrics, _ in notes.steps for name in metrics}
    reported |= {name for _, evaluation in notes.evals for name in evaluation.metrics}
    assert len(reported) > 30
    assert sorted(name for name in reported if about(name) is None) == []


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_every_metric_that_a_loss_reports_is_listed(name: str):
    """On two turns, with a teacher."""
    data = inputs([0.5, 0.2, 0.9], [0.4, 0.4, 0.8], [1.0, 1.0, -1.0], chunks=[0, 0, 1], teacher=[0.6, 0.3, 0.7])
    reported = metrics_of(LOSSES[name].function, data)
    assert sorted(key for key in reported if about(key) is None) == []
