"""Numbers at the edges of what float32 and int64 hold: each is sampled with, or refused with 400; none is a 500."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from e2e.tiny_runs import build_tiny_model
from verbatim.core.sampling import SamplingParams
from verbatim.inference.embedded.engine import TorchSampler
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.http import protocol
from verbatim.inference.http.server import serve_sampler
from verbatim.models.loading import load_tokenizer
from verbatim.models.renderers import create_renderer
from waiting import HANGS

pytestmark = pytest.mark.realtime

FLOATS = ("1e39", "3.5e38", "1e38", "1e30", "1e7", "1e6", "1e-6", "1e-7", "1e-30", "1e-38", "1e-45", "1e-46", "5e-324",
          "1e308", "1e309",
          "-1e39", "0.99999999999", "1.0000000001", "-0.0", "NaN", "Infinity", "1" + "0" * 400)  # fmt: skip
INTEGERS = (
    "2147483647",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551616",
    "1" + "0" * 40,
    "-1",
    "-9223372036854775809",
    "0",
)
FIELDS = {
    "temperature": FLOATS,
    "top_p": FLOATS,
    "min_p": FLOATS,
    "top_k": INTEGERS,
    "max_tokens": INTEGERS,
    "seed": INTEGERS,
    "n": INTEGERS,
}
SPOKEN = {"temperature": FLOATS, "top_p": FLOATS, "top_k": INTEGERS, "max_tokens": INTEGERS}
ROUTES = {
    protocol.GENERATE: ({"token_ids": [1, 2]}, FIELDS),
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "hi"}]}, FIELDS),
    "/v1/messages": ({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}, SPOKEN),
    "/v1/responses": ({"input": "hi"}, {"temperature": FLOATS, "top_p": FLOATS, "max_output_tokens": INTEGERS}),
    protocol.PROMPT_LOGPROBS: ({"token_ids": [1, 2]}, {"temperature": FLOATS}),
}


def body(route: str, field: str, text: str) -> bytes:
    given = dict(ROUTES[route][0])
    where = given.setdefault("sampling_params", {"max_tokens": 2}) if route == protocol.GENERATE else given
    if route.startswith("/v1/chat"):
        where.setdefault("max_tokens", 2)
    where[field] = "@"
    return json.dumps(given).replace('"@"', text).encode()


@pytest.mark.slow
async def test_no_number_of_a_request_is_answered_with_a_fault(tmp_path: Path):
    model = build_tiny_model(tmp_path / "tiny")
    sampler = TorchSampler(
        model, config=TorchSettings(device="cpu", max_batch_size=8), context_length=32, num_threads=1
    )
    renderer = create_renderer("auto", load_tokenizer(str(model)))
    wrong, refused = [], 0
    try:
        async with (
            serve_sampler(sampler, renderer=renderer) as server,
            httpx.AsyncClient(base_url=server.url, timeout=HANGS) as client,
        ):
            for route, (_, fields) in ROUTES.items():
                for field, texts in fields.items():
                    for text in texts:
                        answer = await client.post(
                            route, content=body(route, field, text), headers={"content-type": "application/json"}
                        )
                        refused += answer.status_code == 400
                        if answer.status_code not in (200, 400):
                            wrong.append((route, field, text[:30], answer.status_code, answer.text[:200]))
    finally:
        await sampler.close()
    assert wrong == []
    assert refused > 100


@pytest.mark.parametrize("value", [1e39, 3.5e38, 1.1e6, 1e-7, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_float32_does_not_divide_by_is_no_temperature(value):
    with pytest.raises(ValueError, match=r"temperature = .* 1000000"):
        SamplingParams(temperature=value)


@pytest.mark.parametrize("value", [1e-46, 5e-324, 0.0, -1e-3, 1.5, float("nan")])
def test_a_nucleus_that_float32_rounds_to_nothing_is_no_nucleus(value):
    with pytest.raises(ValueError, match=r"top_p = .* \[1e-30, 1\]"):
        SamplingParams(top_p=value)


def test_the_edges_are_taken():
    assert SamplingParams(temperature=1e6, top_p=1e-30, min_p=0.9999999, top_k=2**31 - 1).truncates
