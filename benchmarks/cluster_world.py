"""Defines what the simulated servers, tools and trainer share: the speed of servers, their faults, and counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from cluster_clock import VirtualLoop
from cluster_workload import CONTEXT, VOCAB, Script, Tables, Workload
from verbatim.core.types import Float32, Int32
from verbatim.trainer.transport.canary import Probes, probe_sequences


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The speed of a server. A decode step samples one token for each request in the server's batch."""

    step: float = 0.008
    """Seconds of a decode step, without the part that depends on the batch."""
    step_per_request: float = 0.0001
    """Additional seconds of a decode step for each request in the batch."""
    prefill: float = 30_000.0
    """Number of prompt tokens computed per second. Decoding stands still meanwhile."""
    cache: int = 850_000
    """Number of tokens that fit into the prefix cache, of running and waiting episodes together."""
    most_running: int = 256
    """Maximum number of requests in a batch; further requests wait."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The faults and delays of servers."""

    seconds_between: float = 20_000.0
    """Mean number of seconds between two deaths of a server; 0 if servers never die."""
    restart: float = 180.0
    """Seconds until a dead server answers again."""
    request: float = 1e-4
    """Share of requests that fail on a server that is alive."""
    slow_share: float = 0.02
    slow_factor: float = 1.5
    """Share of the servers that are slower (`slow_share`), and by which factor (`slow_factor`)."""
    update: float = 2.0
    """Median seconds for which an update pauses a server (log-normal, sigma 0.3)."""


NO_FAULTS = Faults(seconds_between=0.0, request=0.0, slow_share=0.0)


@dataclass(eq=False)
class World:
    """The state that the simulated parts share."""

    loop: VirtualLoop
    curve: Curve
    work: Workload
    faults: Faults
    wire: Mapping[str, float]
    """Processor seconds that a message costs the orchestrator, by the kind of message."""
    seed: int = 0
    scripts: dict[int, Script] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)
    drawn: float = 0.0
    """Number of simulated tokens in completions that were delivered."""
    stood_in: int = 0
    """Number of ids that stand for the tokens in `drawn`."""
    told: int = 0
    """Number of ids that servers reported as sampled, whether or not they were delivered."""
    turns: int = 0
    episodes: int = 0
    num_deaths: int = 0
    busy: float = 0.0
    """Seconds for which servers had a request in their batch, summed over the servers."""

    def __post_init__(self) -> None:
        self.tables = Tables(self.work, self.seed)
        self.rng = np.random.default_rng(self.seed + 1)
        self.probes = probe_sequences(VOCAB, CONTEXT)

    def send(self, kind: str) -> None:
        """Count a message to a server together with its answer."""
        self.messages[kind] = self.messages.get(kind, 0) + 1
        if (seconds := self.wire.get(kind, 0.0)) > 0:
            self.loop.spend(seconds)

    def logprobs_of(self, ids: Int32, version: int) -> Float32:
        """The logprobs of a probe under a policy version: float32 [L]. The first one is NaN."""
        found = np.full(len(ids), -1.0 - 0.01 * version, dtype=np.float32)
        found[0] = np.nan
        return found

    def published(self, version: int) -> Probes:
        """The probes that the trainer publishes with a policy version."""
        logprobs = tuple(self.logprobs_of(ids, version)[1:] for ids in self.probes)
        return Probes(token_ids=self.probes, logprobs=logprobs)
