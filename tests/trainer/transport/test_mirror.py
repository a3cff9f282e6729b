"""What one host writes arrives at the other one whole and once, whatever the connection does; others may not send."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import hashlib
import itertools
import os
import socket
import threading
import types
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from mirror_hosts import KEY, SESSION, Network, Pump, folder_with
from transport_samples import make_sample

from private_ca import PrivateCa, make_private_ca
from verbatim.core.errors import RunStopped, UsageError
from verbatim.trainer.transport import StepReport, TrainerReady, WeightFolders
from verbatim.trainer.transport.exchange import Exchange
from verbatim.trainer.transport.heartbeat import Heartbeat, read_beat
from verbatim.trainer.transport.mirror import app as app_module
from verbatim.trainer.transport.mirror import link as link_module
from verbatim.trainer.transport.mirror import protocol, trainer_side
from verbatim.trainer.transport.mirror.app import MirrorApp
from verbatim.trainer.transport.mirror.incoming import Incoming, IncomingFile
from verbatim.trainer.transport.mirror.link import Busy, Link, SessionGone
from verbatim.trainer.transport.mirror.protocol import RUN, SESSIONS, files_of, is_file_name, is_uploaded
from verbatim.trainer.transport.mirror.server import Listen, serve_mirror
from verbatim.trainer.transport.mirror.trainer_side import Mirror
from verbatim.trainer.transport.remote_trainer import RemoteTrainer
from verbatim.trainer.transport.trainer_messages import TrainerMessage, to_json
from waiting import HANGS, until

pytestmark = pytest.mark.realtime


class BreakingNetwork(Network):
    """Passes on each connection's bytes up to a number of them, then breaks it; the numbers take turns."""

    def __init__(self, port: int, *limits: int | None, damage: int | None = None) -> None:
        super().__init__(port)
        self._limits, self._damage = limits, damage

    def pump(self) -> Pump:
        limit = self._limits[self.connections % len(self._limits)]
        return functools.partial(self._pump, left=[10**12 if limit is None else limit])

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, left: list[int]) -> None:
        while left[0] > 0 and (data := await source.read(min(left[0], 2**16))):
            left[0] -= len(data)
            if self._damage is not None and len(data) > 5000:  # the middle of a file, and of no head
                data, self._damage = data[:4000] + bytes([data[4000] ^ 1]) + data[4001:], None
            target.write(data)
            await target.drain()


@contextlib.asynccontextmanager
async def linked(port: int, key: str = KEY) -> AsyncIterator[Link]:
    async with Link(f"http://127.0.0.1:{port}", key) as link:
        yield link


async def begun(link: Link, session: str = SESSION) -> None:
    await link.ask("POST", f"{SESSIONS}/{session}", {"who": "a test", "checkpoint": "checkpoints/step_000002"})


# ---- files


@pytest.mark.parametrize("limits", [(900, 1500, 700, None), (20_011,), (3_001,), (25_000, 999)])
async def test_a_folder_arrives_whole_whatever_byte_each_connection_breaks_at(here, port, tmp_path, limits):
    source = folder_with(tmp_path / "there" / "weights" / "v000007", a=os.urandom(30_000), b=b"", c=b"x")
    async with BreakingNetwork(port, *limits) as network, Link(network.url, KEY) as link:
        await link.insist("POST", f"{SESSIONS}/{SESSION}", {"checkpoint": "checkpoints/step_000002"})
        await link.upload(SESSION, "weights/v000007", source)
        assert network.connections > 1
    assert files_of(here / "weights" / "v000007") == files_of(source)


async def test_after_a_break_only_what_is_missing_is_sent(here, port, app, tmp_path):
    data = os.urandom(200_000)
    async with linked(port) as link:
        await begun(link)
        mark = {"a": (len(data), hashlib.sha256(data).hexdigest())}
        ask = {"folder": "weights/v000001", "file": "a"}
        folders = functools.partial(link.ask, "POST", f"{SESSIONS}/{SESSION}/folders", mark, folder=ask["folder"])
        assert (await folders())["missing"] == {"a": 0}
        assert await link.ask("PUT", f"{SESSIONS}/{SESSION}/parts", data[:70_001], **ask, offset=0) == {"size": 70_001}
        # sent again, as after a lost answer, or too far: nothing is appended
        assert await link.ask("PUT", f"{SESSIONS}/{SESSION}/parts", data[:70_001], **ask, offset=0) == {"size": 70_001}
        assert await link.ask("PUT", f"{SESSIONS}/{SESSION}/parts", b"y", **ask, offset=70_002) == {"size": 70_001}
        assert (await folders())["missing"] == {"a": 70_001}
        assert not (here / "weights" / "v000001").exists()
        await link.ask("PUT", f"{SESSIONS}/{SESSION}/parts", data[70_001:], **ask, offset=70_001)
        for _ in range(2):  # the second time as after a lost answer
            assert (await folders())["missing"] == {}
    assert (here / "weights" / "v000001" / "a").read_bytes() == data


