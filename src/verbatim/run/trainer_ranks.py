"""Starts the trainer's ranks, or joins those that a launcher (`torchrun`) has started.

Rank 0 is the trainer's own process. It starts the other ranks on this machine, each in an interpreter of its own,
watches them, and ends them when it ends itself. They run `python -m verbatim.run.trainer_rank`, which calls
`follow_leader`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verbatim.config import dump_config
from verbatim.config.schema import RunConfig
from verbatim.core.children import end, how_it_ended, open_log, start
from verbatim.core.errors import RunStopped, UsageError
from verbatim.core.imports import child_environment
from verbatim.run.logs import last_lines
from verbatim.run.rollouts import inference_settings

if TYPE_CHECKING:
    from verbatim.trainer.parallel.failures import Failure, Failures
    from verbatim.trainer.parallel.ranks import Ranks

logger = logging.getLogger(__name__)

STORE = "VERBATIM_TRAINER_STORE"
"""Environment variable of a rank started here: the address of rank 0's key-value store."""
PARENT = "VERBATIM_TRAINER_LEADER"
"""Environment variable of a rank started here: the process id of rank 0."""
_STATUS = {"run": 1, "usage": 2, "component": 2, "sampler": 1, "interrupted": 130}
"""Exit status by the kind of failure (see `verbatim.cli.exit_status`)."""
_START_SECONDS = 600.0
"""Minimum timeout for a rank to start, in seconds: imports alone may take longer than a short deadline."""
_POLL = 0.02
"""Seconds between two checks that test whether the ranks have started."""
_PATIENCE = 20.0
"""Time in seconds that the other ranks have to end by themselves."""


