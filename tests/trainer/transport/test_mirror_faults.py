"""What one host does when the other one is killed, frozen or started again, or when a disk is full."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mirror_hosts import KEY, SESSION, Network, Pump, folder_with
from rich.console import Console

from verbatim.core.errors import RunStopped
from verbatim.run.trainer_main import _look
from verbatim.run.trainer_process import _find_ready
from verbatim.trainer.transport import TrainerReady
from verbatim.trainer.transport.exchange import Exchange
from verbatim.trainer.transport.heartbeat import Heartbeat, read_beat
from verbatim.trainer.transport.mirror import app as app_module
from verbatim.trainer.transport.mirror import link as link_module
from verbatim.trainer.transport.mirror import trainer_side
from verbatim.trainer.transport.mirror.link import Link
from verbatim.trainer.transport.mirror.protocol import SESSIONS
from verbatim.trainer.transport.mirror.server import Listen, serve_mirror
from verbatim.trainer.transport.mirror.trainer_side import Mirror
from verbatim.trainer.transport.trainer_messages import TrainerMessage
from waiting import HANGS, until

pytestmark = pytest.mark.realtime
CHECKPOINT = "checkpoints/step_000002"


class FreezingNetwork(Network):
    """Passes bytes on while `goes_on` is set; connections stay open while it is not, as to a frozen process."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    def pump(self) -> Pump:
        return self._pump

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(2**16):
            await self.goes_on.wait()
            target.write(data)
            await target.drain()


class Disk:
    """A disk without room for one file, while `is_full`; everything else is published."""

    def __init__(self, publish: Callable[..., None], name: str) -> None:
        self._publish, self._name, self.is_full = publish, name, True
        self.refused = 0

    def publish(self, path: Path, value: Any, **how: Any) -> None:
        if self.is_full and path.name == self._name:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        self._publish(path, value, **how)


@pytest.fixture
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_side, "BEAT_SECONDS", 0.05)


@pytest.fixture
def there(tmp_path: Path) -> Exchange:
    """The exchange of the trainer's host."""
    return Exchange.open(tmp_path / "there" / "exchange", SESSION)


def serving(there: Exchange, mirror: Mirror, heartbeat_timeout: float) -> TrainerMessage:
    """What a trainer does that is ready: wait for a batch, while the orchestrator is there."""
    config = SimpleNamespace(orchestrator=SimpleNamespace(heartbeat_timeout=heartbeat_timeout, stall_timeout=1e9))
    folder = SimpleNamespace(log=lambda role: there.run / "none.log")
    return there.wait_for_message(1, _look(there, config, folder, mirror))


@contextlib.asynccontextmanager
async def attached(app, there: Exchange) -> AsyncIterator[Exchange]:
    """The orchestrator's exchange while it beats; the trainer has heard of it."""
    await until(lambda: app.session is not None)
    here = app.session.exchange
    here.attach()
    with Heartbeat(here.orchestrator_beat) as heartbeat:
        heartbeat.progress("at work, after 3 steps")
        await until(lambda: there.is_attached and getattr(read_beat(there.orchestrator_beat), "beats", 0) > 1)
        yield here


# ---- the orchestrator is gone


@pytest.mark.slow
async def test_an_orchestrator_that_is_killed_ends_its_trainer_which_says_so(app, there, monkeypatch):
    monkeypatch.setattr(trainer_side, "_FAREWELL", 0.3)
    with contextlib.ExitStack() as its_life:
        url = its_life.enter_context(serve_mirror(app, Listen(host="127.0.0.1", port=0, key=KEY))).url
        with (
            pytest.raises(RunStopped) as end,
            Heartbeat(there.trainer_beat),
            Mirror(Link(url, KEY), there, CHECKPOINT) as mirror,
        ):
            async with attached(app, there):
                await asyncio.to_thread(its_life.close)
                await until(lambda: "ClientConnectorError" in mirror.trouble)
                training = asyncio.create_task(asyncio.to_thread(serving, there, mirror, 1.5))
            await training
    said = str(end.value)
    assert "the orchestrator (process " in said
    assert "has given no sign of life for " in said and "the last was that it is at work, after 3 steps" in said
    assert f"the connection to {url} is broken: ClientConnectorError" in said


@pytest.mark.slow
async def test_an_orchestrator_that_is_frozen_for_a_while_finds_its_trainer(app, port, there, monkeypatch):
    monkeypatch.setattr(trainer_side, "_UNANSWERED", 0.2)
    async with FreezingNetwork(port) as network:
        with Heartbeat(there.trainer_beat):
            mirror = Mirror(Link(network.url, KEY), there, CHECKPOINT)
            mirror.__enter__()
            async with attached(app, there) as here:
                training = asyncio.create_task(asyncio.to_thread(serving, there, mirror, HANGS))
                network.goes_on.clear()
                await asyncio.to_thread(here.send, 1, TrainerMessage(kind="train", version=3))
                await until(lambda: mirror.trouble.endswith("is broken: no answer"))
                assert not training.done()
                network.goes_on.set()
                assert (await training).version == 3
                mirror.look()
            await asyncio.to_thread(mirror.__exit__, None, None, None)
    assert app.session.ended == ""


