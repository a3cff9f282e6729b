"""Simulates one run: the orchestrator is built as in `run/training_run.py`, but with simulated servers, episodes and
trainer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_clock import VirtualLoop
from cluster_episodes import Errands, StandInRenderer
from cluster_ideal import ideal, means
from cluster_server import Server
from cluster_trainer import SimulatedTrainer
from cluster_workload import CONTEXT, Workload
from cluster_world import Curve, Faults, World
from verbatim.algorithms.credit.baselines import default_advantage
from verbatim.algorithms.curriculum import ExampleSchedule
from verbatim.core.trajectories import Ledger
from verbatim.inference import SamplingParams
from verbatim.inference.pool.pool import ReplicaPool
from verbatim.rollouts import EpisodeLimits, RolloutSetup
from verbatim.run.orchestrator.assemble import GroupRules
from verbatim.run.orchestrator.dispatcher import Dispatcher
from verbatim.run.orchestrator.gc_policy import seldom_collected
from verbatim.run.orchestrator.loop import Orchestrator
from verbatim.run.orchestrator.schedule import RunSchedule

WIRE = {"generate": 160e-6, "health": 200e-6, "load_metrics": 300e-6, "prompt_logprobs": 300e-6}
"""Processor seconds that the HTTP client takes for a message, by kind. For a turn (`generate`), it writes a request
with 2,048 ids and reads a packed answer of 1,533 tokens with their logprobs (`answers.py`)."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of one row of the table."""

    servers: int
    per_server: int = 100
    """Number of concurrent episodes per server."""
    group: int = 16
    batch_share: float = 0.5
    """Number of episodes in a batch, as a share of the concurrent episodes."""
    level: int = 4
    bound: int = 8
    """`max_async_level` (`level`) and `max_off_policy_steps` (`bound`) of the run."""
    core: str = "free"
    """The processor time that counts: "free" for none, "one" for that of the code, "wire" for that of code and HTTP
    client."""
    warm_up: int = 3
    steps: int = 4
    """Number of steps before the measurement (`warm_up`), and of measured steps (`steps`)."""
    train_share: float = 0.6
    """Duration of a training step, as a share of the time in which the servers sample a batch."""
    seed: int = 0
    curve: Curve = field(default_factory=Curve)
    work: Workload = field(default_factory=Workload)
    faults: Faults = field(default_factory=Faults)

    @property
    def episodes(self) -> int:
        """Number of concurrent episodes on all servers together."""
        return self.servers * self.per_server

    @property
    def groups(self) -> int:
        """Number of groups in a batch."""
        return max(1, round(self.episodes * self.batch_share / self.group))


@dataclass(frozen=True, eq=False, kw_only=True)
class Mark:
    """The counts at one moment of the run."""

    at: float
    drawn: float
    stood_in: int
    trained: int
    turns: int
    episodes: int
    messages: int
    code: float
    threads: float
    wire: float
    collecting: float
    busy: float


