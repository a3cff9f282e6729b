"""A replica of a pool that is one of our own servers, started by `verbatim inference FILE` or `verbatim serve
MODEL`."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final, Literal

from verbatim.core.errors import ModelError, SamplerFault, UsageError
from verbatim.core.texts import brief
from verbatim.core.types import Float32, Int32
from verbatim.inference.http import protocol
from verbatim.inference.http.client import CONNECT, HttpClient, HttpResponse, encode
from verbatim.inference.http.sampler import STARTED_AGAIN, HttpSampler, read_answer
from verbatim.inference.http.uploads import Deliver, path_there
from verbatim.inference.pool.phases import phase
from verbatim.inference.pool.replica import ReplicaLoad
from verbatim.inference.sampler import Completion, SampleRequest
from verbatim.inference.validation import check_ids, check_prompt, check_version

_START = "start it with `verbatim inference FILE` and this run's file"
_FOLDER_HINT = (
    "; its host must have the folder at the same path. Otherwise upload the weights: start it with --uploads FOLDER, "
    'and set inference.torch.weight_transfer = "http"'
)


class ServedReplica:
    """Base class of replicas that are reached over HTTP.

    Args:
        url: Root address of the server.
        name: Name of the replica in messages.
        context_length: Maximum number of tokens in prompt and completion together.
        vocab_size: Size of the vocabulary.
        policy_version: Version of the server's weights.
        api_key: Sent as a bearer token.
        seconds: Timeout in seconds of control requests (all requests except sampling).
        headers: Additional headers for control requests.

    Raises:
        UsageError: the version, a limit or the key is invalid.
    """

    _http: HttpSampler
    """The client for sampling."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        context_length: int,
        vocab_size: int,
        policy_version: int,
        api_key: str | None,
        seconds: float,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        check_version(policy_version)
        self.name: Final = name
        """Name of the replica in messages."""
        self.url: Final = url
        """Root address of the server."""
        self.context_length: Final = context_length
        """Maximum number of tokens in prompt and completion together."""
        self.vocab_size: Final = vocab_size
        """Size of the vocabulary; all ids are below it."""
        self.policy_version = policy_version
        """Policy version of the weights in use."""
        self._client = HttpClient(url, api_key=api_key, request_timeout=seconds, max_retries=0, headers=headers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, name={self.name!r})"

    async def prompt_logprobs(self, token_ids: Int32, temperature: float = 1.0) -> Float32:
        """Logprob of each token given those before it, bypassing the prefix cache: float32 [L]; the first is NaN.

        Raises:
            RecordError: there are no ids or too many (vLLM needs room for one more), an id is outside the vocabulary,
                or the temperature is not above 0.
            UsageError: the temperature is not 1, and the server is vLLM.
            SamplerFault: the server failed, cannot be reached or was restarted.
        """
        ids = check_ids(token_ids, self.vocab_size, "token_ids")
        return await self._http.prompt_logprobs(ids, temperature)


