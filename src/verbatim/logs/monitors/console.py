"""Prints lines of steps, evaluations and alarms, and a live view below them where there is a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

import rich.console
from rich.text import Text

from verbatim.core.plain_console import PlainConsole
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.alarm_log import standing_alarms
from verbatim.logs.monitors.base import NO_DISTRIBUTIONS, Distributions, Metrics, Monitor
from verbatim.logs.monitors.live import LiveView

COLUMNS = (
    ("reward", "reward/mean"),
    ("success", "success"),
    ("failed", "rollouts/failed_share"),
    ("turns", "turns"),
    ("mismatch KL", "mismatch_kl"),
    ("age", "staleness/mean"),
    ("sampler tok/s", "sampler/tokens_per_second"),
    ("idle s", "time/sampler_idle"),
    ("trainer tok/s", "tokens_per_second"),
    ("idle s", "time/trainer_idle"),
)
"""Heading and metric of each column. One that had no value yet is left out; a value that is missing is shown as -."""

HEADER_EVERY = 20
"""Lines of steps between two headings."""

SECONDS_BETWEEN = 5.0
"""On a terminal, a step that ends sooner after the last line is shown in the bar alone."""


class Console(Monitor):
    """Prints steps, evaluations and alarms. On a terminal there is a live view below them: progress with the time left,
    the last evaluation, what each side waits for, and the alarm that stands; lines have as many columns as fit, and of
    quick steps not every one has a line. Elsewhere every step has a whole line.

    Args:
        max_steps: The length of the bar.
        console: Where to print; standard output by default.
        first_step: Steps done before this process started (a resumed run).
        now: A clock, in seconds.
        alarms: Those that stand since before this process started; each gets a line.
    """

    def __init__(
        self,
        max_steps: int,
        *,
        console: rich.console.Console | None = None,
        first_step: int = 0,
        now: Callable[[], float] = time.monotonic,
        alarms: Iterable[Alarm] = (),
    ) -> None:
        self.console = console or PlainConsole()
        self.max_steps = max_steps
        self._now = now
        self._last_line = -math.inf
        self._columns: tuple[tuple[str, str], ...] = ()
        self._lines_since_header = HEADER_EVERY
        self._metrics: Metrics = {}
        self._evals: dict[str, str] = {}
        self._alarms = list(alarms)
        self.view = LiveView(self.console, lines=self.lines, now=now)
        self._bar = self.view.open("training", max_steps, done=first_step)
        for alarm in self._alarms:
            self._print_alarm(alarm, "since")

    def on_step(self, step: int, metrics: Metrics, distributions: Distributions = NO_DISTRIBUTIONS) -> None:
        """One line, under a heading every so often."""
        reward = metrics.get("reward/mean", math.nan)
        self._bar.update(step, note="" if math.isnan(reward) else f"reward {format_number(reward)}")
        self._metrics = metrics
        width = None
        if self.console.is_terminal:
            if self._now() - self._last_line < SECONDS_BETWEEN and step < self.max_steps:
                return
            width = self.console.width
        columns = known_columns(metrics, self._columns)
        if columns != self._columns or self._lines_since_header >= HEADER_EVERY:
            self._columns, self._lines_since_header = columns, 0
            self._print(header(self.max_steps, columns, width), style="dim")
        self._lines_since_header += 1
        self._print(step_line(step, self.max_steps, metrics, columns, width))
        self._last_line = self._now()

    def on_eval(self, step: int, env: str, metrics: Metrics) -> None:
        """One line with the metrics of the evaluation that have a value; on a terminal, as many as fit."""
        self._evals[env] = f"{env}  {_main_figure(metrics)}  after step {step}"
        width = self.console.width if self.console.is_terminal else None
        self._print(eval_line(step, env, metrics, width), style="bold")

    def on_alarm(self, alarm: Alarm) -> None:
        """What is wrong, why, and what to do."""
        self._alarms = standing_alarms([*self._alarms, alarm])
        self._print_alarm(alarm, "after")

    def _print_alarm(self, alarm: Alarm, when: str) -> None:
        line = Text(
            f"alarm  {alarm.name}  {when} step {alarm.step}  {alarm.text}",
            style="bold red" if alarm.state == "raised" else "green",
        )
        self.console.print(line, soft_wrap=not self.console.is_terminal)

    def close(self) -> None:
        self.view.stop()

    def lines(self) -> list[tuple[str, Text]]:
        """The lines of the live view: a label and a text for each."""
        found = []
        if self._evals:
            found.append(("eval", Text("  ·  ".join(self._evals.values()))))
        if waits := what_waits(self._metrics):
            found.append(("waits", Text(waits)))
        if self._alarms:
            *others, last = self._alarms
            more = f"  (and {len(others)} more)" if others else ""
            found.append(("alarm", Text(f"{last.name} after step {last.step}{more}: {last.message}", style="bold red")))
        return found

    def _print(self, line: str, style: str = "") -> None:
        self.console.print(Text(line, style=style), soft_wrap=True)


def known_columns(metrics: Metrics, shown: Sequence[tuple[str, str]] = ()) -> tuple[tuple[str, str], ...]:
    """The columns that have a value in these metrics, and those that were shown before.

    >>> known_columns({"reward/mean": 0.5, "success": float("nan")})
    (('reward', 'reward/mean'),)
    """
    return tuple(column for column in COLUMNS if column in shown or not math.isnan(metrics.get(column[1], math.nan)))


def header(max_steps: int, columns: Sequence[tuple[str, str]], width: int | None = None) -> str:
    """The columns' names over their values, as many as fit into the width."""
    return _fit([f"{'step':>{_step_width(max_steps)}}", *(f"{name:>{_width(name)}}" for name, _ in columns)], width)


