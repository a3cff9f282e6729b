"""A sampler over HTTP. Ids, logprobs and policy versions are what the engine returned, bit for bit.

Failed requests are retried (`http.client`). This is safe, because nothing of a failed attempt is kept. On our own
servers randomness is a function of seed and position, so a retry returns the same tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from verbatim.core.errors import RecordError, SamplerFault, UsageError
from verbatim.core.texts import brief
from verbatim.core.types import Float32, Int32
from verbatim.inference.http import completions, protocol, scoring
from verbatim.inference.http.client import ClientClosed, HttpClient, HttpResponse, decode, encode, read_json
from verbatim.inference.http.connection_settings import check_address
from verbatim.inference.sampler import Completion, SampleRequest, nothing_sampled
from verbatim.inference.validation import check_temperature, refuse_stop_strings

STARTED_AGAIN = "it was restarted, or another server answers at its address"
_NO_TOKEN_ENDPOINT = "vLLM has this endpoint only if started with --enable-scale-out"
_DESCRIBE_TIMEOUT = 60.0
"""Timeout in seconds for a server to describe itself. It is long enough for a busy server, but finite, because a server
can never answer if it runs in the same event loop that waits for the answer."""

_Facts: TypeAlias = dict[str, Any]
"""The facts about the engine that the client needs: context_length, vocab_size, policy_version and model."""


class HttpSampler:
    """A `Sampler` that uses one of our servers (`server.serve_sampler`) or vLLM's token endpoint.

    `HttpSampler(url)` queries the server when a property is first read, and blocks until it answers. A server in the
    same event loop could never answer; use `await HttpSampler.connect(url)` in that case. The sampler can be pickled,
    and used from several event loops.

    With vLLM (started with `--enable-scale-out`), `context_length` is read from vLLM's list of models, and the other
    facts have to be given. If vLLM's weight version is a number, it is the policy version; otherwise tokens get
    `policy_version`, or no version if `policy_version` is None. Logprobs are kept only if they belong to the
    distribution that was sampled from.

    Args:
        url: Root address of the server: "http://127.0.0.1:8000".
        api_key: Sent as a bearer token.
        model: The model's name in requests; None to leave it out.
        context_length: Maximum number of tokens in prompt and completion together; None to query the server.
        vocab_size: Size of the vocabulary; None to query the server, which only our own servers support.
        policy_version: Version of the server's current weights; None to query the server. With vLLM: the version to
            assume for weights that vLLM labels with a text that is not a number, such as "default" (the weights that
            the server was started with).
        processed_logprobs: True if vLLM was started with `--logprobs-mode processed_logprobs`.
        returns_kept_sets: True if vLLM was started with `--return-sampling-mask`; it then refuses requests at
            temperature 0 or without `top_k`.
        send_seeds: True to send seeds to vLLM too. Our own servers always get them. vLLM 0.32 for CPUs crashes on a
            request with a seed if the prompt is longer than one prefill chunk.
        ours: True if the server is one of ours; None to query the server.
        request_timeout: Timeout in seconds of one attempt, including the wait for a slot in the batch.
        max_retries: Maximum number of further attempts after the first fails.

    Raises:
        UsageError: the address is not http or https, or the extra `serve` is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        context_length: int | None = None,
        vocab_size: int | None = None,
        policy_version: int | None = None,
        processed_logprobs: bool = False,
        returns_kept_sets: bool = False,
        send_seeds: bool = False,
        ours: bool | None = None,
        request_timeout: float = 3600.0,
        max_retries: int = 5,
    ) -> None:
        check_address(url, "url")
        root = url.rstrip("/").removesuffix("/v1")
        self._client = HttpClient(root, api_key=api_key, request_timeout=request_timeout, max_retries=max_retries)
        self.url: Final = self._client.url
        """Root address of the server."""
        self._given: _Facts = {
            "model": model,
            "context_length": context_length,
            "vocab_size": vocab_size,
            "policy_version": policy_version,
        }
        self._processed_logprobs, self._returns_kept_sets = processed_logprobs, returns_kept_sets
        self._send_seeds = send_seeds
        self._ours = ours
        self._facts: _Facts | None = None
        self.cache_salt: str | None = None
        """Sent to vLLM, where requests with different salts do not share prefix cache entries."""
        self.server: str | None = None
        """Id of the server that has to answer; None to accept any. A restarted server has a new id, and may have other
        weights under the same version."""

    @classmethod
    async def connect(cls, url: str, **settings: Any) -> HttpSampler:
        """Create a sampler and query its server without blocking the event loop. `settings` are arguments of the class.

        Raises:
            UsageError: the server does not report a required fact; the message names the fact.
            SamplerFault: the server cannot be reached, or refuses the key.
        """
        sampler = cls(url, **settings)
        sampler._facts = await sampler._query_facts()
        return sampler

    def __repr__(self) -> str:
        return f"HttpSampler({self.url!r})"

    # ---- the Sampler protocol

    @property
    def context_length(self) -> int:
        """Maximum number of tokens in prompt and completion together."""
        return int(self._known()["context_length"])

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; all ids are below it."""
        return int(self._known()["vocab_size"])

    @property
    def policy_version(self) -> int:
        """Policy version of the weights in use, according to the last response; 0 if the server does not report it."""
        return int(self._known()["policy_version"] or 0)

    async def generate(self, request: SampleRequest) -> Completion:
        """Sample one completion. Cancelling the call cancels the request on the server.

        Raises:
            RecordError: the prompt is empty or too long, an id is outside the vocabulary, or a required `top_k` is
                missing.
            SamplerFault: the engine failed, or the server cannot be reached.
        """
        refuse_stop_strings(request)
        asked = replace(request, params=completions.bounded(request.params)) if self._returns_kept_sets else request
        try:
            body = completions.request_body(
                asked, self._model_name(), seed_for_all=self._send_seeds, cache_salt=self.cache_salt
            )
            answer = await self._ask_engine(protocol.GENERATE, body, if_missing=_NO_TOKEN_ENDPOINT)
        except ClientClosed:
            return nothing_sampled()
        try:
            completion, ours = completions.read_completion(answer, self._given["policy_version"])
            completion = completions.check_experts(completion, request)
        except ValueError as error:
            raise SamplerFault(f"{self.url}: {error}") from None
        if ours is not None:
            self._note_version(ours, num_tokens=len(completion.ids))
            return completion
        if completion.policy_versions is not None and len(completion.ids):
            self._note_version({"policy_version": int(completion.policy_versions[-1])})
        if not request.params.needs_kept_sets:
            completion = replace(completion, kept_sets=None)
        # Without `processed_logprobs`, vLLM's logprobs ignore temperature and truncation.
        as_modelled = request.params.temperature == 1 and not request.params.truncates
        return completion if self._processed_logprobs or as_modelled else replace(completion, logprobs=None)

    async def update_weights(self, path: Path, version: int) -> None:
        """Load a Hugging Face folder. The server reads the folder, so the server's host must have the folder at the
        same path.

        Raises:
            ModelError: the weights do not fit the model. The engine keeps its current weights.
            SamplerFault: the server refuses, has no such endpoint, or cannot be reached.
        """
        there = await asyncio.to_thread(path.absolute)  # the server may have a different working directory
        body = encode({"path": str(there), "version": version})
        answer = await self._client.ask("POST", protocol.WEIGHTS, body, read_answer)
        self._note_version(self._object(answer))

    async def prompt_logprobs(self, token_ids: Int32, temperature: float = 1.0) -> Float32:
        """Logprob of each token given the tokens before it: float32 [L]; the first is NaN.

        vLLM only scores at temperature 1, and needs room for one more token in its context.

        Raises:
            RecordError: there are no ids or too many, an id is outside the vocabulary, or the temperature is not above
                0.
            UsageError: the temperature is not 1, and the server is vLLM.
            SamplerFault: the server failed, or cannot be reached.
        """
        check_temperature(temperature)
        if not await self._is_ours():
            return await self._scored_by_vllm(token_ids, temperature)
        body = {"token_ids": token_ids, "temperature": temperature}
        answer = self._object(await self._ask_engine(protocol.PROMPT_LOGPROBS, body))
        self._note_version(answer)
        found = answer.get("logprobs")
        try:
            rest = completions.read_plain(found[1:] if isinstance(found, list) else found, len(token_ids) - 1)
        except ValueError as error:
            raise SamplerFault(f"{self.url}: {error} (the first of the {len(token_ids)} ids has no logprob)") from None
        return np.concatenate([np.full(1, np.nan, dtype=np.float32), rest])

    async def cached_logprob(self, token_ids: Int32) -> tuple[float, int | None]:
        """Score the last id by an ordinary request, which reads and writes vLLM's prefix cache.

        Returns:
            (the logprob of the last id given the ids before it, at temperature 1; the number of prompt tokens that came
            from the cache, or None if the server does not report it).

        Raises:
            RecordError: there are fewer than two ids.
            SamplerFault: the server failed, or cannot be reached.
        """
        if len(token_ids) < 2:
            raise RecordError(f"token_ids: expected at least 2 ids, found {len(token_ids)}")
        body = scoring.last_logprob_body(token_ids, self._model_name(), self.cache_salt)
        answer = await self._ask_engine(protocol.GENERATE, body, if_missing=_NO_TOKEN_ENDPOINT)
        try:
            return scoring.read_last_logprob(answer, token_ids), completions.read_cached_tokens(answer)
        except ValueError as error:
            raise SamplerFault(f"{self.url}: {error}") from None

    async def close(self) -> None:
        """Close the connections. Requests in flight in this event loop end as cancelled. The server keeps running."""
        await self._client.close()

    async def hang_up(self) -> None:
        """Close this event loop's connections before the loop ends. A later request reconnects."""
        await self._client.hang_up()

    async def _scored_by_vllm(self, token_ids: Int32, temperature: float) -> Float32:
        if temperature != 1:
            raise UsageError(f"temperature = {temperature}: vLLM returns prompt logprobs at temperature 1 only")
        if len(token_ids) == 0:
            raise RecordError("token_ids: expected at least one token id, found none")
        body = scoring.scoring_body(token_ids, self._model_name())
        answer = await self._ask_engine(protocol.GENERATE, body, if_missing=_NO_TOKEN_ENDPOINT)
        try:
            return scoring.read_scores(answer, token_ids)
        except ValueError as error:
            raise SamplerFault(f"{self.url}: {error}") from None

    def _model_name(self) -> str | None:
        """The model's name in requests."""
        name: str | None = (self._facts or self._given)["model"]
        return name

    async def _is_ours(self) -> bool:
        """True if the server is one of ours. Only our servers have the `SAMPLER` route."""
        if self._ours is None:
            self._ours = await self._client.ask("GET", protocol.SAMPLER, None, _is_found)
        return self._ours

    def _object(self, answer: object) -> dict[str, Any]:
        if not isinstance(answer, dict):
            raise SamplerFault(f"{self.url}: expected a JSON object, found {brief(answer)}")
        return answer

    async def _ask_engine(self, path: str, body: Mapping[str, Any], *, if_missing: str = "") -> Any:
        """Send a request to the engine. A UsageError, such as a refused key, becomes a SamplerFault, so that only this
        rollout fails."""
        try:
            return await self._client.ask("POST", path, encode(body), lambda answer: read_answer(answer, if_missing))
        except UsageError as error:
            raise SamplerFault(f"{self.url}: {error}") from error

    # ---- description of the server

    def _known(self) -> _Facts:
        if self._facts is None:
            self._facts = self._query_facts_blocking()
        return self._facts

    def _query_facts_blocking(self) -> _Facts:
        """Query the server, and block this thread until it answers."""

        async def ask() -> _Facts:
            async with asyncio.timeout(_DESCRIBE_TIMEOUT):
                try:
                    return await self._query_facts()
                finally:
                    await self._client.hang_up()  # connections cannot outlive this event loop

        # On a separate thread, because this one may run an event loop, where `asyncio.run` is not allowed.
        with ThreadPoolExecutor(1) as pool:
            try:
                return pool.submit(asyncio.run, ask()).result()
            except TimeoutError:
                raise SamplerFault(
                    f"{self.url} did not describe itself within {_DESCRIBE_TIMEOUT:g} s; if it runs in this event "
                    "loop, use await HttpSampler.connect(url)"
                ) from None

    async def _query_facts(self) -> _Facts:
        """The facts given to the constructor, completed with facts that the server reports."""
        found = await self._client.ask(
            "GET", protocol.SAMPLER, None, lambda answer: None if answer.status == 404 else read_answer(answer)
        )
        if found is None:
            found = _read_cards(await self._client.ask("GET", "/v1/models", None, read_answer), self._given["model"])
        if not isinstance(found, dict):
            raise UsageError(f"{self.url} is not a model server; it replied {brief(found)}")
        facts = {name: found.get(name) if given is None else given for name, given in self._given.items()}
        for name in ("context_length", "vocab_size"):
            if not isinstance(facts[name], int):
                raise UsageError(f"{self.url} does not report its {name}; pass it: HttpSampler(url, {name}=...)")
        return facts

    def _note_version(self, answer: Mapping[str, Any], *, num_tokens: int = 0) -> None:
        """Record the policy version in a response. Raises SamplerFault if the response is not from `self.server`; the
        fault carries the `num_tokens` of the discarded completion for the ledger."""
        if self.server is not None and answer.get("server") != self.server:
            raise SamplerFault(f"{self.url}: {STARTED_AGAIN}", num_tokens=num_tokens)
        version = answer.get("policy_version")
        if self._facts is not None and type(version) is int:
            self._facts["policy_version"] = version


def _is_found(answer: HttpResponse) -> bool:
    if answer.status == 404:
        return False
    read_answer(answer)
    return True


def read_answer(answer: HttpResponse, if_missing: str = "") -> Any:
    """The JSON of a response. An error of one of our servers is raised with the class that the server raised.

    `if_missing` is appended to the message of a 404.

    Raises:
        VerbatimError: the server reported it.
        AttemptFailed: the status is not 200, or the body is not JSON.
    """
    if answer.status != 200:
        ours = None
        with contextlib.suppress(ValueError):
            ours = protocol.read_error(decode(answer))
        if ours is not None:
            raise ours
    return read_json(answer, f" ({if_missing})" if if_missing and answer.status == 404 else "")


def _read_cards(answer: object, model: str | None) -> dict[str, Any]:
    """Facts from a model list in OpenAI's format, about `model` or else about the first model."""
    listed = answer.get("data") if isinstance(answer, dict) else None
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    card = next((c for c in cards if c.get("id") == model), cards[0] if cards else {})
    return {"model": card.get("id"), "context_length": card.get("max_model_len")}