@pytest.mark.slow
@pytest.mark.parametrize("limits", [(700, 1500, 999), (20_011,), (None,)])
async def test_a_file_is_fetched_from_the_last_byte_on(here, port, tmp_path, limits):
    wanted = here / "checkpoints" / "step_000002" / "state"
    size, sha256 = protocol.mark_of(wanted)
    (tmp_path / ".copy.tmp").write_bytes(wanted.read_bytes()[:12_345])  # what a killed process has fetched
    passed = []
    async with BreakingNetwork(port, *limits) as network, Link(network.url, KEY) as link:
        append = link_module._append
        link_module._append = lambda file, digest, chunk: (passed.append(len(chunk)), append(file, digest, chunk))
        try:
            await link.download(f"{RUN}/files", tmp_path / "copy", size, sha256, file="checkpoints/step_000002/state")
        finally:
            link_module._append = append
    assert (tmp_path / "copy").read_bytes() == wanted.read_bytes()
    assert sum(passed) == size - 12_345
    assert not (tmp_path / ".copy.tmp").exists()


async def test_an_attempt_that_is_late_leaves_no_byte_out_of_the_digest(here, port, tmp_path, monkeypatch):
    wanted = here / "checkpoints" / "step_000002" / "state"
    size, sha256 = protocol.mark_of(wanted)
    written, gate = threading.Event(), threading.Event()

    def slow(file, digest, chunk):
        file.write(chunk)
        written.set()
        gate.wait()
        file.flush()
        digest.update(chunk)

    monkeypatch.setattr(link_module, "_append", slow)
    (partial := tmp_path / ".copy.tmp").touch()
    digest, query = hashlib.sha256(), {"file": "checkpoints/step_000002/state"}
    async with linked(port) as link:
        attempt = asyncio.create_task(link._download_rest(f"{RUN}/files", partial, size, digest, query))
        await until(written.is_set)
        attempt.cancel()  # as the limit of an attempt does
        for _ in range(10):
            await asyncio.sleep(0)
        assert not attempt.done()
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await attempt
        assert digest.hexdigest() == hashlib.sha256(partial.read_bytes()).hexdigest()
        assert partial.stat().st_size > 0
        await link.download(f"{RUN}/files", tmp_path / "copy", size, sha256, **query)
    assert (tmp_path / "copy").read_bytes() == wanted.read_bytes()


async def test_an_attempt_that_fails_after_the_last_byte_has_fetched_the_file(here, port, tmp_path, monkeypatch):
    wanted = here / "checkpoints" / "step_000002" / "state"
    size, sha256 = protocol.mark_of(wanted)
    append = link_module._append

    def fail_at_the_end(file, digest, chunk):
        append(file, digest, chunk)
        if file.tell() == size:
            raise link_module.Broken("reset")

    monkeypatch.setattr(link_module, "_append", fail_at_the_end)
    async with linked(port) as link:
        await link.download(f"{RUN}/files", tmp_path / "copy", size, sha256, file="checkpoints/step_000002/state")
    assert (tmp_path / "copy").read_bytes() == wanted.read_bytes()


@pytest.fixture
def each_look_takes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    monkeypatch.setattr(link_module, "time", types.SimpleNamespace(monotonic=lambda: float(next(seconds))))


@pytest.mark.usefixtures("each_look_takes_a_second")
async def test_an_orchestrators_host_that_is_gone_ends_a_fetch(app, here, tmp_path):
    size, sha256 = protocol.mark_of(here / "checkpoints" / "step_000002" / "state")
    with serve_mirror(app, Listen(host="127.0.0.1", port=0, key=KEY)) as server:
        port = int(server.url.rpartition(":")[2])
    ask = {"file": "checkpoints/step_000002/state"}
    async with linked(port) as link:
        with (
            link.patient_for(9.5),
            pytest.raises(
                RunStopped, match=r"nothing has come from http://.* for 1\d s \(.*\); once the orchestrator runs, start"
            ),
        ):
            await link.download(f"{RUN}/files", tmp_path / "copy", size, sha256, **ask)


