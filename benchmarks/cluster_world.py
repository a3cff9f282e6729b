"""What the simulated servers, tools and trainer share: how fast servers are, what goes wrong, and counts."""

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
    """How fast a server is. A decode step draws one token for each request in its batch."""

    step: float = 0.008
    """Seconds of a decode step, and..."""
    step_per_request: float = 0.0001
    """...for each request in the batch."""
    prefill: float = 30_000.0
    """Prompt tokens computed in a second; decoding stands still meanwhile."""
    cache: int = 850_000
    """Tokens that the prefix cache holds, of running and waiting episodes together."""
    most_running: int = 256
    """Requests in a batch; others wait."""


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong with servers."""

    seconds_between: float = 20_000.0
    """Mean seconds between two deaths of one server; 0 = none dies."""
    restart: float = 180.0
    """Seconds until a dead server answers again."""
    request: float = 1e-4
    """Share of requests that fail on a server that lives."""
    slow_share: float = 0.02
    slow_factor: float = 1.5
    """Share of the servers that are slower, and how many times slower."""
    update: float = 2.0
    """Median seconds for which an update pauses a server (log-normal, sigma 0.3)."""


NO_FAULTS = Faults(seconds_between=0.0, request=0.0, slow_share=0.0)


@dataclass(eq=False)
class World:
    """What the simulated parts share."""

    loop: VirtualLoop
    curve: Curve
    work: Workload
    faults: Faults
    wire: Mapping[str, float]
    """Processor seconds of a message, by kind, for the orchestrator."""
    seed: int = 0
    scripts: dict[int, Script] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)
    drawn: float = 0.0
    """Simulated tokens of completions that were delivered."""
    stood_in: int = 0
    """Ids of the same."""
    told: int = 0
    """Ids that servers said they had drawn, whatever became of them."""
    turns: int = 0
    episodes: int = 0
    num_deaths: int = 0
    busy: float = 0.0
    """Seconds in which servers had a request in their batch, summed over the servers."""

    def __post_init__(self) -> None:
        self.tables = Tables(self.work, self.seed)
        self.rng = np.random.default_rng(self.seed + 1)
        self.probes = probe_sequences(VOCAB, CONTEXT)

    def send(self, kind: str) -> None:
        """A message to a server and its answer."""
        self.messages[kind] = self.messages.get(kind, 0) + 1
        if (seconds := self.wire.get(kind, 0.0)) > 0:
            self.loop.spend(seconds)

    def logprobs_of(self, ids: Int32, version: int) -> Float32:
        """Logprobs of a probe under a version: float32 [L]; the first is NaN."""
        found = np.full(len(ids), -1.0 - 0.01 * version, dtype=np.float32)
        found[0] = np.nan
        return found

    def published(self, version: int) -> Probes:
        """What the trainer publishes with a version."""
        logprobs = tuple(self.logprobs_of(ids, version)[1:] for ids in self.probes)
        return Probes(token_ids=self.probes, logprobs=logprobs)
