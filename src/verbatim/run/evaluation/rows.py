"""Lays out results as rows of text, for the terminal and for Markdown reports."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from verbatim.core.texts import counted, number
from verbatim.run.evaluation.intervals import Estimate
from verbatim.run.evaluation.pairs import PairedDifference
from verbatim.run.evaluation.results import EnvResult, ExampleResult
from verbatim.run.evaluation.texts import with_interval

Row = tuple[str, ...]
"""A row: a heading, then one string per column."""

MOST_EXAMPLES = 12
"""Maximum number of examples shown on a terminal."""
_MEANS = {
    "turns": "turns",
    "completion_tokens": "sampled tokens",
    "valid_format": "valid format",
    "tool_errors": "tool errors",
    "truncated": "cut off",
}
"""The figures that are shown, with their headings."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Two models or runs, compared on every environment that both have."""

    before: str
    """The letter of the first model or run."""
    after: str
    """The letter of the second model or run. Differences are second minus first."""
    environments: Mapping[str, PairedDifference]
    """The differences, by environment label."""


def result_rows(results: Sequence[EnvResult | None]) -> list[Row]:
    """One row per figure, one column per result; "-" if a model was not evaluated on this environment (the result is
    None) or lacks the figure. Figures that no result has are left out."""
    there = [result for result in results if result is not None]

    def row(heading: str, cell: Callable[[EnvResult], str | None]) -> Row:
        return (heading, *((cell(result) if result is not None else None) or "-" for result in results))

    rows = [
        row("success", lambda result: with_interval(result.success)),
        row("mean reward", lambda result: with_interval(result.reward)),
    ]
    ks = sorted({k for result in there for k in result.pass_at} - {1})  # pass@1 and pass^1 equal the success rate
    rows += [row(f"pass@{k}", functools.partial(_pass, k, "pass_at")) for k in ks]
    rows += [row(f"pass^{k}", functools.partial(_pass, k, "pass_hat")) for k in ks]
    for name, heading in _MEANS.items():
        if any(name in result.figures and (result.figures[name] or name != "tool_errors") for result in there):
            rows.append(row(heading, functools.partial(_mean, name)))
    rows.append(
        row(
            "episodes",
            lambda result: (
                f"{len(result.examples):,} x {result.episodes_each}" if result.examples else f"{result.num_episodes:,}"
            ),
        )
    )
    rows.append(row("failed", lambda result: f"{result.num_failed:,} of {result.num_episodes:,}"))
    return rows


def _pass(k: int, of: str, result: EnvResult) -> str | None:
    found: Mapping[int, Estimate] = getattr(result, of)
    return with_interval(found[k]) if k in found else None


def _mean(name: str, result: EnvResult) -> str | None:
    return number(result.figures[name]) if name in result.figures else None


def difference_rows(compared: Sequence[Compared], env: str) -> list[Row]:
    """One row per comparison: its name, the differences in success and reward, and the number of pairs."""
    rows: list[Row] = []
    for pair in compared:
        found = pair.environments.get(env)
        if found is None:
            continue
        rows.append(
            (
                f"{pair.after} - {pair.before}",
                with_interval(found.success, signed=True),
                with_interval(found.reward, signed=True),
                _counts(pair, found),
            )
        )
    return rows


def _counts(pair: Compared, found: PairedDifference) -> str:
    """The number of pairs gained and lost, or why the two models are not compared."""
    if any(found.too_many_failed):
        sides = zip((pair.before, pair.after), found.too_many_failed, strict=True)
        return "not compared: " + ", ".join(f"{name}: {clause}" for name, clause in sides if clause is not None)
    if not found.is_paired:
        return "no pairs: other seeds"
    return f"{found.gained} gained, {found.lost} lost of {found.num_pairs:,}"


def unpaired_note(compared: Sequence[Compared], env: str) -> str | None:
    """A sentence about the episodes without a counterpart; None if there are no such episodes."""
    notes = []
    for pair in compared:
        found = pair.environments.get(env)
        if found is not None and found.is_paired and any(found.num_unpaired):
            first, second = found.num_unpaired
            notes.append(
                f"{pair.after} - {pair.before} leaves out {first} episodes of {pair.before} and {second} of "
                f"{pair.after} that the other has not played"
            )
    return "; ".join(notes) or None


def example_rows(results: Sequence[EnvResult | None], most: int | None = MOST_EXAMPLES) -> tuple[list[Row], int]:
    """One row per example, one column per result, with the successes and the mean reward. The hardest examples come
    first; with several results, the examples on which the results differ most come first.

    Returns:
        (1) The rows and (2) the number of examples left out.
    """
    found: dict[str, list[ExampleResult | None]] = {}
    for place, result in enumerate(results):
        for example in result.examples if result is not None else ():
            found.setdefault(example.example_id, [None] * len(results))[place] = example

    def order(item: tuple[str, list[ExampleResult | None]]) -> tuple[float, float]:
        shares = [example.success for example in item[1] if example is not None]
        return -(max(shares) - min(shares)), sum(shares) / len(shares)

    ordered = sorted(found.items(), key=order)
    shown = ordered if most is None else ordered[:most]
    return [(name, *map(_example, examples)) for name, examples in shown], len(ordered) - len(shown)


def _example(example: ExampleResult | None) -> str:
    """
    >>> _example(ExampleResult(example_id="a", num_episodes=4, num_failed=1, num_successes=3, mean_reward=0.8))
    '3 of 4, reward 0.800, 1 failed'
    """
    if example is None:
        return "-"
    failed = f", {example.num_failed} failed" if example.num_failed else ""
    return f"{example.num_successes} of {example.num_episodes}, reward {number(example.mean_reward)}{failed}"


def spent_line(result: EnvResult) -> str:
    """The tokens, requests and costs of the episodes, as text to read.

    >>> spent_line(EnvResult(env="a", num_episodes=1, num_failed=0, spent={"completion_tokens": 1200.0}))
    '1,200 sampled tokens'
    """
    spent = result.spent
    parts = [f"{spent.get('completion_tokens', 0):,.0f} sampled tokens"]
    if "prompt_tokens" in spent:
        parts.append(f"{spent['prompt_tokens']:,.0f} prompt tokens")
    if spent.get("requests_repeated"):
        parts.append(f"{counted(int(spent['requests_repeated']), 'failed request')} made again")
    for name, value in spent.items():
        if name == "cost":
            parts.append(f"cost {value:.4g}")
        elif name in ("judge/requests", "judge/cost"):
            parts.append(f"{name.replace('/', ' ')} {value:.4g}")
    return ", ".join(parts)
