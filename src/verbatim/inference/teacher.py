"""Computes the logprobs of given ids under a teacher model, on a server or in this process."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import numpy as np

from verbatim.config.schema import TeacherConfig
from verbatim.core.errors import RunStopped, SamplerFault
from verbatim.core.types import Float32, Int32, KeptSets
from verbatim.inference.http.client import HttpClient, HttpResponse, encode, read_json
from verbatim.inference.http.connection_settings import named_key
from verbatim.inference.http.protocol import GENERATE
from verbatim.inference.http.scoring import read_scores, scoring_body
from verbatim.inference.validation import check_ids

ATTEMPTS = 5
"""Maximum number of attempts for one request."""
TIMEOUT = 120.0
"""Timeout in seconds of one attempt."""


class Teacher(Protocol):
    """Scores sequences. All methods may be called concurrently from one event loop."""

    async def logprobs(self, token_ids: Int32, temperature: float, kept_sets: KeptSets | None = None) -> Float32:
        """Logprob of each token given the tokens before it, over the token's kept set: float32 [L]; the first is NaN.

        Raises:
            RunStopped: the logprobs cannot be computed, and the run cannot continue without them.
        """

    async def close(self) -> None:
        """Release connections and other resources."""


class LocalTeacher:
    """A frozen model in this process."""

    def __init__(self, config: TeacherConfig) -> None:
        """Load the model. Raises `ModelError` if it cannot be found."""
        from verbatim.models.head import CausalLM
        from verbatim.models.loading import load_model

        self._model = CausalLM(load_model(config.model, device=config.device))
        # Without this, many calls would run on threads at once, each with its activations in memory.
        self._one_at_a_time = asyncio.Lock()

    async def logprobs(self, token_ids: Int32, temperature: float, kept_sets: KeptSets | None = None) -> Float32:
        """See `Teacher.logprobs`.

        Raises:
            RunStopped: an id is outside the teacher's vocabulary.
        """
        try:
            ids = check_ids(token_ids, self._model.vocab_size, "token_ids")
            if kept_sets is not None and len(kept_sets.ids):
                check_ids(kept_sets.ids, self._model.vocab_size, "kept_sets")
        except ValueError as error:
            raise RunStopped(
                f"the teacher cannot score what the policy sampled ({error}); expected a teacher with "
                "the policy's tokenizer"
            ) from error
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._score, ids, temperature, kept_sets)

    def _score(self, ids: Int32, temperature: float, kept_sets: KeptSets | None) -> Float32:
        import torch

        from verbatim.inference.embedded.whole_sequence import sequence_logprobs

        with torch.inference_mode():
            tokens = torch.from_numpy(ids.astype(np.int64)).to(self._model.device)
            scored: Float32 = sequence_logprobs(self._model, tokens, temperature, kept_sets).cpu().numpy()
        return scored

    async def close(self) -> None:
        """Do nothing, because there are no connections."""


class ServerTeacher:
    """A teacher on a vLLM server. The server is queried with exact ids through the token endpoint
    (`--enable-scale-out`) or, if it does not have that, through `/completions`, which works with any server that has
    vLLM's `prompt_logprobs`.

    Prompt logprobs are always at temperature 1, so only tokens sampled at temperature 1 can be scored. Transient
    failures are retried, with up to `ATTEMPTS` attempts in all.
    """

    def __init__(self, config: TeacherConfig) -> None:
        """Prepare the client, which connects on the first request."""
        self._config = config
        base = str(config.base_url).rstrip("/")
        root = base.removesuffix("/v1")  # the path of the token endpoint does not begin with /v1
        self._completions = f"{base[len(root) :]}/completions"
        self._has_token_endpoint: bool | None = None
        self._client = HttpClient(
            root,
            api_key=named_key(base, config.api_key_env),
            request_timeout=TIMEOUT,
            max_retries=ATTEMPTS - 1,
            remote_api=True,
        )

    async def logprobs(self, token_ids: Int32, temperature: float, kept_sets: KeptSets | None = None) -> Float32:
        """See `Teacher.logprobs`. Only supports temperature 1 and the whole vocabulary.

        Raises:
            RunStopped: the server cannot be reached, refuses the request, or answers without the logprobs of these ids,
                or the tokens were sampled from kept sets.
        """
        assert temperature == 1.0, "the configuration admits no other temperature"
        if kept_sets is not None:
            raise RunStopped(
                f"the teacher at {self._config.base_url} gives logprobs over the whole vocabulary, and a client of the "
                "gateway truncated the distribution with top_p, top_k or min_p; remove these settings from the "
                "client's requests, or load the teacher in this process (remove orchestrator.teacher.base_url)"
            )
        try:
            answer = await self._ask(token_ids)
        except SamplerFault as fault:
            raise RunStopped(f"the teacher returned no logprobs: {fault}") from fault
        try:
            return read_scores(answer, token_ids)
        except ValueError as error:
            raise RunStopped(
                f"the teacher at {self._config.base_url} answered without the prompt_logprobs of the {len(token_ids)} "
                f"ids it was given ({error}); expected vLLM, or a server with vLLM's prompt_logprobs on /completions"
            ) from error

    async def _ask(self, token_ids: Int32) -> Any:
        """Request the `prompt_logprobs`. The first answer shows whether the server has the token endpoint."""
        model = self._config.model
        if self._has_token_endpoint is not False:
            read = read_json if self._has_token_endpoint else _read_unless_missing
            answer = await self._client.ask("POST", GENERATE, encode(scoring_body(token_ids, model)), read)
            self._has_token_endpoint = answer is not None
            if answer is not None:
                return answer
        # Servers refuse max_tokens = 0, so one token is sampled and ignored.
        body = encode({"model": model, "prompt": token_ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 1})
        answer = await self._client.ask("POST", self._completions, body, read_json)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        return choices[0] if isinstance(choices, list) and choices else answer

    async def close(self) -> None:
        """Close the connections to the server."""
        await self._client.close()


_MISSING = (401, 403, 404, 405, 501)
"""Statuses that mean that the route does not exist. API gateways in front of a server may answer an unknown route with
401 or 403."""


def _read_unless_missing(answer: HttpResponse) -> Any:
    return None if answer.status in _MISSING else read_json(answer)


def make_teacher(config: TeacherConfig) -> Teacher:
    """Make the configured teacher: a server if `base_url` is set, or else a model in this process."""
    return LocalTeacher(config) if config.base_url is None else ServerTeacher(config)
