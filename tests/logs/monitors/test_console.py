"""The console prints one aligned line per step, whatever is missing."""

from __future__ import annotations

import io
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace

import pyte
import pytest
import rich.console

from verbatim.core.plain_console import PlainConsole
from verbatim.logs.monitors import Alarm, Console
from verbatim.logs.monitors.console import (
    COLUMNS,
    eval_line,
    format_number,
    header,
    known_columns,
    step_line,
    what_waits,
)

METRICS = {
    "rollouts/failed_share": 0.125,
    "reward/mean": 0.5,
    "success": 0.25,
    "turns": 3.5,
    "mismatch_kl": 1.2e-5,
    "sampler/tokens_per_second": 1234.5,
    "tokens_per_second": 98765.4,
    "staleness/mean": 1.0,
    "time/sampler_idle": 0.25,
    "time/trainer_idle": 12.5,
}


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
        "1/100",
        "0.500",
        "0.250",
        "0.125",
        "3.50",
        "1.2e-05",
        "1.00",
        "1,234",
        "0.2",
        "98,765",
        "12.5",
    ]
    assert second.split()[0] == "2/100"
    assert len(heading) == len(first) == len(second)


def test_a_column_has_one_format():
    """There was 786.23 below 4,615, and 32.77 below 0.043."""
    lines = [
        step_line(1, 9, {"tokens_per_second": speed, "time/trainer_idle": idle, "mismatch_kl": kl}, COLUMNS).split()
        for speed, idle, kl in ((4615.2, 0.043, 2e-7), (786.23, 32.77, 0.0123), (12.345, 1234.5, 2.0))
    ]
    assert [line[-2:] for line in lines] == [["4,615", "0.0"], ["786", "32.8"], ["12", "1,234.5"]]
    assert [line[5] for line in lines] == ["2.0e-07", "1.2e-02", "2.0e+00"]


def test_what_is_missing_or_nan_is_a_dash():
    line = step_line(100, 100, {"reward/mean": math.nan, "success": 1.0}, COLUMNS)
    assert line.split() == ["100/100", "-", "1.000", *"--------"]
    assert len(line) == len(header(100, COLUMNS))


def test_a_column_without_a_value_is_left_out_until_it_has_one():
    monitor, out = printed()
    monitor.on_step(1, {"reward/mean": 0.5, "success": math.nan})
    monitor.on_step(2, {"reward/mean": 0.5})
    monitor.on_step(3, {"reward/mean": 0.5, "success": 0.25})
    monitor.on_step(4, {"success": 0.25})
    monitor.close()
    assert [line.split() for line in out.getvalue().splitlines()] == [
        ["step", "reward"],
        ["1/100", "0.500"],
        ["2/100", "0.500"],
        ["step", "reward", "success"],
        ["3/100", "0.500", "0.250"],
        ["4/100", "-", "0.250"],
    ]
    assert known_columns({}) == ()


def test_an_evaluation_is_one_line_of_the_figures_that_are_read_first():
    monitor, out = printed()
    played = {"examples": 15, "episodes": 300, "failed": 0}
    beside = {"truncated": 0.0, "valid_format": 0.9, "reward/std": 0.1, "judge/requests": 9.0, **played}
    monitor.on_eval(20, "guess_number", {"success": 0.91, "reward/mean": 0.91, "turns": math.nan, **beside})
    scored = {"reward_part/style/mean": 0.5, "reward_part/style/std": 0.1, "agent_reward/a/mean": 1.0}
    monitor.on_eval(40, "essays", {"success": 0.25, "reward/mean": 0.75, "turns": 2.5, **scored, **beside, "failed": 3})
    monitor.close()
    assert out.getvalue().splitlines() == [
        "eval  guess_number  after step 20  success 0.910  15 examples, 300 episodes",
        "eval  essays  after step 40  success 0.250  reward/mean 0.750  15 examples, 300 episodes, 3 failed  "
        "style 0.500  turns 2.50",
    ]


def test_an_interval_stands_behind_its_metric():
    line = eval_line(
        3,
        "game",
        {
            "reward/mean": 0.5,
            "success": 0.25,
            "success/low": 0.125,
            "success/high": 0.375,
            "reward/low": math.nan,
            "reward/high": math.nan,
        },
    )
    assert line == "eval  game  after step 3  success 0.250 [0.125, 0.375]  reward/mean 0.500"


RAISED = Alarm(
    name="stale",
    step=3,
    state="raised",
    message="Rollouts are 9 steps old",
    cause="slow episodes",
    advice="lower orchestrator.max_async_level",
    evidence={"staleness/mean": 9.0},
)


def test_an_alarm_is_a_line_with_its_cause_and_what_to_do():
    monitor, out = printed()
    monitor.on_alarm(RAISED)
    monitor.on_alarm(replace(RAISED, step=5, state="cleared"))
    monitor.close()
    assert out.getvalue().splitlines() == [
        "alarm  stale  after step 3  Rollouts are 9 steps old. Cause: slow episodes. To do: lower "
        "orchestrator.max_async_level.",
        "alarm  stale  after step 5  No longer: Rollouts are 9 steps old",
    ]


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
    assert re.search(r"training .*━", terminal.getvalue())
    assert "━" not in file.getvalue() and "\x1b" not in file.getvalue()


def on_terminal(width: int, times: list[float]) -> list[str]:
    """The lines above the bar, of steps that end at these times."""
    clock = iter(times)
    at = [0.0]

    def now() -> float:
        return at[0]

    monitor, out = printed(width, now, force_terminal=True)
    for step, at[0] in enumerate(clock, start=100 - len(times) + 1):
        monitor.on_step(step, METRICS)
    monitor.on_eval(100, "game", {f"reward_part/part_{n}/mean": 0.5 for n in range(8)})
    monitor.close()
    return shown(out, width)


