"""Every metric that a run reports is in the table, and the code reports every one that the table names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import verbatim
from orchestrator import loop_runs
from verbatim.losses import LOSSES
from verbatim.monitors.metric_table import METRICS, about, descriptions

SOURCES = Path(verbatim.__file__).parent
FIELD = re.compile(r"\{[^{}]*\}")
TEXT = re.compile(r'"([^"\n]{1,59})"')


@pytest.fixture(scope="module")
def written() -> set[str]:
    """The short texts of the sources, `{}` for what an f-string fills in; without the table's own."""
    paths = [path for path in SOURCES.rglob("*.py") if path.name != "metric_table.py"]
    found = (text for path in paths for text in TEXT.findall(path.read_text(encoding="utf-8")))
    return {FIELD.sub("{}", text) for text in found}


def is_written(name: str, written: set[str]) -> bool:
    """Whether the sources have this text, or two that make it: `pool/{}/{}` and `easy`; `replica/{}` and
    `{}/serving`."""
    parts = name.split("/")
    if name in written or (parts[-1] in written and "/".join([*parts[:-1], "{}"]) in written):
        return True
    splits = [("/".join(parts[:at]), "{}/" + "/".join(parts[at:])) for at in range(1, len(parts))]
    return any(begin in written and end in written for begin, end in splits)


@pytest.mark.parametrize("name", [metric.name for metric in METRICS])
def test_what_the_table_names_is_in_the_code(name: str, written: set[str]):
    assert is_written(FIELD.sub("{}", name), written)


def test_a_name_that_no_code_makes_is_noticed(written: set[str]):
    invented = ("rewards/mean", "pool/{}/middle", "replica/{}/swiftness", "ledger/eaten")
    assert [is_written(name, written) for name in invented] == [False] * 4


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
def test_every_metric_that_a_loss_declares_is_listed(name: str):
    source = Path(__import__(LOSSES[name].function.__module__, fromlist=["x"]).__file__).read_text(encoding="utf-8")
    keys = {
        key.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict)
        for key in node.keys if isinstance(key, ast.Constant)
    }  # fmt: skip
    assert sorted(key for key in keys if about(key) is None) == []
