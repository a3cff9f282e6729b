"""One rank of the trainer, as a Ray actor on its node."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import os
import shutil
import socket
import struct
import threading
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verbatim.config import make_config
from verbatim.core.errors import RunStopped
from verbatim.core.machine_faults import describe
from verbatim.core.plain_console import PlainConsole
from verbatim.inference.sending import SendOrder
from verbatim.rollouts.workers.worker import WorkerContext
from verbatim.run.cluster.folders import ShippedFolder, bring, ship
from verbatim.run.cluster.node_folder import NodeFolder
from verbatim.run.tables import component_tables

if TYPE_CHECKING:
    from verbatim.trainer.parallel.ranks import Ranks
    from verbatim.trainer.worker import TrainerWorker

FILES = "files"
"""The concurrency group of methods that move files, which run while the trainer computes."""


@dataclass(frozen=True, kw_only=True)
class ActorSetup:
    """What every actor of a run gets."""

    context: WorkerContext
    """Working directory and search path of the orchestrator."""
    config: str
    """The run's configuration as TOML."""
    run: str
    """A name that no other run has."""
    shared: str | None
    """The run folder if all nodes have it at this path; None if files travel through the object store."""


@dataclass(frozen=True)
class NodePaths:
    """The `RunPaths` of a run's folder on a node."""

    path: Path

    @property
    def weights(self) -> Path:
        """Where policy versions are published."""
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / "checkpoints"


class OnNode:
    """Base class of a run's actors: the run's folder on this node, and the files in it."""

    def __init__(self, setup: ActorSetup) -> None:
        import ray

        setup.context.apply()
        self._ray = ray
        self.config = make_config(tomllib.loads(setup.config), tables=component_tables())
        self._place = None if setup.shared else NodeFolder(setup.run, ray.get_runtime_context().get_node_id())
        self.root = Path(setup.shared) if self._place is None else self._place.path  # type: ignore[arg-type]

    def where(self) -> tuple[str, str, int]:
        """The node's id, its address, and this process's id."""
        return self._ray.get_runtime_context().get_node_id(), self._ray.util.get_node_ip_address(), os.getpid()

    def bring(self, shipped: ShippedFolder, below: str = "") -> str:
        """Write a shipped folder into the run's folder on this node, unless it is there. Return its path. `below` is a
        subfolder that takes the place of the run's folder."""
        assert self._place is not None
        with self._place.locked():
            return str(bring(self._ray, shipped, self.root / below))

    def forget(self, name: str) -> None:
        """Remove a folder that this machine no longer needs. With a shared run folder, the orchestrator does so."""
        if self._place is not None:
            with self._place.locked():
                shutil.rmtree(self.root / name, ignore_errors=True)

    def ship(self, name: str, leave_out: Sequence[str] = ()) -> ShippedFolder:
        """Put a folder of the run's folder on this node into the object store."""
        return ship(self._ray, self.root, name, leave_out=leave_out)

    def sees(self, name: str) -> bool:
        """True if this node has this file of the run's folder."""
        return (self.root / name).is_file()

    def leave(self) -> None:
        """Let go of the run's folder on this node."""
        if self._place is not None:
            self._place.leave()


