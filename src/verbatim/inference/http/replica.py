"""One of our own servers as a replica of a pool: started by `verbatim inference FILE` or `verbatim serve MODEL`."""

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
from verbatim.inference.http.uploads import path_there
from verbatim.inference.pool.phases import phase
from verbatim.inference.pool.replica import ReplicaLoad
from verbatim.inference.sampler import Completion, SampleRequest
from verbatim.inference.validation import check_ids, check_prompt, check_version

_START = "start it with `verbatim inference FILE` and this run's file"
_FROM_A_FOLDER = (
    "; its host must have the folder at the same path, or be sent it: start it with --uploads FOLDER, "
    'and set inference.torch.weight_transfer = "http"'
)


class ServedReplica:
    """What replicas are whose servers are asked over HTTP.

    Args:
        url: The server's root.
        name: For messages.
        context_length: Most tokens of prompt and completion together.
        vocab_size: Ids are below this.
        policy_version: Of the weights that the server has.
        api_key: Sent as a bearer token.
        seconds: For the answer to what is no request of an episode.
        headers: Sent with that.

    Raises:
        UsageError: a version, a limit or a key that cannot be used.
    """

    _http: HttpSampler
    """Where new requests go."""

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
        """For messages."""
        self.url: Final = url
        """The server's root."""
        self.context_length: Final = context_length
        """Most tokens of prompt and completion together."""
        self.vocab_size: Final = vocab_size
        """Ids are below this."""
        self.policy_version = policy_version
        """The version of the weights in use."""
        self._client = HttpClient(url, api_key=api_key, request_timeout=seconds, max_retries=0, headers=headers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r}, name={self.name!r})"

    async def prompt_logprobs(self, token_ids: Int32, temperature: float = 1.0) -> Float32:
        """Logprob of each token given those before it, past the prefix cache: float32 [L]; the first is NaN.

        Raises:
            RecordError: no ids, too many (over vLLM one more must fit into the context), an id outside the vocabulary,
                or a temperature that is not above 0.
            UsageError: another temperature than 1, over vLLM.
            SamplerFault: the server failed, cannot be reached or was started again.
        """
        ids = check_ids(token_ids, self.vocab_size, "token_ids")
        return await self._http.prompt_logprobs(ids, temperature)


