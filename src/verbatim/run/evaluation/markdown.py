"""Writes the results of an evaluation as a report in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from verbatim.core.texts import printable
from verbatim.run.evaluation.results import EnvResult
from verbatim.run.evaluation.rows import (
    Compared,
    Row,
    difference_rows,
    example_rows,
    result_rows,
    spent_line,
    unpaired_note,
)

_MOST_EXAMPLES = 500
"""Maximum number of examples per environment in a report."""
NOTE = (
    "Intervals are 95%, over examples: episodes of one example are not independent. Episodes that ended with an "
    "error count as failures, and are left out of rewards and of all other means."
)
"""An explanation of how to read the tables."""


@dataclass(frozen=True, kw_only=True)
class ReportedModel:
    """A model in a report."""

    letter: str
    label: str
    """The model as typed on the command line."""
    where: str
    """The model's folder, or the model's name and its server."""
    results: Mapping[str, EnvResult]
    """The results by environment."""


def markdown(
    title: str,
    conditions: Mapping[str, object],
    subjects: Sequence[ReportedModel],
    compared: Sequence[Compared] = (),
    errors: Mapping[str, Mapping[str, tuple[int, str]]] = MappingProxyType({}),
) -> str:
    """The report as GitHub-flavoured Markdown. Strings that come from models and environments are escaped.

    Args:
        title: The heading.
        conditions: The settings: seed, episodes, sampling, ...
        subjects: The models.
        compared: The comparisons, each between two models.
        errors: The number of failed episodes and the first error, by letter and kind of failure.
    """
    parts = [
        f"# {_plain(title)}",
        _table(("condition", ""), [(name, str(value)) for name, value in conditions.items()]),
    ]
    models = [(each.letter, each.label, each.where) for each in subjects]
    parts += ["## Models", _table(("", "model", "where"), models)]
    for env in dict.fromkeys(env for subject in subjects for env in subject.results):
        parts += [f"## {_plain(env)}", *_environment(subjects, compared, env)]
    if any(errors.values()):
        rows = [
            (letter, str(count), kind, first)
            for letter, kinds in errors.items()
            for kind, (count, first) in kinds.items()
        ]
        parts += ["## Failures", _table(("", "episodes", "kind", "the first"), rows)]
    return "\n\n".join(parts) + "\n"


def _environment(subjects: Sequence[ReportedModel], compared: Sequence[Compared], env: str) -> list[str]:
    letters = [subject.letter for subject in subjects]
    results = [subject.results.get(env) for subject in subjects]
    parts = [_table(("", *letters), result_rows(results)), NOTE]
    if rows := difference_rows(compared, env):
        parts += [_table(("difference", "success", "mean reward", "pairs of episodes"), rows)]
        if note := unpaired_note(compared, env):
            parts.append(_plain(note) + ".")
    spent = [(letter, spent_line(result)) for letter, result in zip(letters, results, strict=True) if result]
    parts.append(_table(("", "spent"), spent))
    rows, left = example_rows(results, _MOST_EXAMPLES)
    more = f"\n\n{left:,} more examples are left out." if left else ""
    parts.append(f"<details><summary>Examples</summary>\n\n{_table(('example', *letters), rows)}{more}\n\n</details>")
    return parts


def _table(header: Sequence[str], rows: Sequence[Row]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_plain(cell) for cell in line) + " |" for line in lines)


def _plain(text: str) -> str:
    r"""The text as one line, escaped so that Markdown shows it unchanged.

    >>> print(_plain("a|b\n<b> `c` [d](e) [0, 1]"))
    a\|b &lt;b&gt; \`c\` [d]\(e) [0, 1]
    """
    text = " ".join(printable(text).split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    text = "".join(f"\\{c}" if c in "\\|`*_#" else c for c in text)
    return text.replace("](", "]\\(").replace("][", "]\\[")  # this makes no link; intervals keep their brackets
