"""Speaks vLLM's routes for reinforcement learning. No other module knows them, because they change between releases.

Written for vLLM 0.32. Each call is one phase of a weight update with a limit of time, and never repeated: a phase that
failed leaves the server in a state that only the caller can judge.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from verbatim.errors import SamplerFault, UsageError
from verbatim.inference.http.client import Answer, AttemptFailed, HttpClient, encode, read_json
from verbatim.inference.http.protocol import GENERATE, SAMPLER, brief
from verbatim.inference.http.scoring import read_cached_tokens, scoring_body
from verbatim.inference.pool.base import ReplicaLoad
from verbatim.inference.pool.phases import phase
from verbatim.inference.vllm.command import lora_options
from verbatim.inference.vllm.digests import REPORT_FORMAT, WorkerReport, read_reports

_LAYERS = ("q_proj", "k_proj", "...all linear layers but the head...")
_METRICS: Mapping[str, str] = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:prefix_cache_queries_total": "cache_queries",
    "vllm:prefix_cache_hits_total": "cache_hits",
    "vllm:generation_tokens_total": "generated_tokens",
}
_ALREADY = "weight update is already active"
"""What vLLM says in `/start_weight_update`."""
Memory = Literal["weights", "kv_cache"]
"""What a server keeps on its device, as vLLM names it."""
_SHARES = ("kv_usage",)
"""Averaged over the engines of a server; the others are added."""


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """How a server was started, as far as exactness depends on it."""

    model: str
    """A folder or a hub id."""
    vocab_size: int
    """Ids are below this."""
    max_model_len: int
    """Most tokens of prompt and completion together."""
    dtype: str
    """Number format of its weights."""
    logprobs_mode: str
    """"processed_logprobs": logprobs of the distribution that is sampled from."""
    generation_config: str
    """"vllm": no sampling defaults of the model's."""
    prefix_caching: bool
    chunked_prefill: bool
    speculative: bool
    """Whether a draft model proposes tokens."""
    weight_transfer: str | None
    """The weight-transfer engine."""
    unsupported_heads: str | None
    """The size of the model's attention heads and those that the server can compute; None = it can compute the
    model's."""
    max_lora_rank: int | None = None
    """Highest rank of low-rank adapters; None = it takes none."""
    adapts_head: bool = False
    """Whether it has room for an adapter of the output head."""


