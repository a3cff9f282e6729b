"""Assembles and runs one training run, after the trainer is ready."""

from __future__ import annotations

import asyncio
import shutil
import tomllib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rich.console import Console

from verbatim.checkpoints import CheckpointStore, RunFolder, read_loop_state
from verbatim.config import dump_config
from verbatim.config.schema import RunConfig
from verbatim.config.secrets import redacted
from verbatim.disk import rename, sync_tree
from verbatim.inference.base import Sampler
from verbatim.inference.chat.client import Connection, OpenAI
from verbatim.monitors.base import Monitor, OpenMonitor, RunInfo, open_monitors
from verbatim.rollouts import EpisodeTally, RolloutSetup
from verbatim.rollouts.program_loop import Ask
from verbatim.run.environments import Environments
from verbatim.run.parts import make_dispatcher, make_logprob_models, make_rules, make_schedule
from verbatim.run.rollouts import make_renderer, make_sampler, make_setups, open_runner
from verbatim.run.run_log import RunLog
from verbatim.trajectories import Ledger

if TYPE_CHECKING:
    from verbatim.run.trainer_process import TrainerSide

T = TypeVar("T")


class RunsLoop(Protocol):
    """Runs a coroutine on an event loop to its end."""

    def __call__(self, work: Coroutine[Any, Any, T], ask: Ask, how_to_go_on: str, /) -> T:
        """Run the coroutine and return its result.

        Args:
            work: The coroutine.
            ask: For the first Ctrl-C.
            how_to_go_on: What to print where the process ends at once.
        """


