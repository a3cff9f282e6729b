"""Defines the `Sampler` protocol for engines that generate: exact ids in; exact ids, logprobs, policy versions out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, cast, runtime_checkable

import numpy as np

from verbatim.core.errors import EngineDead
from verbatim.core.sampling import SamplingParams
from verbatim.core.types import Experts, Float32, Int32, KeptSets, StopReason

_LOOK_EVERY = 0.2
"""Seconds between two checks of whether the engine is alive."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleRequest:
    """A request for one completion, as exact ids."""

    prompt_ids: Int32
    """Prompt: int32 [P], not empty."""
    params: SamplingParams
    """Sampling parameters."""
    seed: int
    """Seed of the randomness, which depends only on the seed and on each token's position in the whole sequence, not on
    the batch."""
    session: str = ""
    """Name that requests have in common if their prompts share a growing prefix. It is a hint for prefix caching, and
    may be empty."""
    routed_experts_start: int = 0
    """Number of leading prompt tokens whose routed experts need not be returned."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """A sampled completion, as exact ids."""

    ids: Int32
    """Sampled ids: int32 [C]; ends with a stop id if `stop_reason` is "stop"."""
    logprobs: Float32 | None
    """Logprob of each token under the distribution that it was sampled from: float32 [C]; None if the engine does not
    report logprobs."""
    policy_versions: Int32 | None
    """Policy version that sampled each token: int32 [C]; None if the engine does not report versions."""
    stop_reason: StopReason
    """"stop", "length" or "cancelled"."""
    queued_seconds: float = 0.0
    """Seconds that the request waited for a slot in the batch."""
    generated_seconds: float = 0.0
    """Seconds from the time when the request got a slot to its last token."""
    routed_experts: Experts | None = None
    """Experts that computed each token: [N, D, K], from the request's `routed_experts_start` to the second to last
    token (the last token is sampled, but never fed to the model); None if the engine does not return experts."""
    kept_sets: KeptSets | None = None
    """The kept set of each token, if the request asks for kept sets (`needs_kept_sets`)."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens that came from the prefix cache; None if the engine does not report it."""
    num_lost_tokens: int = 0
    """Number of tokens that are known to have been sampled for this request but were discarded, because their replica
    was lost or had wrong weights. These tokens are not in `ids`, nor in any other completion."""


def nothing_sampled(queued_seconds: float = 0.0) -> Completion:
    """The completion of a request that was cancelled before its first token."""
    return Completion(
        ids=np.empty(0, dtype=np.int32),
        logprobs=np.empty(0, dtype=np.float32),
        policy_versions=np.empty(0, dtype=np.int32),
        stop_reason=StopReason.CANCELLED,
        queued_seconds=queued_seconds,
    )


@runtime_checkable
class CanFail(Protocol):
    """A sampler that reports the death of its engine."""

    @property
    def failure(self) -> str | None:
        """The reason why the engine is dead; None if it is alive."""


def failure_of(sampler: Sampler) -> str | None:
    """The reason why the sampler's engine is dead; None if it is alive or the sampler does not report failures."""
    return sampler.failure if isinstance(sampler, CanFail) else None


async def watch_engine(sampler: Sampler) -> None:
    """Wait until the engine dies.

    Raises:
        EngineDead: the engine is dead; the message has the reason.
    """
    while (failure := failure_of(sampler)) is None:  # noqa: ASYNC110 - the engine dies on its own thread, for any reason
        await asyncio.sleep(_LOOK_EVERY)
    raise EngineDead(failure)


