"""Defines the HTTP API of our servers: paths, the keys that it adds to vLLM's format, and the format of errors."""

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
"""vLLM's token endpoint, which takes and returns token ids."""
PROMPT_LOGPROBS = "/verbatim/v1/prompt_logprobs"
"""Request: `{"token_ids": [...], "temperature": 1.0}`. Response: `{"logprobs": [null, -0.5, ...]}`."""
SAMPLER = "/verbatim/v1/sampler"
"""Describes the sampler: `{"model": ..., "context_length": ..., "vocab_size": ..., "policy_version": ..., "server":
..., "takes_weights": ..., "takes_uploads": ..., "how": {...}}`. "server" is a random id that is new at each start and
part of every response of the engine. If this id changes, a client knows that the server was restarted and has lost its
weights."""
LOAD = "/verbatim/v1/load"
"""Reports the engine's load: `{"running": 3, "waiting": 0, ...}`, the fields of `ReplicaLoad`."""
REFUSED = "/verbatim/v1/refused"
"""Reports the number of chat requests by the field that was refused, or accepted but not enforced:
`{"openai_chat/logit_bias": 2, "openai_chat/unenforced/tool_choice": 5}`."""
WEIGHTS = "/verbatim/v1/weights"
"""Loads new weights: `{"path": ..., "version": ...}`; the server must be able to read the folder."""
OURS = "verbatim"
"""Key of our additions to vLLM's format and the chat formats. Other servers ignore it."""

UNKNOWN_LOGPROB = -9999.0
"""The number that vLLM writes for a logprob that is missing or that JSON cannot represent (-inf). If a completion has
such a number, all of its logprobs are treated as missing, because a missing logprob is never replaced by a number."""
KEPT_SETS = "kept_sets"
"""In a request, under `OURS`: true asks for the kept set of each token. The response has them as the choice's
`sampling_mask`, a list of ids for each token, where an empty list means that nothing was cut."""
LogprobStyle: TypeAlias = Literal["objects", "packed"] | None
"""Format of the logprobs in a response: vLLM's, with an object for each token; packed together with the ids, at a tenth
of the size; or none."""

_STATUS: Sequence[tuple[type[VerbatimError], int, str]] = (
    (RecordError, 400, "record_error"),
    (ModelError, 400, "model_error"),
    (UsageError, 400, "invalid_request_error"),
    (EnvironmentFault, 400, "invalid_request_error"),
    (TemplateFault, 400, "template_fault"),
    (SamplerFault, 500, "sampler_fault"),
    (VerbatimError, 500, "error"),
)
"""Status and type of each error class. The first match is used, so subclasses come before their bases. A conversation
that the chat template refuses is an `EnvironmentFault`."""


def error_body(error: VerbatimError) -> tuple[int, dict[str, Any]]:
    """The HTTP status of an error, and its body in OpenAI's format.

    >>> error_body(SamplerFault("it burns"))
    (500, {'error': {'message': 'it burns', 'type': 'sampler_fault', 'code': 500}})
    """
    status, kind = next((status, kind) for cls, status, kind in _STATUS if isinstance(error, cls))
    return status, {"error": {"message": str(error), "type": kind, "code": status}}


def read_error(body: object) -> VerbatimError | None:
    """Recreate the error in a response body, with the class that the server raised; None if the body is not one of our
    errors."""
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict):
        return None
    return next((cls(str(error.get("message"))) for cls, _, kind in _STATUS if error.get("type") == kind), None)
