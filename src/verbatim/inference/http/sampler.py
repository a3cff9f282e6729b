"""Samples over HTTP: ids, logprobs and versions are the engine's, bit for bit.

A request that failed on its way is retried (`http.client`). That is harmless: nothing was kept of the attempt that
failed. Over our own server randomness is a function of seed and position, so the same request gives the same tokens.
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

STARTED_AGAIN = "it was started again, or another server answers in its place"
_NO_TOKEN_ENDPOINT = "vLLM has it with --enable-scale-out"
_SAYS_WITHIN = 60.0
"""Seconds in which a server that has much to do says what it is. One in the event loop that waits for it never does."""

_Facts: TypeAlias = dict[str, Any]
"""What a sampler must know of the engine behind it: context_length, vocab_size, policy_version and model."""


class HttpSampler:
    """A `Sampler` over `server.serve_sampler`, or over vLLM's endpoint of the same name.

    `HttpSampler(url)` asks the server what it is when that is first needed, and waits for the answer. Where the server
    runs in the same event loop, waiting would never end: there, `await HttpSampler.connect(url)`. It can be pickled,
    and used from several event loops.

    Over vLLM (started with `--enable-scale-out`), `context_length` is read from its list of models and the rest has to
    be told. Its weight versions are policy versions where they are numbers; all other tokens get the version that was
    told, or none. Logprobs are recorded only where they are of the distribution that was sampled from.

    Args:
        url: The server's root: "http://127.0.0.1:8000".
        api_key: Sent as a bearer token.
        model: The model's name in requests; None names none.
        context_length: Most tokens of prompt and completion together; None asks the server.
        vocab_size: Ids are below this; None asks the server, which has to be one of ours.
        policy_version: Of the weights that the server has now; None asks the server. Over vLLM it is that of the
            weights whose version there is no number, as that of the ones it was started with ("default").
        processed_logprobs: vLLM was started with `--logprobs-mode processed_logprobs`.
        returns_kept_sets: vLLM was started with `--return-sampling-mask`, and takes no request at temperature 0 or
            without `top_k`.
        send_seeds: Send the seeds of requests to a vLLM too. Our own servers always get them; vLLM for CPUs (0.32) ends
            at a prompt with a seed that is longer than what it computes at once.
        ours: Whether the server is one of ours; None asks it.
        request_timeout: Seconds for one try, waiting for a place in the batch included.
        max_retries: Tries after the first.

    Raises:
        UsageError: no plain http(s) address, or the extra `serve` is not installed.
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
        """The server's root."""
        self._told: _Facts = {
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
        """Sent to a vLLM: requests with another salt share no prefix cache with these."""
        self.server: str | None = None
        """The name of one of our servers that has to answer; None: any. A server that was started again has another
        name, and maybe other weights under the same version."""

    @classmethod
    async def connect(cls, url: str, **settings: Any) -> HttpSampler:
        """A sampler that knows its server; `settings` as above.

        Raises:
            UsageError: the server does not say what has to be known; names it.
            SamplerFault: it cannot be reached, or refuses the key.
        """
        sampler = cls(url, **settings)
        sampler._facts = await sampler._ask_what_it_is()
        return sampler

    def __repr__(self) -> str:
        return f"HttpSampler({self.url!r})"

    # ---- the Sampler protocol

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion together."""
        return int(self._known()["context_length"])

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return int(self._known()["vocab_size"])

    @property
    def policy_version(self) -> int:
        """The version of the weights in use, as of the last answer; 0 where the server does not say."""
        return int(self._known()["policy_version"] or 0)

    async def generate(self, request: SampleRequest) -> Completion:
        """Sample one completion. Cancelling the call cancels it on the server.

        Raises:
            RecordError: an empty or too long prompt, an id outside the vocabulary, or no `top_k` where it is needed.
            SamplerFault: the engine failed, or the server cannot be reached.
        """
        refuse_stop_strings(request)
        asked = replace(request, params=completions.bounded(request.params)) if self._returns_kept_sets else request
        try:
            body = completions.request_body(
                asked, self._model_name(), seed_for_all=self._send_seeds, cache_salt=self.cache_salt
            )
            answer = await self._sampled(protocol.GENERATE, body, if_missing=_NO_TOKEN_ENDPOINT)
        except ClientClosed:
            return nothing_sampled()
        try:
            completion, ours = completions.read_completion(answer, self._told["policy_version"])
            completion = completions.check_experts(completion, request)
        except ValueError as error:
            raise SamplerFault(f"{self.url}: {error}") from None
        if ours is not None:
            self._heard(ours, num_tokens=len(completion.ids))
            return completion
        if completion.policy_versions is not None and len(completion.ids):
            self._heard({"policy_version": int(completion.policy_versions[-1])})
        if not request.params.needs_kept_sets:
            completion = replace(completion, kept_sets=None)
        as_modelled = request.params.temperature == 1 and not request.params.truncates
        return completion if self._processed_logprobs or as_modelled else replace(completion, logprobs=None)

    async def update_weights(self, path: Path, version: int) -> None:
        """Load a Hugging Face folder, which the server reads: it has to be on its machine too.

        Raises:
            ModelError: the folder does not fit; the engine goes on with the weights it has.
            SamplerFault: the server refuses, has no such endpoint, or cannot be reached.
        """
        there = await asyncio.to_thread(path.absolute)  # the server works in another folder
        body = encode({"path": str(there), "version": version})
        answer = await self._client.ask("POST", protocol.WEIGHTS, body, read_answer)
        self._heard(self._object(answer))

    async def prompt_logprobs(self, token_ids: Int32, temperature: float = 1.0) -> Float32:
        """Logprob of each token given those before it: float32 [L]; the first is NaN.

        A vLLM scores at temperature 1 only, and needs room for one more token in its context.

        Raises:
            RecordError: no ids, too many, an id outside the vocabulary, or a temperature that is not above 0.
            UsageError: another temperature than 1, and the server is a vLLM.
            SamplerFault: the server failed, or cannot be reached.
        """
        check_temperature(temperature)
        if not await self._is_ours():
            return await self._scored_by_vllm(token_ids, temperature)
        body = {"token_ids": token_ids, "temperature": temperature}
        answer = self._object(await self._sampled(protocol.PROMPT_LOGPROBS, body))
        self._heard(answer)
        found = answer.get("logprobs")
        try:
            rest = completions.read_plain(found[1:] if isinstance(found, list) else found, len(token_ids) - 1)
        except ValueError as error:
            raise SamplerFault(f"{self.url}: {error}, the first of {len(token_ids)} left out") from None
        return np.concatenate([np.full(1, np.nan, dtype=np.float32), rest])

    async def cached_logprob(self, token_ids: Int32) -> tuple[float, int | None]:
        """Logprob of the last id given those before it, at temperature 1, from a vLLM: a new and ordinary request,
        which reads and writes the prefix cache. And how many tokens it read there; None: the server does not say.

        Raises:
            RecordError: fewer than two ids.
            SamplerFault: the server failed, or cannot be reached.
        """
        if len(token_ids) < 2:
            raise RecordError(f"token_ids: expected at least 2 ids, found {len(token_ids)}")
        body = scoring.last_logprob_body(token_ids, self._model_name(), self.cache_salt)
        answer = await self._sampled(protocol.GENERATE, body, if_missing=_NO_TOKEN_ENDPOINT)
        try:
            return scoring.read_last_logprob(answer, token_ids), completions.read_cached_tokens(answer)
        except ValueError as error:
            raise SamplerFault(f"{self.url}: {error}") from None

    async def close(self) -> None:
        """Let go of the connections; what is in flight in this event loop ends as cancelled. The server goes on."""
        await self._client.close()

    async def hang_up(self) -> None:
        """Close this event loop's connections, before the loop ends; they are made anew when they are needed."""
        await self._client.hang_up()

    async def _scored_by_vllm(self, token_ids: Int32, temperature: float) -> Float32:
        if temperature != 1:
            raise UsageError(f"temperature = {temperature}: a vLLM gives prompt logprobs at temperature 1 only")
        if len(token_ids) == 0:
            raise RecordError("token_ids: expected at least one token id, found none")
        body = scoring.scoring_body(token_ids, self._model_name())
        answer = await self._sampled(protocol.GENERATE, body, if_missing=_NO_TOKEN_ENDPOINT)
        try:
            return scoring.read_scores(answer, token_ids)
        except ValueError as error:
            raise SamplerFault(f"{self.url}: {error}") from None

    def _model_name(self) -> str | None:
        """The model's name in requests."""
        name: str | None = (self._facts or self._told)["model"]
        return name

    async def _is_ours(self) -> bool:
        """Whether the server is one of ours."""
        if self._ours is None:
            self._ours = await self._client.ask("GET", protocol.SAMPLER, None, _is_found)
        return self._ours

    def _object(self, answer: object) -> dict[str, Any]:
        if not isinstance(answer, dict):
            raise SamplerFault(f"{self.url}: expected a JSON object, found {brief(answer)}")
        return answer

    async def _sampled(self, path: str, body: Mapping[str, Any], *, if_missing: str = "") -> Any:
        """An answer of the engine. A key or a name that the server refuses is a fault here, on one rollout."""
        try:
            return await self._client.ask("POST", path, encode(body), lambda answer: read_answer(answer, if_missing))
        except UsageError as error:
            raise SamplerFault(f"{self.url}: {error}") from error

    # ---- what the server is

    def _known(self) -> _Facts:
        if self._facts is None:
            self._facts = self._ask_and_wait()
        return self._facts

    def _ask_and_wait(self) -> _Facts:
        async def ask() -> _Facts:
            async with asyncio.timeout(_SAYS_WITHIN):
                try:
                    return await self._ask_what_it_is()
                finally:
                    await self._client.hang_up()

        with ThreadPoolExecutor(1) as pool:  # this thread may have an event loop, which cannot be waited in
            try:
                return pool.submit(asyncio.run, ask()).result()
            except TimeoutError:
                raise SamplerFault(
                    f"{self.url} did not say what it is within {_SAYS_WITHIN:g} s; if it runs in this event "
                    "loop, use await HttpSampler.connect(url)"
                ) from None

    async def _ask_what_it_is(self) -> _Facts:
        """What was told, and where nothing was, what the server says."""
        said = await self._client.ask(
            "GET", protocol.SAMPLER, None, lambda answer: None if answer.status == 404 else read_answer(answer)
        )
        if said is None:
            said = _read_cards(await self._client.ask("GET", "/v1/models", None, read_answer), self._told["model"])
        if not isinstance(said, dict):
            raise UsageError(f"{self.url} is no server of a model: it says {brief(said)}")
        facts = {name: said.get(name) if told is None else told for name, told in self._told.items()}
        for name in ("context_length", "vocab_size"):
            if not isinstance(facts[name], int):
                raise UsageError(f"{self.url} does not say its {name}; give it: HttpSampler(url, {name}=...)")
        return facts

    def _heard(self, answer: Mapping[str, Any], *, num_tokens: int = 0) -> None:
        """Note the version. Raises a SamplerFault, with the tokens that were drawn in vain, for another server."""
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
    """The JSON of an answer. An error that one of our servers raised is raised here, by its name.

    `if_missing` is what people are told beside a 404.

    Raises:
        VerbatimError: the server's own.
        AttemptFailed: another status, or a body that is no JSON.
    """
    if answer.status != 200:
        ours = None
        with contextlib.suppress(ValueError):
            ours = protocol.read_error(decode(answer))
        if ours is not None:
            raise ours
    return read_json(answer, f" ({if_missing})" if if_missing and answer.status == 404 else "")


def _read_cards(answer: object, model: str | None) -> dict[str, Any]:
    """What a list of models, as OpenAI has it, says of this one, or else of the first."""
    listed = answer.get("data") if isinstance(answer, dict) else None
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    card = next((c for c in cards if c.get("id") == model), cards[0] if cards else {})
    return {"model": card.get("id"), "context_length": card.get("max_model_len")}
