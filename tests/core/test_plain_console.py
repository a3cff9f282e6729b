"""Text from elsewhere is shown as it is written: no markup, and nothing that a terminal obeys."""

import io
import logging
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from rich.table import Table
from rich.text import Text

import warm
from verbatim.core.plain_console import PlainConsole
from verbatim.core.texts import cut, error_text, printable, shown
from verbatim.run.logs import log_to_console, log_to_file

HOSTILE = "[/red] [bold]x[/] :smile: \x1b[2J\x1b]8;;http://x\x07 \r\x9b31m \u202e \udc80"
SHOWN = "[/red] [bold]x[/] :smile: \\x1b[2J\\x1b]8;;http://x\\x07 \\r\\x9b31m \\u202e \\udc80"

ON_CONSOLE = SHOWN.replace("\\x07", "").replace("\\r", "")
"""A rich text leaves out bells and carriage returns by itself."""


def console(**options):
    return PlainConsole(file=io.StringIO(), width=200, **options)


def test_control_characters_are_written_out_and_lines_and_tabs_are_kept():
    assert printable(HOSTILE) == SHOWN
    assert printable("a\n\tb ä 漢 🙂") == "a\n\tb ä 漢 🙂"


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        (str, SHOWN),
        (Text, ON_CONSOLE),
        (lambda text: Text.assemble(("error: ", "bold red"), text), ON_CONSOLE),
    ],
)
def test_a_console_shows_hostile_text_as_it_is(wrap, expected):
    shown_on = console()
    shown_on.print(wrap(HOSTILE), soft_wrap=True)
    assert expected in shown_on.file.getvalue()
    assert "\x1b" not in shown_on.file.getvalue()


def test_a_table_shows_hostile_cells_and_titles_as_they_are():
    table = Table("name", title=HOSTILE)
    table.add_row(HOSTILE)
    shown_on = console()
    shown_on.print(table)
    assert shown_on.file.getvalue().count(SHOWN) == 2


def test_a_terminal_still_gets_its_styles():
    shown_on = console(force_terminal=True, color_system="standard")
    shown_on.print("[b]x\x1b[31m", style="bold")
    assert shown_on.file.getvalue() == "\x1b[1m[b]x\\x1b[31m\x1b[0m\n"


def test_logs_show_hostile_text_and_tracebacks_as_they_are(tmp_path):
    shown_on, root = console(), logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        log_to_console(shown_on)
        with log_to_file(tmp_path / "log"):
            try:
                raise ValueError(HOSTILE)
            except ValueError:
                logging.getLogger("verbatim").exception("%s", HOSTILE)
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    for written in (shown_on.file.getvalue(), (tmp_path / "log").read_text()):
        assert "\x1b" not in written
        assert "\x9b" not in written
    assert (tmp_path / "log").read_text().count(SHOWN) == 2  # the message, and the end of the traceback


def logged(shown_on: PlainConsole, write: Callable[[logging.Logger], None]) -> list[str]:
    """The lines that a log record is on this console."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    root.handlers.clear()
    try:
        log_to_console(shown_on)
        write(logging.getLogger("verbatim"))
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    return shown_on.file.getvalue().splitlines()


def failing(log: logging.Logger) -> None:
    try:
        raise ValueError("/a/long/path/" * 30)
    except ValueError:
        log.exception("it failed")


@pytest.mark.parametrize("options", [{}, {"width": 60}, {"width": 60, "force_terminal": True, "color_system": None}])
def test_a_log_record_is_as_long_as_it_is_with_an_iso_time_and_no_columns(options, monkeypatch):
    """On a console of 80 columns a record was wrapped into a column of 50, its traceback too."""
    monkeypatch.delenv("COLUMNS", raising=False)
    path = "/a/path/of/a/run/" * 20
    (line,) = logged(PlainConsole(file=io.StringIO(), **options), lambda log: log.warning("it is in %s", path))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d WARNING it is in " + path, line)
    lines = logged(PlainConsole(file=io.StringIO(), **options), failing)
    assert lines[0].endswith(" ERROR   it failed") and lines[1] == "Traceback (most recent call last):"
    assert '    raise ValueError("/a/long/path/" * 30)' in lines
    assert lines[-1] == "ValueError: " + "/a/long/path/" * 30


def test_a_note_is_shown_once_and_a_warning_each_time(monkeypatch):
    def write(log: logging.Logger) -> None:
        for _ in range(2):
            log.info("the renderer is %s", "qwen3")
            log.warning("it is slow")
        log.info("the renderer is %s", "glm")

    lines = [line[20:] for line in logged(PlainConsole(file=io.StringIO()), write)]
    assert lines == [
        "INFO    the renderer is qwen3",
        "WARNING it is slow",
        "WARNING it is slow",
        "INFO    the renderer is glm",
    ]


def test_in_a_file_nothing_is_wrapped_and_in_a_terminal_tables_fit(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    table = Table("name")
    table.add_row("word " * 50)
    in_file = PlainConsole(file=io.StringIO())
    in_file.print(table)
    in_file.print("word " * 50)
    assert sum("word" in line for line in in_file.file.getvalue().splitlines()) == 2
    on_terminal = PlainConsole(file=io.StringIO(), force_terminal=True, color_system=None)
    on_terminal.print(table)
    assert max(map(len, on_terminal.file.getvalue().splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "60")  # as a user asks for it
    assert PlainConsole(file=io.StringIO()).width == 60


def test_a_text_that_is_cut_says_how_much():
    assert cut("x" * 10, 10) == "x" * 10
    assert cut("x" * 1_234_567, 4) == "xxxx [cut: 1,234,563 of 1,234,567 characters]"
    assert error_text(OSError("ab" * 100), 9) == "OSError:  [cut: 200 of 209 characters]"
    assert shown("abc", 3) == "'ab [cut: 2 of 5 characters]"


@pytest.mark.slow
@pytest.mark.realtime
def test_a_reader_that_goes_away_ends_the_output_and_not_the_command():
    """It leaves a pipe of 64 KiB; 20,000 lines are three times as much."""
    script = (
        "import sys; from verbatim.core.plain_console import PlainConsole; console = PlainConsole();"
        "[console.print('line', i) for i in range(20_000)]; print('went on', file=sys.stderr)"
    )
    process = warm.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"line 0\n"
    process.stdout.close()
    assert process.stderr.read() == b"went on\n"
    assert process.wait() == 0
