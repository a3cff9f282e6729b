"""Bars appear and go, the time left is that of the last updates, and the terminal is left as it was."""

from __future__ import annotations

import io

import pyte
import pytest
import rich.console

from verbatim.logs.monitors.live import LiveView, ProgressStage


def terminal(**options: object) -> tuple[rich.console.Console, io.StringIO]:
    out = io.StringIO()
    given = {"width": 60, "force_terminal": True, **options}
    return rich.console.Console(file=out, highlight=False, **given), out  # type: ignore[arg-type]


def screen_of(out: io.StringIO) -> pyte.Screen:
    screen = pyte.Screen(60, 20)
    pyte.Stream(screen).feed(out.getvalue().replace("\n", "\r\n"))
    return screen


def lines(out: io.StringIO) -> list[str]:
    return [line.rstrip() for line in screen_of(out).display if line.strip()]


def test_the_time_left_is_that_of_the_last_updates():
    """Of 10 things 4 are done, at 2, 4, 6 and 8 seconds: 6 more take 12 seconds, and 11 a second later."""
    at = [0.0]
    stage = ProgressStage("work", 10, now=lambda: at[0])
    assert stage.seconds_left is None
    for done, at[0] in enumerate((2.0, 4.0, 6.0, 8.0), start=1):
        stage.update(done)
    assert stage.seconds_left == 12.0
    at[0] = 9.0
    assert stage.seconds_left == 11.0
    at[0] = 100.0
    assert stage.seconds_left == 0.0


def test_the_first_of_many_that_go_on_side_by_side_say_nothing_of_the_time_left():
    """Of 8 episodes that began together, 3 short ones end after a second each; then one ends every 10 seconds."""
    at, done = [0.0], [0]
    stage = LiveView(terminal(force_terminal=False)[0], now=lambda: at[0]).open(
        "episodes", 8, count=lambda: done[0], side_by_side=True
    )
    for done[0], at[0] in ((1, 1.0), (2, 2.0), (3, 3.0)):
        stage.look()
        assert stage.seconds_left is None
    done[0], at[0] = 4, 13.0
    stage.look()
    assert stage.seconds_left == 4 * (13 - 1) / 3


def test_what_was_done_before_and_what_went_before_the_work_do_not_count():
    """Resumed after 50 of 100; loading takes 30 seconds, then one step 2 seconds: 49 more take 98."""
    at = [0.0]
    view = LiveView(terminal(force_terminal=False)[0], now=lambda: at[0])
    stage = view.open("work", 100, done=50)
    with view.stage("loading"):
        at[0] = 30.0
    at[0] = 32.0
    stage.update(51)
    assert stage.seconds_left == 98.0
    with view.stage("evaluating"):  # between two steps it counts
        at[0] = 42.0
    stage.update(52)
    assert stage.seconds_left == 480.0


def test_without_a_total_or_without_progress_there_is_no_time_left():
    at = [0.0]
    for stage in (ProgressStage("work", None, now=lambda: at[0]), ProgressStage("work", 5, now=lambda: at[0])):
        at[0] += 1.0
        stage.update(0)
        assert stage.seconds_left is None


def test_work_that_nothing_reports_is_asked_at_each_drawing():
    done = [0]
    console, _ = terminal()
    with LiveView(console).stage("episodes", 8, count=lambda: done[0]) as stage:
        done[0] = 5
        stage.look()
        assert stage.done == 5


def test_bars_go_and_what_was_printed_stays():
    console, out = terminal()
    with LiveView(console).stage("warm start", 3) as bar:
        bar.update(2, note="loss 0.5")
        console.print("a line above")
    console.print("a line after")
    assert lines(out) == ["a line above", "a line after"]
    assert not screen_of(out).cursor.hidden


def test_an_error_leaves_the_terminal_as_it_was():
    console, out = terminal()
    with pytest.raises(ValueError), LiveView(console).stage("warm start", 3):
        raise ValueError("no")
    assert lines(out) == [] and not screen_of(out).cursor.hidden


def test_two_bars_stand_below_each_other_and_the_second_goes_first():
    console, _ = terminal()
    view = LiveView(console)

    def drawn() -> list[str]:
        shown, out = terminal(force_terminal=False)
        shown.print(view.drawing())
        return [line.split()[0] for line in out.getvalue().splitlines()]

    training = view.open("training", 10)
    with view.stage("evaluating", 5):
        assert drawn() == ["training", "evaluating"]
    assert drawn() == ["training"]
    view.close(training)
    view.open("again")
    view.stop()
    assert drawn() == []


@pytest.mark.parametrize("options", [{"force_terminal": False}, {"quiet": True}, {"_environ": {"TERM": "dumb"}}])
def test_nothing_is_drawn_where_there_is_no_terminal_that_could_show_it(options: dict[str, object]):
    console, out = terminal(**options)
    with LiveView(console).stage("warm start", 3) as bar:
        bar.update(3)
    assert out.getvalue() == ""