def shown(out: io.StringIO, width: int) -> list[str]:
    """What a terminal of this width has on it in the end."""
    screen = pyte.Screen(width, 40)
    pyte.Stream(screen).feed(out.getvalue().replace("\n", "\r\n"))
    assert not screen.cursor.hidden
    return [line.rstrip() for line in screen.display if line.strip()]


def test_on_a_terminal_lines_are_five_seconds_apart_and_the_last_step_has_one():
    lines = on_terminal(80, [0.0, 2.0, 4.9, 5.0, 9.0, 10.5, 11.0])
    assert [line.split()[0] for line in lines if "/100" in line] == ["94/100", "97/100", "99/100", "100/100"]


def test_on_a_terminal_no_line_is_wider_than_it_and_words_stay_whole():
    lines = on_terminal(50, [0.0])
    assert max(map(len, lines)) <= 50
    heading, step, *evaluation = lines
    assert heading.split() == ["step", "reward", "success", "failed", "turns"]
    assert step.split() == ["100/100", "0.500", "0.250", "0.125", "3.50"]
    assert evaluation == ["eval  game  after step 100  part_0 0.500"]


def drawn(monitor: Console, width: int) -> list[str]:
    """The live view as it would be drawn now."""
    out = io.StringIO()
    rich.console.Console(file=out, width=width, highlight=False).print(monitor.view.drawing())
    return out.getvalue().splitlines()


def seen(width: int) -> list[str]:
    """The live view after the third of 100 steps, which took 10 seconds each; an evaluation goes on."""
    at = [0.0]
    monitor, _ = printed(width, lambda: at[0], force_terminal=True)
    monitor.on_eval(0, "game", {"success": 0.25, "success/low": 0.2, "success/high": 0.3})
    for step, at[0] in enumerate((10.0, 20.0, 30.0), start=1):
        monitor.on_step(
            step,
            {
                **METRICS,
                "reward/mean": step / 8,
                "time/step": 10.0,
                "time/sampler_idle": 1.0,
                "time/trainer_idle": 6.0,
                "time/wait_for_batch": 2.0,
                "queue/groups_in_flight": 4,
            },
        )
    monitor.on_alarm(RAISED)
    with monitor.view.stage("evaluating game", 300, count=lambda: 120):
        lines = drawn(monitor, width)
    monitor.close()
    return lines


def test_the_live_view_has_progress_evaluation_waits_and_the_alarm():
    training, evaluating, *lines = seen(105)
    assert re.fullmatch(r"training +━ +3/100 +reward 0\.375 0:30 left 16:10", training)
    assert re.fullmatch(r"evaluating game ━+╸? +120/300 +0:00 *", evaluating)
    assert [line.rstrip() for line in lines] == [
        "eval  game  success 0.250 [0.200, 0.300]  after step 0",
        "waits idle: sampler 10%, trainer 60%  ·  waited 2.0 s for rollouts  ·  4 groups in flight",
        "alarm stale after step 3: Rollouts are 9 steps old",
    ]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_of_the_live_view_is_wider_than_the_terminal(width: int):
    lines = seen(width)
    assert max(map(len, lines)) <= width - 5  # room for the ^C that a terminal shows
    assert [line.split()[0].rstrip("…") for line in lines] == ["training", "evaluating", "eval", "waits", "alarm"]


def test_a_cleared_alarm_leaves_the_view_and_an_older_one_comes_back():
    monitor, _ = printed(80, force_terminal=True)
    monitor.on_alarm(RAISED)
    monitor.on_alarm(replace(RAISED, name="idle", message="The sampler is idle"))
    assert drawn(monitor, 80)[-1].rstrip() == "alarm idle after step 3  (and 1 more): The sampler is idle"
    monitor.on_alarm(replace(RAISED, name="idle", state="cleared"))
    assert drawn(monitor, 80)[-1].rstrip() == "alarm stale after step 3: Rollouts are 9 steps old"
    monitor.close()


def test_control_sequences_of_an_environment_do_nothing_to_the_terminal():
    out = io.StringIO()
    console = PlainConsole(file=out, width=80, force_terminal=True)
    monitor = Console(100, console=console)
    hostile = replace(RAISED, message="\n\x1b[2J\x1b[?25l[bold]gone", env="\x1b]0;title\x07")
    monitor.on_alarm(hostile)
    monitor.on_eval(1, "\x1b[31mred", {"success": 1.0})
    monitor.on_step(1, METRICS)
    console.print(monitor.view.drawing())
    monitor.close()
    assert "\x1b[2J" not in out.getvalue() and "\x1b]0;" not in out.getvalue() and "\x1b[31mred" not in out.getvalue()
    assert any("\\x1b[2J" in line for line in shown(out, 80))


def test_waits_leaves_out_what_is_not_known():
    assert what_waits({}) == ""
    assert what_waits({"time/step": 0.0, "time/sampler_idle": 1.0}) == ""
    known = {"time/step": 2.0, "time/sampler_idle": 4.0, "time/trainer_idle": math.nan}
    assert what_waits(known) == "idle: sampler 100%"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.000"),
        (-0.25, "-0.250"),
        (9.9994, "9.999"),
        (12.345, "12.35"),
        (1e6, "1,000,000"),
        (-2e-7, "-2.0e-07"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (12, "12"),
        (math.nan, "-"),
    ],
)
def test_numbers_are_short(value: float, text: str):
    assert format_number(value) == text
