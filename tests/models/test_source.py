"""A model that cannot be had is refused at once and in one message: no folder, no hub, no such id, no device."""

import http.server
import json
import logging
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from transformers.utils.hub import hf_api

from ports import held_port, number_of
from verbatim.config.schema import BuildConfig
from verbatim.core.errors import ModelError
from verbatim.models import source
from verbatim.models.build import build_model
from verbatim.models.loading import load_model, load_tokenizer, resolve_device
from verbatim.models.source import find_source
from waiting import HANGS

COMMIT = "c" * 40


TIMEOUTS = source._TIMEOUTS


@pytest.fixture(autouse=True)
def slept(tmp_path, monkeypatch):
    """The seconds that were waited: none pass. The cache is empty, and the hub may take its time."""
    seconds = []
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(source, "time", SimpleNamespace(sleep=seconds.append))
    monkeypatch.setattr(source, "_TIMEOUTS", (HANGS, 2 * HANGS))
    source._on_hub.cache_clear()
    yield seconds
    source._on_hub.cache_clear()


@pytest.fixture
def asked(monkeypatch):
    """The timeouts of the questions to the hub."""
    timeouts, ask = [], huggingface_hub.get_hf_file_metadata

    def asking(url, timeout):
        timeouts.append(timeout)
        return ask(url, timeout=timeout)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", asking)
    return timeouts


@pytest.fixture
def hub(monkeypatch):
    """Points the hub's client at a server of this test; calls give a status and headers, or a folder of files."""

    class Handler(http.server.BaseHTTPRequestHandler):
        seen: ClassVar[list[tuple[str, str]]] = []
        answer: ClassVar[tuple[int, dict[str, str]] | Path] = (404, {})

        def do_HEAD(self) -> None:
            self.seen.append((self.command, self.path))
            status, headers, body = 404, {"X-Error-Code": "EntryNotFound"}, b""
            if not isinstance(self.answer, Path):
                status, headers = self.answer
            elif self.path.startswith("/api/models/org/model?") or self.path == "/api/models/org/model":
                status, headers, body = 200, {}, json.dumps({"id": "org/model", "sha": COMMIT}).encode()
            elif (file := self.answer / re.sub("^.*/resolve/[^/]*/", "", self.path)).is_file():
                body = file.read_bytes()
                status, headers = 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{file.name}"'}
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_GET = do_HEAD

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    point_at(monkeypatch, server.server_port)
    yield Handler
    server.shutdown()
    server.server_close()
    thread.join()


def point_at(monkeypatch, port):
    url = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(hf_api(), "endpoint", url)  # one for the process, with the address of its first use
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def no_hub(monkeypatch):
    """An address that takes no connections."""
    with held_port() as held:
        point_at(monkeypatch, number_of(held))
        yield


@pytest.mark.realtime
@pytest.mark.parametrize("load", [find_source, load_tokenizer, load_model])
def test_a_hub_that_cannot_be_reached_is_one_message_after_two_tries(load, no_hub, asked, slept, caplog):
    with pytest.raises(ModelError) as refused:
        load("org/model")
    assert (asked, slept) == ([HANGS, 2 * HANGS], [1])
    assert "there is no folder 'org/model' here, so it was treated as a hub id" in str(refused.value)
    assert "it is not in the cache" in str(refused.value)
    assert "cannot be reached" in str(refused.value)
    assert caplog.records == []


@pytest.mark.realtime
def test_offline_the_hub_is_not_asked(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE is set, so http://127\.0\.0\.1"):
        find_source("org/model")
    assert hub.seen == []


@pytest.mark.realtime
@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (404, "RepoNotFound", "has no such model for you; check the id"),
        (403, "GatedRepo", "it is gated on"),
        (404, "EntryNotFound", "has no config.json"),
    ],
)
def test_what_the_hub_refuses_is_said(status, code, message, hub):
    hub.answer, hub.seen = (status, {"X-Error-Code": code}), []
    with pytest.raises(ModelError, match=message):
        find_source("org/model")
    assert hub.seen == [("HEAD", "/org/model/resolve/main/config.json")]


@pytest.mark.realtime
@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_hub_that_is_busy_is_left_to_transformers_which_waits(status, hub):
    hub.answer = (status, {})
    assert find_source("org/model") == "org/model"


@pytest.mark.realtime
def test_a_first_try_that_is_lost_is_made_again(hub, monkeypatch):
    hub.answer = (200, {"X-Repo-Commit": COMMIT, "ETag": '"x"'})
    asked = huggingface_hub.get_hf_file_metadata
    tries = []

    def loses_the_first(url, timeout):
        tries.append(timeout)
        if len(tries) == 1:
            raise OSError("lost")
        return asked(url, timeout=timeout)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", loses_the_first)
    assert find_source("org/model") == "org/model"
    assert tries == [HANGS, 2 * HANGS]
    assert TIMEOUTS == (5.0, 10.0), "of what was patched here"


@pytest.mark.realtime
def test_a_model_is_loaded_from_the_hub_and_without_it_from_the_cache(hub, tmp_path, monkeypatch, caplog):
    build_model(
        tmp_path / "published",
        BuildConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1),
        ["some text to learn a vocabulary from " * 5],
        seed=0,
    )
    hub.answer = tmp_path / "published"
    expected = load_model(tmp_path / "published").state_dict()
    for _ in range(2):
        ids = load_tokenizer("org/model").encode("some text")
        model = load_model("org/model")
        assert ids == load_tokenizer(tmp_path / "published").encode("some text")
        assert all(torch.equal(expected[name], value) for name, value in model.state_dict().items())
        point_at(monkeypatch, 1)  # no server has this port
        source._on_hub.cache_clear()
    assert find_source("org/model") == str(tmp_path / "cache/models--org--model/snapshots" / COMMIT)
    (said,) = {record.message for record in caplog.records if record.name == source.__name__}
    assert said.startswith("model 'org/model' is loaded from the cache, because http://127.0.0.1:1 cannot be reached")


@pytest.mark.realtime
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "there is no model folder './nowhere'"),
        ("/nowhere/at/all", "there is no model folder"),
        ("a b", "treated as a hub id; but 'a b' is not a valid hub id"),
    ],
)
def test_a_name_that_can_be_no_model_is_refused_without_asking(name, message, no_hub, asked, slept, caplog):
    caplog.set_level(logging.ERROR)
    with pytest.raises(ModelError, match=message):
        find_source(name)
    assert asked == slept == []


def test_a_misspelt_name_of_the_catalog_is_answered_with_the_right_one(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"there is no folder 'smolm2-135m' here \(did you mean \"smollm2-135m\"\?\)"):
        find_source("smolm2-135m")


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        find_source(tmp_path)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "there is no device 'gpu'"),
        ("meta", "device 'meta' cannot be used here"),
        ("mps", "device 'mps' cannot be used here"),
        ("cuda:99", "a build without CUDA|torch sees"),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_a_model_is_looked_for(device, message):
    with pytest.raises(ModelError, match=message):
        resolve_device(device)
    with pytest.raises(ModelError, match=message):
        load_model("/nowhere/at/all", device=device)


def test_cuda_is_refused_by_a_build_without_it(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ModelError, match=r"device 'cuda', but torch .* is a build without CUDA; take "):
        resolve_device("cuda")


def test_a_cuda_device_that_torch_does_not_see_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    assert resolve_device("auto") == torch.device("cuda")
    with pytest.raises(ModelError, match="device 'cuda:2', but torch sees 2 CUDA devices"):
        resolve_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match="device 'cuda', but torch sees"):
        resolve_device("cuda")
