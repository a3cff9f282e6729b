"""Defines the `Sampler` protocol of rollout engines: exact ids in, exact ids, logprobs and policy versions out."""

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
"""Seconds between two checks that the engine lives."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleRequest:
    """One generation, as exact ids."""

    prompt_ids: Int32
    """Prompt: int32 [P], not empty."""
    params: SamplingParams
    """Sampling parameters."""
    seed: int
    """Randomness is a function of (seed, position of the token in the whole sequence) only."""
    session: str = ""
    """Requests of one session share a growing prefix: a hint for prefix caching; may be empty."""
    routed_experts_start: int = 0
    """Tokens at the beginning of the prompt whose experts need not be returned, by a sampler that returns any."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """A sampled completion, as exact ids."""

    ids: Int32
    """Sampled ids: int32 [C]; ends with a stop id if `stop_reason` is "stop"."""
    logprobs: Float32 | None
    """float32 [C], of the distribution that was sampled from; None: the engine gives none."""
    policy_versions: Int32 | None
    """Version of the weights that sampled each token: int32 [C]; None: the engine gives none."""
    stop_reason: StopReason
    """"stop", "length" or "cancelled"."""
    queued_seconds: float = 0.0
    """Seconds of waiting for a slot in the batch."""
    generated_seconds: float = 0.0
    """Seconds from then to the last token."""
    routed_experts: Experts | None = None
    """The experts that computed each token from `routed_experts_start` of the request on, but for the last one, which
    is sampled and not computed: [N, D, K]. None: the engine returns none."""
    kept_sets: KeptSets | None = None
    """The ids among which each token was drawn, of C ids, where the request asks for them (`needs_kept_sets`)."""
    num_cached_tokens: int | None = None
    """Tokens of the prompt that the engine did not compute for this request, because a prefix cache had them; None =
    the engine does not say."""
    num_lost_tokens: int = 0
    """Tokens known to have been drawn for this request by replicas that were lost or whose weights were wrong. They are
    in no completion, and `ids` does not count them."""


def nothing_sampled(queued_seconds: float = 0.0) -> Completion:
    """A completion that was cancelled before its first token."""
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
        """Why the engine is dead; None while it lives."""


def failure_of(sampler: Sampler) -> str | None:
    """Why the sampler's engine is dead; None while it lives, or if the sampler cannot report it."""
    return sampler.failure if isinstance(sampler, CanFail) else None


async def watch_engine(sampler: Sampler) -> None:
    """Wait until the engine is dead.

    Raises:
        EngineDead: the engine is dead; the message says why.
    """
    while (failure := failure_of(sampler)) is None:  # noqa: ASYNC110 - the engine dies on its own thread, for any reason
        await asyncio.sleep(_LOOK_EVERY)
    raise EngineDead(failure)


@runtime_checkable
class Sampler(Protocol):
    """A rollout engine. All methods may be called concurrently from one event loop.

    Raises (everywhere): SamplerFault when the engine failed for good; RecordError for a prompt that is empty,
    too long, or holds ids outside the vocabulary.
    """

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion together."""

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""

    @property
    def policy_version(self) -> int:
        """The version of the weights in use."""

    async def generate(self, request: SampleRequest) -> Completion:
        """Sample one completion. Cancelling the call frees its slot in the batch.

        An engine that knows how many tokens it had drawn for a cancelled or failed call reports the number:
        `raise cancelled(num_tokens)` (in `inference.cancelled`), `SamplerFault(..., num_tokens=...)`.
        """

    async def update_weights(self, path: Path, version: int) -> None:
        """Load a Hugging Face folder between two decode steps; requests in flight continue."""

    async def prompt_logprobs(self, token_ids: Int32, temperature: float = 1.0) -> Float32:
        """Logprob of each token given those before it: float32 [L]; the first is NaN."""

    async def close(self) -> None:
        """Stop; requests in flight end as cancelled."""


Watch: TypeAlias = Callable[[Sequence[int]], bool]
"""Gets the ids drawn since its last call, in order; True ends the completion with the last of them."""


@runtime_checkable
class ShowsTokens(Protocol):
    """A sampler that shows tokens as they are drawn, and can be told to stop there."""

    async def generate_watched(self, request: SampleRequest, watch: Watch) -> Completion:
        """As `generate`, for someone who watches; a completion that `watch` ends has the stop reason "stop".

        Args:
            request: As in `generate`.
            watch: Called on any thread while tokens are drawn, so it has to be quick; not for the tokens with which a
                completion ends anyway. An exception of it fails the request.
        """


async def generate_watched(sampler: Sampler, request: SampleRequest, watch: Watch | None) -> Completion:
    """Sample a completion while it is watched, where the sampler shows its tokens; else whole and unwatched."""
    if watch is not None and isinstance(sampler, ShowsTokens):
        return await sampler.generate_watched(request, watch)
    return await sampler.generate(request)


@runtime_checkable
class DescribesEngine(Protocol):
    """A sampler that says how it was started, for those who find it behind a server."""

    @property
    def how(self) -> Mapping[str, str]:
        """`{"dtype": "float32", "on_weight_update": "recompute"}`."""


@runtime_checkable
class AsksPrefixCache(Protocol):
    """A sampler whose prefix cache can be asked for a logprob."""

    async def cached_logprob(self, token_ids: Int32) -> float:
        """Logprob of the last id given those before it, at temperature 1.

        The request is new and ordinary: it reads the prefix cache as those of episodes do, and writes it.
        """


class WeightCheck(Protocol):
    """Finds out whether samplers hold the published weights."""

    async def prepare(self, sampler: Sampler) -> None:
        """Called before a sampler loads: put into its caches what must not outlive its old weights.

        Raises:
            SamplerFault: the sampler failed.
        """

    async def __call__(self, sampler: Sampler) -> str | None:
        """What shows that the sampler does not hold the published weights; None if it does.

        Raises:
            SamplerFault: the sampler failed.
        """


class SleepingSampler(Sampler, Protocol):
    """A sampler that can leave its device to the trainer."""

    async def sleep(self) -> None:
        """Release the device's memory, weights and cache. Requests in flight end first; others wait until the next
        update, which takes the memory again.

        Raises:
            SamplerFault: the sampler failed for good.
        """


class ReplicatedSampler(Sampler, Protocol):
    """A sampler of several replicas, each of which has to be checked."""

    async def update_replicas(self, path: Path, version: int, check: WeightCheck) -> None:
        """Load a Hugging Face folder on every replica, at the same time. Replicas that join later are checked too.

        What a replica samples from the beginning of its update is withheld until its check has passed. One that fails
        it is taken out, and the others go on.

        Raises:
            EngineDead: no replica is left; says what happened to each.
        """

    async def check_replicas(self, check: WeightCheck) -> None:
        """Check the weights that the replicas begin with.

        Raises:
            EngineDead: no replica is left; says what happened to each.
        """


def as_replicated(sampler: Sampler) -> ReplicatedSampler | None:
    """The sampler if it is a `ReplicatedSampler`, else None.

    `isinstance` would read its properties, for which a sampler over HTTP asks its server.
    """
    is_one = all(hasattr(type(sampler), name) for name in ("update_replicas", "check_replicas"))
    return cast(ReplicatedSampler, sampler) if is_one else None