@runtime_checkable
class Sampler(Protocol):
    """An engine that samples completions. All methods may be called concurrently from one event loop.

    Every method raises SamplerFault once the engine has failed permanently, and RecordError for a prompt that is empty,
    too long, or contains ids outside the vocabulary.
    """

    @property
    def context_length(self) -> int:
        """Maximum number of tokens in prompt and completion together."""

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary. All ids are below it."""

    @property
    def policy_version(self) -> int:
        """Policy version of the weights in use."""

    async def generate(self, request: SampleRequest) -> Completion:
        """Sample one completion. Cancelling the call frees its slot in the batch.

        An engine that knows how many tokens it had sampled for a cancelled or failed call reports the number, so that
        the ledger adds up: `raise cancelled(num_tokens)` (from `inference.cancelled`) or `SamplerFault(...,
        num_tokens=...)`.
        """

    async def update_weights(self, path: Path, version: int) -> None:
        """Load weights from a Hugging Face folder between two decode steps. Requests in flight continue."""

    async def prompt_logprobs(self, token_ids: Int32, temperature: float = 1.0) -> Float32:
        """Logprob of each token given the tokens before it: float32 [L]; the first is NaN."""

    async def close(self) -> None:
        """Stop the sampler. Requests in flight end with the stop reason "cancelled"."""


Watch: TypeAlias = Callable[[Sequence[int]], bool]
"""A callback for sampled tokens. It receives the ids sampled since its last call, in order. It returns True to end the
completion after these ids."""


@runtime_checkable
class ShowsTokens(Protocol):
    """A sampler that passes tokens to a callback as they are sampled, and stops when the callback says so."""

    async def generate_watched(self, request: SampleRequest, watch: Watch) -> Completion:
        """Like `generate`, but with a callback. A completion that `watch` ends has the stop reason "stop".

        Args:
            request: As in `generate`.
            watch: Called during sampling, on any thread. It delays the engine, so it has to be fast. It is not called
                for tokens that end the completion anyway. If it raises, the request fails.
        """


async def generate_watched(sampler: Sampler, request: SampleRequest, watch: Watch | None) -> Completion:
    """Sample one completion, with the callback if the sampler supports it. Otherwise `watch` is never called."""
    if watch is not None and isinstance(sampler, ShowsTokens):
        return await sampler.generate_watched(request, watch)
    return await sampler.generate(request)


@runtime_checkable
class DescribesEngine(Protocol):
    """A sampler that reports its engine's settings, so that a client over HTTP can compare them with its own."""

    @property
    def how(self) -> Mapping[str, str]:
        """Engine settings, such as `{"dtype": "float32", "on_weight_update": "recompute"}`."""


@runtime_checkable
class AsksPrefixCache(Protocol):
    """A sampler that can score an id through its prefix cache."""

    async def cached_logprob(self, token_ids: Int32) -> float:
        """Logprob of the last id given the ids before it, at temperature 1.

        This is an ordinary request, which reads and writes the prefix cache as the requests of episodes do, so that a
        cache entry computed with old weights shows up in the logprob.
        """


class WeightCheck(Protocol):
    """Checks whether samplers have the published weights."""

    async def prepare(self, sampler: Sampler) -> None:
        """Fill a sampler's caches with entries that must not survive the next update. Called before the update.

        Raises:
            SamplerFault: the sampler failed.
        """

    async def __call__(self, sampler: Sampler) -> str | None:
        """Return evidence that the sampler does not have the published weights; None if it has them.

        Raises:
            SamplerFault: the sampler failed.
        """


class SleepingSampler(Sampler, Protocol):
    """A sampler that can hand its device over to the trainer."""

    async def sleep(self) -> None:
        """Release the device memory of weights and cache. Requests in flight finish first. New requests wait for the
        next weight update, which allocates the memory again.

        Raises:
            SamplerFault: the sampler failed permanently.
        """


class ReplicatedSampler(Sampler, Protocol):
    """A sampler with several replicas, each of which has to be checked."""

    async def update_replicas(self, path: Path, version: int, check: WeightCheck) -> None:
        """Load a Hugging Face folder on all replicas concurrently. Replicas that join later are checked too.

        Completions of a replica are withheld from the start of its update until its check has passed. If the check
        fails, the replica is removed, and the others continue.

        Raises:
            EngineDead: no replica is left; the message lists what happened to each.
        """

    async def check_replicas(self, check: WeightCheck) -> None:
        """Check the initial weights of all replicas.

        Raises:
            EngineDead: no replica is left; the message lists what happened to each.
        """


def as_replicated(sampler: Sampler) -> ReplicatedSampler | None:
    """The sampler if it is a `ReplicatedSampler`, else None.

    `isinstance` is not used, because with a runtime protocol it reads the sampler's properties, and `HttpSampler` sends
    a request to read them.
    """
    is_one = all(hasattr(type(sampler), name) for name in ("update_replicas", "check_replicas"))
    return cast(ReplicatedSampler, sampler) if is_one else None
