"""What a run prints: on a terminal, for programs, and when only warnings are wanted."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pyte
import pytest

import warm
from e2e.tiny_runs import LOTS, TOML, build_tiny_model, train_lines, workplace
from verbatim.cli.main import main
from waiting import HANGS

pytestmark = pytest.mark.slow

NOISY = (
    LOTS.replace("return self.reward", "print('NOISE', flush=True); return self.reward")
    + '''
import time
from pathlib import Path


class Held(Lots):
    """No episode begins before the first file is there, and only those of two evaluations and batches before the
    second one is: a bar stays until a test has seen it, and the run does not end."""

    num_started = 0

    async def start(self, example, seed):
        self.num_started += 1
        file = Path("begin" if self.num_started <= 26 else "go_on")
        # The check before there is a run would wait until its time is over.
        while Path("run/config.toml").exists() and not file.exists():
            await asyncio.sleep(0.01)
        return await super().start(example, seed)


class Stubborn(Held):
    """An episode that is held keeps the event loop once it is cancelled, so the run does not end by itself."""

    async def start(self, example, seed):
        if self.num_started == 26:
            Path("held").touch()
        try:
            return await super().start(example, seed)
        except asyncio.CancelledError:
            while True:
                time.sleep(0.01)
'''
)
IN_A_TERMINAL = """
import os
os.close(os.open(os.ttyname(0), os.O_RDWR))  # it becomes that of this session: Ctrl-C comes from there
from verbatim.cli.main import program
program()
"""
EVALUATED = """
[orchestrator.eval]
episodes = 5
interval = 1
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("output") / "model")


@pytest.fixture
def place(model: Path, tmp_path: Path) -> Iterator[Path]:
    with workplace(tmp_path / "work", {"lots": NOISY}) as folder:
        (folder / "run.toml").write_text(TOML.format(model=model) + 'import_path = "lots.Lots"\n' + EVALUATED)
        yield folder


def test_json_has_one_object_for_each_step_evaluation_and_the_end_and_nothing_else(place: Path, capfd):
    assert main(["rl", "run.toml", "--run-dir", "run", "--json"]) == 0
    said = capfd.readouterr()
    records = [json.loads(line) for line in said.out.splitlines()]
    assert [(record["kind"], record.get("step")) for record in records] == [
        ("eval", 0),
        ("step", 1),
        ("eval", 1),
        ("step", 2),
        ("eval", 2),
        ("end", None),
    ]
    assert [record["metrics"] for record in records if record["kind"] == "step"] == [
        line["metrics"] for line in train_lines(place / "run")
    ]
    end = records[-1]
    assert (end["state"], end["steps"], end["results"]["steps"]) == ("finished", 2, 2)
    assert end["folder"] == str((place / "run").resolve())
    assert end["ledger"]["sampled"] == end["ledger"]["trained"] + sum(
        count for name, count in end["ledger"].items() if name.startswith("dropped/")
    )
    assert "NOISE" in said.err


def test_a_run_that_cannot_start_prints_no_json(place: Path, capfd):
    assert main(["rl", "run.toml", "--trainer.optim.lr", "high", "--json"]) == 2
    said = capfd.readouterr()
    assert said.out == "" and "trainer.optim.lr" in said.err


def test_quiet_prints_nothing_but_warnings(place: Path, capfd, caplog):
    assert main(["rl", "run.toml", "--run-dir", "run", "--quiet", "--max-steps", "1"]) == 0
    said = capfd.readouterr()
    assert said.out.replace("NOISE\n", "") == ""  # the environment's own
    assert "step" not in said.err
    assert main(["rl", "run.toml", "--resume", "run", "--quiet"]) == 0
    assert capfd.readouterr().out.replace("NOISE\n", "") == ""
    assert "the configuration changed since this run started" in caplog.text


def test_quiet_and_json_exclude_each_other(place: Path, capfd):
    with pytest.raises(SystemExit):
        main(["rl", "run.toml", "--quiet", "--json"])
    assert "not allowed with argument --quiet" in capfd.readouterr().err


class Terminal:
    """A command in a terminal of 80 columns and 40 rows."""

    def __init__(self, *command: str, folder: Path) -> None:
        self._descriptor, theirs = pty.openpty()
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        self._process = warm.Popen(
            [sys.executable, "-c", IN_A_TERMINAL, *command],
            cwd=folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color"},
        )
        os.close(theirs)
        self.screen = pyte.Screen(80, 40)
        self._stream = pyte.ByteStream(self.screen)
        self.seen: list[list[str]] = []

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display if line.strip()]

    def until(self, found: Callable[[], bool]) -> None:
        """Read until something is on the screen."""
        while not found():
            assert self._read(), ("the command ended", self.lines)

    def _read(self) -> bool:
        """Show what the command printed next; False: it ended."""
        ready, _, _ = select.select([self._descriptor], [], [], HANGS)
        assert ready, ("nothing was printed", self.lines)
        try:
            printed = os.read(self._descriptor, 1 << 16)
        except OSError:
            return False
        for drawn in re.split(rb"(?=\r)", printed):  # a busy machine hands over several screens at once
            self._stream.feed(drawn)
            self.seen.append(self.lines)
        return True

    def has(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    @property
    def steps(self) -> int:
        """Steps that the bar of the training counts."""
        return max((int(done) for done in re.findall(r"(\d+)/50", "\n".join(self.lines))), default=0)

    def press_ctrl_c(self) -> None:
        os.write(self._descriptor, b"\x03")

    def end(self) -> int:
        while self._read():
            pass
        os.close(self._descriptor)
        return self._process.wait(HANGS)


HELD = ("--orchestrator.train.env.0.import-path", "lots.Held")


def is_clean(terminal: Terminal) -> bool:
    """No bar is left, and the cursor is there, at the beginning of a line."""
    return not terminal.screen.cursor.hidden and terminal.screen.cursor.x == 0 and not terminal.has("━━━━━━━━")


@pytest.mark.realtime
def test_a_run_on_a_terminal_has_bars_and_ctrl_c_leaves_it_clean(place: Path):
    terminal = Terminal("rl", "run.toml", "--run-dir", "run", "--max-steps", "50", *HELD, folder=place)
    terminal.until(lambda: terminal.has("evaluating lots.Held"))
    (place / "begin").touch()
    terminal.until(lambda: terminal.steps >= 2)  # a screen may pass over one
    terminal.press_ctrl_c()
    assert terminal.end() == 130
    assert is_clean(terminal) and terminal.has("not finished; to continue:")
    bars = {re.split("[━╸╺]", line)[0].strip() for lines in terminal.seen for line in lines if "━━━" in line}
    assert {"training", "evaluating lots.Held"} <= bars
    assert any(line.startswith("waits ") for lines in terminal.seen for line in lines)


@pytest.mark.realtime
def test_a_second_ctrl_c_shows_the_cursor_again(place: Path):
    stubborn = ("--orchestrator.train.env.0.import-path", "lots.Stubborn")
    terminal = Terminal("rl", "run.toml", "--run-dir", "run", "--max-steps", "50", *stubborn, folder=place)
    (place / "begin").touch()
    terminal.until(lambda: (place / "held").exists() and terminal.screen.cursor.hidden)
    terminal.press_ctrl_c()
    terminal.until(lambda: terminal.has("again ends at once"))
    terminal.press_ctrl_c()
    assert terminal.end() == 130
    assert not terminal.screen.cursor.hidden
