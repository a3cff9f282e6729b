"""The orchestrator's host, which listens."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mirror_hosts import KEY

from verbatim.inference.http import client as client_module
from verbatim.trainer.transport.mirror import app as app_module
from verbatim.trainer.transport.mirror import link as link_module
from verbatim.trainer.transport.mirror import trainer_side
from verbatim.trainer.transport.mirror.app import MirrorApp
from verbatim.trainer.transport.mirror.protocol import files_of
from verbatim.trainer.transport.mirror.server import Listen, serve_mirror
from waiting import HANGS


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The orchestrator's run folder, with a checkpoint."""
    checkpoint = tmp_path / "here" / "checkpoints" / "step_000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state").write_bytes(os.urandom(50_000))
    return tmp_path / "here"


@pytest.fixture
def app(here: Path) -> MirrorApp:
    checkpoint = here / "checkpoints" / "step_000002"
    return MirrorApp(here, config="x = 1\n", offers={"checkpoints/step_000002": files_of(checkpoint)}, keep=2, key=KEY)


@pytest.fixture
def port(app: MirrorApp):
    with serve_mirror(app, Listen(host="127.0.0.1", port=0, key=KEY)) as server:
        yield int(server.url.rpartition(":")[2])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are short, and limits so long that they end nothing but a test that hangs."""
    monkeypatch.setattr(link_module, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(link_module, "_LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(client_module, "CONNECT", HANGS)
    for name in ("STILL_SECONDS", "ATTEMPT_SECONDS"):
        monkeypatch.setattr(link_module, name, HANGS)
    for name in ("_UNANSWERED", "_ALIVE_SECONDS", "_FAREWELL"):
        monkeypatch.setattr(trainer_side, name, HANGS)
    monkeypatch.setattr(app_module, "_QUIET", HANGS)
