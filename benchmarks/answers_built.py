"""Measures how long vLLM's API server takes to build the answer to a turn of 1,533 tokens from the output of its
engine.

The figures are milliseconds of processor time from the engine's last output to the bytes of the response, as medians
over the rounds. Two forms are measured in turns: vLLM's own, and the form packed by our middleware
(`verbatim_vllm_answers`). The time to follow the tokens one by one is not included, although packed answers reduce it
too; `answers.py` measures the whole answer.

Runs in a Python environment with vLLM, and prints one JSON line:
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
    """Replaces vLLM's method of this name: answer as if the engine had just returned its last output."""

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
    """Build the answer once; returns the duration in milliseconds and the size in bytes."""
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
    written = JSONResponse(content=answer.model_dump()).body  # in the same way as vLLM's route
    return (time.process_time() - raw.began) * 1e3, len(written)


def main() -> None:
    """Run the benchmark and print the result."""
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
