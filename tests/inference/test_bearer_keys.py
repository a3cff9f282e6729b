"""Every server of ours reads a key in the same way: a bearer token, the scheme in any case, and nothing bare."""

from __future__ import annotations

import doctest
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

import verbatim
from byte_renderer import VOCAB_SIZE, say
from verbatim.inference.chat.protocol import Options
from verbatim.inference.http.app import SamplerApp
from verbatim.inference.http.limits import ServerLimits
from verbatim.inference.scripted import ScriptedSampler
from verbatim.inference.vllm.plugin import verbatim_keys

KEY = "a-secret-key"
PLUGIN = Path(verbatim.__file__).parent / "inference" / "vllm" / "plugin"
RIGHT = [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY} "]
WRONG = [
    KEY,
    f"Basic {KEY}",
    f"Token {KEY}",
    f"Bearer{KEY}",
    "Bearer",
    "Bearer ",
    "",
    f"Bearer {KEY}x",
    f"Bearer Bearer {KEY}",
]
TWICE = [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer other")]


def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, str, str]:
    sampler = ScriptedSampler(script=lambda r: say("yo"), vocab_size=VOCAB_SIZE, context_length=400)
    app = SamplerApp(
        sampler,
        render_pool=None,
        renderer=None,
        model="m",
        api_key=KEY,
        seed=0,
        limits=ServerLimits(),
        weights_folder=None,
        uploads=None,
        hosts=(),
        options=Options(),
    )
    return app, "GET", "/v1/models"


def middleware(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, str, str]:
    monkeypatch.setenv("VERBATIM_KEY", KEY)
    monkeypatch.syspath_prepend(str(PLUGIN))
    for name in ("verbatim_vllm_http", "verbatim_uploads", "verbatim_keys"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import verbatim_vllm_http

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'"vllm"'})

    return verbatim_vllm_http.Guard(vllm), "GET", "/v1/models"


@pytest.mark.parametrize("server", [serve, middleware])
async def test_a_key_is_a_bearer_token(server, monkeypatch, tmp_path):
    app, method, path = server(monkeypatch, tmp_path)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:

        async def status(headers: Any) -> int:
            return (await client.request(method, path, headers=headers, json={})).status_code

        assert [await status({"authorization": value}) for value in RIGHT] == [200] * len(RIGHT)
        assert [await status({"authorization": value}) for value in WRONG] == [401] * len(WRONG)
        assert [await status(TWICE), await status({})] == [401, 401]
        assert await status({"x-api-key": KEY}) == (200 if server is serve else 401)


def test_the_examples_are_true_and_an_empty_key_is_none():
    assert doctest.testmod(verbatim_keys).failed == 0
    assert not verbatim_keys.is_key(None, b"")
