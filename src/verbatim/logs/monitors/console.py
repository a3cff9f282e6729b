"""Prints a line for each step, evaluation and alarm, with a live view below them on a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

import rich.console
from rich.text import Text

from verbatim.core.plain_console import PlainConsole
from verbatim.core.texts import number
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.alarm_log import standing_alarms
from verbatim.logs.monitors.learning_curve import reward_is_success, reward_parts
from verbatim.logs.monitors.live import LiveView
from verbatim.logs.monitors.monitor import NO_DISTRIBUTIONS, Distributions, Metrics, Monitor

Column = tuple[str, str, str]

COLUMNS: tuple[Column, ...] = (
    ("reward", "reward/mean", ".3f"),
    ("success", "success", ".3f"),
    ("failed", "rollouts/failed_share", ".3f"),
    ("turns", "turns", ".2f"),
    ("mismatch KL", "mismatch_kl", ".1e"),
    ("age", "staleness/mean", ".2f"),
    ("sampler tok/s", "sampler/tokens_per_second", ".0f"),
    ("idle s", "time/sampler_idle", ".1f"),
    ("trainer tok/s", "tokens_per_second", ".0f"),
    ("idle s", "time/trainer_idle", ".1f"),
)
"""Heading, metric and number format of each column. A column is left out until its metric has a value. From then on,
missing values are shown as -."""

HEADER_EVERY = 20
"""Number of step lines between two headings."""

SECONDS_BETWEEN = 5.0
"""Minimum seconds between step lines on a terminal. The steps in between only move the bar."""


class Console(Monitor):
    """Prints steps, evaluations and alarms.

    On a terminal, a live view below them shows the progress with the time left, the last evaluation, how long sampler
    and trainer are idle, and the latest alarm that has not been cleared. Lines have as many columns as fit, and some
    quick steps have no line. If the output is not a terminal, every step has a full line.

    Args:
        max_steps: Number of steps of the run.
        console: Where to print; standard output by default.
        first_step: Number of steps done before this process started; not 0 in a resumed run.
        now: Returns the time in seconds.
        alarms: Alarms that earlier processes of the run raised and did not clear. They are printed at the start.
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
        self._columns: tuple[Column, ...] = ()
        self._lines_since_header = HEADER_EVERY
        self._metrics: Metrics = {}
        self._evals: dict[str, str] = {}
        self._alarms = list(alarms)
        self.view = LiveView(self.console, lines=self.lines, now=now)
        self._bar = self.view.open("training", max_steps, done=first_step)
        for alarm in self._alarms:
            self._print_alarm(alarm, "since")

    def on_step(self, step: int, metrics: Metrics, distributions: Distributions = NO_DISTRIBUTIONS) -> None:
        """Print one line, with a heading every `HEADER_EVERY` lines."""
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
        """Print one line with the main metrics of the evaluation; on a terminal, only the metrics that fit into the
        line."""
        self._evals[env] = f"{env}  {'  '.join(_main_figures(metrics)) or 'no result'}  after step {step}"
        width = self.console.width if self.console.is_terminal else None
        self._print(eval_line(step, env, metrics, width), style="bold")

    def on_alarm(self, alarm: Alarm) -> None:
        """Print the alarm with its cause and advice."""
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
        """The lines of the live view, each a pair of label and text."""
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


def known_columns(metrics: Metrics, shown: Sequence[Column] = ()) -> tuple[Column, ...]:
    """The columns that have a value in these metrics or were shown before.

    >>> known_columns({"reward/mean": 0.5, "success": float("nan")})
    (('reward', 'reward/mean', '.3f'),)
    """
    return tuple(column for column in COLUMNS if column in shown or not math.isnan(metrics.get(column[1], math.nan)))


def header(max_steps: int, columns: Sequence[Column], width: int | None = None) -> str:
    """The line with the names of the columns that fit into the width, aligned with the values below them."""
    return _fit([f"{'step':>{_step_width(max_steps)}}", *(f"{name:>{_width(name)}}" for name, *_ in columns)], width)


