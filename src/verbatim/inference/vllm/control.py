"""Client for vLLM's routes for reinforcement learning. Only this module knows these routes, which change between
releases.

The module is written for vLLM 0.32. Each call is one phase of a weight update and has a timeout. A call is never
retried, because only the caller knows the state of the server after a failed phase.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from verbatim.core.errors import SamplerFault, UsageError
from verbatim.core.sampling import SamplingParams
from verbatim.core.texts import brief
from verbatim.inference.http.client import AttemptFailed, HttpClient, HttpResponse, encode, read_json
from verbatim.inference.http.completions import read_cached_tokens, request_body
from verbatim.inference.http.packed import PACKED
from verbatim.inference.http.protocol import GENERATE, SAMPLER
from verbatim.inference.pool.phases import phase
from verbatim.inference.pool.replica import ReplicaLoad
from verbatim.inference.sampler import SampleRequest
from verbatim.inference.vllm.digests import REPORT_FORMAT, WorkerReport, read_reports
from verbatim.inference.vllm.facts import ServerFacts

logger = logging.getLogger(__name__)

_ALREADY = "weight update is already active"
"""vLLM's error text for `/start_weight_update` while another update is open."""
Memory = Literal["weights", "kv_cache"]
"""vLLM's tag for a kind of device memory, which sleep mode releases and `wake_up` allocates again."""