def step_line(
    step: int, max_steps: int, metrics: Metrics, columns: Sequence[tuple[str, str]], width: int | None = None
) -> str:
    """One step: `3/100`, then the columns that fit into the width.

    >>> step_line(3, 100, {"reward/mean": 0.5}, COLUMNS[:3])
    '   3/100    0.500        -        -'
    >>> step_line(3, 100, {"reward/mean": 0.5}, COLUMNS[:3], 26)
    '   3/100    0.500        -'
    """
    cells = [f"{format_number(metrics.get(key, math.nan)):>{_width(name)}}" for name, key in columns]
    return _fit([f"{f'{step}/{max_steps}':>{_step_width(max_steps)}}", *cells], width)


def _fit(cells: Sequence[str], width: int | None) -> str:
    """The first cells that fit, two spaces between them; all of them where no width is given."""
    line = cells[0]
    for cell in cells[1:]:
        if width is not None and len(line) + 2 + len(cell) > width:
            break
        line += f"  {cell}"
    return line


def eval_line(step: int, env: str, metrics: Metrics, width: int | None = None) -> str:
    """What has a value, success and reward first, an interval in brackets behind its metric; as much as fits.

    >>> eval_line(20, "game", {"success": 0.91, "turns": math.nan, "success/low": 0.85, "success/high": 0.95})
    'eval  game  after step 20  success 0.910 [0.850, 0.950]'
    """
    names = [*(name for name in _MAIN if name in metrics), *(name for name in metrics if name not in _MAIN)]
    values = [
        f"{name} {format_number(metrics[name])}{_interval(name, metrics)}"
        for name in names
        if not math.isnan(metrics[name]) and not name.endswith(("/low", "/high"))
    ]
    return _fit([f"eval  {env}  after step {step}", *values], width)


_MAIN = ("success", "reward/mean")
"""The first metrics of an evaluation."""


def _interval(name: str, metrics: Metrics) -> str:
    """The interval beside a metric: from `success/low` and `success/high`, or `reward/low` and `reward/high`."""
    family = name.removesuffix("/mean")
    low, high = metrics.get(f"{family}/low", math.nan), metrics.get(f"{family}/high", math.nan)
    return "" if math.isnan(low) or math.isnan(high) else f" [{format_number(round(low, 9))}, {format_number(high)}]"


def _main_figure(metrics: Metrics) -> str:
    name = next((name for name in _MAIN if not math.isnan(metrics.get(name, math.nan))), None)
    return "no result" if name is None else f"{name} {format_number(metrics[name])}{_interval(name, metrics)}"


def what_waits(metrics: Metrics) -> str:
    """What each side of the last step waited for; empty where nothing is known.

    >>> what_waits({"time/step": 10.0, "time/sampler_idle": 1.0, "time/trainer_idle": 6.0, "time/wait_for_batch": 2.0,
    ...             "queue/groups_in_flight": 3})
    'idle: sampler 10%, trainer 60%  ·  waited 2.0 s for rollouts  ·  3 groups in flight'
    """
    seconds = metrics.get("time/step", 0.0)
    idle = [
        f"{side} {min(1.0, metrics[f'time/{side}_idle'] / seconds):.0%}"
        for side in ("sampler", "trainer")
        if seconds > 0 and not math.isnan(metrics.get(f"time/{side}_idle", math.nan))
    ]
    waits = [
        f"{metrics[f'time/{name}']:.1f} s {label}"
        for name, label in (("wait_for_batch", "for rollouts"), ("wait_for_trainer", "for the trainer"))
        if metrics.get(f"time/{name}", 0.0) >= 0.05
    ]
    batches = metrics.get("queue/batches_submitted")
    queues = [
        f"{metrics[f'queue/{name}']:.0f} {label}"
        for name, label in (
            ("groups_in_flight", "groups in flight"),
            ("groups_ready", "ready"),
            ("batches_submitted", f"{'batch' if batches == 1 else 'batches'} at the trainer"),
        )
        if metrics.get(f"queue/{name}")
    ]
    parts = {"idle: ": idle, "waited ": waits, "": queues}
    return "  ·  ".join(f"{label}{', '.join(found)}" for label, found in parts.items() if found)


def format_number(value: float) -> str:
    """Four significant places at most, `-` for NaN.

    >>> [format_number(x) for x in (float("nan"), 0.5, 12345.6, 0.00012, 7, 0.0)]
    ['-', '0.500', '12,346', '1.2e-04', '7', '0.000']
    """
    if math.isnan(value):
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if math.isinf(value) or value == 0 or 0.001 <= abs(value) < 10:
        return f"{value:.3f}"
    if abs(value) < 0.001:
        return f"{value:.1e}"
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def _width(name: str) -> int:
    return max(len(name), 7)


def _step_width(max_steps: int) -> int:
    return 2 * len(str(max_steps)) + 2