def step_line(step: int, max_steps: int, metrics: Metrics, columns: Sequence[Column], width: int | None = None) -> str:
    """The line of one step: the step (`3/100`), then the columns that fit into the width.

    >>> step_line(3, 100, {"reward/mean": 0.5}, COLUMNS[:3])
    '   3/100    0.500        -        -'
    >>> step_line(3, 100, {"reward/mean": 0.5}, COLUMNS[:3], 26)
    '   3/100    0.500        -'
    """
    values = [(name, metrics.get(key, math.nan), places) for name, key, places in columns]
    cells = [f"{'-' if math.isnan(value) else f'{value:,{places}}':>{_width(name)}}" for name, value, places in values]
    return _fit([f"{f'{step}/{max_steps}':>{_step_width(max_steps)}}", *cells], width)


def _fit(cells: Sequence[str], width: int | None) -> str:
    """Join as many of the first cells as fit into the width, with two spaces between cells; all cells if there is no
    width."""
    line = cells[0]
    for cell in cells[1:]:
        if width is not None and len(line) + 2 + len(cell) > width:
            break
        line += f"  {cell}"
    return line


def eval_line(step: int, env: str, metrics: Metrics, width: int | None = None) -> str:
    """The line of one evaluation: success with its interval, the reward unless it equals success, the number of
    examples and episodes, reward parts, and turns. Missing values are left out. All other metrics are in the metrics
    log.

    >>> eval_line(20, "game", {"success": 0.91, "success/low": 0.85, "success/high": 0.95, "turns": 2.5, "lr": 0.1,
    ...                        "examples": 15, "episodes": 30, "failed": 0})
    'eval  game  after step 20  success 0.910 [0.850, 0.950]  15 examples, 30 episodes  turns 2.50'
    """
    known = {name: value for name, value in metrics.items() if not math.isnan(value)}
    values = _main_figures(known)
    values += [", ".join(f"{known[name]:,} {name}" for name in ("examples", "episodes", "failed") if known.get(name))]
    values += [f"{name} {number(value)}" for name, value in reward_parts(known).items()]
    values += [f"turns {known['turns']:.2f}"] if "turns" in known else []
    return _fit([f"eval  {env}  after step {step}", *filter(None, values)], width)


def _main_figures(metrics: Metrics) -> list[str]:
    """The main metrics of an evaluation: success, and the reward unless it equals success."""
    known = {name: metrics[name] for name in ("success", "reward/mean") if not math.isnan(metrics.get(name, math.nan))}
    if len(known) == 2 and reward_is_success(metrics):
        known.pop("reward/mean")
    return [f"{name} {number(value)}{_interval(name, metrics)}" for name, value in known.items()]


def _interval(name: str, metrics: Metrics) -> str:
    """A metric's interval as text, from `success/low` and `success/high`, or `reward/low` and `reward/high`."""
    family = name.removesuffix("/mean")
    low, high = metrics.get(f"{family}/low", math.nan), metrics.get(f"{family}/high", math.nan)
    return "" if math.isnan(low) or math.isnan(high) else f" [{number(low)}, {number(high)}]"


def what_waits(metrics: Metrics) -> str:
    """Text on how long sampler, trainer and orchestrator waited in the last step; empty if nothing is known.

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
    """Like `number`, but with an exponent for values near 0; integers have no decimals.

    >>> [format_number(x) for x in (float("nan"), 0.5, 12345.6, 0.00012, 7, 0.0)]
    ['-', '0.500', '12,346', '1.2e-04', '7', '0.000']
    """
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.1e}" if 0 < abs(value) < 0.001 else number(value)


def _width(name: str) -> int:
    return max(len(name), 7)


def _step_width(max_steps: int) -> int:
    return 2 * len(str(max_steps)) + 2