class VllmControl:
    """The control routes of one server.

    Args:
        client: HTTP client for the server's root URL. Its timeout exceeds `phase_timeout`, so that the phase times out
            first.
        name: The replica's name, for messages.
        phase_timeout: Timeout of each call, in seconds.
    """

    def __init__(self, client: HttpClient, *, name: str, phase_timeout: float) -> None:
        self._client = client
        self._name = name
        self._phase_timeout = phase_timeout

    # ---- weight update, in call order

    async def pause(self) -> None:
        """Pause the engine between two steps. Requests in flight stay queued and keep their KV cache."""
        await self._ask("pause", "/pause?mode=keep&clear_cache=false")

    async def num_workers(self) -> int:
        """Number of worker processes that hold a part of the weights.

        Raises:
            SamplerFault: the reply has no world size.
        """
        answer = await self._ask("number of workers", "/get_world_size", method="GET")
        found = answer.get("world_size") if isinstance(answer, dict) else None
        if not isinstance(found, int):
            raise SamplerFault(f"{self._name}: number of workers: expected a number, found {brief(answer)}")
        return found

    async def start_update(self) -> None:
        """Begin an update. If a client left an earlier update unfinished, that update is ended first."""
        try:
            await self._ask("start weight update", "/start_weight_update")
        except SamplerFault as fault:
            if _ALREADY not in str(fault):
                raise
            await self.finish_update()
            await self._ask("start weight update", "/start_weight_update")

    async def load(self, info: Mapping[str, Any]) -> None:
        """Load weights. `info` is passed to the weight-transfer engine: {"path": ...} or {"group": ...}."""
        await self._ask("load weights", "/update_weights", {"update_info": info})

    async def finish_update(self) -> None:
        """End the update. The policy version changes only with `set_version`."""
        await self._ask("finish weight update", "/finish_weight_update", {})

    async def reports(self, of: Literal["weights", "adapter"] = "weights") -> list[WorkerReport]:
        """Each worker's report: what the worker's kernels were built from in the last update, or the tensors of its
        newest adapter.

        Raises:
            SamplerFault: the reply is not a list of reports.
        """
        method = "verbatim_report" if of == "weights" else "verbatim_adapter"
        async with phase(self._name, f"report {of}", self._phase_timeout):
            answer = await self._client.ask("POST", "/collective_rpc", encode({"method": method}), read_json)
            return read_reports(answer.get("results") if isinstance(answer, dict) else None)

    async def set_version(self, version: int) -> None:
        """Set the policy version of the weights. Tokens sampled from now on carry this version.

        Raises:
            SamplerFault: the server still reports a different version.
        """
        await self._ask("set version", "/update_weight_version", {"new_version": str(version)})
        answer = await self._ask("set version", "/weight_info", method="GET")
        found = answer.get("weight_version") if isinstance(answer, dict) else answer
        if found != str(version):
            raise SamplerFault(f"{self._name}: its weights are of version {brief(found)}, expected {version}")

    async def forget_prefixes(self, *, running_too: bool) -> bool:
        """Empty the prefix cache.

        Args:
            running_too: Drop the cache of requests in flight too. Their cache is then recomputed with the new weights.

        Returns:
            True if the cache is empty; False if requests in flight kept their blocks.
        """
        path = f"/reset_prefix_cache?reset_running_requests={'true' if running_too else 'false'}"
        answer = await self._ask("empty prefix cache", path)
        return isinstance(answer, dict) and answer.get("success") is True

    async def resume(self) -> None:
        """Resume the engine."""
        await self._ask("resume", "/resume")

    # ---- sleep mode: the trainer has the device

    async def sleep(self) -> None:
        """Release the device's memory, so that weights and KV cache are lost. Requests in flight finish first; later
        requests wait.

        Raises:
            SamplerFault: the server does not report that it sleeps.
        """
        answer = await self._ask("sleep", "/sleep?level=2&mode=wait")
        if not isinstance(answer, dict) or answer.get("status") != "sleeping":
            raise SamplerFault(f"{self._name}: sleep: the server replied {brief(answer)}")

    async def wake_up(self, memory: Memory, *, is_last: bool) -> None:
        """Allocate one kind of memory again, with undefined contents. After the last kind, the engine resumes.

        Raises:
            SamplerFault: the server does not report the expected state.
        """
        answer = await self._ask(f"wake up {memory}", f"/wake_up?tags={memory}")
        expected = "awake" if is_last else "sleeping"
        if not isinstance(answer, dict) or answer.get("status") != expected:
            raise SamplerFault(
                f"{self._name}: wake up {memory}: the server replied {brief(answer)}, expected {expected}"
            )

    # ---- LoRA adapters

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter from a folder on the server's host. Requests select the adapter by its name.

        Raises:
            SamplerFault: the adapter cannot be read or does not fit, or the name is taken.
        """
        await self._ask("load adapter", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, _read_success)

    async def forget_adapter(self, name: str) -> None:
        """Unload an adapter. New requests can no longer select it."""
        await self._ask("unload adapter", "/v1/unload_lora_adapter", {"lora_name": name}, _read_success)

    # ---- state of the server

    async def health(self, seconds: float) -> None:
        """Check that the server answers within `seconds` and that its engine is alive.

        Raises:
            SamplerFault: the server does not answer, or the engine is dead.
        """
        await self._ask("health", "/health", None, _read_any, method="GET", seconds=seconds)

    async def facts(self) -> ServerFacts:
        """How the server was started.

        Raises:
            UsageError: the server cannot report this, or refuses the key; the message says how to start the server.
            SamplerFault: the server cannot be reached.
        """
        status = await self._ask("facts", "/collective_rpc", {"method": "verbatim_facts"}, _status_or_facts)
        if isinstance(status, int):
            # The embedded engine's server answers 404 too, but needs different advice from vLLM.
            why = _OURS if status == 404 and await self._is_ours() else _HOW_TO_START[status]
            raise UsageError(f"{named(self._name, self._client.url)}: {why}")
        try:
            (first, *_) = status["results"]
            if first.pop("format") != REPORT_FORMAT:
                raise ValueError(f"the format of its reports is not {REPORT_FORMAT}")
            # Unknown keys are ignored, because a plug-in may report more than this client reads.
            return ServerFacts(**{key: value for key, value in first.items() if key in ServerFacts.__annotations__})
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"{named(self._name, self._client.url)}: its plug-in belongs to another version of Verbatim "
                f"({error}); {_USE_PLUGIN}"
            ) from error

    async def _is_ours(self) -> bool:
        """True for a server of the embedded engine."""
        found: bool = await self._ask("facts", SAMPLER, None, lambda answer: answer.status == 200, method="GET")
        return found

    async def missing_flag(self, model: str | None) -> str | None:
        """Send one request to find out what the token endpoint lacks.

        The other routes cannot show this. For example, vLLM's own --api-key guards the token endpoint, but not the
        routes of weight updates. A server that does not pack its answers can be used, but a warning states what this
        costs.

        Returns:
            A text that says what is missing and which flag to add; None if nothing is missing.

        Raises:
            SamplerFault: the request failed.
        """
        prompt = np.zeros(1, dtype=np.int32)
        params = SamplingParams(max_tokens=1, top_k=1)  # a server that returns kept sets refuses requests without top_k
        body = request_body(SampleRequest(prompt_ids=prompt, params=params, seed=0), model)
        answer = await self._ask("token endpoint", GENERATE, body, _read_unless_refused)
        if isinstance(answer, str):
            return answer
        if read_cached_tokens(answer) is None:
            return (
                "it does not report how many tokens it reads from its prefix cache, so stale prefixes would go "
                "unnoticed: add --enable-prompt-tokens-details"
            )
        if PACKED not in answer:
            logger.warning(
                "%s: its answers list every token as JSON, which takes ten times as long to read as packed answers: "
                "add --middleware verbatim_vllm_http.Guard, with the plugin of this version",
                named(self._name, self._client.url),
            )
        return None

    async def load_metrics(self) -> ReplicaLoad:
        """The server's load: running and waiting requests, cache use, tokens generated.

        Raises:
            SamplerFault: the request to /metrics fails, or the response lacks vLLM's metrics.
        """
        return read_metrics(await self._ask("metrics", "/metrics", None, _read_any, method="GET"))

    async def _ask(
        self,
        doing: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        read: Callable[[HttpResponse], Any] = read_json,
        *,
        method: Literal["POST", "GET"] = "POST",
        seconds: float | None = None,
    ) -> Any:
        async with phase(self._name, doing, self._phase_timeout if seconds is None else seconds):
            return await self._client.ask(method, path, None if body is None else encode(body), read)


_USE_PLUGIN = (
    "start it with `verbatim inference FILE`, or with --worker-extension-cls verbatim_vllm.WeightReport and "
    "the folder verbatim/inference/vllm/plugin of this package in its PYTHONPATH"
)
_KEY = (
    "it requires a key, but received none or a wrong one; put the key into the environment variable that "
    "inference.vllm.api_key_env names"
)
_OURS = 'it is a server of the embedded engine: set inference.backend = "torch", and list it in [inference.torch] urls'
_HOW_TO_START: Mapping[int, str] = {
    401: _KEY,
    403: _KEY,
    404: "it has no routes for weight updates; start it with the environment variable VLLM_SERVER_DEV_MODE=1",
    500: f"its workers run without our plug-in; {_USE_PLUGIN}",
}


def _status_or_facts(answer: HttpResponse) -> Any:
    return answer.status if answer.status in _HOW_TO_START else read_json(answer)


def _read_unless_refused(answer: HttpResponse) -> Any:
    """The JSON, or a string that says which flag or key is missing. A 404 that names the model is an ordinary failure.

    vLLM 0.32 answers 403 if the route is switched off: "Scale-out endpoints are disabled".
    """
    said = answer.text.lower()
    if answer.status == 401:
        return _KEY
    if (answer.status == 403 and "scale-out" in said) or (answer.status == 404 and "model" not in said):
        return "it does not accept token ids: add --enable-scale-out"
    return read_json(answer)


def _read_any(answer: HttpResponse) -> str:
    if answer.status != 200:
        raise AttemptFailed(f"status_{answer.status}", f"status {answer.status}", final=True)
    return answer.text


def _read_success(answer: HttpResponse) -> None:
    """Ignore the body of a successful response, which is plain text. For any other status, raise its error."""
    if answer.status != 200:
        read_json(answer)


def named(name: str, url: str) -> str:
    """A replica's name with the URL of its server, for messages.

    >>> named("replica 0", "http://a:1"), named("replica 0 (http://a:1)", "http://a:1")
    ('replica 0 (http://a:1)', 'replica 0 (http://a:1)')
    """
    return name if url in name else f"{name} ({url})"


_METRICS: Mapping[str, str] = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:prefix_cache_queries_total": "cache_queries",
    "vllm:prefix_cache_hits_total": "cache_hits",
    "vllm:generation_tokens_total": "generated_tokens",
}
_SHARES = ("kv_usage",)
"""Metrics that are averaged over the engines of a server. The other metrics are summed."""


def read_metrics(text: str) -> ReplicaLoad:
    """Parse vLLM's metrics from Prometheus's text format.

    >>> read_metrics('vllm:num_requests_running{engine="0"} 2.0\\nvllm:num_requests_running{engine="1"} 3.0').running
    5

    Raises:
        SamplerFault: the text has none of vLLM's metrics.
    """
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        key = _METRICS.get(name.partition("{")[0])
        if key is not None:
            with contextlib.suppress(ValueError):
                found.setdefault(key, []).append(float(value))
    if not found:
        raise SamplerFault(f"/metrics contains none of vLLM's metrics: {brief(text)}")
    figures: dict[str, Any] = {
        key: sum(values) / len(values) if key in _SHARES else int(sum(values)) for key, values in found.items()
    }
    return ReplicaLoad(**figures)