class TrainingRun:
    """The orchestrator of one run, with the trainer that is started for it or found.

    Args:
        config: The run's configuration, with its name.
        environments: Those of the configuration.
        services: The monitors of the configuration, not yet started.
        monitors: Further listeners.
        folder: The run folder.
        console: Is told how the run goes on.
        started: `time.monotonic()` when this process began.
    """

    def __init__(
        self,
        config: RunConfig,
        environments: Environments,
        services: Mapping[str, OpenMonitor],
        monitors: Sequence[Monitor],
        folder: RunFolder,
        console: Console,
        *,
        started: float,
    ) -> None:
        self._config = config
        self._environments = environments
        self._services = services
        self._monitors = monitors
        self._folder = folder
        self._console = console
        self._started = started
        self._stop: Callable[[], None] | None = None
        """Asks the loop to end; None before it is at work."""
        self.has_begun = False
        """Whether everything was made, and the loop is at work: what fails from then on may be mended, and the run go
        on."""
        self.was_interrupted = False
        """Whether this process was asked to end the run after a step."""
        self.summary: dict[str, Any] = {}
        """After a run that took all its steps: its results, as in `summary.json`."""
        self.nothing_trained: str | None = None
        """After a run that came to its end and learned nothing: why."""
        checkpoint = config.checkpoint
        self._store = CheckpointStore(
            folder.checkpoints, keep_last=checkpoint.keep_last, keep_every=checkpoint.keep_every
        )

    def run(self, run_loop: RunsLoop, how_to_go_on: str, *, trainer_elsewhere: bool = False) -> bool:
        """Whether all steps were taken.

        The trainer prepares the model outside the event loop, so that Ctrl-C ends it at once.
        """
        from verbatim.run import trainer_process as places

        config, folder = self._config, self._folder
        if trainer_elsewhere:
            place = places.trainer_elsewhere(config, folder, self._console)
        elif config.trainer.separate_process:
            place = places.trainer_child(config, folder, self._console)
        else:
            place = places.trainer_inside(config, self._environments, folder, self._console)
        with place as side:
            finished, log = run_loop(self._orchestrate(side), self._ask_to_end, how_to_go_on)
        if finished:
            self.summary = log.summarize()
        return finished

    def _ask_to_end(self, loop: asyncio.AbstractEventLoop) -> bool:
        """The first Ctrl-C or SIGTERM: end after this step. False where there is no step yet."""
        if self._stop is None:
            return False
        self.was_interrupted = True
        self._console.print("ending after this step, with a checkpoint; Ctrl-C again ends at once", style="bold")
        loop.call_soon_threadsafe(self._stop)
        return True

    async def _orchestrate(self, side: TrainerSide) -> tuple[bool, RunLog]:
        ready = side.ready
        state: dict[str, Any] = {}
        if ready.checkpoint is not None:
            self._console.print(f"going on after step {ready.version}, from {ready.checkpoint}", soft_wrap=True)
            state = read_loop_state(ready.checkpoint)
            assert state["step"] == ready.version
            self._store.set_aside_after(ready.version)
        log = RunLog(
            self._folder,
            title=str(self._config.name),
            max_steps=self._config.max_steps,
            first_step=ready.version,
            save_trajectories=self._config.monitor.save_trajectories,
            console=self._console,
            monitors=[*open_monitors(self._services, self._about(ready.version)), *self._monitors],
            store=self._store,
            environments={label: environment for label, (_, environment) in self._environments.eval.items()},
            earlier_seconds=state.get("seconds", 0.0),
            started=self._started,
        )
        try:
            return await self._connect_chat_teacher(side, state, log), log
        finally:
            log.close()

    def _about(self, first_step: int) -> RunInfo:
        config = redacted(tomllib.loads(dump_config(self._config)))
        return RunInfo(name=str(self._config.name), folder=self._folder.path, config=config, first_step=first_step)

    async def _connect_chat_teacher(self, side: TrainerSide, state: dict[str, Any], log: RunLog) -> bool:
        teacher = self._config.orchestrator.teacher
        if teacher is None or self._config.orchestrator.training_mode != "sft":
            return await self._open_rollouts(side, state, log, chat_teacher=None)
        assert teacher.base_url is not None  # the configuration sees to it
        api = OpenAI(model=teacher.model, base_url=teacher.base_url, api_key_env=teacher.api_key_env)
        async with api.connect() as chat_teacher:
            return await self._open_rollouts(side, state, log, chat_teacher=chat_teacher)

    async def _open_rollouts(
        self, side: TrainerSide, state: dict[str, Any], log: RunLog, *, chat_teacher: Connection | None
    ) -> bool:
        from verbatim.models.loading import load_tokenizer
        from verbatim.run.trainer_setup import threads_of

        config, ready = self._config, side.ready
        renderer = make_renderer(config.orchestrator.renderer, load_tokenizer(ready.weights))
        sampler = await make_sampler(
            config, ready.weights, policy_version=ready.version, num_threads=threads_of(config, None),
            logs=self._folder.path / "logs" / "inference",
        )  # fmt: skip
        made = {"train": self._environments.train, "eval": self._environments.eval}
        api = chat_teacher.api if chat_teacher is not None else None
        try:
            logs = self._folder.path / "logs" / "environments"
            async with open_runner(config.orchestrator, made, sampler, renderer, api, logs) as runner:
                slots = asyncio.Semaphore(config.orchestrator.max_concurrent)
                tallies = {purpose: EpisodeTally(purpose) for purpose in made}
                setups, eval_setups = (
                    make_setups(
                        config.orchestrator, made[purpose], sampler, renderer, slots, writer, runner, tallies[purpose],
                        run_id=self._folder.path.name,
                    )
                    for purpose, writer in (("train", chat_teacher), ("eval", None))
                )
                try:
                    return await self._build_and_run(side, state, log, sampler, setups, eval_setups, tallies["train"])
                finally:
                    for tally in tallies.values():
                        tally.log_summary()
        finally:
            await sampler.close()
            await side.link.close()

    async def _build_and_run(
        self, side: TrainerSide, state: dict[str, Any], log: RunLog, sampler: Sampler,
        setups: Mapping[str, RolloutSetup], eval_setups: Mapping[str, RolloutSetup], tally: EpisodeTally,
    ) -> bool:  # fmt: skip
        from verbatim.orchestrator.loop import Orchestrator
        from verbatim.orchestrator.nothing_trained import why_nothing_was_trained
        from verbatim.run.trainer_process import while_telling

        config, ready, ledger = self._config, side.ready, Ledger()
        logprob_models = make_logprob_models(config)
        orchestrator = Orchestrator(
            schedule=make_schedule(config, eval_setups),
            sampler=sampler,
            trainer=side.link,
            dispatcher=make_dispatcher(config, self._environments, setups, ledger),
            ledger=ledger,
            rules=make_rules(config, self._environments),
            environments=self._environments.by_label,
            observer=log,
            checkpointer=log,
            probes=ready.probes,
            logprob_models=logprob_models,
            tally=tally,
        )
        if state:
            orchestrator.load_state_dict(state)

        async def train() -> bool:
            finished = await orchestrator.run()
            if finished and orchestrator.has_learned:
                await asyncio.to_thread(self._keep_final, orchestrator.weights or Path(ready.weights))
            elif finished:
                self.nothing_trained = why_nothing_was_trained(
                    ledger, tally, num_steps=orchestrator.step, seq_len=config.orchestrator.seq_len
                )
            return finished

        try:
            self.has_begun = True
            self._stop = orchestrator.request_stop
            return await while_telling(side, orchestrator, train())
        finally:
            for model in logprob_models.values():
                await model.close()

    def _keep_final(self, weights: Path) -> None:
        """The last version as a folder that `from_pretrained` loads."""
        final, partial = self._folder.final, self._folder.path / ".final.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(weights, partial)
        sync_tree(partial)
        shutil.rmtree(final, ignore_errors=True)
        rename(partial, final)