@pytest.mark.slow
async def test_an_orchestrator_that_stays_frozen_is_left_and_hears_why_when_it_goes_on(app, port, there):
    async with FreezingNetwork(port) as network:
        with Heartbeat(there.trainer_beat):
            mirror = Mirror(Link(network.url, KEY), there, CHECKPOINT)
            mirror.__enter__()
            async with attached(app, there):
                network.goes_on.clear()
                with pytest.raises(RunStopped, match=r"the orchestrator .* no sign of life for \d+ s") as end:
                    await asyncio.to_thread(serving, there, mirror, 1.2)
                leaving = asyncio.create_task(asyncio.to_thread(mirror.__exit__, RunStopped, end.value, None))
                network.goes_on.set()
                await leaving
    assert "has given no sign of life" in app.session.ended


# ---- a full disk


async def more_are_refused(disk: Disk) -> None:
    seen = disk.refused
    await until(lambda: disk.refused >= seen + 3)


@pytest.mark.slow
async def test_a_heartbeat_that_the_orchestrators_host_cannot_write_costs_itself_alone(
    app, port, there, quick_beats, monkeypatch, caplog
):
    caplog.set_level("INFO")
    disk = Disk(app_module.publish_bytes, "trainer.json")
    monkeypatch.setattr(app_module, "publish_bytes", disk.publish)
    with Heartbeat(there.trainer_beat), Mirror(Link(f"http://127.0.0.1:{port}", KEY), there, CHECKPOINT) as mirror:
        await until(lambda: "heartbeats do not pass, and go on: " in caplog.text)
        await more_are_refused(disk)
        mirror.look()
        assert f"; the orchestrator's host http://127.0.0.1:{port} cannot write: No space left" in mirror.trouble
        assert caplog.text.count("heartbeats do not pass") == 1
        assert caplog.text.count("heartbeats of the trainer cannot be written: No space left on device") == 1
        disk.is_full = False
        await until(lambda: read_beat(app.session.exchange.trainer_beat) is not None)
        await until(lambda: mirror.trouble == "")


@pytest.mark.slow
async def test_a_heartbeat_that_the_trainers_host_cannot_write_costs_itself_alone(
    app, port, there, quick_beats, monkeypatch, caplog
):
    disk = Disk(trainer_side.publish_json, "orchestrator.json")
    monkeypatch.setattr(trainer_side, "publish_json", disk.publish)
    with Heartbeat(there.trainer_beat), Mirror(Link(f"http://127.0.0.1:{port}", KEY), there, CHECKPOINT) as mirror:
        await until(lambda: app.session is not None)
        with Heartbeat(app.session.exchange.orchestrator_beat):
            await until(lambda: "this host cannot write: No space left on device" in caplog.text)
            await more_are_refused(disk)
            mirror.look()
            assert caplog.text.count("heartbeats do not pass") == 1
            disk.is_full = False
            await until(lambda: read_beat(there.orchestrator_beat) is not None)
            await until(lambda: mirror.trouble == "")


@pytest.mark.slow
async def test_a_batch_that_finds_a_full_disk_ends_the_trainer_and_both_hosts_say_so(app, there, monkeypatch):
    def full(file, digest, chunk):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(link_module, "_append", full)
    with serve_mirror(app, Listen(host="127.0.0.1", port=0, key=KEY)) as server:
        with (
            pytest.raises(OSError, match="No space left on device") as end,
            Heartbeat(there.trainer_beat),
            Mirror(Link(server.url, KEY), there, CHECKPOINT) as mirror,
        ):
            async with attached(app, there) as here:
                await asyncio.to_thread(here.send, 1, TrainerMessage(kind="train", version=3))
                await asyncio.to_thread(serving, there, mirror, HANGS)
        assert str(there.messages) in str(end.value)
        said = await asyncio.to_thread(server.how_trainer_ended)
    assert said.startswith("the trainer, process ")
    assert f"has ended: No space left on device ({there.messages}" in said


# ---- a trainer that is started again


@pytest.mark.slow
async def test_a_trainer_that_is_killed_as_it_prepares_and_started_again_is_the_one_that_is_served(
    app, here, port, tmp_path, quick_beats, monkeypatch
):
    monkeypatch.setattr(app_module, "_QUIET", 1.0)
    monkeypatch.setattr(trainer_side, "_AGAIN_SECONDS", 0.1)
    seen, said = [], io.StringIO()
    folder = SimpleNamespace(path=here, exchange=here / "exchange", agree=lambda config, text: seen.append(text))
    config = SimpleNamespace(orchestrator=SimpleNamespace(heartbeat_timeout=1e9))
    find = partial(_find_ready, config, folder, Console(file=said), "how", lambda: None, None)
    finding = asyncio.create_task(asyncio.to_thread(find))

    async with Link(f"http://127.0.0.1:{port}", KEY) as killed:
        session = f"{SESSIONS}/{'a' * 16}"
        await killed.ask("POST", session, {"who": "the first", "checkpoint": CHECKPOINT})
        beats = 0
        while not seen:
            beats += 1
            beat = {"pid": 7, "beats": beats, "progress": 0, "doing": "starting", "wants_to_stop": False}
            await killed.ask("PUT", f"{session}/beat", beat)
            await asyncio.sleep(0.05)
    second = Exchange.open(tmp_path / "there" / "exchange")
    model = folder_with(tmp_path / "there" / "model", m=b"m")
    second.ready(TrainerReady(version=2, weights=str(model.resolve()), checkpoint=None))
    with Heartbeat(second.trainer_beat), Mirror(Link(f"http://127.0.0.1:{port}", KEY), second, CHECKPOINT) as mirror:
        await asyncio.to_thread(mirror.wait_until_answered)  # a moment after the first was killed
        exchange, ready = await asyncio.wait_for(finding, HANGS)
        assert exchange.folder.name == second.folder.name
        assert exchange.is_attached
        assert ready.version == 2
    assert "the trainer was started again" in said.getvalue()
