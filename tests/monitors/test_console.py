"""The console prints one aligned line per step, whatever is missing."""

from __future__ import annotations

import io
import math

import pytest
import rich.console

from verbatim.monitors import Console
from verbatim.monitors.console import format_number, header, step_line

METRICS = {"rollouts/failed_share": 0.125, "reward/mean": 0.5, "success": 0.25, "turns": 3.5, "mismatch_kl": 1.2e-5,
           "sampler/tokens_per_second": 1234.5, "tokens_per_second": 98765.4,
           "staleness/mean": 1.0, "time/sampler_idle": 0.25, "time/trainer_idle": 12.5}  # fmt: skip


def printed(width: int = 40, **options: object) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    console = rich.console.Console(file=out, width=width, highlight=False, **options)  # type: ignore[arg-type]
    return Console(100, console=console), out


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


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.000"), (-0.25, "-0.250"), (9.9994, "9.999"), (12.345, "12.35"), (1e6, "1,000,000"), (-2e-7, "-2.0e-07"),
     (math.inf, "inf"), (-math.inf, "-inf"), (12, "12"), (math.nan, "-")],
)  # fmt: skip
def test_numbers_are_short(value: float, text: str):
    assert format_number(value) == text