class RankActor(OnNode):
    """One rank. Rank 0 is called for each step; the other ranks follow it within one long call of `follow`."""

    def __init__(self, setup: ActorSetup) -> None:
        super().__init__(setup)
        self.forget("states")  # of ranks that were lost; the ranks of this start have written nothing yet
        self._said = _Said()
        self._console = PlainConsole(file=self._said)
        self._open = contextlib.ExitStack()
        self._ranks: Ranks | None = None
        self._worker: TrainerWorker | None = None

    def said(self) -> list[str]:
        """The lines printed since the last call."""
        return self._said.take()

    # ---- the process group

    def serve_store(self) -> str:
        """On rank 0: serve the rendezvous store of all ranks; return its address."""
        import torch.distributed as dist

        _, address, _ = self.where()
        listening = socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET)
        port = listening.getsockname()[1]
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        return f"{address}:{port}"

    def join(self, store: str, rank: int, size: int, ranks_here: int) -> None:
        """Set the variables by which a launcher tells a rank about the others. Ray has chosen this process's devices,
        so each rank sees its own device as number 0."""
        from verbatim.run.trainer_ranks import STORE

        variables = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": ranks_here, STORE: store}
        os.environ.update({name: str(value) for name, value in variables.items()})
        _, address, _ = self.where()
        if (interface := interface_of(address)) is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)

    def follow(self) -> None:
        """On ranks other than 0: follow rank 0 until it ends. If this rank cannot continue, its process exits."""
        from verbatim.run.trainer_ranks import follow_leader

        follow_leader(self.root)

    def lead(self) -> None:
        """On rank 0: connect to the other ranks."""
        from verbatim.run.trainer_ranks import open_ranks

        ranks = open_ranks(self.config, self.root / "logs", may_be_launched=True, root=self.root.resolve())
        self._ranks = self._open.enter_context(ranks)

    # ---- rank 0

    def build(self) -> None:
        """Build the run's model, if it builds one."""
        from verbatim.run.environments import make_environments
        from verbatim.run.prepare import build_first_model

        if self.config.model.name is None:
            build_first_model(self.config, make_environments(self.config), self.root, self._console)

    def prepare(self) -> None:
        """Do the warm start, if the run has one."""
        from verbatim.run.environments import make_environments
        from verbatim.run.prepare import prepare_model

        prepare_model(self.config, make_environments(self.config), self.root, self._console, ranks=self._ranks)

    def open(self, restarts: int) -> dict[str, Any]:
        """Open the trainer with the newest checkpoint in the run's folder on this node, or with the first model; return
        a `TrainerReady` as JSON."""
        from verbatim.run.environments import make_environments
        from verbatim.run.make_trainer import set_trainer_threads
        from verbatim.run.rollouts import inference_settings
        from verbatim.run.trainer_main import open_trainer
        from verbatim.trainer.transport.trainer_messages import to_json

        if self._ranks is None:
            set_trainer_threads(self.config, 1)
        sends = inference_settings(self.config).broadcast is not None
        self._worker, ready = open_trainer(
            self.config,
            lambda: make_environments(self.config),
            NodePaths(self.root),
            self._console,
            states=self.root / "states",
            ranks=self._ranks,
            sends_from=self.where()[1] if sends else None,
            restarted=restarts > 0,
        )
        return to_json(ready, self.root)

    def train(self, message: Any, again: bool = False) -> dict[str, Any]:
        """Train on a batch (uint8 [N], the bytes of a `TrainerMessage`). Returns {"result": a `StepReport` as JSON,
        "weights": the `ShippedFolder` of the new version} or, if the run must end, {"error", "lost"}; "lost" is true if
        another rank is gone."""
        from verbatim.trainer.transport.trainer_messages import read_message_bytes, to_json

        def work() -> dict[str, Any]:
            order = read_message_bytes(memoryview(message))
            checkpoint = order.checkpoint and not again  # its state was delivered the first time
            report = self._trained().train(order.samples, order.version, checkpoint=checkpoint)
            shipped = None if self._place is None else self.ship(f"weights/v{order.version:06d}")
            return {"result": to_json(report, self.root), "weights": shipped}

        return self._answer(work)

    def save(self, version: int) -> dict[str, Any]:
        """Write the state of this version into the run's folder on this node (`states/v000012`)."""
        return self._answer(lambda: {"result": str(self._trained().leave_state(version))})

    def send(self, order: SendOrder) -> dict[str, Any]:
        """Send the weights to the sampler's servers."""
        return self._answer(lambda: {"result": dataclasses.asdict(self._trained().send(order))})

    def close(self) -> None:
        """On rank 0: end the other ranks."""
        self._open.close()

    def _trained(self) -> TrainerWorker:
        assert self._worker is not None, "the trainer is not open"
        return self._worker

    def _answer(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            if self._ranks is not None:
                self._ranks.look()
            return work()
        except (RunStopped, OSError) as error:
            return {"error": describe(error), "lost": self._ranks is not None and self._ranks.are_broken}


def interface_of(address: str) -> str | None:
    """The network interface that has this IPv4 address; None if no interface has it, or for an IPv6 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                # SIOCGIFADDR fills a struct ifreq, whose bytes 20 to 24 are the interface's IPv4 address.
                found = fcntl.ioctl(asking.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return None


class _Said(io.TextIOBase):
    """Collects printed lines until they are taken."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._begun = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            self._lines += lines
        return len(text)

    def take(self) -> list[str]:
        with self._lock:
            taken, self._lines = self._lines, []
        return taken
