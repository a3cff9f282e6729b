"""Packed answers of a vLLM server: what the middleware writes, and when."""

from __future__ import annotations

import json
import sys
import types
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verbatim.inference.http import packed as ours
from verbatim.inference.http.completions import read_completion, request_body
from verbatim.inference.http.protocol import UNKNOWN_LOGPROB
from verbatim.inference.vllm.plugin import verbatim_vllm_answers as answers

NEUTRAL = {"logprobs": 0, "logprob_token_ids": None, "stop": [], "prompt_logprobs": None, "n": 1}
ASKED = {"verbatim": {"packed": True}}


def row(**logprobs: float) -> Any:
    return {int(name[1:]): SimpleNamespace(logprob=value) for name, value in logprobs.items()}


def flat(*rows: Any) -> Any:
    """As vLLM's `FlatLogprobs`: lists for all positions, and a mapping for each on request."""

    class Flat(list[Any]):
        pass

    made = Flat(rows)
    made.start_indices = np.cumsum([0, *map(len, rows)])[:-1].tolist()  # type: ignore[attr-defined]
    made.token_ids = [token for each in rows for token in each]  # type: ignore[attr-defined]
    made.logprobs = [entry.logprob for each in rows for entry in each.values()]  # type: ignore[attr-defined]
    return made


@given(bits=st.lists(st.integers(0x80000000, 0xC61C3C00), min_size=1, max_size=9))  # every float32 from -0 to -9999
def test_what_the_middleware_packs_is_what_our_servers_pack_bit_for_bit(bits: list[int]):
    logprobs = np.array(bits, dtype=np.uint32).view(np.float32)
    ids = list(range(2**31 - 1, 2**31 - 1 - len(bits), -1))
    rows = [{token: SimpleNamespace(logprob=value)} for token, value in zip(ids, logprobs.tolist(), strict=True)]
    written = answers.packed(ids, answers.sampled_logprobs(ids, rows))
    assert written == answers.packed(ids, answers.sampled_logprobs(ids, flat(*rows)))
    assert written == ours.pack(np.array(ids, dtype=np.int32), logprobs)
    read_ids, read = ours.read_packed(json.loads(json.dumps(written)))
    assert read_ids.tolist() == ids and read_ids.dtype == np.int32
    assert read is not None and read.tobytes() == logprobs.tobytes()


@pytest.mark.parametrize("kind", [lambda *rows: list(rows), flat])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([row(_5=-0.5), row(_7=-0.25)], [-0.5, -0.25]),
        ([row(_5=-0.5, _0=-9999.0), row(_7=-0.25)], [-0.5, -0.25]),  # vLLM pads with id 0
        ([row(_5=-0.5), row(_0=-0.25)], [-0.5, -9999.0]),  # none of id 7
        ([row(_5=-0.5), {}], [-0.5, -9999.0]),
        ([row(_5=float("nan")), row(_7=-0.25)], [-9999.0, -0.25]),
        ([row(_5=-0.5), row(_7=-float("inf"))], [-0.5, -9999.0]),
    ],
)
def test_a_token_without_a_logprob_has_the_number_that_vllm_writes(kind: Any, rows: Any, expected: list[float]):
    found = answers.sampled_logprobs([5, 7], kind(*rows))
    assert found.tolist() == expected
    assert UNKNOWN_LOGPROB == answers.MISSING
    choice = {"finish_reason": "length", "token_ids": None, "logprobs": None}
    completion, is_ours = read_completion({"choices": [choice], "packed": answers.packed([5, 7], found)}, 3)
    assert is_ours is None
    assert completion.ids.tolist() == [5, 7]
    assert (completion.logprobs is None) == (-9999.0 in expected)


def test_too_few_rows_are_an_error_as_in_vllm():
    with pytest.raises(IndexError):
        answers.sampled_logprobs([5, 7], [row(_5=-0.5)])


def test_our_clients_ask_for_packed_answers():
    from verbatim.inference import SampleRequest, SamplingParams

    body = request_body(SampleRequest(prompt_ids=np.array([1], dtype=np.int32), params=SamplingParams(), seed=0), "m")
    sampling = SimpleNamespace(**{**NEUTRAL, "logprobs": body["sampling_params"]["logprobs"]})
    assert answers.is_asked(body, sampling, output_mode="tokens", stream=False)


@pytest.mark.parametrize(
    ("body", "sampling", "settings"),
    [
        ({}, {}, {}),
        ([], {}, {}),
        ({"verbatim": None}, {}, {}),
        ({"verbatim": [1]}, {}, {}),
        ({"verbatim": {"packed": False}}, {}, {}),
        ({"verbatim": {"packed": 1}}, {}, {}),
        (ASKED, {"logprobs": None}, {}),
        (ASKED, {"logprobs": 1}, {}),
        (ASKED, {"logprob_token_ids": [5, 5]}, {}),
        (ASKED, {"prompt_logprobs": 0}, {}),
        (ASKED, {"n": 2}, {}),
        (ASKED, {"stop": ["x"]}, {}),
        (ASKED, {}, {"output_mode": "text"}),
        (ASKED, {}, {"stream": True}),
    ],
)
def test_what_has_no_place_in_a_packed_answer_is_answered_as_vllm_does(body: Any, sampling: Any, settings: Any):
    given = {"output_mode": "tokens", "stream": False, **settings}
    assert not answers.is_asked(body, SimpleNamespace(**{**NEUTRAL, **sampling}), **given)
    assert answers.is_asked(ASKED, SimpleNamespace(**NEUTRAL), output_mode="tokens", stream=False)


def test_a_vllm_whose_methods_have_other_parameters_keeps_its_own_answers(monkeypatch: pytest.MonkeyPatch):
    class ServingTokens:
        async def serve_tokens(self, request, raw_request=None): ...

        def _create_tokens_logprobs(self, token_ids, logprobs): ...

    former = ServingTokens.serve_tokens, ServingTokens._create_tokens_logprobs
    root = "vllm.entrypoints.scale_out.token_in_token_out"
    names = ["vllm", "vllm.entrypoints", "vllm.entrypoints.scale_out", root, f"{root}.protocol", f"{root}.serving"]
    modules = {name: types.ModuleType(name) for name in names}
    modules[f"{root}.protocol"].GenerateTokensResponse = object  # type: ignore[attr-defined]
    modules[f"{root}.serving"].ServingTokens = ServingTokens  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert answers.install() == (
        "_create_tokens_logprobs has other parameters than self, token_ids, top_logprobs, num_output_top_logprobs"
    )
    assert (ServingTokens.serve_tokens, ServingTokens._create_tokens_logprobs) == former


def test_where_there_is_no_such_endpoint_it_says_so():
    assert "vllm" in str(answers.install())  # there is no vLLM in the environment of the tests