class Notes:
    """The observer and checkpointer of the run. It keeps the metrics and counts of each step, and requests the run's
    end after the last step."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.marks: list[Mark] = []
        """The counts at the end of each step."""
        self.metrics: list[Mapping[str, float]] = []
        self.in_flight: list[int] = []
        """Number of episodes in flight at the end of each step."""

    def on_step(self, step: int, metrics: Mapping[str, float], outcomes: Sequence[Any]) -> None:
        simulation = self._simulation
        self.metrics.append({name: value for name, value in metrics.items() if not name.startswith("replica/")})
        self.in_flight.append(len(simulation.world.scripts))
        self.marks.append(simulation.mark())
        simulation.told(f"step {step}")
        if step >= simulation.setting.warm_up + simulation.setting.steps:
            simulation.orchestrator.request_stop()

    def on_eval(self, step: int, evaluation: Any) -> None:
        raise AssertionError

    def stage(self, what: str, total: int | None = None, *, count: Any = None) -> Any:
        return contextlib.nullcontext()

    async def save(self, step: int, trainer: Any, state: Mapping[str, Any], trainer_state: Path | None = None) -> None:
        self.saved = state

    def mark_best(self, step: int, best: Mapping[str, Any]) -> None:
        raise AssertionError


class Simulation:
    """A simulated run, from its start to the end of the last measured step.

    Args:
        setting: The settings of the row.
        loop: The event loop on which the run is simulated.
        tell: Called repeatedly with this simulation and the event that happened ("step 3", or "" if there was none).
    """

    def __init__(self, setting: Setting, loop: VirtualLoop, tell: Any = lambda simulation, what: None) -> None:
        self.setting, self.loop, self._tell = setting, loop, tell
        self.notes = Notes(self)
        wire = WIRE if setting.core == "wire" else {}
        self.world = world = World(
            loop=loop, curve=setting.curve, work=setting.work, faults=setting.faults, wire=wire, seed=setting.seed
        )
        self.mean = means(world.tables)
        self.ideal, self.never = ideal(
            setting.servers,
            setting.episodes,
            setting.groups * setting.group,
            setting.curve,
            self.mean,
            update=setting.faults.update,
        )
        self.servers = [Server(world, index) for index in range(setting.servers)]
        self.pool = ReplicaPool(self.servers, restart=self._restart)  # type: ignore[arg-type]
        self.ledger = Ledger()
        self.environment = Errands(world)
        self.dispatcher = self._dispatcher()
        step = setting.groups * setting.group * self.mean.turns * self.mean.tokens / self.never
        rules = GroupRules(
            advantage=default_advantage,
            filters={},
            strategy="interleaved",
            max_length=CONTEXT,
            max_off_policy_steps=setting.bound,
        )
        self.orchestrator = Orchestrator(
            schedule=RunSchedule(
                max_steps=10_000,
                eval_setups=[],
                eval_interval=10_000,
                eval_episodes=0,
                eval_examples=None,
                eval_seed=0,
                checkpoint_interval=10_000,
            ),
            sampler=self.pool,
            trainer=SimulatedTrainer(world, setting.train_share * step),
            dispatcher=self.dispatcher,
            ledger=self.ledger,
            rules={"errands": rules},
            environments={"errands": self.environment},
            observer=self.notes,
            checkpointer=self.notes,
            probes=world.published(0),
        )
        self.collecting = 0.0
        """Processor seconds of garbage collections so far."""
        self.longest_collection = 0.0
        self.lags: list[float] = []
        """The delays in seconds with which a timer fired in the measured steps."""

    def _dispatcher(self) -> Dispatcher:
        setting = self.setting
        setup = RolloutSetup(
            env="errands",
            environment=self.environment,
            sampler=self.pool,
            renderer=StandInRenderer(setting.work),
            params=SamplingParams(max_tokens=CONTEXT),
            limits=EpisodeLimits(
                max_turns=setting.work.turns[1],
                max_context=CONTEXT,
                timeout=36_000.0,
                tool_timeout=setting.work.tool_timeout,
            ),
            slots=asyncio.Semaphore(setting.episodes),
        )
        examples = ExampleSchedule({"errands": self.environment.examples("train")}, {"errands": 1.0}, seed=setting.seed)
        return Dispatcher(
            schedule=examples,
            setups={"errands": setup},
            ledger=self.ledger,
            group_size=setting.group,
            groups_per_batch=setting.groups,
            max_async_level=setting.level,
            max_off_policy_steps=setting.bound,
            run_seed=setting.seed,
            oversampling_factor=setting.level + 1.0,
            max_steps=10_000,
        )

    async def _restart(self, index: int) -> Server:
        await self.loop.sleep(self.setting.faults.restart)
        self.servers[index] = Server(self.world, index)
        return self.servers[index]

    def mark(self) -> Mark:
        """The current counts."""
        world, loop = self.world, self.loop
        return Mark(
            at=loop.time(),
            drawn=world.drawn,
            stood_in=world.stood_in,
            trained=self.ledger.trained,
            turns=world.turns,
            episodes=world.episodes,
            messages=sum(world.messages.values()),
            code=loop.code_seconds,
            threads=loop.thread_seconds,
            wire=loop.wire_seconds,
            collecting=self.collecting,
            busy=world.busy,
        )

    @property
    def is_measured(self) -> bool:
        """True if the steps before the measurement are over."""
        return len(self.notes.marks) >= self.setting.warm_up

    def told(self, what: str = "") -> None:
        """Report an event to `tell`, without charging its processor time."""
        with self.loop.uncharged:
            self._tell(self, what)

    async def run(self) -> None:
        """Run to the end of the last measured step, and shut down."""
        probe = asyncio.create_task(self._probe())
        gc.callbacks.append(self._collected)
        try:
            with seldom_collected():
                await self.orchestrator.run()
        finally:
            gc.callbacks.remove(self._collected)
            probe.cancel()
            await self.pool.close()
        self.ledger.check(self.dispatcher.num_pending_tokens)

    async def _probe(self) -> None:
        while True:
            due = self.loop.time() + 0.05
            await asyncio.sleep(0.05)
            if self.is_measured:
                self.lags.append(self.loop.time() - due)
            self.told()

    def _collected(self, phase: str, info: Mapping[str, int]) -> None:
        now = time.thread_time()
        if phase == "start":
            self._since = now
        else:
            self.collecting += now - self._since
            self.longest_collection = max(self.longest_collection, now - self._since)