def is_launched() -> bool:
    """True if a launcher started this process as one of several ranks."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def is_led() -> bool:
    """True if a launcher started this process as a rank other than 0."""
    return is_launched() and os.environ["RANK"] != "0"


def num_processes(config: RunConfig, *, may_be_launched: bool) -> int:
    """Number of processes that train together.

    Raises:
        UsageError: the number is larger than the number of CUDA devices here, or differs from the number of launched
            ranks.
    """
    wanted = config.trainer.parallel.processes
    several = wanted > 1 or (may_be_launched and is_launched())
    if several and inference_settings(config).shares_device:
        raise UsageError(
            "the sampler shares the trainer's device, which a trainer of several processes cannot release; "
            "use trainer.parallel.processes = 1, or give the sampler a device of its own"
        )
    if may_be_launched and is_launched():
        size = int(os.environ["WORLD_SIZE"])
        if wanted not in (1, size):
            raise UsageError(
                f"trainer.parallel.processes = {wanted}, but {size} processes were launched; remove the "
                "key, or the launcher"
            )
        return size
    if wanted > 1 and _use_cuda(config):
        import torch

        if wanted > torch.cuda.device_count():
            raise UsageError(
                f"trainer.parallel.processes = {wanted}, but there are {torch.cuda.device_count()} CUDA "
                "devices here, and each process needs its own; take fewer, or launch them on several "
                "hosts: torchrun ... -m verbatim.cli trainer FILE --run-dir FOLDER"
            )
    return wanted


@contextlib.contextmanager
def open_ranks(
    config: RunConfig, logs: Path, *, may_be_launched: bool = False, root: Path | None = None
) -> Iterator[Ranks | None]:
    """Open the ranks, seen from rank 0, while the block runs. Yields None if this process trains alone.

    Args:
        config: The run's configuration, which the other ranks receive from this process.
        logs: The folder for the ranks' logs.
        may_be_launched: True if a launcher may have started this process as one of several ranks. False for the trainer
            of `verbatim rl`, which may inherit a launcher's environment variables from its parent.
        root: As for `Ranks`.

    Raises:
        UsageError: as for `num_processes`.
        RunStopped: a rank ended before it was ready; the message quotes its log.
    """
    size = num_processes(config, may_be_launched=may_be_launched)
    if size == 1:
        yield None
        return
    if may_be_launched and is_launched():
        with _leading(config, *_rendezvous(), root=root) as ranks:
            yield ranks
        return
    others = _Others(size, logs)
    try:
        store = others.start(config)
        with _leading(config, store, 0, size, others=others) as ranks:
            yield ranks
        others.wait()
    finally:
        others.kill()


@contextlib.contextmanager
def _leading(
    config: RunConfig,
    store: Any,
    rank: int,
    size: int,
    *,
    others: _Others | None = None,
    root: Path | None = None,
) -> Iterator[Ranks]:
    """Lead the other ranks while the block runs. If the block fails, they are notified, and end."""
    from verbatim.trainer.parallel.failures import Failures

    assert rank == 0
    failures = Failures(store, rank, size, ended=others.ended if others is not None else dict)
    store.set("config", dump_config(config))

    def end(failure: Failure | None, seen: Failures) -> None:
        if not ranks.are_broken:  # in this case the main thread is stuck in a collective, so only an exit ends it
            _end_for(failure, seen)

    try:
        with _connected(config, store, 0, size, others=others, root=root) as ranks:
            with failures.watched(end, patience=_PATIENCE):
                yield ranks
            ranks.end()
    except BaseException as error:
        failures.tell(error)
        if others is None:  # launched ranks end by themselves; `open_ranks` ends those that it started
            failures.wait_until_left()
        raise


@contextlib.contextmanager
def _connected(
    config: RunConfig,
    store: Any,
    rank: int,
    size: int,
    *,
    others: _Others | None = None,
    root: Path | None = None,
) -> Iterator[Ranks]:
    """Join the process group of all ranks while the block runs."""
    import torch.distributed as dist

    from verbatim.run.make_trainer import set_trainer_threads
    from verbatim.trainer.parallel.ranks import Ranks

    set_trainer_threads(config, _processes_here(size))
    ranks = Ranks(
        store,
        rank=rank,
        size=size,
        local_rank=int(os.environ.get("LOCAL_RANK", "0")) if others is None else 0,
        use_cuda=_use_cuda(config),
        deadline=config.trainer.parallel.deadline,
        ended=others.ended if others is not None else dict,
        root=root,
    )
    try:
        yield ranks
    finally:
        with contextlib.suppress(Exception):  # the other ranks may be gone
            dist.destroy_process_group()


def follow_leader(root: Path | None = None) -> None:
    """Follow rank 0's orders as one of the other ranks, until rank 0 ends. Returns when all work is done. `root` is as
    for `Ranks`.

    Never raises. If this process cannot continue, it tells rank 0 and exits, because the other ranks may be waiting for
    it in a collective.
    """
    from verbatim.trainer.parallel.failures import Failures, is_lost, kind_of

    store, rank, size = _rendezvous()
    failures = Failures(store, rank, size)

    try:
        with failures.watched(_end_for):
            _follow(store, rank, size, root)
    except BaseException as error:
        logger.exception("rank %d ends", rank)
        failures.tell(error)
        if is_lost(error):  # another rank's failure caused this error: exit with that rank's status
            _end_for(failures.wait_for_first(), failures)
        failures.leave()
        _exit(_STATUS[kind_of(error)])  # there is no cleanup: the other ranks wait as long as this process lives


def _follow(store: Any, rank: int, size: int, root: Path | None) -> None:
    """Get the configuration from rank 0, then follow its orders."""
    import tomllib

    from verbatim.config import make_config
    from verbatim.run.make_trainer import make_trainer
    from verbatim.run.tables import component_tables

    store.set(f"ready/{rank}", "")
    store.wait(["config"], timedelta(days=1))
    config = make_config(tomllib.loads(store.get("config").decode()), tables=component_tables())
    trainer: Any = None

    def obey(order: dict[str, Any]) -> None:
        nonlocal trainer
        if order["do"] == "make":
            trainer = None  # free this trainer's memory before the next one is loaded
            trainer = make_trainer(config, order["purpose"], order["source"], first=order["first"], ranks=ranks)
        else:
            trainer.obey(order)

    with _connected(config, store, rank, size, root=root) as ranks:
        ranks.follow(obey)


def _end_for(failure: Failure | None, failures: Failures) -> None:
    """End this process because another rank failed. `failure` is None if the cause is unknown."""
    if failure is None:
        logger.error("the trainer's processes end: the other ranks no longer respond")
        _exit(1)
    else:
        logger.error("the trainer's processes end: %s failed: %s", failures.name(failure.rank), failure.said)
        failures.leave()
        _exit(_STATUS[failure.kind])


def _exit(status: int) -> None:
    """Exit at once, without exit handlers: this process may have a thread that is stuck in a collective."""
    sys.stderr.flush()
    os._exit(status)


def _rendezvous() -> tuple[Any, int, int]:
    """The store, this process's rank, and the number of ranks."""
    import torch.distributed as dist

    if STORE in os.environ:
        host, _, port = os.environ[STORE].rpartition(":")
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=False, wait_for_workers=False
        )
        return store, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, rank, size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    return store, rank, size


