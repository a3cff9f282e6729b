"""Fills the tables of docs/metrics.md from the table of metrics in the code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from docs_site.markdown import cell, code, table
from verbatim.logs.monitors.metric_table import METRICS, Metric

_TABLE = re.compile(r"(<!-- metrics: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def document(page: str) -> str:
    """The page with its tables written anew, each between `<!-- metrics: Group -->` and `<!-- end -->`.

    Raises:
        ValueError: the page has no table for a group, or one for a group that there is not.
    """
    groups: dict[str, list[Metric]] = {}
    for metric in METRICS:
        groups.setdefault(metric.group, []).append(metric)
    found = [name for _, name, _ in _TABLE.findall(page)]
    if found != list(groups):
        raise ValueError(f"docs/metrics.md has tables of {found}; expected {list(groups)}")
    return _TABLE.sub(lambda match: f"{match[1]}\n{_table(groups[match[2]])}\n{match[3]}", page)


def _table(metrics: Sequence[Metric]) -> str:
    """One row for each metric."""
    rows = [(code(metric.name), metric.unit, cell(metric.about) + _see(metric)) for metric in metrics]
    return table(("metric", "unit", ""), rows)


def _see(metric: Metric) -> str:
    if not metric.see:
        return ""
    page, _, heading = metric.see.partition("#")
    name = (heading or page.removesuffix(".md")).replace("-", " ")
    return f" ([{_NAMES.get(metric.see, name)}]({metric.see}))"


_NAMES: Mapping[str, str] = {
    "asynchrony.md#what-to-look-at": "asynchrony",
    "vllm.md#weights-from-the-trainers-devices": "broadcast",
    "vllm.md#one-gpu": "one GPU",
    "environments.md#a-judge-or-a-reward-model": "judges",
}
