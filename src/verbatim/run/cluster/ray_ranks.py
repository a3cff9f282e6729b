"""The actors of all trainer ranks on a Ray cluster, from their start to their end."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from verbatim.config.schema import RunConfig
from verbatim.core.disk import link_or_copy
from verbatim.core.errors import RunStopped, UsageError, VerbatimError
from verbatim.logs.checkpoints import CheckpointStore
from verbatim.rollouts.ray.cluster import said_by_ray
from verbatim.run.cluster.folders import ShippedFolder, write
from verbatim.run.cluster.placement import Reserved
from verbatim.run.cluster.rank_actor import FILES, ActorSetup, RankActor
from verbatim.run.cluster.shipments import Shipments
from verbatim.trainer.transport import TrainerReady
from verbatim.trainer.transport.trainer_messages import (
    ready_from_json,
)

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 5.0
"""Seconds within which a rank that is alive says where it is."""
_CAUSE_SECONDS = 30.0
"""Seconds that rank 0 has to say why another rank ended."""
_SAID_SECONDS = 0.5
"""Seconds between two questions for what rank 0 printed."""
_PREPARED = ("model", "warm_start")
"""Folders that rank 0 makes before training: the built model, and the model after its warm start."""


class RanksLost(Exception):
    """Ranks are gone; the message says how."""


@dataclass(eq=False)
class RayRanks:
    """The actors of all ranks, from their start to their end. Methods block, and are called on threads.

    Args:
        ray: The package, connected.
        config: The run's configuration.
        reserved: The ranks' resources.
        setup: What each actor gets.
        shipments: Folders in the object store.
        folder: The run folder on this machine.
        console: Where the output of rank 0 is printed while it prepares.
    """

    ray: Any
    config: RunConfig
    reserved: Reserved
    setup: ActorSetup
    shipments: Shipments
    folder: Path
    console: Console
    actors: list[Any] = field(default_factory=list)
    """The handles, by rank."""
    restarts: int = 0
    """Number of restarts so far."""
    _nodes: dict[str, Any] = field(default_factory=dict)
    """One actor of each node, by the node's id."""
    _follows: list[Any] = field(default_factory=list)
    """The calls in which the other ranks follow rank 0. They end only with their rank, or with the run."""
    _places: list[tuple[str, str, int]] = field(default_factory=list)
    """Node, address and process of each rank."""

    @property
    def is_shared(self) -> bool:
        """True if all nodes have the run folder at this machine's path."""
        return self.setup.shared is not None

    def start_first(self) -> TrainerReady:
        """Same as `start`, again and again if ranks are lost meanwhile.

        Raises:
            RunStopped: too many restarts.
        """
        while True:
            try:
                return self.start()
            except RanksLost as lost:
                self.prepare_restart(lost)

    def prepare_restart(self, lost: RanksLost) -> None:
        """Count a restart, and end the ranks that are left.

        Raises:
            RunStopped: there were too many restarts.
        """
        assert self.config.cluster is not None
        if self.restarts == self.config.cluster.max_trainer_restarts:
            raise RunStopped(
                f"the trainer lost ranks ({lost}), after {self.restarts} restarts (cluster.max_trainer_restarts)"
            )
        self.restarts += 1
        logger.warning("the trainer lost ranks (%s); restart %d", lost, self.restarts)
        self.end(in_order=False)
        self.shipments.forget_all()  # objects of a rank that is gone are lost

    def start(self) -> TrainerReady:
        """Start all ranks, and open the trainer with the run's newest checkpoint or its first model.

        Raises:
            RanksLost: a rank is gone.
            VerbatimError: the ranks refuse the run.
        """
        cluster, size = self.config.cluster, self.config.trainer.parallel.processes
        assert cluster is not None
        kind = self.ray.remote(concurrency_groups={FILES: 1})(RankActor)
        self.actors = [
            kind.options(**self.reserved.options(rank), max_restarts=0).remote(self.setup) for rank in range(size)
        ]
        self._places = []
        places = self._places = self._all("where", timeout=cluster.start_timeout)
        self._nodes = {}
        for actor, (node, _, _) in zip(self.actors, places, strict=True):
            self._nodes.setdefault(node, actor)  # rank 0 comes first, so it stands for its node
        if self.is_shared:
            self._refuse_unshared(places)
        here = [node for node, _, _ in places]
        if size > 1:
            store = self._get(self.actors[0].serve_store.remote())
            self._wait(
                [actor.join.remote(store, rank, size, here.count(here[rank])) for rank, actor in enumerate(self.actors)]
            )
            self._follows = [actor.follow.remote() for actor in self.actors[1:]]
            self._get(self.actors[0].lead.remote())
        return self._open()

    def _open(self) -> TrainerReady:
        rank_0, first = self.actors[0], [name for name in _PREPARED if (self.folder / name).is_dir()]
        found = CheckpointStore(self.folder / "checkpoints", read_only=True).latest()
        for name in first:
            self._bring_to_ranks(self.folder / name)
        if found is not None:
            self._bring_to_ranks(found.folder)
        if self.config.model.name is None and "model" not in first:
            self._prepare(rank_0.build, "model")
        if found is None and self.config.warm_start is not None and "warm_start" not in first:
            self._prepare(rank_0.prepare, "warm_start")
        ready = ready_from_json(self._told(rank_0.open.remote(self.restarts)), self.folder)
        if not self.is_shared and Path(ready.weights).is_relative_to(self.folder) and not Path(ready.weights).is_dir():
            self.fetch(Path(ready.weights))
        return ready

    def _prepare(self, method: Any, name: str) -> None:
        """Have rank 0 make a folder, and bring it to this machine and to all ranks."""
        self._told(method.remote())
        if not self.is_shared:
            self.fetch(self.folder / name)
            self._bring_to_ranks(self.folder / name)

    def fetch(self, path: Path) -> None:
        """Bring a folder from rank 0's node to its place in the run folder."""
        shipped = self._get(self._files(self.actors[0].ship).remote(path.relative_to(self.folder).as_posix()))
        partial = path.with_name(f".{path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        self._write(shipped, partial)
        partial.rename(path)
        self.shipments.note(path, shipped)

    def _write(self, shipped: ShippedFolder, folder: Path) -> None:
        try:
            write(self.ray, shipped, folder, self.folder)
        except self.ray.exceptions.ObjectLostError as error:
            raise RanksLost(self._gone() or said_by_ray(error)) from error

    def _bring_to_ranks(self, path: Path) -> None:
        if not self.is_shared:
            shipped = self.shipments.of(path)
            self._wait([self._files(actor.bring).remote(shipped) for actor in self._nodes.values()])

    def fetch_state(self, version: int, weights: Path | None) -> Path:
        """Bring the trainer's part of a checkpoint from the nodes of all ranks into `states/` of the run folder.

        Args:
            version: The version.
            weights: The folder of its weights on this machine, which are linked. None to bring them too.
        """
        name = f"states/v{version:06d}"
        folder = self.folder / name
        if self.is_shared:
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for actor in self._nodes.values():
            # Each rank leaves its part of the optimizer's state on its node. Weights are on the node of rank 0.
            leave_out = [] if weights is None and actor is self._first else ["weights"]
            shipped = self._get(self._files(actor.ship).remote(name, leave_out))
            self._write(shipped, folder)
        self._wait([self._files(actor.forget).remote(name) for actor in self._nodes.values()])
        if weights is not None:
            shutil.copytree(weights, folder / "weights", copy_function=link_or_copy)
        return folder

    @property
    def _first(self) -> Any:
        """The actor that stands for rank 0's node: rank 0."""
        return self.actors[0]

    def call(self, method: str, *arguments: Any) -> dict[str, Any]:
        """Call rank 0, and return its answer.

        Raises:
            RanksLost: a rank is gone.
            RunStopped: the trainer reports an error; or it took longer than the timeout for steps.
        """
        answer: dict[str, Any] = self._get(
            getattr(self.actors[0], method).remote(*arguments), timeout=self.config.orchestrator.stall_timeout
        )
        if "error" not in answer:
            return answer
        if answer["lost"] or self._has_lost_follower():
            raise RanksLost(self._gone() or answer["error"])
        raise RunStopped(f"the trainer: {answer['error']}")

    def end(self, *, in_order: bool) -> None:
        """End all ranks. With `in_order`, rank 0 ends the others, and the nodes' folders are removed."""
        if in_order and self.actors:
            self._follows = []  # they end now
            with contextlib.suppress(RanksLost, VerbatimError):
                self._get(self.actors[0].close.remote(), timeout=30.0)
                self._wait([self._files(actor.leave).remote() for actor in self.actors], timeout=30.0)
        for actor in self.actors:
            self.ray.kill(actor)
        self.actors, self._nodes, self._follows = [], {}, []

    # ---- calls

    def _files(self, method: Any) -> Any:
        return method.options(concurrency_group=FILES)

    def _all(self, method: str, timeout: float) -> list[Any]:
        return self._wait([getattr(actor, method).remote() for actor in self.actors], timeout=timeout)

    def _get(self, reference: Any, timeout: float | None = None) -> Any:
        return self._wait([reference], timeout=timeout)[0]

    def _wait(self, references: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """Wait for results of the ranks.

        Raises:
            RanksLost: a rank is gone.
            RunStopped: the timeout expired.
            VerbatimError: a rank refuses the run.
        """
        errors, wanted = self.ray.exceptions, set(references)
        until = None if timeout is None else time.monotonic() + timeout
        while wanted:
            left = None if until is None else max(0.0, until - time.monotonic())
            ended, _ = self.ray.wait([*wanted, *self._follows], num_returns=1, timeout=left)
            if not ended:
                raise RunStopped(
                    f"the trainer's ranks on the cluster did not answer within {timeout:g} s "
                    "(cluster.start_timeout, or orchestrator.stall_timeout for a step)"
                )
            wanted -= set(ended)
            if wanted and any(follow in ended for follow in self._follows):
                # Rank 0 may know why, and says so if it is not the loss itself.
                self.ray.wait(list(wanted), num_returns=len(wanted), timeout=_CAUSE_SECONDS)
                break
        try:
            return list(self.ray.get(list(references), timeout=0 if self._has_lost_follower() else None))
        except (errors.RayActorError, errors.ObjectLostError, errors.WorkerCrashedError) as error:
            if "creation task" in str(error):  # its `__init__` failed: the same would happen again
                raise UsageError(f"a process could not start on the cluster: {said_by_ray(error)}") from error
            raise RanksLost(": ".join(filter(None, (self._gone(), said_by_ray(error))))) from error
        except errors.GetTimeoutError:
            raise RanksLost(self._gone() or "a rank ended") from None
        except errors.RayTaskError as error:
            if isinstance(error.cause, RunStopped) and self._has_lost_follower():
                raise RanksLost(self._gone() or str(error.cause)) from error
            if isinstance(error.cause, VerbatimError):
                raise error.cause from None
            raise

    def _has_lost_follower(self) -> bool:
        """True if a rank other than 0 has ended."""
        if not self._follows:
            return False
        ended, _ = self.ray.wait(list(self._follows), num_returns=1, timeout=0)
        return bool(ended)

    def _gone(self) -> str:
        """Names the ranks that no longer answer; empty if all answer."""
        asked = {self._files(actor.where).remote(): rank for rank, actor in enumerate(self.actors)}
        self.ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER_SECONDS)
        gone = []
        for reference, rank in asked.items():
            try:
                self.ray.get(reference, timeout=0)
            except Exception:  # noqa: BLE001  Ray has several errors for an actor that is gone
                _, address, process = self._places[rank] if self._places else ("", "an unknown node", "unknown")
                gone.append(f"rank {rank} (process {process} on {address}) is gone")
        return "; ".join(gone)

    def _told(self, reference: Any) -> Any:
        """Wait for rank 0, and print what it prints meanwhile."""
        over = threading.Event()

        def tell() -> None:
            while True:
                ended = over.wait(_SAID_SECONDS)
                with contextlib.suppress(Exception):  # the wait below reports why rank 0 does not answer
                    for line in self.ray.get(self._files(self.actors[0].said).remote(), timeout=10):
                        self.console.print(line, soft_wrap=True)
                if ended:
                    return

        telling = threading.Thread(target=tell, name="output of rank 0", daemon=True)
        telling.start()
        try:
            return self._get(reference)
        finally:
            over.set()
            telling.join()

    def _refuse_unshared(self, places: Sequence[tuple[str, str, int]]) -> None:
        seen = self._wait([actor.sees.remote("config.toml") for actor in self.actors])
        for (_, address, _), sees in zip(places, seen, strict=True):
            if not sees:
                raise UsageError(
                    f'cluster.transfer = "folder", but node {address} has no {self.folder / "config.toml"}; share the '
                    'run folder with all nodes at this path, or set cluster.transfer = "object_store"'
                )