async def test_a_host_that_answers_and_takes_no_part_of_a_file_ends_the_run(port, tmp_path, monkeypatch):
    """A proxy between the hosts that refuses large requests."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model").write_bytes(b"x" * 1000)
    monkeypatch.setattr(link_module, "MOST_IN_VAIN", 3)
    monkeypatch.setattr(link_module, "_LONGEST_PAUSE", 0.0)
    asked = []

    async def missing(method, path, body=None, **query):
        asked.append(path)
        return {"wrong": [], "missing": {"model": 0}}

    async def refuse(*arguments, **query):
        raise link_module.Broken("502: too large")

    async with linked(port) as link:
        monkeypatch.setattr(link, "insist", missing)
        monkeypatch.setattr(link, "ask", refuse)
        said = r"answers, but no byte of .*weights has arrived there in 3 attempts \(502"
        with pytest.raises(RunStopped, match=said):
            await link.upload("s", "weights/v000001", tmp_path / "weights")
    assert len(asked) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("each_look_takes_a_second")
async def test_a_fetch_goes_on_while_each_connection_brings_some_bytes(here, port, tmp_path):
    wanted = here / "checkpoints" / "step_000002" / "state"
    size, sha256 = protocol.mark_of(wanted)
    async with BreakingNetwork(port, 3_001) as network, Link(network.url, KEY) as link:
        with link.patient_for(1.5):  # the second failure in a row would end it
            await link.download(f"{RUN}/files", tmp_path / "copy", size, sha256, file="checkpoints/step_000002/state")
        assert network.connections > 15
    assert (tmp_path / "copy").read_bytes() == wanted.read_bytes()


async def test_a_damaged_part_is_sent_again_and_never_published(here, port, tmp_path, caplog):
    source = folder_with(tmp_path / "there" / "w", a=os.urandom(90_000))
    async with BreakingNetwork(port, None, damage=1) as network, Link(network.url, KEY) as link:
        await begun(link)
        await link.upload(SESSION, "weights/v000001", source)
    assert files_of(here / "weights" / "v000001") == files_of(source)
    assert "arrived with other bytes" in caplog.text


async def test_a_file_that_changes_on_its_way_is_refused_after_three_times(here, port, tmp_path, monkeypatch):
    source = folder_with(tmp_path / "there" / "w", a=b"right")
    monkeypatch.setattr(link_module, "files_of", lambda folder: {"a": (5, hashlib.sha256(b"wrong").hexdigest())})
    async with linked(port) as link:
        await begun(link)
        with pytest.raises(RunStopped, match=r"w/a arrived at http://.* with another sha256 3 times"):
            await link.upload(SESSION, "weights/v000001", source)
        with pytest.raises(RunStopped, match=r"with another sha256 3 times, expected 000"):
            await link.download(f"{RUN}/files", tmp_path / "copy", 50_000, "000", file="checkpoints/step_000002/state")
    assert not (here / "weights" / "v000001").exists()


async def test_a_request_that_takes_over_ends_the_one_whose_connection_broke(tmp_path):
    file, gate = IncomingFile(tmp_path / "a"), asyncio.Event()

    async def slow():
        yield bytes(2**20)
        await gate.wait()
        yield b"XXX"

    async def parts(*data):
        for part in data:
            yield part

    old = asyncio.create_task(file.append(0, slow()))
    await until(lambda: file.size == 2**20)
    assert await file.append(2**20, parts(b"de", b"f")) == 2**20 + 3
    gate.set()
    assert await old == 2**20 + 3
    assert file.path.read_bytes() == bytes(2**20) + b"def"
    assert file.sha256 == hashlib.sha256(bytes(2**20) + b"def").hexdigest()


async def test_weights_that_are_part_of_a_state_do_not_travel_twice_and_old_versions_go(tmp_path):
    run = tmp_path / "run"
    incoming = Incoming(run, run / "exchange" / SESSION / "incoming", WeightFolders(run / "weights", keep=2))

    async def arrive(folder: str, source: Path) -> int:
        sent, files = 0, files_of(source)
        missing, wrong = await incoming.announce(folder, files)
        for name, offset in missing.items():
            data = (source / name).read_bytes()[offset:]

            async def parts(data=data):
                yield data

            await incoming.file(folder, name).append(offset, parts())
            sent += len(data)
        assert await incoming.announce(folder, files) == ({}, [])
        assert wrong == []
        return sent

    for version in (1, 2, 3):
        there = folder_with(tmp_path / f"v{version}", model=bytes([version]) * 1000)
        assert await arrive(f"weights/v{version:06d}", there) == 1000
    assert sorted(path.name for path in (run / "weights").iterdir()) == ["v000002", "v000003"]
    state = folder_with(tmp_path / "state" / "weights", model=bytes([3]) * 1000).parent
    folder_with(state / "trainer", optimizer=b"o" * 10)
    assert await arrive(f"exchange/{SESSION}/states/v000003", state) == 10
    assert files_of(run / "exchange" / SESSION / "states" / "v000003") == files_of(state)
    model = folder_with(tmp_path / "model", model=b"m" * 500)
    assert await arrive("model", model) == 500
    assert await Incoming(run, run / "x", WeightFolders(run / "weights")).announce("model", files_of(model)) == ({}, [])


async def test_a_full_disk_on_the_orchestrators_host_is_named_on_both(here, port, tmp_path, monkeypatch, caplog):
    def full(self, part):
        raise OSError(errno.ENOSPC, "No space left on device", str(self.path))

    monkeypatch.setattr(IncomingFile, "_write", full)
    source = folder_with(tmp_path / "there" / "w", a=b"data")
    async with linked(port) as link:
        await begun(link)
        with pytest.raises(RunStopped, match=r"the orchestrator's host .* cannot write: No space left on device"):
            await link.upload(SESSION, "weights/v000001", source)
    assert "No space left on device" in caplog.text


# ---- who may send, and what


@pytest.mark.slow
@pytest.mark.parametrize("key", ["a-key-of-16-byteS", "a-key-of-16-byte", "x"])
async def test_a_wrong_key_is_refused(port, key):
    async with linked(port, key) as link:
        with pytest.raises(UsageError, match="refuses the key; put the same one into the variable that --api-key-env"):
            await link.insist("POST", RUN, {"protocol": 1})


@pytest.mark.slow
async def test_no_key_is_refused_on_every_route(port, app):
    async with aiohttp.ClientSession() as client:
        for method, path in [
            ("POST", RUN),
            ("GET", f"{RUN}/files?file=x"),
            ("PUT", f"{SESSIONS}/{SESSION}/beat"),
            ("GET", "/health"),
            ("GET", "/"),
        ]:
            async with client.request(method, f"http://127.0.0.1:{port}{path}") as response:
                assert response.status == 401
    assert app.session is None


async def test_another_version_of_the_protocol_is_refused(port):
    async with linked(port) as link:
        with pytest.raises(UsageError, match=r"version 2 of this protocol, expected 1; install the same version"):
            await link.insist("POST", RUN, {"protocol": 2})
        assert (await link.insist("POST", RUN, {"protocol": 1}))["config"] == "x = 1\n"


async def test_a_second_trainer_is_refused_while_the_first_one_lives(port, app, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(app_module, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(app_module, "_QUIET", 5.0)
    async with linked(port) as link:
        await begun(link)
        await begun(link)  # again, as after a lost answer
        now[0] += 4
        with pytest.raises(Busy, match=r"has a trainer, a test, heard of 4 s ago; end it first") as busy:
            await begun(link, "f" * 16)
        assert busy.value.alive
        now[0] += 60  # silent, but it may have an orchestrator: that has to notice first
        app.session.exchange.attach()
        with pytest.raises(Busy) as busy:
            await begun(link, "f" * 16)
        assert not busy.value.alive
        await link.ask("DELETE", f"{SESSIONS}/{SESSION}", {"why": "done"})
    assert app.session.exchange.folder.name == SESSION


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of requests, as they arrive."""
    paths, call = [], MirrorApp.__call__

    async def noted(self, scope, receive, send):
        paths.append(scope.get("path", ""))
        await call(self, scope, receive, send)

    monkeypatch.setattr(MirrorApp, "__call__", noted)
    return paths


