"""Reads the figures of a vLLM server, which are in Prometheus's format."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from verbatim.core.errors import SamplerFault
from verbatim.core.texts import brief
from verbatim.inference.pool.base import ReplicaLoad

_METRICS: Mapping[str, str] = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:prefix_cache_queries_total": "cache_queries",
    "vllm:prefix_cache_hits_total": "cache_hits",
    "vllm:generation_tokens_total": "generated_tokens",
}
_SHARES = ("kv_usage",)
"""Averaged over the engines of a server; the others are added."""


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
