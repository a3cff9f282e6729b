"""Shows an episode from the evaluation before training next to the same episode from the last evaluation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from verbatim.core.plain_console import UNBOUNDED
from verbatim.core.texts import number, printable
from verbatim.core.trajectory_json import was_cut
from verbatim.core.types import Message, Trajectory
from verbatim.environments.environment import Environment, succeeded
from verbatim.logs.monitors.conversation import message_text
from verbatim.logs.monitors.trajectory_log import read_evaluated

_LONGEST = 400
"""Maximum number of characters shown per message."""
_MOST = 24
"""Maximum number of messages shown per episode, not counting the opening messages that both episodes share."""
_ROLES = {"assistant": "agent"}
"""Display names of roles; other roles are shown by their own name."""
_Line = tuple[Text, Text]
"""The speaker, and the text."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same episode, with the same seed, before and after training."""

    before: Trajectory
    after: Trajectory
    succeeded_before: bool
    succeeded_after: bool

    @property
    def gain(self) -> float:
        """The reward after training minus the reward before; NaN if either episode has no reward."""
        before, after = self.before.reward, self.after.reward
        return math.nan if before is None or after is None else after - before


@dataclass(frozen=True, kw_only=True)
class BeforeAfter:
    """The evaluations of one environment before and after training."""

    env: str
    steps: tuple[int, int]
    """The steps after which the first and the last evaluation ran."""
    pairs: Sequence[Pair]

    @property
    def shown(self) -> tuple[Pair, str]:
        """Return (1) the episode to show and (2) the reason for the choice: the first episode that went from failure to
        success, or else the episode whose reward grew most, or else the first episode."""
        gained = [pair for pair in self.pairs if pair.succeeded_after and not pair.succeeded_before]
        lost = [pair for pair in self.pairs if pair.succeeded_before and not pair.succeeded_after]
        if gained:
            return gained[0], (
                f"of {len(self.pairs)} episodes, {len(gained)} failed before and succeeded after (this is the first); "
                f"{len(lost)} went the other way"
            )
        best = max(self.pairs, key=lambda pair: -math.inf if math.isnan(pair.gain) else pair.gain)
        if best.gain > 0:
            return best, (
                f"of {len(self.pairs)} episodes, none went from failure to success; this one gained the most reward"
            )
        return self.pairs[0], f"of {len(self.pairs)} episodes, none earned more after than before; this is the first"


def compare(run: Path, environments: Mapping[str, Environment]) -> list[BeforeAfter]:
    """Pair the first evaluation of each environment with its last evaluation.

    Episodes are paired by example id, sample index and seed. Episodes whose messages could not be written to the log,
    environments that were evaluated only once, and environments without a pair are left out.

    Args:
        run: The run folder.
        environments: The environments by label; used to decide whether an episode succeeded.

    Raises:
        UsageError: as for `read_evaluated`.
    """
    found: dict[str, dict[int, dict[tuple[object, ...], Trajectory]]] = {}
    for step, trajectory in read_evaluated(run):
        if was_cut(trajectory):
            continue
        of_env = found.setdefault(trajectory.env, {})
        for middle in sorted(of_env)[1:]:  # keep only the first and the newest step in memory
            if middle < step:
                del of_env[middle]
        key = (trajectory.example_id, trajectory.sample_index, trajectory.seed)
        of_env.setdefault(step, {})[key] = trajectory
    comparisons = []
    for env, by_step in found.items():
        first, last = min(by_step), max(by_step)
        pairs = [
            Pair(
                before=before,
                after=by_step[last][key],
                succeeded_before=succeeded(environments[env], before),
                succeeded_after=succeeded(environments[env], by_step[last][key]),
            )
            for key, before in by_step[first].items()
            if env in environments and key in by_step[last]
        ]
        if first < last and pairs:
            comparisons.append(BeforeAfter(env=env, steps=(first, last), pairs=pairs))
    return comparisons


def print_comparison(comparison: BeforeAfter, console: Console) -> None:
    """Print the opening messages, then the rest of the episode before and after: in two columns, or one below the other
    if the console has no fixed width."""
    pair, why = comparison.shown
    opening = _common(pair.before.messages, pair.after.messages)
    is_plain = console.width >= UNBOUNDED
    width = None if is_plain else min(console.width, 100)
    title = f"one episode before and after: {comparison.env}, example {pair.before.example_id}, same seed"
    console.print(Text(_safe(title, console), style="bold"), width=width)
    console.print(Text(f"({why})", style="dim"), width=width)
    console.print()
    console.print(_grid([_cells(message, console) for message in _few(pair.before.messages[:opening])]), width=width)
    console.print()
    sides = [
        (
            Text(f"{when} (step {step})", style="bold"),
            [
                *(_cells(message, console) for message in _few(side.messages[opening:])),
                (Text("end", style="dim"), Text(_outcome(side, success), style="bold")),
            ],
        )
        for when, step, side, success in (
            ("before", comparison.steps[0], pair.before, pair.succeeded_before),
            ("after", comparison.steps[1], pair.after, pair.succeeded_after),
        )
    ]
    if not is_plain:
        console.print(_side_by_side(sides), width=width)
        return
    for heading, lines in sides:
        console.print(heading)
        console.print(_grid(lines))


def _grid(lines: Sequence[_Line]) -> Table:
    grid = Table.grid(padding=(0, 2), expand=False)
    for line in lines:
        grid.add_row(*line)
    return grid


def _side_by_side(sides: Sequence[tuple[Text, Sequence[_Line]]]) -> Table:
    """Two columns, before and after, with one row per message."""
    table = Table(box=None, padding=(0, 1), pad_edge=False, show_edge=False, expand=True)
    for title, _ in sides:
        table.add_column("", no_wrap=True, min_width=6)
        table.add_column(title, ratio=1, overflow="fold")
    for row in itertools.zip_longest(*(lines for _, lines in sides), fillvalue=(Text(), Text())):
        table.add_row(*(cell for line in row for cell in line))
    return table


def _common(before: Sequence[Message], after: Sequence[Message]) -> int:
    """Number of opening messages that both episodes share, up to the agent's first message."""
    count = 0
    for one, other in zip(before, after, strict=False):
        if one != other or one["role"] == "assistant":
            break
        count += 1
    return count


def _few(messages: Sequence[Message]) -> list[Message]:
    """All messages; for a long episode, the first and the last messages, with a line between them that counts the
    omitted messages."""
    if len(messages) <= _MOST:
        return list(messages)
    half = _MOST // 2
    left_out: Message = {"role": "...", "content": f"{len(messages) - 2 * half} more messages"}
    return [*messages[:half], left_out, *messages[-half:]]


def _outcome(trajectory: Trajectory, success: bool) -> str:
    if trajectory.error is not None:
        return "ended with an error"
    earned = "no reward" if trajectory.reward is None else f"reward {number(trajectory.reward)}"
    return f"{'success' if success else 'failure'}, {earned}"


def _cells(message: Message, console: Console) -> _Line:
    """The speaker and the text of a message."""
    role = str(message.get("role", ""))
    content = _safe(message_text(message, _LONGEST), console)
    return (Text(_safe(_ROLES.get(role, role), console), style="dim"), Text(content))


def _safe(text: str, console: Console) -> str:
    """The text without control characters, and with `?` for characters that the console's encoding cannot write."""
    return printable(text).encode(console.encoding, "replace").decode(console.encoding)