async def both_wait(link: Link, arrived: list[str], path: str) -> None:
    """Two requests of this path have arrived, and whatever does not hold them up is over."""
    await until(lambda: arrived.count(f"/{path.lstrip('/')}") == 2)
    for _ in range(5):
        await link.ask("POST", RUN, {"protocol": 1})


async def test_a_begin_that_is_sent_again_does_not_begin_twice(arrived, port, app, monkeypatch):
    opened, gate, open_exchange = [], threading.Event(), Exchange.open

    def slow(root, session):
        opened.append(session)
        gate.wait()
        return open_exchange(root, session)

    monkeypatch.setattr(app_module.Exchange, "open", slow)
    async with linked(port) as link:
        begins = [asyncio.create_task(begun(link)) for _ in range(2)]
        await until(lambda: opened)
        await both_wait(link, arrived, f"{SESSIONS}/{SESSION}")
        gate.set()
        await asyncio.gather(*begins)
    assert opened == [SESSION]


@pytest.mark.parametrize(("route", "name"), [("beat", "trainer.json"), ("answers/1", "000001.json")])
async def test_a_file_that_is_sent_again_while_a_slow_disk_writes_it_is_published_once(
    arrived, port, app, monkeypatch, route, name
):
    writing, most, gate = [], [], threading.Event()
    publish = app_module.publish_bytes

    def slow(path, data):
        if path.name == name:
            writing.append(path)
            most.append(len(writing))
            gate.wait()
            publish(path, data)
            writing.pop()
        else:
            publish(path, data)

    async with linked(port) as link:
        await begun(link)
        monkeypatch.setattr(app_module, "publish_bytes", slow)
        sent = [asyncio.create_task(link.ask("PUT", f"{SESSIONS}/{SESSION}/{route}", b"{}")) for _ in range(2)]
        await until(lambda: most)
        await both_wait(link, arrived, f"{SESSIONS}/{SESSION}/{route}")
        gate.set()
        await asyncio.gather(*sent)
    assert set(most) == {1}


