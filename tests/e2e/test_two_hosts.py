"""Orchestrator and trainer on two hosts that share no folder: whatever the connection does, the run is the same."""

from __future__ import annotations

import contextlib
import io
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from e2e.tiny_runs import (
    LOTS,
    TOML,
    assert_ledger_adds_up,
    build_tiny_model,
    train_lines,
    trajectory_lines,
    workplace,
)
from verbatim.cli.main import main
from verbatim.logs.checkpoints import find_damage
from waiting import HANGS, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.realtime]

STEPS = 6
KEY = "0123456789abcdef-key"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "RUN_KEY": KEY, "OTHER_KEY": "fedcba9876543210-key"}


HELD = (
    LOTS
    + '''
from pathlib import Path

import watched


class Held(Lots):
    """While the file `hold` is there, no episode of the fourth batch begins: the run cannot end before a test has
    looked."""

    num_started = 0

    async def start(self, example, seed):
        self.num_started += 1
        while self.num_started > 24 and Path("hold").exists():
            await asyncio.sleep(0.01)
        return await super().start(example, seed)
'''
)
WATCHED = '''
import sys
from pathlib import Path

from verbatim.algorithms.losses import LOSSES
from verbatim.trainer.transport.heartbeat import PeerWatch

loss = LOSSES["default"]
judge = PeerWatch.fault


def fault(self):
    """While the file `impatient` is there, two seconds without a heartbeat are too many; else it may be a slow one."""
    if Path("impatient").exists():
        assert self._heartbeat_timeout in (600, 2)  # as configured, or from here
        self._heartbeat_timeout = 2
    return judge(self)


if "pytest" not in sys.modules:
    PeerWatch.fault = fault
'''


class Proxy:
    """The network between two hosts: passes bytes on, and can be cut after some bytes, or held up."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._open: set[socket.socket] = set()
        self.num_refused = 0
        self.down = False
        """While it is, every connection breaks."""
        self.cut_every: int | None = None
        """Bytes after which a connection breaks, whatever it is at."""
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.down = True
        self._listening.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listening.accept()
                threading.Thread(target=self._pass_on, args=(here,), daemon=True).start()

    def _pass_on(self, here: socket.socket) -> None:
        with here, contextlib.suppress(OSError):
            if self.down:
                self.num_refused += 1
                return
            with socket.create_connection(("127.0.0.1", self._to)) as there:
                self._open |= {here, there}
                left, other = self.cut_every, {here: there, there: here}
                while not self.down:
                    for ready in select.select([here, there], [], [], 0.2)[0]:
                        data = ready.recv(2**16 if left is None else min(left, 2**16))
                        if not data:
                            return
                        other[ready].sendall(data)
                        if left is not None:
                            left -= len(data)
                            if left <= 0:
                                return
        self._open -= {here}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("hosts")
    text = TOML.format(model=build_tiny_model(root / "model"))
    text = text.replace("separate_process = false\n", "").replace("max_steps = 2", f"max_steps = {STEPS}")
    text += 'import_path = "lots.Held"\n[checkpoint]\ninterval = 2\n'
    text += '[trainer.loss]\ntype = "custom"\nimport_path = "watched.loss"\n'  # so the trainer imports it too
    text = text.replace("[orchestrator]", "[orchestrator]\nheartbeat_timeout = 600")
    with workplace(root / "place", {"lots": HELD, "watched": WATCHED}) as folder:
        (folder / "run.toml").write_text(text.replace("[inference.torch]", "[inference.torch]\ndeterministic = true"))
        yield folder


def typed(*arguments: object) -> tuple[int, str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main([*map(str, arguments)])
    assert "Traceback" not in said.getvalue(), said.getvalue()
    return status, said.getvalue()


@contextlib.contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    log = Path(f"said-{time.monotonic_ns()}")
    with log.open("w") as file:
        running = subprocess.Popen(
            [sys.executable, "-m", "verbatim.cli", *map(str, arguments)],
            text=True,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT,
        )
    running.said = log.read_text  # type: ignore[attr-defined]
    try:
        yield running
    finally:
        running.kill()
        running.wait()
        print(f"---- {arguments[0]}\n{log.read_text()}")


@pytest.fixture
def held(place: Path) -> Iterator[Path]:
    """No run comes to its end while this file is there."""
    file = place / "hold"
    file.touch()
    yield file
    for left in (file, place / "impatient"):
        left.unlink(missing_ok=True)


def until(condition: Callable[[], object], *running: subprocess.Popen[str]) -> None:
    """`wait_until`, while these run."""
    wait_until(lambda: condition() or any(each.poll() is not None for each in running))
    for each in running:
        assert each.poll() is None, each.said()


@contextlib.contextmanager
def orchestrator(run: Path, *more: object) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process on the first host, and the port it listens on."""
    where = ["--run-dir", run, "--listen", "0", "--api-key-env", "RUN_KEY"]
    with process("orchestrator", "run.toml", *where, *more) as it:
        until(lambda: "--connect http" in it.said(), it)
        yield it, int(re.search(r"--connect http://127\.0\.0\.1:(\d+)", it.said())[1])


