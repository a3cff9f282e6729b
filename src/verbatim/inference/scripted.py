"""A sampler that returns scripted completions, for testing callers without a model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from verbatim.core.errors import ModelError, RecordError, SamplerFault
from verbatim.core.types import Float32, Ids, Int32, StopReason
from verbatim.inference.cancelled import cancelled
from verbatim.inference.sampler import Completion, SampleRequest, Watch
from verbatim.inference.validation import check_ids, check_prompt

Fault: TypeAlias = Literal["fail", "hang", "wrong_length", "outside_vocabulary", "nan"]
"""Fault to inject into a request: "fail" raises SamplerFault, "hang" never returns, "wrong_length" returns one logprob
too few, "outside_vocabulary" returns an id equal to `vocab_size`, and "nan" returns a NaN logprob."""

Script: TypeAlias = Callable[[SampleRequest], Ids] | Mapping[tuple[int, ...], Ids] | Sequence[Ids]
"""A script: a function of the request, completions by prompt, or completions in the order of the requests."""


def default_logprob(token_id: int) -> float:
    """The logprob -1 / (1 + id), which is different for each id, so that a test can tell which token it belongs to.

    >>> default_logprob(3)
    -0.25
    """
    return -1.0 / (1 + token_id)


@dataclass(kw_only=True)
class ScriptedSampler:
    """A `Sampler` whose completions come from a script, cut at stop ids, `max_tokens` and the end of the context.

    Example:
        >>> from verbatim.inference import SamplingParams
        >>> sampler = ScriptedSampler(script=[[5, 6, 2]], vocab_size=10, context_length=32)
        >>> request = SampleRequest(prompt_ids=np.array([1], np.int32), seed=0,
        ...                         params=SamplingParams(stop_token_ids=(6,)))
        >>> completion = asyncio.run(sampler.generate(request))
        >>> completion.ids.tolist(), completion.stop_reason.value
        ([5, 6], 'stop')
    """

    script: Script
    """The completions."""
    vocab_size: int
    """Size of the vocabulary; all ids are below it."""
    context_length: int
    """Maximum number of tokens in prompt and completion together."""
    logprob: Callable[[int], float] | None = default_logprob
    """Maps a token id to its logprob. If None, completions have no logprobs."""
    seconds_per_token: float = 0.0
    """Delay in seconds before each token. Even with 0, other tasks run between tokens."""
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep
    """Called and awaited with `seconds_per_token` before each token. A test can pass its own function to control when
    tokens are sampled."""
    policy_version: int = 0
    """The current policy version. Each token gets the version that is current when it is sampled."""
    trouble: Mapping[int, Fault] | Callable[[int, SampleRequest], Fault | None] = field(default_factory=dict)
    """Faults to inject, either by index in `requests` or as a function of index and request."""
    failing_updates: frozenset[int] = frozenset()
    """Versions for which `update_weights` raises ModelError."""
    requests: list[SampleRequest] = field(default_factory=list, init=False)
    """All requests, in order."""
    updates: list[tuple[Path, int]] = field(default_factory=list, init=False)
    """(path, version) of each successful update, in order."""
    num_cancelled: int = field(default=0, init=False)
    """Number of calls that were cancelled by their caller."""
    num_in_flight: int = field(default=0, init=False)
    """Number of calls in progress."""
    num_drawn: int = field(default=0, init=False)
    """Number of sampled tokens, including the tokens of cancelled calls."""
    _closed: asyncio.Event = field(default_factory=asyncio.Event, init=False, repr=False)

    async def generate(self, request: SampleRequest, watch: Watch | None = None) -> Completion:
        """Return the scripted completion. `watch` is called after each token except the last.

        Raises:
            RecordError: the prompt is invalid, or the script has no completion for this request.
            SamplerFault: `trouble` makes the request fail, or the sampler is closed.
            asyncio.CancelledError: the call was cancelled; the error has the number of sampled tokens.
        """
        check_prompt(request, vocab_size=self.vocab_size, context_length=self.context_length)
        if self._closed.is_set():
            raise SamplerFault("the sampler is closed; make a new one")
        index = len(self.requests)
        self.requests.append(request)
        self.num_in_flight += 1
        versions: list[int] = []
        try:
            return await self._answer(index, request, versions, watch)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise cancelled(len(versions)) from None
        finally:
            self.num_in_flight -= 1

    generate_watched = generate

    async def _answer(self, index: int, request: SampleRequest, versions: list[int], watch: Watch | None) -> Completion:
        """Run the request. For each sampled token, its version is appended to `versions`, so that the number of tokens
        is known if the call is cancelled."""
        trouble = self.trouble(index, request) if callable(self.trouble) else self.trouble.get(index)
        if trouble == "fail":
            raise SamplerFault(f"request {index} fails: the script says so")
        began = time.perf_counter()
        ids, reason = self._cut(self._look_up(index, request), request)
        if trouble == "hang":
            await self._closed.wait()
        for _ in ids:
            await self.pause(self.seconds_per_token)
            if self._closed.is_set():
                break
            versions.append(self.policy_version)
            self.num_drawn += 1
            if watch is not None and len(versions) < len(ids) and watch([int(ids[len(versions) - 1])]):
                ids, reason = ids[: len(versions)], StopReason.STOP
                break
        if self._closed.is_set():
            ids, reason = ids[: len(versions)], StopReason.CANCELLED
        logprobs = None
        if self.logprob is not None:
            logprobs = np.array([self.logprob(int(i)) for i in ids], dtype=np.float32)
        if trouble == "outside_vocabulary":
            ids[-1:] = self.vocab_size
        elif trouble == "wrong_length" and logprobs is not None:
            logprobs = logprobs[:-1]
        elif trouble == "nan" and logprobs is not None:
            logprobs[-1:] = np.nan
        return Completion(
            ids=ids,
            logprobs=logprobs,
            policy_versions=np.array(versions, dtype=np.int32),
            stop_reason=reason,
            generated_seconds=time.perf_counter() - began,
        )

    def _look_up(self, index: int, request: SampleRequest) -> Ids:
        if callable(self.script):
            return self.script(request)
        if isinstance(self.script, Mapping):
            prompt = tuple(int(i) for i in request.prompt_ids)
            if prompt not in self.script:
                raise RecordError(f"the script has no completion for the prompt {prompt}")
            return self.script[prompt]
        if index >= len(self.script):
            raise RecordError(f"the script has {len(self.script)} completions, but request {index} came")
        return self.script[index]

    def _cut(self, ids: Ids, request: SampleRequest) -> tuple[Int32, StopReason]:
        """Cut after the first stop id, or at the length limits. Without a stop id, the stop reason is always
        "length"."""
        drawn = check_ids(ids, self.vocab_size, "script") if len(ids) else np.empty(0, dtype=np.int32)
        drawn = drawn[: min(request.params.max_tokens, self.context_length - len(request.prompt_ids))]
        stops = np.flatnonzero(np.isin(drawn, request.params.stop_token_ids))
        if stops.size:
            return drawn[: stops[0] + 1], StopReason.STOP
        return drawn, StopReason.LENGTH

    async def update_weights(self, path: Path, version: int) -> None:
        """Record the update. Tokens sampled from now on have the new version.

        Raises:
            ModelError: the version is in `failing_updates`. Nothing is changed.
        """
        if version in self.failing_updates:
            raise ModelError(f"{path} does not fit the model: the script says so")
        self.updates.append((Path(path), version))
        self.policy_version = version

    async def prompt_logprobs(self, token_ids: Int32, temperature: float = 1.0) -> Float32:
        """`logprob` of each id, regardless of the temperature: float32 [L]; the first is NaN.

        Raises:
            RecordError: there are no ids, or an id is outside the vocabulary.
            SamplerFault: `logprob` is None.
        """
        ids = check_ids(token_ids, self.vocab_size, "token_ids")
        if self.logprob is None:
            raise SamplerFault("this engine returns no logprobs")
        return np.array([np.nan, *(self.logprob(int(i)) for i in ids[1:])], dtype=np.float32)

    async def close(self) -> None:
        """Stop the sampler. Requests in flight return the tokens sampled so far, with the stop reason "cancelled". May
        be called repeatedly."""
        self._closed.set()