async def test_a_trainer_that_ended_before_it_was_served_is_replaced(here, port, app):
    async with linked(port) as link:
        await begun(link)
        await link.ask("DELETE", f"{SESSIONS}/{SESSION}", {"why": ""})
        await begun(link, "f" * 16)
        with pytest.raises(SessionGone):
            await link.ask("PUT", f"{SESSIONS}/{SESSION}/beat", b"{}")
    assert [path.name for path in (here / "exchange").iterdir() if path.is_dir()] == ["f" * 16]


async def test_a_trainer_that_begins_elsewhere_in_the_run_is_refused(port):
    async with linked(port) as link:
        with pytest.raises(UsageError, match=r"from None, expected checkpoints/step_000002: the run has gone on"):
            await link.ask("POST", f"{SESSIONS}/{SESSION}", {"checkpoint": None})


@pytest.mark.parametrize(
    "folder",
    [
        "checkpoints/step_000002",
        "../x",
        "weights",
        "weights/../../v000001",
        "/tmp/v1",
        "exchange/ffffffffffffffff/states/v000001",
        "config.toml",
        "",
    ],
)
async def test_a_trainer_writes_only_the_folders_that_are_its_own(here, port, folder):
    async with linked(port) as link:
        await begun(link)
        with pytest.raises(UsageError, match="no folder that a trainer writes"):
            await link.ask("POST", f"{SESSIONS}/{SESSION}/folders", {"a": (1, "x")}, folder=folder)
    assert not (here.parent / "x").exists()


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", ".hidden", "a/../b", "", "a//b", "a\0"])
async def test_names_that_leave_their_folder_are_refused(port, name):
    assert not is_file_name(name)
    async with linked(port) as link:
        await begun(link)
        with pytest.raises(UsageError, match="expected names of files below the folder"):
            await link.ask("POST", f"{SESSIONS}/{SESSION}/folders", {name: (1, "x")}, folder="weights/v000001")
        with pytest.raises(UsageError, match="is not offered"):
            await link.ask("GET", f"{RUN}/files", file=f"checkpoints/step_000002/{name}")


def test_a_folder_of_the_run_is_recognised():
    assert is_uploaded(f"exchange/{SESSION}/states/v000001")
    assert not is_uploaded(f"exchange/{SESSION}/messages")


@pytest.fixture
def ca(tmp_path: Path) -> PrivateCa:
    return make_private_ca(tmp_path)


