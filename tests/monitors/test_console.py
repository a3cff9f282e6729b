"""The console prints one aligned line per step, whatever is missing."""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Callable

import pytest
import rich.console

from verbatim.monitors import Console
from verbatim.monitors.console import format_number, header, step_line

METRICS = {"rollouts/failed_share": 0.125, "reward/mean": 0.5, "success": 0.25, "turns": 3.5, "mismatch_kl": 1.2e-5,
           "sampler/tokens_per_second": 1234.5, "tokens_per_second": 98765.4,
           "staleness/mean": 1.0, "time/sampler_idle": 0.25, "time/trainer_idle": 12.5}  # fmt: skip


def printed(
    width: int = 40, now: Callable[[], float] = time.monotonic, **options: object
) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    console = rich.console.Console(file=out, width=width, highlight=False, **options)  # type: ignore[arg-type]
    return Console(100, console=console, now=now), out


def test_a_step_is_one_plain_line_under_a_heading():
    monitor, out = printed()
    monitor.on_step(1, METRICS)
    monitor.on_step(2, METRICS)
    monitor.close()
    heading, first, second = out.getvalue().splitlines()
    assert " ".join(heading.split()) == (
        "step reward success failed turns mismatch KL age sampler tok/s idle s trainer tok/s idle s"
    )
    assert first.split() == [
        "1/100", "0.500", "0.250", "0.125", "3.500", "1.2e-05", "1.000", "1,234", "0.250", "98,765", "12.50"
    ]  # fmt: skip
    assert second.split()[0] == "2/100"
    assert len(heading) == len(first) == len(second)


def test_what_is_missing_or_nan_is_a_dash():
    line = step_line(100, 100, {"reward/mean": math.nan, "success": 1.0})
    assert line.split() == ["100/100", "-", "1.000", *"--------"]
    assert len(line) == len(header(100))


def test_an_evaluation_is_one_line_of_all_its_metrics():
    monitor, out = printed()
    monitor.on_eval(20, "guess_number", {"success": 0.91, "turns": math.nan, "episodes": 300})
    monitor.close()
    assert out.getvalue() == "eval  guess_number  after step 20  success 0.910  turns -  episodes 300\n"


def test_the_heading_returns_every_20_steps():
    monitor, out = printed()
    for step in range(1, 42):
        monitor.on_step(step, METRICS)
    monitor.close()
    assert out.getvalue().count("mismatch KL") == 3


def test_a_terminal_gets_a_bar_and_a_file_does_not():
    on_terminal, terminal = printed(width=100, force_terminal=True)
    on_terminal.on_step(50, METRICS)
    on_terminal.close()
    in_file, file = printed()
    in_file.on_step(50, METRICS)
    in_file.close()
    assert "50/100" in terminal.getvalue().split("\n")[-2]
    assert "\x1b" in terminal.getvalue()
    assert "\x1b" not in file.getvalue()


def on_terminal(width: int, times: list[float]) -> list[str]:
    """The lines above the bar, of steps that end at these times."""
    clock = iter(times)
    at = [0.0]

    def now() -> float:
        return at[0]

    monitor, out = printed(width, now, force_terminal=True)
    for step, at[0] in enumerate(clock, start=100 - len(times) + 1):
        monitor.on_step(step, METRICS)
    monitor.on_eval(100, "game", {f"metric_{n}": 0.5 for n in range(8)})
    monitor.close()
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n")
    return [line for line in plain.split("\n") if line and not line.startswith("training")]


def test_on_a_terminal_lines_are_five_seconds_apart_and_the_last_step_has_one():
    lines = on_terminal(80, [0.0, 2.0, 4.9, 5.0, 9.0, 10.5, 11.0])
    assert [line.split()[0] for line in lines if "/100" in line] == ["94/100", "97/100", "99/100", "100/100"]


def test_on_a_terminal_no_line_is_wider_than_it_and_words_stay_whole():
    lines = on_terminal(50, [0.0])
    assert max(map(len, lines)) <= 50
    heading, step, *evaluation = lines
    assert heading.split() == ["step", "reward", "success", "failed", "turns"]
    assert step.split() == ["100/100", "0.500", "0.250", "0.125", "3.500"]
    words = " ".join(evaluation).split()
    assert words == ["eval", "game", "after", "step", "100", *(w for n in range(8) for w in (f"metric_{n}", "0.500"))]


def test_the_bar_shows_the_last_reward_and_the_time_left():
    monitor, out = printed(100, force_terminal=True)
    for step in (1, 2, 3):
        monitor.on_step(step, {**METRICS, "reward/mean": step / 8})
    monitor.close()
    bar = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).split("\n")[-2]
    assert "3/100 reward 0.375" in bar
    assert re.search(r"\d:\d\d:\d\d left \d:\d\d:\d\d", bar)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.000"), (-0.25, "-0.250"), (9.9994, "9.999"), (12.345, "12.35"), (1e6, "1,000,000"), (-2e-7, "-2.0e-07"),
     (math.inf, "inf"), (-math.inf, "-inf"), (12, "12"), (math.nan, "-")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str):
    assert format_number(value) == text
