"""Names what our servers and their clients say to each other: paths, keys beside vLLM's, and errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from verbatim.core.errors import (
    EnvironmentFault,
    ModelError,
    RecordError,
    SamplerFault,
    TemplateFault,
    UsageError,
    VerbatimError,
)

GENERATE = "/inference/v1/generate"
"""Token ids in, token ids out, as vLLM has it."""
PROMPT_LOGPROBS = "/verbatim/v1/prompt_logprobs"
"""`{"token_ids": [...], "temperature": 1.0}` to `{"logprobs": [null, -0.5, ...]}`."""
SAMPLER = "/verbatim/v1/sampler"
"""What the sampler is: `{"model": ..., "context_length": ..., "vocab_size": ..., "policy_version": ..., "server": ...,
"takes_weights": ..., "takes_uploads": ..., "how": {...}}`. "server" is another name each time that a server is started;
every answer of its engine has it too."""
LOAD = "/verbatim/v1/load"
"""How busy the engine is: `{"running": 3, "waiting": 0, ...}`, the fields of `ReplicaLoad`."""
REFUSED = "/verbatim/v1/refused"
"""What chat requests were refused for, and which fields were let pass without effect, counted:
`{"openai_chat/logit_bias": 2, "openai_chat/unenforced/tool_choice": 5}`."""
WEIGHTS = "/verbatim/v1/weights"
"""`{"path": ..., "version": ...}`: other weights, from a folder that the server can read."""
OURS = "verbatim"
"""The key of what we add to vLLM's format; servers that do not know it pass over it."""

UNKNOWN_LOGPROB = -9999.0
"""What vLLM writes where it has no logprob of the sampled token, or none that JSON can hold: then the completion has
none."""
KEPT_SETS = "kept_sets"
"""In a request, under `OURS`: true = return the ids among which each token was drawn, where some are cut off, as the
choice's `sampling_mask`: a list of ids for each token, an empty one where nothing was cut."""
LogprobStyle: TypeAlias = Literal["objects", "packed"] | None
"""Logprobs as vLLM writes them, an object for each token; or packed, with the ids, a tenth of the size; or none."""

_STATUS: Sequence[tuple[type[VerbatimError], int, str]] = (
    (RecordError, 400, "record_error"),
    (ModelError, 400, "model_error"),
    (UsageError, 400, "invalid_request_error"),
    (EnvironmentFault, 400, "invalid_request_error"),
    (TemplateFault, 400, "template_fault"),
    (SamplerFault, 500, "sampler_fault"),
    (VerbatimError, 500, "error"),
)
"""Our errors as status and type, the most special first. Messages that no template can render are an
`EnvironmentFault`."""


def error_body(error: VerbatimError) -> tuple[int, dict[str, Any]]:
    """An error as OpenAI's servers write it, with its status.

    >>> error_body(SamplerFault("it burns"))
    (500, {'error': {'message': 'it burns', 'type': 'sampler_fault', 'code': 500}})
    """
    status, kind = next((status, kind) for cls, status, kind in _STATUS if isinstance(error, cls))
    return status, {"error": {"message": str(error), "type": kind, "code": status}}


def read_error(body: object) -> VerbatimError | None:
    """The error that one of our servers raised; None: none of ours."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return None
    return next((cls(str(error.get("message"))) for cls, _, kind in _STATUS if error.get("type") == kind), None)