async def test_https_with_an_authority_that_the_environment_names(app, ca, tmp_path, monkeypatch):
    where = Listen(host="127.0.0.1", port=0, key=KEY, certificate=ca.certificate, private_key=ca.key)
    with serve_mirror(app, where) as it:
        assert it.url.startswith("https://")
        async with Link(it.url, KEY) as link:
            with pytest.raises(UsageError, match=r"its certificate is not trusted .*SSL_CERT_FILE"):
                await link.insist("POST", RUN, {"protocol": 1})
        monkeypatch.setenv("SSL_CERT_FILE", str(ca.authority))
        async with Link(it.url, KEY) as link:
            assert (await link.insist("POST", RUN, {"protocol": 1}))["protocol"] == 1
    with (
        pytest.raises(UsageError, match=r"--tls-cert .*: .*; expected PEM files"),
        serve_mirror(app, Listen(host="127.0.0.1", port=0, key=KEY, certificate=tmp_path / "none.pem")),
    ):
        pass


def test_connections_that_never_finish_their_handshake_are_counted(app, ca, monkeypatch):
    monkeypatch.setattr(app_module, "LIMITS", dataclasses.replace(app_module.LIMITS, head_seconds=HANGS))
    where = Listen(host="127.0.0.1", port=0, key=KEY, certificate=ca.certificate, private_key=ca.key)
    with serve_mirror(app, where) as it, contextlib.ExitStack() as stack:
        port = int(it.url.rpartition(":")[2])
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        with socket.create_connection(("127.0.0.1", port), timeout=HANGS) as another:
            assert another.recv(12) == b"HTTP/1.1 503"


# ---- the exchange as a whole


@pytest.mark.slow
async def test_batches_answers_weights_and_heartbeats_pass_over_a_network_that_breaks(here, port, app, tmp_path):
    there = Exchange.open(tmp_path / "there" / "exchange", SESSION)
    version = folder_with(tmp_path / "there" / "weights" / "v000003", a=os.urandom(20_000))
    state = folder_with(there.states / "v000003", a=(version / "a").read_bytes(), b=b"optimizer")
    folder_with(tmp_path / "there" / "model", m=b"m" * 100)
    samples = tuple(make_sample(length, seed=length) for length in (9, 300, 2))

    def train() -> list[str]:
        seen = []
        for number in (1, 2):
            message = there.wait_for_message(number, mirror.look)
            seen.append(message.kind)
            if message.kind == "train":
                report = StepReport(
                    version=message.version,
                    weights=version,
                    num_trained_tokens=7,
                    state=state,
                    metrics={"n": float(sum(map(len, message.samples)))},
                )
                there.answer(number, {"result": to_json(report, there.run)})
        return seen

    async with BreakingNetwork(port, 9_001, 2_500) as network:
        mirror = Mirror(Link(network.url, KEY), there, "checkpoints/step_000002")
        mirror.__enter__()
        with Heartbeat(there.trainer_beat) as heart:
            heart.progress("computing")
            training = asyncio.create_task(asyncio.to_thread(train))
            there.ready(TrainerReady(version=2, weights=str((tmp_path / "there" / "model").resolve()), checkpoint=None))
            await until(lambda: app.session is not None and app.session.exchange.read_ready() is not None)
            current = Exchange.current(here / "exchange")
            assert current.read_ready().weights == str(here / "model")
            assert (here / "model" / "m").read_bytes() == b"m" * 100
            current.attach()
            with Heartbeat(current.orchestrator_beat):
                remote = RemoteTrainer(current, fault=lambda: None)
                report = await remote.train(samples, 3, checkpoint=True)
                assert (report.metrics, report.num_trained_tokens) == ({"n": 311.0}, 7)
                assert report.weights == here / "weights" / "v000003"
                assert files_of(report.weights) == files_of(version)
                assert (report.state / "b").read_bytes() == b"optimizer"
                await until(lambda: there.is_attached and getattr(read_beat(there.orchestrator_beat), "beats", 0) > 1)
                assert (await asyncio.to_thread(read_beat, current.trainer_beat)).doing in ("starting", "computing")
                await remote.close()
                assert await training == ["train", "stop"]
        await asyncio.to_thread(mirror.__exit__, None, None, None)  # the network is of this event loop
        assert network.connections > 5
    assert not state.exists()
    assert app.session.ended == ""