class _Others:
    """The processes of the other ranks, which this process started."""

    def __init__(self, size: int, logs: Path) -> None:
        self._size = size
        self._logs = logs
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, config: RunConfig) -> Any:
        """Start the other ranks, and return the shared store once all of them have reported in.

        Raises:
            RunStopped: a rank ended or did not start in time; the message names the rank and quotes its log.
        """
        import torch.distributed as dist

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
        # The port is bound here and the socket handed over, because another process could take a port picked in
        # advance.
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        store.set("config", dump_config(config))
        for rank in range(1, self._size):
            variables = {
                **child_environment(),
                STORE: f"127.0.0.1:{port}",
                PARENT: str(os.getpid()),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self._size),
                "LOCAL_WORLD_SIZE": str(self._size),
            }
            with open_log(self._log(rank)) as log:
                command = [sys.executable, "-m", "verbatim.run.trainer_rank"]
                self._processes[rank] = start(command, environment=variables, stdout=log, stderr=log)
        limit = max(config.trainer.parallel.deadline, _START_SECONDS)
        until = time.monotonic() + limit
        while True:
            ended = self.ended()
            missing = [rank for rank in self._processes if not store.check([f"ready/{rank}"])]
            if not missing:
                return store
            # A rank that was ready and then ended is named by `Failures.introduce`, which also knows its reason.
            if gone := [f"rank {rank} of the trainer {ended[rank]}" for rank in missing if rank in ended]:
                raise RunStopped("; ".join(gone))
            if time.monotonic() > until:
                names = (f"rank {rank} of the trainer (process {self._processes[rank].pid})" for rank in missing)
                raise RunStopped(
                    f"{', '.join(names)} did not start within {limit:g} s (trainer.parallel.deadline)"
                    f"{last_lines(self._log(missing[0]))}"
                )
            time.sleep(_POLL)

    def ended(self) -> dict[int, str]:
        """How each process that has exited ended, with the last lines of its log, by rank."""
        statuses = {rank: process.poll() for rank, process in self._processes.items()}
        return {
            rank: f"{how_it_ended(status)}{last_lines(self._log(rank))}"
            for rank, status in statuses.items()
            if status is not None
        }

    def wait(self) -> None:
        """Wait up to `_PATIENCE` seconds for the ranks to end by themselves."""
        until = time.monotonic() + _PATIENCE
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, until - time.monotonic()))

    def kill(self) -> None:
        """Kill the ranks that are still running."""
        for process in self._processes.values():
            end(process, patience=0.0)

    def _log(self, rank: int) -> Path:
        return self._logs / f"trainer-rank-{rank}.log"


def _processes_here(size: int) -> int:
    """Number of ranks on this machine, which share its cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size)) if is_launched() else size


def _use_cuda(config: RunConfig) -> bool:
    if config.trainer.device == "cpu":
        return False
    from verbatim.models.loading import resolve_device

    return resolve_device(config.trainer.device).type == "cuda"