def trainer(run: Path, port: int, *more: object):
    return process(
        "trainer",
        "run.toml",
        "--run-dir",
        run,
        "--connect",
        f"http://127.0.0.1:{port}",
        "--api-key-env",
        "RUN_KEY",
        *more,
    )


def steps_of(run: Path) -> int:
    return len(train_lines(run)) if (run / "metrics.jsonl").exists() else 0


def assert_same_run(run: Path, expected: Path) -> None:
    weights, state = "final/model.safetensors", f"checkpoints/step_{STEPS:06d}/trainer/optimizer.safetensors"
    for name in (weights, state):
        assert (run / name).read_bytes() == (expected / name).read_bytes()
    assert [line["step"] for line in train_lines(run)] == list(range(1, STEPS + 1))
    mine, theirs = (
        [(t["trajectory_id"], [turn["completion_ids"] for turn in t["turns"]]) for t in trajectory_lines(folder)]
        for folder in (run, expected)
    )
    assert mine == theirs
    assert_ledger_adds_up(run)
    assert find_damage(run / "checkpoints" / f"step_{STEPS:06d}") is None


@pytest.fixture(scope="module")
def one_folder(place: Path) -> Path:
    """What everything must come to."""
    run = place / "one_folder"
    assert typed("rl", "run.toml", "--run-dir", run, "--trainer.separate-process", "false")[0] == 0
    return run


def test_a_run_over_a_connection_that_breaks_and_a_trainer_that_is_killed_ends_as_in_one_folder(
    place: Path, one_folder: Path, held: Path
):
    here, there, elsewhere = place / "here" / "run", place / "there" / "run", place / "fresh" / "run"
    with orchestrator(here) as (rollouts, port), contextlib.closing(Proxy(port)) as network:
        network.cut_every = 20_001  # a file of weights takes several connections
        with trainer(there, network.port) as training:
            until(lambda: steps_of(here) >= 2, rollouts, training)
            network.down = True
            network.cut()
            until(lambda: network.num_refused >= 3, rollouts, training)
            network.down, network.cut_every = False, None
            until(lambda: steps_of(here) >= 3, rollouts, training)
            training.kill()
            training.wait()
            (place / "impatient").touch()
        assert rollouts.wait(timeout=HANGS) == 1
        assert re.search(r"stopped: the trainer \(process \d+\) has given no sign of life for \d+ s", rollouts.said())
    held.unlink()
    (place / "impatient").unlink()
    done = max(int(path.name[5:]) for path in (here / "checkpoints").glob("step_*"))
    assert 2 <= done < STEPS

    # The run goes on with a trainer on a host that never heard of it, which fetches the checkpoint.
    with orchestrator(here, "--resume") as (rollouts, port), trainer(elsewhere, port) as training:
        assert rollouts.wait(timeout=HANGS) == 0, rollouts.said()
        assert training.wait(timeout=HANGS) == 0, training.said()
        assert f"fetching checkpoints/step_{done:06d}" in training.said()
    assert_same_run(here, one_folder)
    assert not (there / "metrics.jsonl").exists()
    assert not list((elsewhere / "exchange").glob("*/states/*"))


