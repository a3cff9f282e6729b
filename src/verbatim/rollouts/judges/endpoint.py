"""Sends requests to a judge's endpoint, with retries, a cache keyed by the whole request, and usage counts."""

from __future__ import annotations

import asyncio
import hashlib
import json
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verbatim.core.disk import replacing, temporary_beside, write_private
from verbatim.core.errors import JudgeFailed, SamplerFault, UsageError
from verbatim.core.texts import shown

Answer = tuple[Any, Mapping[str, int]]
"""The answer of an endpoint: (the answer as JSON values, the token counts that the endpoint reports)."""
_PRICES = ("prompt", "completion")


@dataclass(frozen=True, kw_only=True)
class EndpointSettings:
    """The endpoint settings that judges and reward models have in common."""

    cache: str | Path | None = "memory"
    """Where answers are cached, keyed by the whole request: "memory" or a folder; None for no cache."""
    price: Mapping[str, float] | None = None
    """Price of a million tokens, such as `{"prompt": 0.25, "completion": 2.0}`. If it is set and the answers have a
    `usage`, there is a metric `judge/cost`."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Additional keys of each request. In a judge's requests, a value of None removes the key: `{"temperature":
    None}`."""
    api_key_env: str | None = None
    """Environment variable with the API key. If None, no key is sent, except that OpenAI's own server gets
    OPENAI_API_KEY."""
    request_timeout: float = 120.0
    """Timeout of one attempt of a request, in seconds."""
    max_retries: int = 5
    """Maximum number of retries after the first attempt."""
    max_concurrent: int = 32
    """Maximum number of concurrent requests."""
    _endpoint: Endpoint = field(init=False, repr=False, compare=False)

    def _open(self, hang_up: Callable[[], Awaitable[None]]) -> None:
        endpoint = Endpoint(hang_up, self.cache, self.price, self.max_concurrent)
        object.__setattr__(self, "_endpoint", endpoint)


class Endpoint:
    """Sends requests to one judge, at most `max_concurrent` at a time. If there is a cache, equal requests are sent
    only once, even if they are made concurrently.

    Args:
        hang_up: Closes the connections of the running event loop. Called whenever no request is in flight.
        cache: "memory", a folder, or None for no cache. Several processes and runs may share a folder.
        price: Price of a million tokens, in any currency: `{"prompt": 0.25, "completion": 2.0}`.
        max_concurrent: Maximum number of concurrent requests in one event loop.

    Raises:
        UsageError: an argument is invalid.
    """

    def __init__(
        self,
        hang_up: Callable[[], Awaitable[None]],
        cache: str | Path | None,
        price: Mapping[str, float] | None,
        max_concurrent: int,
    ) -> None:
        if cache is not None and not isinstance(cache, str | Path):
            raise UsageError(f'cache: found {shown(cache, 80)}, expected "memory", a folder, or none')
        if price is not None and (not isinstance(price, Mapping) or set(price) - {*_PRICES}):
            raise UsageError(
                f"price: found {shown(price, 80)}, expected the price of a million tokens, "
                "{ prompt = 0.25, completion = 2.0 }"
            )
        if isinstance(max_concurrent, bool) or not isinstance(max_concurrent, int) or max_concurrent < 1:
            raise UsageError(f"max_concurrent: found {shown(max_concurrent, 80)}, expected at least 1")
        self._folder = None if cache in (None, "memory") else Path(str(cache))
        self._memory: dict[str, Any] | None = {} if cache == "memory" else None
        self._price = dict(price or {})
        self._most, self._hang_up = max_concurrent, hang_up
        self._start_over()

    def _start_over(self) -> None:
        # The values are weak: a lock is freed when no request holds it or waits for it.
        self._locks: weakref.WeakValueDictionary[tuple[int, str], asyncio.Lock] = weakref.WeakValueDictionary()
        self._places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self._under_way: Counter[int] = Counter()

    # Locks and semaphores belong to an event loop of this process, so a pickled copy starts without them.

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_locks": None, "_places": None, "_under_way": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start_over()

    async def ask(
        self, request: Mapping[str, Any], send: Callable[[Counter[str]], Awaitable[Answer]], usage: Counter[str]
    ) -> Any:
        """Return the endpoint's answer, from the cache if possible.

        Args:
            request: Everything on which the answer depends, as JSON values. It is the key of the cache.
            send: Sends the request. It counts failed attempts in the counter that it is given.
            usage: Counter to which `requests`, `cached`, `retries`, `prompt_tokens`, `completion_tokens` and `cost` are
                added.

        Raises:
            JudgeFailed: the request was refused or failed, and retries did not help.
        """
        text = json.dumps(request, sort_keys=True, ensure_ascii=False)
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        loop = asyncio.get_running_loop()
        # There is one lock for each key. An equal concurrent request waits here, and then finds the answer in the
        # cache.
        lock = self._locks.setdefault((id(loop), key), asyncio.Lock())
        async with lock:
            known, said = self._kept(key)
            if known:
                usage["cached"] += 1
                return said
            async with self._places.setdefault(loop, asyncio.Semaphore(self._most)):
                usage["requests"] += 1
                said, tokens = await self._send(send, usage)
            self._spend(tokens, usage)
            await asyncio.to_thread(self._keep, key, said)
            return said

    async def _send(self, send: Callable[[Counter[str]], Awaitable[Answer]], usage: Counter[str]) -> Answer:
        failures: Counter[str] = Counter()
        loop = id(asyncio.get_running_loop())
        self._under_way[loop] += 1
        try:
            return await send(failures)
        except SamplerFault as fault:
            raise JudgeFailed(str(fault)) from fault
        finally:
            usage["retries"] += sum(failures.values())
            self._under_way[loop] -= 1
            if not self._under_way[loop]:
                await self._hang_up()

    def _spend(self, tokens: Mapping[str, int], usage: Counter[str]) -> None:
        for kind in _PRICES:
            count = tokens.get(f"{kind}_tokens", 0)
            usage[f"{kind}_tokens"] += count
            if self._price:
                usage["cost"] += count * self._price.get(kind, 0.0) / 1e6  # type: ignore[assignment]

    def _kept(self, key: str) -> tuple[bool, Any]:
        if self._memory is not None:
            return key in self._memory, self._memory.get(key)
        if self._folder is None:
            return False, None
        try:
            return True, json.loads(self._place(self._folder, key).read_text(encoding="utf-8"))["said"]
        except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: ask the endpoint again
            return False, None

    def _keep(self, key: str, said: Any) -> None:
        if self._memory is not None:
            self._memory[key] = said
        if self._folder is None:
            return
        place = self._place(self._folder, key)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            with replacing(place, temporary=temporary_beside(place), lasting=False) as new:
                write_private(new, json.dumps({"said": said}).encode())
        except OSError as error:
            raise JudgeFailed(
                f"its answer cannot be stored in {self._folder}: {error.strerror}; free disk space, or set "
                'cache = "memory"'
            ) from error

    @staticmethod
    def _place(folder: Path, key: str) -> Path:
        return folder / key[:2] / f"{key}.json"