async def test_a_trainer_that_fails_says_so_to_the_orchestrator(here, port, app, tmp_path):
    there = Exchange.open(tmp_path / "there" / "exchange", SESSION)
    mirror = Mirror(Link(f"http://127.0.0.1:{port}", KEY), there, "checkpoints/step_000002")
    with pytest.raises(RunStopped), Heartbeat(there.trainer_beat), mirror:
        await until(lambda: app.session is not None)
        raise RunStopped("the disk burns")
    assert app.session.ended == "the disk burns"


async def test_a_trainer_that_is_refused_hears_why(port, tmp_path):
    there = Exchange.open(tmp_path / "there" / "exchange", SESSION)
    refused = pytest.raises(UsageError, match="the run has gone on meanwhile")
    with Mirror(Link(f"http://127.0.0.1:{port}", KEY), there, None) as mirror, refused:
        there.wait_for_message(1, mirror.look)


@pytest.mark.slow
def test_a_trainer_that_is_refused_hears_it_before_it_prepares_anything(port, app, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_side, "_ALIVE_SECONDS", 0.2)
    url = f"http://127.0.0.1:{port}"
    first, second = (Exchange.open(tmp_path / host / "exchange") for host in ("there", "elsewhere"))
    with Mirror(Link(url, KEY), first, "checkpoints/step_000002") as mirror:
        mirror.wait_until_answered()
        assert app.session.exchange.folder.name == first.folder.name
        refused = pytest.raises(UsageError, match=r"the orchestrator has a trainer, .*; end it first")
        with Mirror(Link(url, KEY), second, "checkpoints/step_000002") as late, refused:
            late.wait_until_answered()


@pytest.mark.slow
async def test_a_trainer_that_was_sent_a_batch_never_takes_one_of_another_orchestrator(port, app, tmp_path):
    there = Exchange.open(tmp_path / "there" / "exchange", SESSION)
    with Mirror(Link(f"http://127.0.0.1:{port}", KEY), there, "checkpoints/step_000002") as mirror:
        await asyncio.to_thread(mirror.wait_until_answered)
        app.session.exchange.send(1, TrainerMessage(kind="train", version=3))  # no heartbeat says that it is attached
        message = await asyncio.to_thread(there.wait_for_message, 1, mirror.look)
        assert message.version == 3
        assert there.is_attached
        app.session = None  # as of an orchestrator that was started again
        with pytest.raises(RunStopped, match="the orchestrator that this trainer served has ended"):
            await asyncio.to_thread(there.wait_for_message, 2, mirror.look)


def test_the_key_is_in_no_text_of_the_settings():
    assert KEY not in repr(Listen(host="127.0.0.1", port=0, key=KEY))


@pytest.mark.slow
async def test_a_trainer_that_waits_is_found_by_the_next_orchestrator(here, app, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer_side, "_FAREWELL", 0.01)  # the orchestrators have ended before it does
    there = Exchange.open(tmp_path / "there" / "exchange", SESSION)
    folder_with(tmp_path / "there" / "model", m=b"m")
    there.ready(TrainerReady(version=2, weights=str((tmp_path / "there" / "model").resolve()), checkpoint=None))

    with serve_mirror(app, Listen(host="127.0.0.1", port=0, key=KEY)) as first:
        port = int(first.url.rpartition(":")[2])
    offers = {"checkpoints/step_000002": files_of(here / "checkpoints" / "step_000002")}
    second = MirrorApp(here, config="x = 1\n", offers=offers, keep=2, key=KEY)
    with Mirror(Link(f"http://127.0.0.1:{port}", KEY), there, "checkpoints/step_000002"):
        for each in (app, second):
            with serve_mirror(each, Listen(host="127.0.0.1", port=port, key=KEY)):
                await until(lambda: each.session is not None and each.session.exchange.read_ready() is not None)  # noqa: B023


async def test_a_body_that_does_not_come_is_refused_in_time(app, monkeypatch):
    monkeypatch.setattr(app_module, "LIMITS", dataclasses.replace(app_module.LIMITS, body_seconds=0.1))
    head = f"POST {RUN} HTTP/1.1\r\nhost: x\r\nauthorization: bearer {KEY}\r\n"
    with serve_mirror(app, Listen(host="127.0.0.1", port=0, key=KEY)) as it:
        for about, status in (("content-length: 9", b"408"), ("transfer-encoding: chunked", b"411")):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(it.url.rpartition(":")[2]))
            writer.write(f"{head}{about}\r\n\r\n".encode())
            assert (await reader.readline()).split()[1] == status
            writer.close()