class HttpReplica(ServedReplica):
    """A `Sampler` over one of our own servers, as a replica of a run.

    The server generates a new id at each start. Responses with an id that differs from the one at the first check are
    discarded, because after a restart the loaded weights are gone, which the version number alone would not show.

    Args:
        url: Root address of the server.
        name: Name of the replica in messages.
        context_length: Maximum number of tokens in prompt and completion together that the run needs.
        vocab_size: Size of the model's vocabulary.
        policy_version: Version of the run's initial weights.
        how: Engine settings that the run requires, with the keys of `DescribesEngine`.
        api_key: Sent as a bearer token.
        weight_transfer: With "files", the server reads the published folder at the same path on its host. With "http",
            the folder is uploaded first.
        update_timeout: Timeout in seconds for each phase of a weight update.
        request_timeout: Timeout in seconds for one completion.
        max_retries: Maximum number of further attempts for a completion after the first fails.
        deliver: Brings folders to the server's host in place of `weight_transfer`.

    Raises:
        UsageError: the address is not http or https, or a limit or the key is invalid.
    """

    num_unverified = 0
    """Number of tensors that were loaded without verification. It is 0, because the engine either loads all tensors of
    a folder or fails. Wrong values are found by the canary."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        context_length: int,
        vocab_size: int,
        policy_version: int,
        how: Mapping[str, str],
        api_key: str | None = None,
        weight_transfer: Literal["files", "http"] = "files",
        update_timeout: float = 300.0,
        request_timeout: float = 3600.0,
        max_retries: int = 2,
        deliver: Deliver | None = None,
    ) -> None:
        self._http = HttpSampler(
            url,
            api_key=api_key,
            context_length=context_length,
            vocab_size=vocab_size,
            ours=True,
            request_timeout=request_timeout,
            max_retries=max_retries,
        )
        super().__init__(
            self._http.url,
            name=name,
            context_length=context_length,
            vocab_size=vocab_size,
            policy_version=policy_version,
            api_key=api_key,
            seconds=update_timeout + CONNECT,
        )
        self._first_version = policy_version
        self._how = how
        self._weight_transfer = weight_transfer
        self._deliver = deliver
        self._update_timeout = update_timeout
        self._sessions = uuid.uuid4().hex  # prefix of session names, because a different run may use the same server

    # ---- the Sampler protocol

    async def generate(self, request: SampleRequest) -> Completion:
        """Sample one completion. Cancelling the call cancels the request on the server.

        Raises:
            RecordError: the prompt is empty or too long, or an id is outside the vocabulary.
            SamplerFault: the engine failed, the server cannot be reached or was restarted, or the completion has no
                logprobs or versions.
        """
        check_prompt(request, vocab_size=self.vocab_size, context_length=self.context_length)
        session = f"{self._sessions}/{request.session}" if request.session else ""
        found = await self._http.generate(replace(request, session=session))
        if len(found.ids) and (found.logprobs is None or found.policy_versions is None):
            raise SamplerFault(f"{self.name}: the completion lacks logprobs or versions", num_tokens=len(found.ids))
        return found

    async def update_weights(self, path: Path, version: int) -> None:
        """Load a Hugging Face folder between two decode steps. Requests in flight continue.

        Raises:
            ModelError: the weights do not fit the model, or the folder is missing. The engine keeps its current
                weights.
            UsageError: the version is invalid, or the server does not accept weights from this folder.
            SamplerFault: a phase failed or timed out; the message names the replica and the phase.
        """
        check_version(version)
        async with phase(self.name, "upload weights", self._update_timeout):
            there = await path_there(
                self._client, path, version, shares_folders=self._weight_transfer == "files", deliver=self._deliver
            )
        answer = await self._ask("load weights", "POST", protocol.WEIGHTS, {"path": there, "version": version})
        self._refuse_another_server(answer)
        if answer.get("policy_version") != version:
            raise SamplerFault(
                f"{self.name}: load weights: the server reports version "
                f"{brief(answer.get('policy_version'))}, expected {version}"
            )
        self.policy_version = version

    async def close(self) -> None:
        """Close the connections. Requests in flight in this event loop end as cancelled. The server keeps running."""
        await self._http.close()
        await self._client.close()

    # ---- description and state of the server

    async def check_server(self) -> None:
        """Query the server and check that it fits the run. From then on, responses with another server id are refused.

        Raises:
            UsageError: the server does not fit; the message lists every problem with its fix.
            SamplerFault: the server cannot be reached.
        """
        try:
            found = await self._ask("describe", "GET", protocol.SAMPLER, read=_read_unless_refused)
        except UsageError as error:
            raise UsageError(f"{self.name}: {error}") from error
        if isinstance(found, str):
            raise UsageError(f"{self.name}: {found}")
        wrong = self._misfits(found)
        if wrong:
            raise UsageError(f"{self.name} cannot be used: {'; '.join(wrong)}")
        self._http.server = found["server"]
        self.policy_version = found["policy_version"]

    def _misfits(self, facts: Mapping[str, Any]) -> list[str]:
        """Messages about everything in the server's description that does not fit the run."""
        if not isinstance(facts.get("server"), str) or not isinstance(facts.get("policy_version"), int):
            return [
                f"it runs another version of Verbatim (it replied {brief(facts)}); install the same version on both "
                "sides"
            ]
        how = facts.get("how") if isinstance(facts.get("how"), dict) else {}
        found = [
            f"its {key} is {brief(how.get(key))}, expected {wanted!r}: {_START}"  # type: ignore[union-attr]
            for key, wanted in self._how.items()
            if how.get(key) != wanted  # type: ignore[union-attr]
        ]
        checks = (
            (
                facts.get("vocab_size") == self.vocab_size,
                f"it serves {brief(facts.get('model'))} with {brief(facts.get('vocab_size'))} ids, expected the model "
                f"of this run with {self.vocab_size}: {_START}",
            ),
            (
                isinstance(length := facts.get("context_length"), int) and length >= self.context_length,
                f"its context is {brief(length)} tokens, expected at least {self.context_length} "
                f"(orchestrator.seq_len): {_START}, or `verbatim serve` with --context-length {self.context_length}",
            ),
            (
                facts.get("takes_weights") is True,
                "it does not accept weights: start it with --api-key-env VARIABLE, and name the variable in "
                "inference.torch.api_key_env; or start it with --weights-folder and the folder of this run",
            ),
            (
                self._weight_transfer != "http" or facts.get("takes_uploads") is True,
                "it does not accept uploads: start it with --uploads FOLDER",
            ),
        )
        return [*(text for ok, text in checks if not ok), *found]

    async def prove_path(self, folder: Path) -> None:
        """Load the run's initial weights, so that an unreadable path fails at the start instead of at the first update.

        Raises:
            UsageError: the server does not accept the weights; the message says what to do.
            SamplerFault: see `update_weights`.
        """
        try:
            await self.update_weights(folder, self._first_version)
        except (ModelError, UsageError) as error:
            hint = _FOLDER_HINT if self._weight_transfer == "files" else ""
            raise UsageError(
                f"{self.name} does not accept the weights of this run: {error}. It has to serve the model "
                f"of this run{hint}"
            ) from error

    async def health(self) -> None:
        """Check that the server responds and its engine is alive.

        Raises:
            SamplerFault: there was no response within 10 seconds, the engine is dead, or the server was restarted.
        """
        async with phase(self.name, "health", CONNECT):
            self._refuse_another_server(await self._client.ask("GET", "/health", None, _read_object))

    async def load_metrics(self) -> ReplicaLoad:
        """The server's current load.

        Raises:
            SamplerFault: the server does not report its load.
        """
        answer = await self._ask("load", "GET", protocol.LOAD)
        figures = {field.name: answer.get(field.name) for field in fields(ReplicaLoad)}
        if not all(isinstance(value, int | float) for value in figures.values()):
            raise SamplerFault(f"{self.name}: load: expected numbers, found {brief(answer)}")
        return ReplicaLoad(**figures)

    def _refuse_another_server(self, answer: Mapping[str, Any]) -> None:
        if self._http.server is not None and answer.get("server") != self._http.server:
            raise SamplerFault(f"{self.name}: {STARTED_AGAIN}")

    async def _ask(
        self,
        doing: str,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        read: Callable[[HttpResponse], Any] | None = None,
    ) -> Any:
        async with phase(self.name, doing, self._update_timeout):
            return await self._client.ask(method, path, None if body is None else encode(body), read or _read_object)


def _read_object(answer: HttpResponse) -> dict[str, Any]:
    found = read_answer(answer)
    if not isinstance(found, dict):
        raise SamplerFault(f"expected a JSON object, found {brief(found)}")
    return found


def _read_unless_refused(answer: HttpResponse) -> dict[str, Any] | str:
    """The server's description, or a message for people if the status is 401 or 404."""
    if answer.status == 401:
        return (
            "it needs a key, or another one; give it in the environment variable that inference.torch.api_key_env names"
        )
    if answer.status == 404:
        return (
            "it is not a server of `verbatim inference` or `verbatim serve`; for vLLM servers use [inference.vllm] and "
            'inference.backend = "vllm"'
        )
    return _read_object(answer)
