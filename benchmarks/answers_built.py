"""What vLLM's API server takes to build the answer of a turn of 1,533 tokens from what its engine returned.

Milliseconds of processor time from the engine's last output to the bytes of the response, in two forms that take turns:
vLLM's own, and packed by our middleware (`verbatim_vllm_answers`). Following the tokens one by one is not in it, which
packed answers make cheaper too (`answers.py` measures the whole). Medians over the rounds.

Runs in an environment with vLLM, and prints one JSON line:
PYTHONPATH=src/verbatim/inference/vllm/plugin VLLM_ENVIRONMENT/bin/python benchmarks/answers_built.py
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import verbatim_vllm_answers
from fastapi.responses import JSONResponse
from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
from vllm.logprobs import append_logprobs_for_next_position, create_sample_logprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

TOKENS, ROUNDS, VOCAB = 1_533, 15, 151_936


async def serve_tokens(self: Any, request: Any, raw_request: Any = None) -> Any:
    """In the place of vLLM's: the engine has just returned its last output."""

    output = engine_output(request.sampling_params)

    async def ready() -> AsyncIterator[RequestOutput]:
        yield output

    raw_request.began = time.process_time()
    about = RequestResponseMetadata(request_id="1")
    return await self.serve_tokens_full_generator(request, ready(), "1", "policy", about)


def engine_output(params: SamplingParams) -> RequestOutput:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, TOKENS).tolist()
    rows = create_sample_logprobs(params.flat_logprobs)
    for token, logprob in zip(ids, (-rng.random(TOKENS, dtype=np.float32) * 3).tolist(), strict=True):
        append_logprobs_for_next_position(rows, [token], [logprob], ["x"], 1, 0)
    completion = CompletionOutput(
        index=0, text="", token_ids=ids, cumulative_logprob=0.0, logprobs=rows, finish_reason="stop"
    )
    return RequestOutput(
        request_id="1",
        prompt=None,
        prompt_token_ids=[1] * 2_048,
        prompt_logprobs=None,
        outputs=[completion],
        finished=True,
        num_cached_tokens=1_920,
    )


async def build(is_packed: bool) -> tuple[float, int]:
    """Milliseconds, and bytes of the answer."""
    serving = ServingTokens.__new__(ServingTokens)
    vars(serving).update(
        return_tokens_as_token_ids=False,
        enable_prompt_tokens_details=True,
        enable_log_outputs=False,
        request_logger=None,
    )
    raw = SimpleNamespace(began=0.0)

    async def body() -> dict[str, Any]:
        return {"verbatim": {"packed": is_packed}}

    raw.json = body
    request = GenerateRequest(token_ids=[1], sampling_params=SamplingParams(logprobs=0, max_tokens=TOKENS))
    answer = await serving.serve_tokens(request, raw)
    written = JSONResponse(content=answer.model_dump()).body  # as vLLM's route does
    return (time.process_time() - raw.began) * 1e3, len(written)


def main() -> None:
    """Measure and print."""
    ServingTokens.serve_tokens = serve_tokens
    assert verbatim_vllm_answers.install() is None
    found: dict[str, list[tuple[float, int]]] = {"vllm": [], "packed": []}
    for _ in range(ROUNDS):
        for form, runs in found.items():
            runs.append(asyncio.run(build(form == "packed")))
    medians = {form: statistics.median(took for took, _ in runs) for form, runs in found.items()}
    print(
        json.dumps(
            {
                "benchmark": "answers_built",
                "tokens": TOKENS,
                **{f"{form}_ms": round(value, 3) for form, value in medians.items()},
                "ratio": round(medians["vllm"] / medians["packed"], 1),
                "bytes": {form: runs[0][1] for form, runs in found.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
