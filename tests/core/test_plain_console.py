"""Text from elsewhere is shown as it is written: no markup, and nothing that a terminal obeys."""

import io
import logging
import subprocess
import sys

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