def test_a_trainer_whose_orchestrator_is_killed_ends_and_both_go_on_from_the_checkpoint(
    place: Path, one_folder: Path, held: Path
):
    here, there = place / "killed" / "run", place / "left" / "run"
    with orchestrator(here) as (rollouts, port), trainer(there, port) as training:
        until(lambda: (here / "checkpoints" / "step_000002").exists() and steps_of(here) >= 3, rollouts, training)
        rollouts.kill()
        rollouts.wait()
        (place / "impatient").touch()
        assert training.wait(timeout=HANGS) == 1
        said = " ".join(training.said().split())
        assert re.search(
            r"stopped: the orchestrator \(process \d+\) has given no sign of life for \d+ s; the last was", said
        )
        assert f"the connection to http://127.0.0.1:{port} is broken" in said
        assert "Traceback" not in said
    held.unlink()
    (place / "impatient").unlink()

    with orchestrator(here, "--resume") as (rollouts, port), trainer(there, port) as training:
        assert rollouts.wait(timeout=HANGS) == 0, rollouts.said()
        assert training.wait(timeout=HANGS) == 0, training.said()
    assert_same_run(here, one_folder)


def test_two_hosts_that_do_not_fit_together_are_told_what_to_type(place: Path, monkeypatch):
    monkeypatch.setenv("RUN_KEY", KEY)
    monkeypatch.setenv("OTHER_KEY", "fedcba9876543210-key")
    here, there = place / "mine", place / "yours"
    with orchestrator(here) as (rollouts, port):
        connect = ["--run-dir", there, "--connect", f"http://127.0.0.1:{port}", "--api-key-env"]
        status, text = typed("trainer", "run.toml", *connect, "OTHER_KEY")
        assert status == 2
        assert "refuses the key; put the same one into the variable that --api-key-env names" in text
        status, text = typed("trainer", "run.toml", *connect, "RUN_KEY", "--max-steps", STEPS + 1)
        assert status == 2
        assert f"another configuration; stored -> given: max_steps: {STEPS} -> {STEPS + 1}" in text
        status, text = typed("trainer", "run.toml", "--run-dir", here, *connect[2:], "RUN_KEY")
        assert status == 2
        assert "is the folder of an orchestrator; with --connect the trainer needs a folder of its own" in text
        other = there / "checkpoints" / "step_000004"
        other.mkdir(parents=True)
        status, text = typed("trainer", "run.toml", *connect, "RUN_KEY")
        assert status == 2
        assert "holds a checkpoint of step 4, and the run at" in text
        assert "it is another run. Give this trainer another folder: --run-dir FOLDER" in text
        assert rollouts.poll() is None
        rollouts.send_signal(signal.SIGINT)
        assert rollouts.wait(timeout=HANGS) == 130


@pytest.mark.parametrize(
    ("command", "options", "said"),
    [
        ("orchestrator", ["--listen", "8400"], "whoever reaches this port could send weights; give it a key"),
        ("orchestrator", ["--listen", "host:http", "--api-key-env", "RUN_KEY"], "expected [HOST:]PORT, such as 8400"),
        ("orchestrator", ["--listen", "1", "--api-key-env", "NO_KEY"], "that variable is empty; put the key into it"),
        ("orchestrator", ["--tls-cert", "x.pem"], "--tls-cert is for --listen [HOST:]PORT"),
        (
            "orchestrator",
            ["--listen", "1", "--api-key-env", "RUN_KEY", "--tls-key", "x"],
            "give that too: --tls-cert FILE",
        ),
        ("trainer", ["--connect", "http://127.0.0.1:1"], "--connect needs the key of the orchestrator's host"),
        ("trainer", ["--connect", "127.0.0.1:1", "--api-key-env", "RUN_KEY"], "expected an address such as"),
        ("trainer", ["--api-key-env", "RUN_KEY"], "--api-key-env is for --connect URL"),
    ],
)
def test_options_that_cannot_be_used_are_refused(place: Path, monkeypatch, command, options, said):
    monkeypatch.setenv("RUN_KEY", KEY)
    status, text = typed(command, "run.toml", "--run-dir", place / "never", *options)
    assert (status, said in text) == (2, True), text
    assert not (place / "never" / "config.toml").exists()
