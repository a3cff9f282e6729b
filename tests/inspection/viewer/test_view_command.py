"""`verbatim view` as a process: it says its address, follows the run, and ends at Ctrl-C with status 0."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from viewer_runs import make_run, trained, trajectory

from verbatim.cli.main import main
from verbatim.core.imports import child_environment
from verbatim.logs.monitors.metrics_log import MetricsLog
from verbatim.logs.outcomes.files import OutcomeFolder
from waiting import HANGS, wait_until

COMMAND = [sys.executable, "-m", "verbatim.cli", "view", "--no-open"]


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=HANGS) as answer:
        return json.load(answer)


@pytest.mark.slow
@pytest.mark.realtime
def test_a_run_is_followed_until_ctrl_c(tmp_path: Path):
    run = make_run(tmp_path / "run", {1: [trained(trajectory("first"))]}, metrics=[(1, {"loss": 1.0})])
    process = subprocess.Popen(
        [*COMMAND, str(run), "--port", "0"], stdout=subprocess.PIPE, text=True, env=child_environment()
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.endswith("(Ctrl-C ends it)\n")
        url = line.split()[0]
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(url, timeout=HANGS) as answer:
            assert b"viewer.js" in answer.read()

        def is_known(step: int) -> bool:
            found = get(f"{url}/api/runs")[0]
            return (found["num_trajectories"], found["step"]) == (step, step)

        wait_until(lambda: is_known(1))
        OutcomeFolder(run / "trajectories").write(2, [trained(trajectory("second"))])
        metrics = MetricsLog(run / "metrics.jsonl", now=lambda: 0.0)
        metrics.on_step(2, {"loss": 0.5})
        metrics.close()
        wait_until(lambda: is_known(2))
        assert get(f"{url}/api/runs/0/trajectories/second")["step"] == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(HANGS) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.realtime
def test_a_port_that_is_taken_is_refused_where_it_was_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make_run(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["view", str(run), "--no-open", "--port", str(port)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"cannot listen on 127.0.0.1, port {port}" in said and "give another --port, or 0" in said


def test_without_its_packages_the_command_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("verbatim.core.imports.is_installed", lambda package: package != "starlette")
    assert main(["view", str(make_run(tmp_path / "run"))]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "verbatim view needs the package starlette, which is not installed; type: pip install 'verbatim-rl[viewer]'"
        in said
    )
