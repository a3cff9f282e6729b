"""A reward model behind an HTTP endpoint. The endpoint returns a number for a conversation."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verbatim.core.errors import UsageError
from verbatim.core.texts import shown
from verbatim.core.types import Message
from verbatim.inference.http.client import AttemptFailed, HttpClient, status_failure
from verbatim.inference.http.client import HttpResponse as HttpAnswer
from verbatim.rollouts.judges.endpoint import Answer, EndpointSettings


@dataclass(frozen=True, kw_only=True)
class RewardModel(EndpointSettings):
    """Posts `{"model": ..., "messages": [...]}` to a URL and reads a number from the answer.

    Example: for a reward model that vLLM serves, `RewardModel(url="http://localhost:8000/classify",
    model="my/reward-model", path="data.0.probs.0")`.

    Raises:
        UsageError: a setting is invalid, the variable `api_key_env` is empty, or the extra `api` is not installed.
    """

    url: str
    """The full URL of the endpoint."""
    model: str | None = None
    """The value that is sent as `model`; None to leave out `model`."""
    path: str = "reward"
    """Path to the number in the answer: keys and list indices, separated by dots."""
    name: str = "reward_model"
    """Name under which metrics show this part of the reward."""
    weight: float = 1.0
    """Factor by which the number is multiplied."""
    _client: HttpClient = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise UsageError(f'reward model: path: found {shown(self.path, 80)}, expected "reward" or "data.0.score"')
        key = os.environ.get(self.api_key_env) if self.api_key_env is not None else None
        if self.api_key_env is not None and not key:
            raise UsageError(
                f"reward model: the environment variable {self.api_key_env} is empty; expected the key of "
                f"{self.url}: export it, or leave api_key_env out"
            )
        client = HttpClient(
            self.url,
            api_key=key,
            request_timeout=self.request_timeout,
            max_retries=self.max_retries,
            remote_api=True,
        )
        object.__setattr__(self, "_client", client)
        self._open(client.hang_up)

    async def grade(
        self, messages: Sequence[Message], usage: Counter[str], fields: Mapping[str, Any] | None = None
    ) -> dict[str, float]:
        """Return the reward as a part called `name`. Arguments and errors are the same as for `Judge.grade`."""
        body = {
            **({} if self.model is None else {"model": self.model}),
            "messages": [dict(message) for message in messages],
            **self.extra_body,
        }

        async def send(failures: Counter[str]) -> Answer:
            data = json.dumps(body, ensure_ascii=False, default=str).encode("utf-8", "replace")
            return await self._client.ask("POST", "", data, self._read, failures)

        request = {"url": self.url, "path": self.path, "body": body}
        number: float = await self._endpoint.ask(request, send, usage)
        return {self.name: self.weight * number}

    def _read(self, answer: HttpAnswer) -> Answer:
        if not 200 <= answer.status < 300:
            raise status_failure(answer, "")
        try:
            said = found = json.loads(answer.text)
            for key in self.path.split("."):
                found = found[int(key)] if isinstance(found, list) else found[key]
            if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
                raise TypeError
        except (ValueError, KeyError, IndexError, TypeError, RecursionError):
            raise AttemptFailed(
                "bad_answer", f"expected a number at {self.path!r}, found {answer.text[:200]!r}", final=True
            ) from None
        counts = said.get("usage") if isinstance(said, dict) else None
        tokens = {key: n for key, n in (counts or {}).items() if isinstance(n, int)} if isinstance(counts, dict) else {}
        return float(found), tokens
