"""Computes the logprobs that a second model gives to exact ids: on a server, or loaded in this process."""

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
"""Attempts of one request, with a pause after each failure."""
TIMEOUT = 120.0
"""Seconds for one answer."""


class Teacher(Protocol):
    """Scores sequences. All methods may be called concurrently from one event loop."""

    async def logprobs(self, token_ids: Int32, temperature: float, kept_sets: KeptSets | None = None) -> Float32:
        """Logprob of each token given those before it, over its kept set: float32 [L]; the first is NaN.

        Raises:
            RunStopped: it cannot be had, and a run without it makes no sense.
        """

    async def close(self) -> None:
        """Let go of what it holds."""


class LocalTeacher:
    """A frozen model in this process."""

    def __init__(self, config: TeacherConfig) -> None:
        """Load it; raises `ModelError` if there is no such model."""
        from verbatim.models.head import CausalLM
        from verbatim.models.loading import load_model

        self._model = CausalLM(load_model(config.model, device=config.device))
        self._one_at_a_time = asyncio.Lock()

    async def logprobs(self, token_ids: Int32, temperature: float, kept_sets: KeptSets | None = None) -> Float32:
        """At this temperature, as `Teacher.logprobs`.

        Raises:
            RunStopped: an id outside the teacher's vocabulary.
        """
        try:
            ids = check_ids(token_ids, self._model.vocab_size, "token_ids")
            if kept_sets is not None and len(kept_sets.ids):
                check_ids(kept_sets.ids, self._model.vocab_size, "kept_sets")
        except ValueError as error:
            raise RunStopped(
                f"the teacher does not know what the policy sampled ({error}); expected a teacher with "
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
        """Nothing to let go of."""


class ServerTeacher:
    """A vLLM server, asked with exact ids: on its token endpoint (`--enable-scale-out`), or else on `/completions`, as
    other servers with vLLM's `prompt_logprobs` have it.

    Its logprobs are those of the unscaled distribution, so it only serves samples of temperature 1. A request that
    fails in passing is retried, `ATTEMPTS` attempts in all.
    """

    def __init__(self, config: TeacherConfig) -> None:
        """Connect to nothing yet."""
        self._config = config
        base = str(config.base_url).rstrip("/")
        root = base.removesuffix("/v1")  # the token endpoint is beside /v1
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
        """As `Teacher.logprobs`, at temperature 1 and over the vocabulary.

        Raises:
            RunStopped: the server cannot be reached, refuses, or answers without the logprobs of these ids; or tokens
                were drawn from a cut distribution.
        """
        assert temperature == 1.0, "the configuration admits no other temperature"
        if kept_sets is not None:
            raise RunStopped(
                f"the teacher at {self._config.base_url} gives logprobs over the whole vocabulary, and a client of the "
                "gateway cut the distribution with top_p, top_k or min_p; let the run's sampling hold, or load the "
                "teacher here (remove orchestrator.teacher.base_url)"
            )
        try:
            answer = await self._ask(token_ids)
        except SamplerFault as fault:
            raise RunStopped(f"the teacher gave no logprobs: {fault}") from fault
        try:
            return read_scores(answer, token_ids)
        except ValueError as error:
            raise RunStopped(
                f"the teacher at {self._config.base_url} answered without the prompt_logprobs of the {len(token_ids)} "
                f"ids it was given ({error}); expected a vLLM server, or one that offers them on /completions as vLLM "
                "does"
            ) from error

    async def _ask(self, token_ids: Int32) -> Any:
        """An answer with `prompt_logprobs`. Which endpoint there is shows in the first answers."""
        model = self._config.model
        if self._has_token_endpoint is not False:
            read = read_json if self._has_token_endpoint else _read_unless_missing
            answer = await self._client.ask("POST", GENERATE, encode(scoring_body(token_ids, model)), read)
            self._has_token_endpoint = answer is not None
            if answer is not None:
                return answer
        # The token that is generated is not looked at: servers refuse to generate none.
        body = encode({"model": model, "prompt": token_ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 1})
        answer = await self._client.ask("POST", self._completions, body, read_json)
        choices = answer.get("choices") if isinstance(answer, dict) else None
        return choices[0] if isinstance(choices, list) and choices else answer

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


_MISSING = (401, 403, 404, 405, 501)
"""Statuses of a route that a server does not have; gateways ask for a key there, or forbid it."""


def _read_unless_missing(answer: HttpResponse) -> Any:
    return None if answer.status in _MISSING else read_json(answer)


def make_teacher(config: TeacherConfig) -> Teacher:
    """The configured teacher: a server where there is a `base_url`, else a model of this process."""
    return LocalTeacher(config) if config.base_url is None else ServerTeacher(config)