class HttpReplica(ServedReplica):
    """A `Sampler` over one server of ours that belongs to a run.

    The server has another name each time that it is started. An answer under another name than at the start is
    discarded: weights that were loaded before are gone then, and the version alone would not show it.

    Args:
        url: The server's root.
        name: For messages.
        context_length: Most tokens of prompt and completion together that the run asks for.
        vocab_size: The model's: ids are below this.
        policy_version: Of the weights that the run begins with.
        how: How the run wants the engine to compute: the keys of `DescribesEngine`.
        api_key: Sent as a bearer token.
        weight_transfer: "files": the server reads the published folder, which has the same path on its host. "http":
            the folder is sent there first.
        update_timeout: Seconds for each phase of a weight update.
        request_timeout: Seconds for one completion.
        max_retries: Further attempts of a completion.

    Raises:
        UsageError: no plain http(s) address, or a limit or key that cannot be used.
    """

    num_unverified = 0
    """The engine takes every tensor of a folder, or none; which ones, the canary shows."""

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
        self._update_timeout = update_timeout
        self._sessions = uuid.uuid4().hex  # another run may have left sessions of the same names

    # ---- the Sampler protocol

    async def generate(self, request: SampleRequest) -> Completion:
        """Sample one completion. Cancelling the call cancels it on the server.

        Raises:
            RecordError: an empty or too long prompt, or an id outside the vocabulary.
            SamplerFault: the engine failed, the server cannot be reached or was started again, or a token came without
                logprob or version.
        """
        check_prompt(request, vocab_size=self.vocab_size, context_length=self.context_length)
        session = f"{self._sessions}/{request.session}" if request.session else ""
        found = await self._http.generate(replace(request, session=session))
        if len(found.ids) and (found.logprobs is None or found.policy_versions is None):
            raise SamplerFault(f"{self.name}: a completion without logprobs or versions", num_tokens=len(found.ids))
        return found

    async def update_weights(self, path: Path, version: int) -> None:
        """Load a Hugging Face folder between two decode steps; requests in flight continue.

        Raises:
            ModelError: the folder does not fit, or is not there; the engine goes on with the weights it has.
            UsageError: an invalid version, or the server does not take weights from this folder.
            SamplerFault: a phase failed or took too long: names the replica and the phase.
        """
        check_version(version)
        async with phase(self.name, "upload weights", self._update_timeout):
            there = await path_there(self._client, path, version, shares_folders=self._weight_transfer == "files")
        answer = await self._ask("load weights", "POST", protocol.WEIGHTS, {"path": there, "version": version})
        self._refuse_another_server(answer)
        if answer.get("policy_version") != version:
            raise SamplerFault(
                f"{self.name}: load weights: its weights are of version "
                f"{brief(answer.get('policy_version'))}, expected {version}"
            )
        self.policy_version = version

    async def close(self) -> None:
        """Let go of the connections; what is in flight in this event loop ends as cancelled. The server goes on."""
        await self._http.close()
        await self._client.close()

    # ---- what the server is, and how it is

    async def check_server(self) -> None:
        """Ask the server what it is. From here on it has to be the same one that answers.

        Raises:
            UsageError: names everything that is wrong, and what to type.
            SamplerFault: it cannot be reached.
        """
        try:
            said = await self._ask("what it is", "GET", protocol.SAMPLER, read=_read_unless_refused)
        except UsageError as error:
            raise UsageError(f"{self.name}: {error}") from error
        if isinstance(said, str):
            raise UsageError(f"{self.name}: {said}")
        wrong = self._wrong(said)
        if wrong:
            raise UsageError(f"{self.name} cannot be used: {'; '.join(wrong)}")
        self._http.server = said["server"]
        self.policy_version = said["policy_version"]

    def _wrong(self, said: Mapping[str, Any]) -> list[str]:
        if not isinstance(said.get("server"), str) or not isinstance(said.get("policy_version"), int):
            return [
                f"it is a server of another version of Verbatim ({brief(said)}); install the same version on both sides"
            ]
        how = said.get("how") if isinstance(said.get("how"), dict) else {}
        found = [
            f"its {key} is {brief(how.get(key))}, expected {wanted!r}: {_START}"  # type: ignore[union-attr]
            for key, wanted in self._how.items()
            if how.get(key) != wanted  # type: ignore[union-attr]
        ]
        checks = (
            (
                said.get("vocab_size") == self.vocab_size,
                f"it serves {brief(said.get('model'))} with {brief(said.get('vocab_size'))} ids, expected the model of "
                f"this run with {self.vocab_size}: {_START}",
            ),
            (
                isinstance(length := said.get("context_length"), int) and length >= self.context_length,
                f"its context is {brief(length)} tokens, expected at least {self.context_length} "
                f"(orchestrator.seq_len): {_START}, or `verbatim serve` with --context-length {self.context_length}",
            ),
            (
                said.get("takes_weights") is True,
                "it takes no weights: start it with --api-key-env VARIABLE, and name the variable in "
                "inference.torch.api_key_env; or with --weights-folder and the folder of this run",
            ),
            (
                self._weight_transfer != "http" or said.get("takes_uploads") is True,
                "it takes no uploads: start it with --uploads FOLDER",
            ),
        )
        return [*(text for ok, text in checks if not ok), *found]

    async def prove_path(self, folder: Path) -> None:
        """Load the weights that the run begins with.

        Raises:
            UsageError: the server does not take them; says what to type.
            SamplerFault: as `update_weights`.
        """
        try:
            await self.update_weights(folder, self._first_version)
        except (ModelError, UsageError) as error:
            hint = _FROM_A_FOLDER if self._weight_transfer == "files" else ""
            raise UsageError(
                f"{self.name} does not take the weights of this run: {error}. It has to serve the model "
                f"of this run{hint}"
            ) from error

    async def health(self) -> None:
        """Return if the server answers and its engine lives.

        Raises:
            SamplerFault: it does not within 10 seconds, its engine is dead, or it was started again.
        """
        async with phase(self.name, "health", CONNECT):
            self._refuse_another_server(await self._client.ask("GET", "/health", None, _read_object))

    async def load_metrics(self) -> ReplicaLoad:
        """How busy the server is.

        Raises:
            SamplerFault: it does not say.
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
    """What the server is, or why it does not say: for people."""
    if answer.status == 401:
        return (
            "it needs a key, or another one; give it in the environment variable that inference.torch.api_key_env names"
        )
    if answer.status == 404:
        return (
            "it is no server of `verbatim inference` or `verbatim serve`; servers of vLLM belong in "
            '[inference.vllm], with inference.backend = "vllm"'
        )
    return _read_object(answer)
