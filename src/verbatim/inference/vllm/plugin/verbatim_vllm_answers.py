"""Lets vLLM's token endpoint answer with packed arrays: one string for all ids, and one for all logprobs.

For each sampled token, vLLM 0.32 decodes text twice, and builds two validated records, a dictionary from each record,
and 142 bytes of JSON. A request with `{"verbatim": {"packed": true}}` that asks for the logprobs of the sampled tokens
skips all of that: in the answer, `token_ids` and `logprobs` of the choice are null, and next to `choices` there is

    "packed": {"token_ids": "BQAAAAcAAAA=", "logprobs": "AAAAvwAAgL4="}      [5, 7] and [-0.5, -0.25]

in base64: int32 and float32, little-endian. The rest of the answer, and all other requests, are unchanged.

This module runs in vLLM's processes, where Verbatim is not installed.
"""

from __future__ import annotations

import base64
import contextlib
import inspect
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

KEY = "packed"
OURS = "verbatim"
MISSING = -9999.0
"""vLLM's logprob for a token whose logprob is missing or NaN."""
_REQUEST = ("self", "request", "raw_request")
_LOGPROBS = ("self", "token_ids", "top_logprobs", "num_output_top_logprobs")
"""Parameters of the vLLM methods that are replaced. In a release whose methods have different parameters, nothing is
replaced."""

_logprobs: ContextVar[list[np.ndarray] | None] = ContextVar("verbatim_packed_logprobs", default=None)
"""Collects the logprobs of the current request; None if the request is answered in vLLM's own format. It is a context
variable, because requests run concurrently as asyncio tasks."""


def packed(token_ids: Sequence[int], logprobs: np.ndarray) -> dict[str, str]:
    """Ids and logprobs as base64 strings.

    >>> packed([5, 7], np.array([-0.5, -0.25], dtype=np.float32))
    {'token_ids': 'BQAAAAcAAAA=', 'logprobs': 'AAAAvwAAgL4='}
    """
    return {"token_ids": _text(np.array(token_ids, dtype="<i4")), "logprobs": _text(logprobs.astype("<f4"))}


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def is_asked(body: Any, sampling: Any, *, output_mode: str, stream: bool) -> bool:
    """True if a request asks for a packed answer, and does not ask for anything that a packed answer cannot carry.

    Args:
        body: The request's JSON.
        sampling: vLLM's sampling parameters of the request.
        output_mode: "tokens" or "text".
        stream: True if the answer is streamed.
    """
    ours = body.get(OURS) if isinstance(body, dict) else None
    if not isinstance(ours, dict) or ours.get(KEY) is not True or stream or output_mode != "tokens":
        return False
    others = (sampling.logprob_token_ids, sampling.stop, sampling.prompt_logprobs is not None, sampling.n != 1)
    # With logprobs == 0, a request asks vLLM for only the sampled token's logprob.
    return sampling.logprobs == 0 and not any(others)


def sampled_logprobs(token_ids: Sequence[int], rows: Any) -> np.ndarray:
    """The logprob of each sampled token: float32 [L]. NaN, and values below vLLM's `MISSING`, become `MISSING`.

    Args:
        token_ids: The sampled ids.
        rows: vLLM's logprobs, one mapping from id to logprob for each position: a list, or vLLM's `FlatLogprobs`.
    """
    ids = list(token_ids)
    # `FlatLogprobs` with exactly one entry per position: its array is used directly, without a lookup for each token.
    if getattr(rows, "token_ids", None) == ids and rows.start_indices == list(range(len(ids))):
        values = rows.logprobs
    else:
        found = [(rows[at] or {}).get(token) for at, token in enumerate(ids)]
        values = [MISSING if entry is None else entry.logprob for entry in found]
    wide = np.array(values, dtype=np.float64)
    return np.where(np.isnan(wide), MISSING, np.maximum(wide, MISSING)).astype(np.float32)


def install() -> str | None:
    """Patch this process's token endpoint. Called once for each application, possibly twice in one process.

    Returns:
        Why the endpoint cannot be patched; None if it was patched.
    """
    try:
        from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateTokensResponse
        from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    except ImportError as error:
        return str(error)
    if getattr(ServingTokens, "verbatim_packs", False):
        return None
    serve, name_each = ServingTokens.serve_tokens, ServingTokens._create_tokens_logprobs
    for method, names in ((serve, _REQUEST), (name_each, _LOGPROBS)):
        if tuple(inspect.signature(method).parameters) != names:
            return f"{method.__name__} has other parameters than {', '.join(names)}"

    class PackedResponse(GenerateTokensResponse):  # type: ignore[misc]
        packed: dict[str, str]

    async def serve_tokens(self: Any, request: Any, raw_request: Any = None) -> Any:
        sampling = request.sampling_params
        body = {} if raw_request is None else await raw_request.json()  # cached: vLLM has read it already
        if not is_asked(body, sampling, output_mode=request.output_mode, stream=bool(request.stream)):
            return await serve(self, request, raw_request)
        sampling.detokenize, sampling.flat_logprobs = False, True
        with _taken() as taken:
            answer = await serve(self, request, raw_request)
        if not taken or not isinstance(answer, GenerateTokensResponse):
            return answer
        (choice,), (logprobs,) = answer.choices, taken
        strings = packed(choice.token_ids, logprobs)
        choice.token_ids = None
        # `model_construct` skips validation, whose cost packing is meant to save.
        return PackedResponse.model_construct(**dict(answer), packed=strings)

    def create_tokens_logprobs(
        self: Any, token_ids: Any, top_logprobs: Any, num_output_top_logprobs: int | None = None
    ) -> Any:
        taken = _logprobs.get()
        if taken is None:
            return name_each(self, token_ids, top_logprobs, num_output_top_logprobs)
        taken.append(sampled_logprobs(token_ids, top_logprobs))
        return None

    ServingTokens.serve_tokens, ServingTokens._create_tokens_logprobs = serve_tokens, create_tokens_logprobs
    ServingTokens.verbatim_packs = True
    return None


@contextlib.contextmanager
def _taken() -> Iterator[list[np.ndarray]]:
    taken: list[np.ndarray] = []
    token = _logprobs.set(taken)
    try:
        yield taken
    finally:
        _logprobs.reset(token)
