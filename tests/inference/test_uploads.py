"""Weights travel to a host with folders of its own, whatever happens on the way; nothing is served without the key."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from verbatim.core.errors import SamplerFault, UsageError
from verbatim.inference.http import uploads
from verbatim.inference.http.client import HttpClient
from verbatim.inference.http.limits import ServerLimits
from verbatim.inference.http.sampler import HttpSampler
from verbatim.inference.http.server import serve_sampler
from verbatim.inference.scripted import ScriptedSampler
from verbatim.inference.vllm.command import PLUGIN
from waiting import HANGS


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "here" / "v7"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    (folder / "config.json").write_text('{"model_type": "x"}')
    (folder / "empty").write_bytes(b"")
    return folder


async def says_vllm(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b'"vllm"'})


def guard(monkeypatch, there: Path | None, key: str | None = "a-secret-key", app=says_vllm):
    """The middleware before an app, by default one that answers everything with 200 and "vllm"."""
    for name, value in (("VERBATIM_KEY", key), ("VERBATIM_UPLOADS", there)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, str(value))
    monkeypatch.syspath_prepend(str(PLUGIN))
    for name in ("verbatim_vllm_http", "verbatim_uploads", "verbatim_keys"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import verbatim_vllm_http as module

    return module.Guard(app)


class InProcess(HttpClient):
    """Sends to the app; `lose` numbers the requests whose answer is lost after the server has done its work."""

    def __init__(self, app, key: str | None = "a-secret-key") -> None:
        super().__init__("http://replica", api_key=key, request_timeout=HANGS, max_retries=3)
        self._app, self._key = app, key
        self.lose: set[int] = set()
        self.sent: list[tuple[str, str]] = []

    async def _attempt(self, method, path, body):
        from verbatim.inference.http.client import AttemptFailed, HttpResponse

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(verify=False, transport=transport, base_url=self.url) as client:
            answer = await client.request(method, path, content=body, headers=headers)
        self.sent.append((method, path))
        if len(self.sent) in self.lose:
            raise AttemptFailed("connection", "lost")
        return HttpResponse(path, answer.status_code, answer.content, answer.headers)


@pytest.fixture
async def client(monkeypatch, there) -> AsyncIterator[InProcess]:
    monkeypatch.setattr("verbatim.inference.http.client.FIRST_PAUSE", 0.001)
    monkeypatch.setattr(uploads, "PART", 100_000)
    made = InProcess(guard(monkeypatch, there))
    yield made
    await made.close()


def same(there: Path, published: Path) -> bool:
    return {p.name: p.read_bytes() for p in there.iterdir()} == {p.name: p.read_bytes() for p in published.iterdir()}


async def test_a_folder_arrives_byte_for_byte(client, there, published):
    digests = uploads.digests_of(published)
    assert digests["config.json"] == hashlib.sha256(b'{"model_type": "x"}').hexdigest()
    path = await uploads.upload(client, published, digests, 7)
    assert path == str(there / "v7") and same(there / "v7", published)
    assert sum(method == "PUT" for method, _ in client.sent) == 3 + 2  # 256,000 bytes in parts of 100,000; two others


async def test_what_is_there_is_not_sent_again(client, there, published):
    digests = uploads.digests_of(published)
    (there / "v7").mkdir(parents=True)
    (there / "v7" / "model.safetensors").write_bytes((published / "model.safetensors").read_bytes()[:200_000])
    await uploads.upload(client, published, digests, 7)
    assert same(there / "v7", published)
    assert [path for method, path in client.sent if method == "PUT" and "model" in path] == [
        "/verbatim/v1/uploads/v7/model.safetensors?offset=200000"
    ]


@pytest.mark.parametrize("lost", range(1, 10))
async def test_an_answer_that_is_lost_changes_nothing(client, there, published, lost):
    client.lose = {lost}
    await uploads.upload(client, published, uploads.digests_of(published), 7)
    assert same(there / "v7", published)


async def test_a_file_with_other_bytes_is_sent_again(client, there, published):
    (there / "v7").mkdir(parents=True)
    (there / "v7" / "model.safetensors").write_bytes(b"x" * 256_000)  # of an earlier run: the size is right
    await uploads.upload(client, published, uploads.digests_of(published), 7)
    assert same(there / "v7", published)


async def test_bytes_that_never_arrive_right_end_the_upload(client, there, published):
    digests = {**uploads.digests_of(published), "config.json": "0" * 64}
    with pytest.raises(SamplerFault, match=r"config\.json of .* arrived with wrong bytes 3 times"):
        await uploads.upload(client, published, digests, 7)


async def test_versions_before_are_removed(client, there, published):
    digests = uploads.digests_of(published)
    for version in (6, 7):
        await uploads.upload(client, published, digests, version)
    assert [path.name for path in there.iterdir()] == ["v7"]


async def test_what_else_is_in_the_folder_for_uploads_stays(client, there, published):
    for name in ("thesis", "v", "v6-of-another"):
        (there / name).mkdir(parents=True)
        (there / name / "text").write_text("mine")
    await uploads.upload(client, published, uploads.digests_of(published), 7)
    assert sorted(path.name for path in there.iterdir()) == ["thesis", "v", "v6-of-another", "v7"]
    assert (there / "thesis" / "text").read_text() == "mine"


async def test_a_server_without_a_folder_for_uploads_says_so(monkeypatch, published):
    made = InProcess(guard(monkeypatch, None))
    with pytest.raises(SamplerFault, match=r"does not accept uploads: start it with --uploads FOLDER"):
        await uploads.upload(made, published, {"config.json": "0" * 64}, 7)


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/v1/models", f"{uploads.ROUTE}/v1/x"])
@pytest.mark.parametrize("key", [None, "another-key"])
async def test_every_route_needs_the_key(monkeypatch, there, path, key):
    app = guard(monkeypatch, there)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(verify=False, transport=httpx.ASGITransport(app), base_url="http://replica") as client:
        assert (await client.post(path, headers=headers)).status_code == 401
        assert (await client.get("/health")).json() == "vllm"
    assert not there.exists()


@pytest.mark.parametrize(
    ("given", "heard"), [(None, "close"), (b"Bearer another-key", "close"), (b"Bearer a-secret-key", "accept")]
)
async def test_a_websocket_needs_the_key(monkeypatch, there, given, heard):
    async def vllm(scope, receive, send):
        await send({"type": "websocket.accept"})

    app, sent = guard(monkeypatch, there, app=vllm), []

    async def send(message):
        sent.append(message["type"])

    headers = [] if given is None else [(b"authorization", given)]
    scope = {"type": "websocket", "path": "/v1/realtime", "headers": headers}
    await app(scope, None, send)
    assert sent == [f"websocket.{heard}"]


async def test_names_cannot_leave_the_folder(monkeypatch, there):
    async with httpx.AsyncClient(
        verify=False, transport=httpx.ASGITransport(guard(monkeypatch, there, key=None)), base_url="http://replica"
    ) as client:
        for names in ("..%2f..%2fx", "../x", "v1/..%2fx", "v1/%2e%2e", ".hidden/x", "v1/a/b", "v1/"):
            answer = await client.put(f"/verbatim/v1/uploads/{names}?offset=0", content=b"x")
            assert answer.status_code != 200 or json.loads(answer.content) == "vllm"
        wrong = await client.post("/verbatim/v1/uploads/v1", json={"../x": "0"})
        assert wrong.status_code == 422
    assert not any(path.name == "x" for path in there.parent.rglob("*"))


# ---- our own server


@pytest.mark.realtime
async def test_our_server_takes_a_folder_and_loads_it(there, published):
    engine = ScriptedSampler(script=lambda r: [5], vocab_size=10, context_length=16)
    async with serve_sampler(engine, api_key="a-secret-key", uploads=there) as server:
        client = HttpClient(server.url, api_key="a-secret-key", request_timeout=HANGS, max_retries=0)
        path = await uploads.upload(client, published, uploads.digests_of(published), 7)
        assert path == str(there / "v7") and same(there / "v7", published)
        sampler = await HttpSampler.connect(server.url, api_key="a-secret-key")
        await sampler.update_weights(Path(path), 7)
        assert engine.policy_version == 7
        await sampler.close()
        await client.close()


@pytest.mark.realtime
async def test_our_server_takes_nothing_without_the_key_and_no_part_without_a_length(there):
    engine = ScriptedSampler(script=lambda r: [5], vocab_size=10, context_length=16)
    with pytest.raises(UsageError, match="uploads need an api key"):
        async with serve_sampler(engine, uploads=there):
            pass

    async def parts():
        yield b"x"

    async with (
        serve_sampler(engine, api_key="a-secret-key", uploads=there, limits=ServerLimits(max_body=4)) as server,
        httpx.AsyncClient(base_url=server.url, timeout=HANGS, verify=False) as client,
    ):
        route, key = f"{uploads.ROUTE}/v1/x?offset=0", {"Authorization": "Bearer a-secret-key"}
        assert (await client.put(route, content=b"x")).status_code == 401
        assert (await client.put(route, content=parts(), headers=key)).status_code == 411
        assert (await client.put(route, content=b"12345", headers=key)).status_code == 413
    assert not there.exists()
