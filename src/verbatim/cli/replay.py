"""Prints a replayed step next to the stored step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from verbatim.cli import exit_status
from verbatim.config.overrides import parse_overrides
from verbatim.core.errors import UsageError
from verbatim.core.plain_console import PlainConsole
from verbatim.logs.checkpoints.hold import RUNS
from verbatim.logs.monitors.console import format_number
from verbatim.run.replay import Replay, as_json, replay
from verbatim.run.replay_compare import TokenDifference

_FIRST = ("loss", "grad_norm", "lr", "entropy", "mismatch_kl", "trained_tokens")
"""Metrics that are shown even if they are identical."""


def run_replay(step: int, overrides: Sequence[str], *, prints_json: bool) -> int:
    """Replay a step and print the comparison. Returns 0 if the step is identical up to rounding, or if keys were
    changed; otherwise 1.

    Raises:
        UsageError: no run was named, or the step cannot be replayed.
    """
    folder, rest = _split(overrides)
    found = replay(folder, step, rest)
    console = PlainConsole()
    if prints_json:
        console.print_json(json.dumps(as_json(found)))
    else:
        show(found, console)
    return exit_status.FINISHED if found.changes or found.is_same else exit_status.STOPPED


def _split(overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """The run folder, and the overrides of other keys."""
    folder, rest = None, list[str]()
    for override in parse_overrides(overrides):
        if override.flag.replace("_", "-") == "--run-dir":
            folder = override.text
        else:
            rest += [override.flag] if override.text is None else [override.flag, override.text]
    if folder is None:
        raise UsageError(f"--replay needs the run's folder: --run-dir {RUNS}/NAME/latest")
    return Path(folder), rest


def show(found: Replay, console: PlainConsole) -> None:
    """Print the comparison as readable text."""
    between = found.step - found.checkpoint - 1
    on_the_way = f", and {between} steps on the way" if between else ""
    console.print(
        f"replay      step {found.step} of {found.run}, from the checkpoint of step {found.checkpoint}{on_the_way}",
        soft_wrap=True,
    )
    for change in found.changes:
        console.print(f"changed     {change}", soft_wrap=True)
    table = Table("metric", "stored", "replayed", "difference", title_justify="left")
    shown = [name for name in _FIRST if name in found.metrics]
    shown += [name for name, metric in found.metrics.items() if not metric.is_exact and name not in _FIRST]
    for name in shown:
        metric = found.metrics[name]
        apart = "" if metric.is_exact else f"{metric.replayed - metric.stored:+.2g}"
        table.add_row(name, format_number(metric.stored), format_number(metric.replayed), apart)
    console.print(table)
    if not found.metrics:
        console.print("metrics     the run's log has none of this step")
    _show_tokens("logprobs", found.logprobs, console)
    _show_tokens("gradients", found.gradients, console)
    weights = found.weights
    if weights is None:
        console.print(f"weights     not compared: there is no checkpoint of step {found.step}")
    elif weights.is_exact:
        console.print(f"weights     the same bit for bit, all {weights.num_parameters} parameters")
    else:
        console.print(
            f"weights     {weights.num_different} of {weights.num_parameters} parameters differ, by "
            f"{weights.largest:.2g} at most ({weights.parameter})",
            soft_wrap=True,
        )
    console.print(_verdict(found), style="bold", soft_wrap=True)


def _show_tokens(what: str, found: TokenDifference, console: PlainConsole) -> None:
    """Print the comparison of one per-token value."""
    if not found.num_compared and not found.is_exact:
        result = "not compared"
    elif not found.num_different:
        result = f"the same bit for bit, of {found.num_compared} tokens"
    else:
        result = (
            f"{found.num_different} of {found.num_compared} tokens differ, by {found.largest:.2g} at most: "
            f"trajectory {found.trajectory_id}, turn {found.turn}, token {found.position} (id {found.token_id}): "
            f"stored {found.stored:.6g}, replayed {found.replayed:.6g}"
        )
    more = [
        f"{count} tokens are trained {when}"
        for count, when in ((found.num_only_stored, "no longer"), (found.num_only_replayed, "only now"))
        if count
    ]
    console.print(f"{what:<11} {'; '.join([result, *more])}", soft_wrap=True)


def _verdict(found: Replay) -> str:
    if found.changes:
        return f"step {found.step} with {len(found.changes)} changed key{'s' if len(found.changes) > 1 else ''}"
    if found.is_exact:
        return f"step {found.step} replays bit for bit"
    if found.is_same:
        return f"step {found.step} replays up to rounding (differences below {found.rounding:g})"
    return f"step {found.step} does not replay: differences above {found.rounding:g}, which is more than rounding"
