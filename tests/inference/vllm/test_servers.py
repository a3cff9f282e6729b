"""What a run does with servers that it cannot use."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from pathlib import Path

import pytest

from e2e.tiny_runs import build_tiny_model
from ports import held_port, number_of
from verbatim.core.errors import SamplerFault, UsageError
from verbatim.inference.backends import BackendInputs
from verbatim.inference.vllm.backend import vllm_backend
from verbatim.inference.vllm.servers import vllm_servers
from verbatim.inference.vllm.settings import VllmSettings
from waiting import until

pytestmark = pytest.mark.realtime


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("servers") / "model")


async def test_a_context_shorter_than_the_runs_sequences_is_refused(model):
    inputs = BackendInputs(model=model, context_length=128)
    with pytest.raises(UsageError, match=r"max_model_len = 64 is shorter than orchestrator\.seq_len = 128"):
        await vllm_backend(inputs, VllmSettings(max_model_len=64))


async def test_servers_that_do_not_answer_are_named_and_their_connections_closed(model, caplog):
    inputs = BackendInputs(model=model, context_length=128)
    with held_port() as one, held_port() as other, caplog.at_level(logging.ERROR):
        urls = tuple(f"http://127.0.0.1:{number_of(held)}" for held in (one, other))
        with pytest.raises(SamplerFault, match=r"replica \d \(http://127\.0\.0\.1:\d+\)"):
            await vllm_backend(inputs, VllmSettings(urls=urls))
    assert "Unclosed" not in caplog.text


@pytest.mark.slow
async def test_a_server_that_cannot_start_is_told_with_its_log(model, tmp_path):
    inputs = BackendInputs(model=model, context_length=128, logs=tmp_path / "logs")
    with pytest.raises(SamplerFault, match=r"(?s)ended before it answered \(status 1\)\. From .*replica_0\.log"):
        await vllm_backend(inputs, VllmSettings(python="false"))


FAKE = """\
#!{python}
import http.server, os, pathlib, signal, sys, time
options = dict(zip(sys.argv[1:], sys.argv[2:]))
here = pathlib.Path(__file__).parent


def end(number, frame):
    (here / "ends").write_text(str(os.getpid()))
    while not (here / "may_end").exists():
        time.sleep(0.01)
    os._exit(0)


signal.signal(signal.SIGTERM, end)
(here / "starts").touch()
while not (here / "go").exists():
    time.sleep(0.01)
print("weights:", (pathlib.Path(options["--model"]) / "model.safetensors").read_bytes()[-40:].hex(), flush=True)


class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


http.server.HTTPServer(("127.0.0.1", int(options["--port"])), Healthy).serve_forever()
"""
"""In the place of a Python with vLLM: reads the weights only once there is a file `go`, then answers; told to end, it
does so only once there is a file `may_end`."""


@pytest.fixture
def fake(tmp_path) -> str:
    program = tmp_path / "python"
    program.write_text(FAKE.format(python=sys.executable))
    program.chmod(0o755)
    return str(program)


@pytest.mark.slow
async def test_a_server_that_starts_again_has_its_weights_though_the_trainer_removes_them(model, tmp_path, fake):
    """A start takes longer than a few steps."""
    published = tmp_path / "weights" / "v000003"
    (tmp_path / "may_end").touch()
    shutil.copytree(model, published)
    inputs = BackendInputs(model=model, context_length=128, logs=tmp_path / "logs")
    servers = vllm_servers(inputs, VllmSettings(python=fake))
    servers.weights = (published, 3)
    try:
        starting = asyncio.ensure_future(servers.start(0))
        await until(lambda: (tmp_path / "starts").exists() or starting.done())
        shutil.rmtree(published)
        servers.weights = (published.with_name("v000007"), 7)
        (tmp_path / "go").touch()
        replica = await starting
        assert replica.policy_version == 3
        await replica.close()
    finally:
        await servers.close()
    read = (model / "model.safetensors").read_bytes()[-40:].hex()
    assert f"weights: {read}" in (tmp_path / "logs" / "replica_0.log").read_text()
    assert [path.name for path in (tmp_path / "logs").iterdir()] == ["replica_0.log"]


@pytest.mark.slow
async def test_a_run_that_ends_while_a_server_is_started_again_waits_until_the_old_one_has_ended(model, tmp_path, fake):
    """A loop that ends kills what it has started, the subreaper too: then the server's workers would stay."""
    (tmp_path / "go").touch()
    inputs = BackendInputs(model=model, context_length=128, logs=tmp_path / "logs")
    servers = vllm_servers(inputs, VllmSettings(python=fake))
    replica = await servers.start(0)
    await replica.close()
    again = asyncio.ensure_future(servers.start_again(0))
    await until(lambda: (tmp_path / "ends").exists())
    again.cancel()
    with pytest.raises(asyncio.CancelledError):
        await again
    closing = asyncio.ensure_future(servers.close())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not closing.done()
    (tmp_path / "may_end").touch()
    await closing
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "ends").read_text()), 0)