class VllmControl:
    """The control routes of one server.

    Args:
        client: Of the server's root; its own limit is longer than a phase's.
        name: The replica's, for messages.
        phase_timeout: Seconds for each call.
    """

    def __init__(self, client: HttpClient, *, name: str, phase_timeout: float) -> None:
        self._client = client
        self._name = name
        self._phase_timeout = phase_timeout

    # ---- a weight update, in order

    async def pause(self) -> None:
        """No more steps; requests keep their place, and their cache until it is emptied."""
        await self._post("pause", "/pause?mode=keep&clear_cache=false")

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Prepare the weight-transfer engine; needed once, and only by engines that have something to agree on."""
        await self._post("init weight transfer", "/init_weight_transfer_engine", {"init_info": info})

    async def num_workers(self) -> int:
        """Processes that hold a part of the weights.

        Raises:
            SamplerFault: it does not say.
        """
        async with self._phase("number of workers"):
            answer = await self._client.ask("GET", "/get_world_size", None, read_json)
        found = answer.get("world_size") if isinstance(answer, dict) else None
        if not isinstance(found, int):
            raise SamplerFault(f"{self._name}: number of workers: expected a number, found {brief(answer)}")
        return found

    async def start_update(self) -> None:
        """Begin an update. One that was given up in the middle, by whomever, is ended first."""
        try:
            await self._post("start weight update", "/start_weight_update")
        except SamplerFault as fault:
            if _ALREADY not in str(fault):
                raise
            await self.finish_update()
            await self._post("start weight update", "/start_weight_update")

    async def load(self, info: Mapping[str, Any]) -> None:
        """Load weights; `info` is the engine's: {"path": ...}."""
        await self._post("load weights", "/update_weights", {"update_info": info})

    async def finish_update(self) -> None:
        """End the update. The version stays the old one."""
        await self._post("finish weight update", "/finish_weight_update", {})

    async def reports(self) -> list[WorkerReport]:
        """What each worker built its kernels from in the last update.

        Raises:
            SamplerFault: it does not say.
        """
        async with self._phase("report weights"):
            return read_reports(await self._call_workers("verbatim_report"))

    async def set_version(self, version: int) -> None:
        """Give the weights their version; tokens that are drawn from here on have it.

        Raises:
            SamplerFault: the server still has another one.
        """
        await self._post("set version", "/update_weight_version", {"new_version": str(version)})
        async with self._phase("set version"):
            answer = await self._client.ask("GET", "/weight_info", None, read_json)
        found = answer.get("weight_version") if isinstance(answer, dict) else answer
        if found != str(version):
            raise SamplerFault(f"{self._name}: its weights are of version {brief(found)}, expected {version}")

    async def forget_prefixes(self, *, running_too: bool) -> bool:
        """Empty the prefix cache.

        Args:
            running_too: Requests in flight lose their cache too; it is computed anew, with the new weights.

        Returns:
            Whether it is empty; requests in flight that keep their cache prevent that.
        """
        path = f"/reset_prefix_cache?reset_running_requests={'true' if running_too else 'false'}"
        answer = await self._post("empty prefix cache", path)
        return isinstance(answer, dict) and answer.get("success") is True

    async def resume(self) -> None:
        """Steps go on."""
        await self._post("resume", "/resume")

    # ---- asleep: the trainer has the device

    async def sleep(self) -> None:
        """Release the device's memory: what weights and cache hold is lost. Requests in flight end first; those that
        come later wait.

        Raises:
            SamplerFault: it did not.
        """
        answer = await self._post("sleep", "/sleep?level=2&mode=wait")
        if not isinstance(answer, dict) or answer.get("status") != "sleeping":
            raise SamplerFault(f"{self._name}: sleep: it says {brief(answer)}")

    async def wake_up(self, memory: Memory, *, is_last: bool) -> None:
        """Take one kind of memory on the device again; what is in it is undefined. After the last one, steps go on.

        Raises:
            SamplerFault: it did not.
        """
        answer = await self._post(f"wake up {memory}", f"/wake_up?tags={memory}")
        expected = "awake" if is_last else "sleeping"
        if not isinstance(answer, dict) or answer.get("status") != expected:
            raise SamplerFault(f"{self._name}: wake up {memory}: it says {brief(answer)}, expected {expected}")

    # ---- low-rank adapters

    async def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter from a folder of the server's host; requests that name it use it.

        Raises:
            SamplerFault: it cannot be read, does not fit, or the name is taken.
        """
        await self._send("load adapter", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def forget_adapter(self, name: str) -> None:
        """No new request may name it."""
        await self._send("unload adapter", "/v1/unload_lora_adapter", {"lora_name": name})

    async def adapter_reports(self) -> list[WorkerReport]:
        """What the newest adapter of each worker is made of.

        Raises:
            SamplerFault: it does not say.
        """
        async with self._phase("report adapter"):
            return read_reports(await self._call_workers("verbatim_adapter"))

    async def _send(self, phase: str, path: str, body: Mapping[str, Any]) -> None:
        """`_post` for routes whose answer is a sentence."""
        async with self._phase(phase):
            await self._client.ask("POST", path, encode(body), _read_success)

    # ---- what the server is

    async def health(self, seconds: float) -> None:
        """Return if the server answers and its engine lives.

        Raises:
            SamplerFault: it does not.
        """
        async with self._phase("health", seconds):
            await self._client.ask("GET", "/health", None, _read_any)

    async def facts(self) -> ServerFacts:
        """How the server was started.

        Raises:
            UsageError: it does not say, and how to start it; or it refuses the key.
            SamplerFault: it cannot be reached.
        """
        async with self._phase("facts"):
            status = await self._client.ask(
                "POST", "/collective_rpc", encode({"method": "verbatim_facts"}), _status_or_facts
            )
        if isinstance(status, int):
            why = _OURS if status == 404 and await self._is_ours() else _HOW_TO_START[status]
            raise UsageError(f"{named(self._name, self._client.url)}: {why}")
        try:
            (first, *_) = status["results"]
            if first.pop("format") != REPORT_FORMAT:
                raise ValueError(f"another format than {REPORT_FORMAT}")
            return ServerFacts(**{key: value for key, value in first.items() if key in ServerFacts.__annotations__})
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{named(self._name, self._client.url)}: its plug-in is of another version of Verbatim "
                             f"({error}); {_USE_PLUGIN}") from error  # fmt: skip

    async def _is_ours(self) -> bool:
        """Whether it is a server of the embedded engine."""
        async with self._phase("facts"):
            return await self._client.ask("GET", SAMPLER, None, lambda answer: answer.status == 200)

    async def missing_flag(self, model: str | None) -> str | None:
        """What the token endpoint needs and the server was started without, as found by one request; None = nothing.

        A key of vLLM's own guards this endpoint, and not the routes of weight updates.

        Raises:
            SamplerFault: the request failed.
        """
        body = scoring_body(np.zeros(1, dtype=np.int32), model)
        async with self._phase("token endpoint"):
            answer = await self._client.ask("POST", GENERATE, encode(body), _read_unless_refused)
        if isinstance(answer, str):
            return answer
        if read_cached_tokens(answer) is None:
            return ("it does not say what it reads from its prefix cache, so that an old one would not show: add "
                    "--enable-prompt-tokens-details")  # fmt: skip
        return None

    async def load_metrics(self) -> ReplicaLoad:
        """How busy the server is.

        Raises:
            SamplerFault: it does not say.
        """
        async with self._phase("metrics"):
            text = await self._client.ask("GET", "/metrics", None, _read_any)
        return read_metrics(text)

    async def _call_workers(self, method: str) -> Any:
        answer = await self._client.ask("POST", "/collective_rpc", encode({"method": method}), read_json)
        return answer.get("results") if isinstance(answer, dict) else None

    async def _post(self, phase: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        async with self._phase(phase):
            return await self._client.ask("POST", path, None if body is None else encode(body), read_json)

    def _phase(self, doing: str, seconds: float | None = None) -> AbstractAsyncContextManager[None]:
        return phase(self._name, doing, self._phase_timeout if seconds is None else seconds)


_USE_PLUGIN = ("start it with `verbatim inference FILE`, or with --worker-extension-cls verbatim_vllm.WeightReport and "
               "the folder verbatim/inference/vllm/plugin of this package in its PYTHONPATH")  # fmt: skip
_KEY = "it needs a key, or another one; give it in the environment variable that inference.vllm.api_key_env names"
_OURS = 'it is a server of the embedded engine: with inference.backend = "torch", put it into [inference.torch] urls'
_HOW_TO_START: Mapping[int, str] = {
    401: _KEY,
    403: _KEY,
    404: "it has no routes for weight updates; start it with the environment variable VLLM_SERVER_DEV_MODE=1",
    500: f"its workers do not know our plug-in; {_USE_PLUGIN}",
}


def _status_or_facts(answer: Answer) -> Any:
    return answer.status if answer.status in _HOW_TO_START else read_json(answer)


def _read_unless_refused(answer: Answer) -> Any:
    """The JSON, or what a server needs that has not the route, or another key; a 404 that names the model is a failure.

    vLLM 0.32 answers 403 where the route is switched off: "Scale-out endpoints are disabled".
    """
    said = answer.text.lower()
    if answer.status == 401:
        return _KEY
    if (answer.status == 403 and "scale-out" in said) or (answer.status == 404 and "model" not in said):
        return "it takes no token ids: add --enable-scale-out"
    return read_json(answer)


def _read_any(answer: Answer) -> str:
    if answer.status != 200:
        raise AttemptFailed(f"status_{answer.status}", f"status {answer.status}", final=True)
    return answer.text


def _read_success(answer: Answer) -> None:
    """Whatever it says, unless it says why it failed."""
    if answer.status != 200:
        read_json(answer)


def refuse_inexact(
    facts: ServerFacts, *, name: str, transfer: str, vocab_size: int, context_length: int,
    adapter_rank: int | None = None,
) -> None:  # fmt: skip
    """Refuse a server that does not sample exactly what is asked for, or that cannot load weights.

    Args:
        facts: The server's.
        name: The replica's.
        transfer: The weight-transfer engine that it needs.
        vocab_size: The model's.
        context_length: Most tokens of prompt and completion together that the run asks for.
        adapter_rank: Rank of the low-rank adapters that it is to load; None = it gets whole weights.

    Raises:
        UsageError: names everything that is wrong, and the flags to add.
    """
    wrong = [said for ok, said in (
        (facts.vocab_size == vocab_size,
         f"it serves {facts.model} with {facts.vocab_size} ids, expected the model of this run with {vocab_size}: "
         "start it with --model and the folder in model.name"),
        (facts.max_model_len >= context_length,
         f"its context is {facts.max_model_len} tokens, expected at least {context_length}: add --max-model-len "
         f"{context_length}"),
        (facts.unsupported_heads is None,
         f"its attention heads have a size of {facts.unsupported_heads}: sample this model with a GPU, or with "
         'inference.backend = "torch"'),
        (facts.logprobs_mode == "processed_logprobs",
         f"its logprobs are {facts.logprobs_mode}, not those of the distribution that is sampled from: add "
         "--logprobs-mode processed_logprobs"),
        (facts.generation_config == "vllm",
         "it takes sampling defaults from the model's generation_config.json: add --generation-config vllm"),
        (facts.prefix_caching, "it computes every prompt anew: add --enable-prefix-caching"),
        (facts.chunked_prefill, "long prompts hold up all other requests: add --enable-chunked-prefill"),
        (not facts.speculative, "a draft model proposes its tokens, which weight updates do not reach: leave out "
                                "--speculative-config"),
        (facts.weight_transfer == transfer,
         f"its weight-transfer engine is {facts.weight_transfer}: add --weight-transfer-config "
         f"'{{\"backend\": \"{transfer}\"}}'"),
        (adapter_rank is None or (facts.max_lora_rank or 0) >= adapter_rank,
         f"it takes no adapters of rank {adapter_rank}: add {' '.join(lora_options(adapter_rank or 1, _LAYERS))}, and "
         "the environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
        (adapter_rank is None or not facts.adapts_head,
         f"it adapts the output head, which ends vLLM 0.32 in a step with prompt logprobs: add --lora-target-modules "
         f"{' '.join(_LAYERS)}"),
        (adapter_rank is not None or facts.max_lora_rank is None,
         "it was started for adapters, and this run sends it whole weights: leave out --enable-lora"),
    ) if not ok]  # fmt: skip
    if wrong:
        raise UsageError(f"{name} cannot be used: " + "; ".join(wrong))


def read_metrics(text: str) -> ReplicaLoad:
    """vLLM's figures in Prometheus's format.

    >>> read_metrics('vllm:num_requests_running{engine="0"} 2.0\\nvllm:num_requests_running{engine="1"} 3.0').running
    5

    Raises:
        SamplerFault: there are none.
    """
    found: dict[str, list[float]] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        key = _METRICS.get(name.partition("{")[0])
        if key is not None:
            with contextlib.suppress(ValueError):
                found.setdefault(key, []).append(float(value))
    if not found:
        raise SamplerFault(f"/metrics has no figures of vLLM: {brief(text)}")
    figures: dict[str, Any] = {
        key: sum(values) / len(values) if key in _SHARES else int(sum(values)) for key, values in found.items()
    }
    return ReplicaLoad(**figures)


def named(name: str, url: str) -> str:
    """A replica for a message about its server.

    >>> named("replica 0", "http://a:1"), named("replica 0 (http://a:1)", "http://a:1")
    ('replica 0 (http://a:1)', 'replica 0 (http://a:1)')
    """
    return name if url in name else f"{name} ({url})"


def joined(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are.

    >>> joined(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
