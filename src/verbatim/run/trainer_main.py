"""Builds the trainer of a run, and runs it as a process that serves one orchestrator until the run ends."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from verbatim.config import dump_config
from verbatim.config.schema import RunConfig
from verbatim.core.children import end_with_parent
from verbatim.core.errors import CheckpointError, RunStopped
from verbatim.logs.checkpoints import ORCHESTRATOR, CheckpointStore, RunFolder
from verbatim.logs.monitors.live import LiveView
from verbatim.models.native.cores import CoreShare, own_cores
from verbatim.run.build import needs_first_model
from verbatim.run.environments import Environments, make_environments
from verbatim.run.logs import last_lines
from verbatim.run.make_trainer import make_trainer, shares_cores, threads_of, while_both_start
from verbatim.run.rollouts import inference_settings
from verbatim.run.trainer_ranks import open_ranks
from verbatim.run.weight_transfer import own_address
from verbatim.trainer.transport import TrainerReady, WeightFolders
from verbatim.trainer.transport.exchange import Exchange
from verbatim.trainer.transport.files import publish_bytes
from verbatim.trainer.transport.heartbeat import Heartbeat, PeerWatch

if TYPE_CHECKING:
    from verbatim.trainer.parallel.ranks import Ranks
    from verbatim.trainer.worker import TrainerWorker


class RunPaths(Protocol):
    """The paths of a run folder that a trainer uses."""

    @property
    def path(self) -> Path:
        """The run folder."""

    @property
    def weights(self) -> Path:
        """Where policy versions are published."""

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""


def open_trainer(
    config: RunConfig,
    environments: Callable[[], Environments],
    folder: RunPaths,
    console: Console,
    *,
    states: Path,
    ranks: Ranks | None = None,
    sends_from: str | None = None,
    restarted: bool = False,
) -> tuple[TrainerWorker, TrainerReady]:
    """Open a trainer with the newest checkpoint of the run, or with the model from which the run starts.

    Args:
        config: The run's configuration.
        environments: Called only if a model has to be built or warm-started.
        folder: The run folder.
        console: Where progress is printed.
        states: The folder for the trainer's parts of checkpoints.
        ranks: The processes that train together. None if this process trains alone.
        sends_from: The address at which the sampler's servers connect to receive weights. None if no weights are sent.
        restarted: True if the trainer restarts within its run, so that the sampler may read versions after the
            checkpoint.
    """
    from verbatim.models.loading import load_tokenizer
    from verbatim.trainer.device_memory import DeviceMemory
    from verbatim.trainer.weight_sender import WeightBroadcaster
    from verbatim.trainer.worker import TrainerWorker

    found = CheckpointStore(folder.checkpoints, read_only=True).latest()
    first, base = _sources(
        config, environments, folder, console, found.folder / "weights" if found else None, ranks=ranks
    )
    with LiveView(console).stage("loading the model"):
        trainer = make_trainer(config, "run", base, first=first, ranks=ranks, tokenizer=load_tokenizer(base))
    if trainer.adapters is not None:
        console.print(f"lora        {trainer.adapters}", soft_wrap=True)
    if found is not None:
        if trainer.adapters is not None:
            trainer.load_adapters(found.folder / "weights")
        left = (config.max_steps - found.step) * config.trainer.optimizer_steps_per_batch
        trainer.load_state(found.folder / "trainer", left=left)
    shares_device = inference_settings(config).shares_device
    # Published versions to keep: those by which the sampler may lag behind, the version that it reads, and the version
    # being written.
    worker = TrainerWorker(
        trainer,
        version=found.step if found is not None else 0,
        weights=WeightFolders(
            folder.weights.resolve(), keep=config.orchestrator.max_async_level + 2, keeps_newer=restarted
        ),
        states=states.resolve(),
        context_length=config.orchestrator.seq_len,
        keeps_tokens=config.monitor.save_trajectories,
        memory=DeviceMemory(trainer.models, trainer.optimizer, trainer.device) if shares_device else None,
        measures_rounding=(
            config.inference.canary_tolerance is None
            and "bfloat16" in (config.trainer.dtype, inference_settings(config).precision)
        ),
        broadcaster=WeightBroadcaster(trainer, sends_from) if sends_from is not None else None,
    )
    # A resumed run's adapters are published again, because their base path in the checkpoint is stale if the folder was
    # moved.
    if found is not None and trainer.adapters is not None:
        base = worker.weights.publish(worker.version, trainer.save_weights)
    ready = TrainerReady(
        version=worker.version,
        weights=str(base.resolve() if base.exists() else base),  # the other process may have another working directory
        checkpoint=found.folder.resolve() if found is not None else None,
        probes=worker.probe(),
        store=worker.broadcaster.store if worker.broadcaster is not None else None,
    )
    if worker.memory is not None:
        worker.memory.leave()  # free the device for the sampler, which starts next
    return worker, ready


def _sources(
    config: RunConfig,
    environments: Callable[[], Environments],
    folder: RunPaths,
    console: Console,
    checkpoint: Path | None,
    *,
    ranks: Ranks | None,
) -> tuple[Path, Path]:
    """Return (1) the model from which the run started and (2) the weights to load.

    The model is the checkpoint itself if the original model is not needed. With adapters, the weights to load are those
    of their base model.

    Raises:
        CheckpointError: the checkpoint holds an adapter, but this run does not train one.
    """
    from verbatim.models.source import is_adapter
    from verbatim.run.prepare import prepare_model

    if checkpoint is not None and config.trainer.lora is None and is_adapter(checkpoint):
        raise CheckpointError(
            f"{checkpoint} holds an adapter: the run in {folder.path} was started with "
            "[trainer.lora]; resume it with that table, or start a new run"
        )
    if checkpoint is not None and not needs_first_model(config):
        return checkpoint, checkpoint
    first = prepare_model(config, environments(), folder.path, console, ranks=ranks)
    return first, first if checkpoint is None or config.trainer.lora is not None else checkpoint


AskedToEnd = Callable[[Exchange, Heartbeat], AbstractContextManager[Callable[[], bool]]]
"""A context manager that handles Ctrl-C and SIGTERM while the block runs. It yields a function that returns True once
either has arrived."""


def serve_trainer(
    config: RunConfig,
    folder: RunFolder,
    console: Console,
    asked_to_end: AskedToEnd,
    *,
    session: str | None,
    parent: int | None,
) -> bool:
    """Serve an orchestrator until the run ends; True if this process was asked to end.

    Args:
        config: The run's configuration.
        folder: The run folder.
        console: Where preparation is reported, and each step if this process was started separately.
        asked_to_end: Handles Ctrl-C and SIGTERM.
        session: The subfolder of the exchange in which both processes meet. None if this process was started
            separately.
        parent: The id of the process that started this process; when the parent ends, this process ends too.
    """
    from verbatim.trainer.local import set_num_threads
    from verbatim.trainer.serve import serve

    sends_from = own_address(config)
    exchange = Exchange.open(folder.exchange, session)
    publish_bytes(exchange.config, dump_config(config).encode(), private=True)
    if parent is not None:
        end_with_parent(parent)  # this ends at once, even within a step, because nobody would use the result
    with (
        Heartbeat(exchange.trainer_beat) as heartbeat,
        open_ranks(config, folder.path / "logs", may_be_launched=session is None) as ranks,
    ):
        with while_both_start(config):
            worker, ready = open_trainer(
                config,
                lambda: make_environments(config),
                folder,
                console,
                states=exchange.states,
                ranks=ranks,
                sends_from=sends_from,
            )
        if ranks is None:
            set_num_threads(threads_of(config, config.trainer.num_threads))
        if session is not None and shares_cores(config):  # the orchestrator is on this machine
            worker.share(CoreShare(exchange.cores, "trainer", own_cores()))
        exchange.ready(ready)
        look = ranks.look if ranks is not None else lambda: None
        with asked_to_end(exchange, heartbeat) as stopped:
            if session is not None:  # the orchestrator started this process and watches it
                serve(worker, exchange, heartbeat, look=look)
            else:
                _serve_by_itself(worker, ready, config, folder, exchange, heartbeat, console, look)
        return stopped()


def _serve_by_itself(
    worker: TrainerWorker,
    ready: TrainerReady,
    config: RunConfig,
    folder: RunFolder,
    exchange: Exchange,
    heartbeat: Heartbeat,
    console: Console,
    look_at_ranks: Callable[[], None],
) -> None:
    """Serve an orchestrator that is started separately, print each step, and watch both ranks and orchestrator."""
    from verbatim.logs.monitors.console import format_number
    from verbatim.trainer.serve import serve

    def show(version: int, metrics: dict[str, float]) -> None:
        names = (
            ("loss", "loss"),
            ("grad norm", "grad_norm"),
            ("tok/s", "tokens_per_second"),
            ("idle s", "time/trainer_idle"),
        )
        shown = "  ".join(f"{label} {format_number(metrics[key])}" for label, key in names if key in metrics)
        console.print(f"step {version}/{config.max_steps}  {shown}", soft_wrap=True)

    the_other = f"the other process:  verbatim orchestrator FILE --run-dir {folder.path}"
    console.print(f"ready after step {ready.version}; {the_other}", soft_wrap=True)
    look_at_orchestrator = _look(exchange, config, folder)

    def look() -> None:
        look_at_ranks()
        look_at_orchestrator()

    serve(worker, exchange, heartbeat, look=look, on_step=show)


def _look(exchange: Exchange, config: RunConfig, folder: RunFolder) -> Callable[[], None]:
    """A check to call regularly: it waits for the orchestrator to appear, and raises once the orchestrator is gone."""
    watch: PeerWatch | None = None

    def look() -> None:
        nonlocal watch
        if watch is None:
            if exchange.orchestrator_beat.exists():
                watch = PeerWatch(
                    exchange.orchestrator_beat,
                    name="the orchestrator",
                    heartbeat_timeout=config.orchestrator.heartbeat_timeout,
                    stall_timeout=config.orchestrator.stall_timeout,
                )
            return
        fault = watch.fault()
        if fault is not None:
            raise RunStopped(f"{fault}{last_lines(folder.log(ORCHESTRATOR))}")

    return look
