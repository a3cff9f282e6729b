"""Assembles and runs one training run around the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
import tomllib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from verbatim.config import dump_config
from verbatim.config.schema import MonitorConfig, RunConfig
from verbatim.core.ctrl_c import Ask
from verbatim.core.disk import making
from verbatim.core.redaction import redacted
from verbatim.core.trajectories import Ledger
from verbatim.inference.chat.client import OpenAI
from verbatim.inference.embedded.settings import TorchSettings
from verbatim.inference.sampler import Sampler
from verbatim.logs.checkpoints import CheckpointStore, RunFolder, read_loop_state
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.alarms import AlarmWatch
from verbatim.logs.monitors.monitor import Monitor, OpenMonitor, RunInfo, open_monitors
from verbatim.logs.outcomes.retention import Retention
from verbatim.logs.uploads import NoUploads, Uploads
from verbatim.models.native.cores import CoreShare
from verbatim.rollouts import EpisodeStats, RolloutSetup
from verbatim.rollouts.main_loop import run_in_program
from verbatim.run.build import (
    make_dispatcher,
    make_logprob_models,
    make_progress,
    make_rules,
    make_schedule,
    max_failed,
    named_weights,
)
from verbatim.run.check import find_routing
from verbatim.run.ending import RunState
from verbatim.run.environments import Environments
from verbatim.run.orchestrator.gc_policy import seldom_collected
from verbatim.run.orchestrator.sending_trainer import SendingTrainer
from verbatim.run.rollouts import inference_settings, make_renderer, make_sampler, make_setups, open_runner
from verbatim.run.run_log import ALARMS, RunLog
from verbatim.run.weight_transfer import refuse_unreachable

if TYPE_CHECKING:
    from verbatim.run.cluster.cluster_run import ClusterRun
    from verbatim.run.trainer_process import TrainerSide

RunLoop = Callable[[Coroutine[Any, Any, bool], Ask, str], bool]
"""A function that runs a coroutine on an event loop to completion, and returns its result. Its arguments are the
coroutine, what to do at the first Ctrl-C, and what to print if the process ends at once."""


@dataclass(kw_only=True, eq=False)
class TrainingRun:
    """The orchestrator of one run, with the trainer that is started or found for it."""

    config: RunConfig
    """The run's configuration, with its name."""
    environments: Environments
    """The environments of the configuration."""
    services: Mapping[str, OpenMonitor]
    """The monitors of the configuration, not yet started."""
    monitors: Sequence[Monitor]
    """Additional monitors."""
    watch: AlarmWatch | None
    """Raises alarms. None if there are no alarms."""
    folder: RunFolder
    console: Console
    """Where progress is printed."""
    uploads: Uploads | NoUploads
    """Keeps a copy of the run folder elsewhere."""
    started: float
    """`time.monotonic()` when this process began."""
    has_begun: bool = False
    """True once the training loop runs. If the user's mistake is found earlier, no run folder is left behind."""
    finished: bool = False
    """True if all steps were taken; False after Ctrl-C, or if the trainer process was asked to end."""
    was_interrupted: bool = False
    """True if this process was asked to end the run after a step."""
    summary: dict[str, Any] = field(default_factory=dict)
    """The final results, as in `summary.json`, after a run that took all its steps."""
    alarm: Alarm | None = None
    """The alarm that stopped the run, if any."""
    nothing_trained: str | None = None
    """The reason, after a run that finished without training a token."""
    _stop: Callable[[], None] | None = None
    """Asks the loop to end. None if the loop is not running yet."""
    _starting: Future[Sampler] | None = field(default=None, init=False)
    """The sampler that is being started while the trainer prepares."""
    _cluster: ClusterRun | None = field(default=None, init=False)
    _store: CheckpointStore = field(init=False)
    _log: RunLog = field(init=False)

    def run(self, run_loop: RunLoop, how_to_go_on: str, *, trainer_elsewhere: bool = False) -> None:
        """Take all steps.

        The trainer prepares the model outside the event loop, so that Ctrl-C ends the process at once.
        """
        from verbatim.run import trainer_process as places

        config, folder, kept = self.config, self.folder, self.config.checkpoint
        self._store = CheckpointStore(
            folder.checkpoints, keep_last=kept.keep_last, keep_every=kept.keep_every, held=self.uploads.held
        )
        cluster = config.cluster
        if cluster is not None:
            from verbatim.run.cluster.cluster_run import ClusterRun

            self._cluster = ClusterRun(config, folder.path)
        if trainer_elsewhere:
            place = places.trainer_elsewhere(config, folder, self.console)
        elif self._cluster is not None and cluster is not None and cluster.places("trainer"):
            place = self._cluster.trainer(self.console)
        elif config.trainer.separate_process:
            place = places.trainer_child(config, folder, self.console, self._start_sampler)
        else:
            place = places.trainer_inside(config, self.environments, folder, self.console)
        try:
            with self._cluster.reserved() if self._cluster is not None else contextlib.nullcontext(), place as side:
                self.finished = run_loop(self._orchestrate(side), self._ask_to_end, how_to_go_on)
        finally:
            if self._starting is not None:  # the run failed before it took over the sampler
                self._starting.add_done_callback(_close)
        if self.finished:
            self.summary = self._log.summarize()

    def _start_sampler(self, cores: CoreShare | None) -> None:
        """If the initial weights exist already, load them into the sampler on a thread while the trainer loads them.
        Errors are raised once the trainer is ready."""
        from verbatim.run.make_trainer import while_both_start

        settings = inference_settings(self.config)
        is_here = isinstance(settings, TorchSettings) and not settings.urls and not self._samples_on_cluster
        weights = named_weights(self.config)
        # Resumed weights come from a checkpoint, and servers or a shared device cannot load alongside the trainer.
        if not is_here or weights is None or self._store.steps():
            return
        self._starting = starting = Future[Sampler]()
        starting.set_running_or_notify_cancel()  # this way, cancelling the loop while it waits does not cancel the load

        def start() -> None:
            try:
                with while_both_start(self.config):
                    starting.set_result(asyncio.run(self._make_sampler(weights, 0, cores)))
            except BaseException as error:  # noqa: BLE001  raised where the future is awaited
                starting.set_exception(error)

        threading.Thread(target=start, name="verbatim-starting", daemon=True).start()

    @property
    def _samples_on_cluster(self) -> bool:
        return self.config.cluster is not None and self.config.cluster.places("sampler")

    async def _make_sampler(
        self, weights: str, version: int, cores: CoreShare | None, sender: SendingTrainer | None = None
    ) -> Sampler:
        """Make the run's sampler."""
        from verbatim.run.make_trainer import threads_of

        if self._cluster is not None and self._samples_on_cluster:
            return await self._cluster.sampler(weights, version, sender)
        return await make_sampler(
            self.config,
            weights,
            policy_version=version,
            num_threads=threads_of(self.config, None),
            logs=self.folder.path / "logs" / "inference",
            sender=sender,
            cores=cores,
        )

    def _ask_to_end(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Handle the first Ctrl-C or SIGTERM: end after this step. False if the loop is not running yet."""
        if self._stop is None:
            return False
        self.was_interrupted = True
        loop.call_soon_threadsafe(self._stop)
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone, or stdout is closed
            self.console.print("ending after this step, with a checkpoint; Ctrl-C again ends at once", style="bold")
        return True

    def _watched(self, loop: asyncio.AbstractEventLoop) -> AlarmWatch | None:
        """The alarms. The first alarm that stops the run asks the loop to end after this step."""

        def end(alarm: Alarm) -> None:  # on the thread of the monitors
            if self.alarm is None and self._stop is not None:
                self.alarm = alarm
                loop.call_soon_threadsafe(self._stop)

        if self.watch is not None:
            self.watch.on_stop = end
        return self.watch

    async def _orchestrate(self, side: TrainerSide) -> bool:
        """Open the log, restore it to the trainer's checkpoint, and run the training loop."""
        config, ready = self.config, side.ready
        state: dict[str, Any] = {}
        if ready.checkpoint is not None:
            self.console.print(f"continuing after step {ready.version}, from {ready.checkpoint}", soft_wrap=True)
            state = read_loop_state(ready.checkpoint)
            assert state["step"] == ready.version
            self._store.set_aside_after(ready.version)
        about = RunInfo(
            name=str(config.name),
            folder=self.folder.path,
            config=redacted(tomllib.loads(dump_config(config))),
            first_step=ready.version,
        )
        if self.watch is not None and (known := state.get(ALARMS)) is not None:
            self.watch.load_state_dict(known)
        self._log = RunLog(
            self.folder,
            title=str(config.name),
            max_steps=config.max_steps,
            first_step=ready.version,
            trajectories=_retention(config.monitor),
            console=self.console,
            monitors=[*open_monitors(self.services, about), *self.monitors],
            detector=self._watched(asyncio.get_running_loop()),
            store=self._store,
            environments={label: environment for label, (_, environment) in self.environments.eval.items()},
            earlier_seconds=state.get("seconds", 0.0),
            started=self.started,
            max_failed=max_failed(config),
            on_checkpoint=self.uploads.checkpoint_written,
        )
        ended: RunState = "failed"
        try:
            await asyncio.to_thread(self._log.start, about.config)
            async with contextlib.AsyncExitStack() as stack:
                finished = await self._open_rollouts(side, state, stack)
            ended = "finished" if finished else "stopped"
            return finished
        except (asyncio.CancelledError, KeyboardInterrupt):
            ended = "stopped"
            raise
        finally:
            self._log.close(ended)

    async def _open_rollouts(self, side: TrainerSide, state: dict[str, Any], stack: contextlib.AsyncExitStack) -> bool:
        """Open everything that episodes need, then take the steps. `stack` closes it all."""
        from verbatim.models.loading import load_tokenizer

        config, ready, settings = self.config, side.ready, self.config.orchestrator
        sending = None
        if ready.store is not None:
            refuse_unreachable(ready.store)
            sending = SendingTrainer(side.link, ready.store)
            side = replace(side, link=sending)
        teacher, chat_teacher = settings.teacher, None
        # In this mode a teacher writes the training episodes, over a chat API; in the other modes it only scores
        # tokens.
        if settings.training_mode == "sft":
            assert teacher is not None and teacher.base_url is not None  # ensured by the configuration
            api = OpenAI(model=teacher.model, base_url=teacher.base_url, api_key_env=teacher.api_key_env)
            chat_teacher = await stack.enter_async_context(api.connect())
        renderer = make_renderer(settings.renderer, load_tokenizer(ready.weights))
        with self._log.stage("starting the sampler"):
            if self._starting is None:
                sampler = await self._make_sampler(ready.weights, ready.version, side.cores, sending)
            else:
                sampler = await asyncio.wrap_future(self._starting)
                self._starting = None
        stack.push_async_callback(side.link.close)
        stack.push_async_callback(sampler.close)
        made = {"train": self.environments.train, "eval": self.environments.eval}
        runner = await stack.enter_async_context(
            open_runner(
                settings,
                made,
                sampler,
                renderer,
                chat_teacher.api if chat_teacher is not None else None,
                self.folder.path / "logs" / "environments",
                config.cluster,
            )
        )
        # One limit for both purposes, since training and evaluation share the sampler.
        slots = asyncio.Semaphore(settings.max_concurrent)
        all_stats = {purpose: EpisodeStats(purpose) for purpose in made}
        for episode_stats in reversed(all_stats.values()):  # callbacks run in reverse order: "train" is logged first
            stack.callback(episode_stats.log_summary)
        routing = find_routing(config)
        setups, eval_setups = (
            make_setups(
                settings,
                made[purpose],
                sampler,
                renderer,
                slots,
                writer,
                runner,
                all_stats[purpose],
                run_id=self.folder.path.name,
                routing=routing,
                trains=purpose == "train",
            )
            for purpose, writer in (("train", chat_teacher), ("eval", None))
        )
        # This comes last, when everything that the run needs is loaded, because it is then excluded from garbage
        # collection.
        stack.enter_context(seldom_collected())
        return await self._take_steps(side, state, stack, sampler, setups, eval_setups, all_stats["train"])

    async def _take_steps(
        self,
        side: TrainerSide,
        state: dict[str, Any],
        stack: contextlib.AsyncExitStack,
        sampler: Sampler,
        setups: Mapping[str, RolloutSetup],
        eval_setups: Mapping[str, RolloutSetup],
        episode_stats: EpisodeStats,
    ) -> bool:
        """Make the orchestrator, restore its state, and train."""
        from verbatim.run.orchestrator.loop import Orchestrator
        from verbatim.run.orchestrator.nothing_trained import why_nothing_was_trained
        from verbatim.run.trainer_process import while_telling

        config, ready, ledger = self.config, side.ready, Ledger()
        logprob_models = make_logprob_models(config)
        for model in logprob_models.values():
            stack.push_async_callback(model.close)
        orchestrator = Orchestrator(
            schedule=make_schedule(config, eval_setups),
            sampler=sampler,
            trainer=side.link,
            sending=side.link if isinstance(side.link, SendingTrainer) else None,
            dispatcher=make_dispatcher(config, self.environments, setups, ledger),
            ledger=ledger,
            rules=make_rules(config, self.environments),
            environments=self.environments.by_label,
            observer=self._log,
            checkpointer=self._log,
            probes=ready.probes,
            logprob_models=logprob_models,
            episode_stats=episode_stats,
            progress=make_progress(config),
        )
        if state:
            orchestrator.load_state_dict(self._log.without_missing_best(state))
        self._log.link_best(orchestrator.progress.state_dict()["best"])

        async def train() -> bool:
            finished = await orchestrator.run()
            self._log.results |= orchestrator.ending()
            if finished and orchestrator.has_learned:
                await asyncio.to_thread(self._keep_final, orchestrator.weights or Path(ready.weights))
            elif finished:
                self.nothing_trained = why_nothing_was_trained(ledger, episode_stats, num_steps=orchestrator.step)
            return finished

        self.has_begun = True
        self._stop = orchestrator.request_stop
        return await while_telling(side, orchestrator, train())

    def _keep_final(self, weights: Path) -> None:
        """Save the last version as a folder that `from_pretrained` loads; for adapters, as a folder that `peft` loads,
        with the merged model if [trainer.lora] merge_final is set."""
        lora = self.config.trainer.lora
        with making(self.folder.final) as partial:
            shutil.copytree(weights, partial, dirs_exist_ok=True)
            if lora is not None and lora.merge_final:
                from verbatim.models.adapters import save_merged

                (partial / "merged").mkdir()
                save_merged(weights, partial / "merged")


def _close(started: Future[Sampler]) -> None:
    if started.exception() is None:
        run_in_program(started.result().close())


def _retention(monitor: MonitorConfig) -> Retention | None:
    if not monitor.save_trajectories:
        return None
    gigabytes = monitor.max_trajectory_gb
    return Retention(
        share=monitor.trajectory_share,
        steps=monitor.keep_trajectory_steps,
        size=None if gigabytes is None else int(gigabytes * 1e9),
    )
