"""Plays the evaluation episodes of a configuration with one model after the other, and computes the results of each
model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verbatim.config.schema import EnvConfig, EvalConfig, RunConfig
from verbatim.core.errors import RunStopped, UsageError
from verbatim.core.tasks import run_together
from verbatim.core.types import Example, Trajectory
from verbatim.environments.environment import Environment, succeeded
from verbatim.environments.resolve import examples_of
from verbatim.rollouts import EpisodeStats, GroupRun, RolloutSetup
from verbatim.rollouts.chat_runner import ChatRunner, chat_setup
from verbatim.rollouts.turn_limiter import turn_limiter
from verbatim.run.environments import Environments, check_tools
from verbatim.run.episode_log import Conditions, EpisodeLog
from verbatim.run.eval_models import EvalModel
from verbatim.run.evaluation.chosen import chosen
from verbatim.run.evaluation.evaluated_episode import EvaluatedEpisode
from verbatim.run.evaluation.results import EnvResult, env_result
from verbatim.run.orchestrator.gc_policy import group_is_over, seldom_collected, spot_checks
from verbatim.run.precision import resolve_sampler
from verbatim.run.rollouts import (
    check_backend,
    limits_of,
    make_renderer,
    make_sampler,
    make_setups,
    open_runner,
    plays_elsewhere,
)

LONGEST_LOSING_STREAK = 16
"""An API counts as dead after this many failed episodes in a row, or after twice the concurrency if that is more."""
CHAT_CONCURRENCY = 8
"""Default number of concurrent episodes with an API."""


@dataclass(frozen=True, kw_only=True)
class EvalSettings:
    """How much to play, and with which seed."""

    num_examples: int | None = None
    """Number of examples to play per environment, from the first on; None for the value of
    orchestrator.eval.examples."""
    episodes_per_example: int | None = None
    """Number of episodes per example; None for as many as orchestrator.eval.episodes allows."""
    seed: int = 0
    """The seed of all episodes."""
    concurrency: int | None = None
    """Maximum number of concurrent episodes; None for the value of orchestrator.max_concurrent, or 8 with an API."""
    ks: Sequence[int] | None = None
    """The values of k for pass@k; None for 1, 2, 4 and 8."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    """Fields added to every request to an API."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EnvPlan:
    """The episodes to play in one environment."""

    env: str
    config: EnvConfig
    environment: Environment
    examples: Sequence[Example]
    episodes_each: int

    @property
    def num_episodes(self) -> int:
        """Number of episodes per model."""
        return len(self.examples) * self.episodes_each

    def units(self, played: Mapping[tuple[str, int], object]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The units that are left to play, as pairs (index of an example, indices of its episodes). If the environment
        scores the episodes of an example together, these episodes are one unit; otherwise each episode is a unit."""
        for index, example in enumerate(self.examples):
            left = tuple(k for k in range(self.episodes_each) if (example.id, k) not in played)
            if left and self.scores_together:
                yield index, tuple(range(self.episodes_each))
            elif left:
                yield from ((index, (k,)) for k in left)

    @property
    def scores_together(self) -> bool:
        """True if a reward depends on the other episodes of the example."""
        return getattr(self.environment, "score_group", None) is not None


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelResult:
    """The results of one model."""

    model: EvalModel
    environments: Mapping[str, EnvResult]
    """The results by environment label."""
    outcomes: Mapping[str, Sequence[EvaluatedEpisode]]
    """The episodes behind the results, by environment label."""


Progress = Callable[[EvalModel, int, int, int], None]
"""A function that is called with the model and with the numbers of episodes played, planned and failed."""


def plan_evaluation(config: RunConfig, environments: Environments, settings: EvalSettings) -> list[EnvPlan]:
    """Choose the episodes of each environment.

    Raises:
        ComponentError: the examples of an environment cannot be read.
    """
    asked = config.orchestrator.eval or EvalConfig()
    plans = []
    for label, (env, environment) in (environments.eval or environments.train).items():
        examples = examples_of(environment, label, "eval")
        most = settings.num_examples or asked.examples
        if settings.episodes_per_example is not None:
            first, each = examples[:most], settings.episodes_per_example
        else:
            first, each = chosen(examples, episodes=asked.episodes, most=most)
        plans.append(EnvPlan(env=label, config=env, environment=environment, examples=first, episodes_each=each))
    return plans


async def evaluate_models(
    config: RunConfig,
    environments: Environments,
    models: Sequence[EvalModel],
    settings: EvalSettings,
    log: EpisodeLog,
    progress: Progress,
) -> AsyncIterator[ModelResult]:
    """Yield each model's result as soon as its episodes are played. Episodes in the log are not played again.

    Raises:
        UsageError: the conditions differ from the conditions in the log, or a model or backend cannot be used.
        RunStopped: all requests to an API fail.
    """
    plans = plan_evaluation(config, environments, settings)
    for model in models:  # this checks the conditions of all models before anything is played
        for plan in plans:
            log.played(_conditions(config, model, plan, settings))
    for model in models:
        playing = _Playing(config, environments, model, plans, settings, log, progress)
        yield await playing.run()


class _Playing:
    """Plays one model's episodes."""

    def __init__(
        self,
        config: RunConfig,
        environments: Environments,
        model: EvalModel,
        plans: Sequence[EnvPlan],
        settings: EvalSettings,
        log: EpisodeLog,
        progress: Progress,
    ) -> None:
        self._config, self._environments, self._model = config, environments, model
        self._plans, self._settings, self._log, self._progress = plans, settings, log, progress
        self._conditions = {plan.env: _conditions(config, model, plan, settings) for plan in plans}
        self._played = {plan.env: log.played(self._conditions[plan.env]) for plan in plans}
        own = CHAT_CONCURRENCY if model.api is not None else config.orchestrator.max_concurrent
        self._concurrency = settings.concurrency or own
        self._total = sum(plan.num_episodes for plan in plans)
        self._done = sum(
            (example.id, k) in self._played[plan.env]
            for plan in plans
            for example in plan.examples
            for k in range(plan.episodes_each)
        )
        self._num_failed = self._streak = 0

    async def run(self) -> ModelResult:
        """Play the episodes that are left, and return the results of all episodes."""
        if any(True for plan in self._plans for _ in plan.units(self._played[plan.env])):
            episode_stats = EpisodeStats("eval")
            async with self._open(episode_stats) as setups:
                for plan in self._plans:
                    await self._play(plan, setups[plan.env])
            episode_stats.log_summary()
        outcomes = {plan.env: list(self._asked(plan)) for plan in self._plans}
        results = {env: env_result(env, found, ks=self._settings.ks) for env, found in outcomes.items()}
        return ModelResult(model=self._model, environments=results, outcomes=outcomes)

    def _asked(self, plan: EnvPlan) -> Iterator[EvaluatedEpisode]:
        """The played episodes of this plan; the log may contain further episodes."""
        played = self._played[plan.env]
        for example in plan.examples:
            yield from (played[example.id, k] for k in range(plan.episodes_each))

    @contextlib.asynccontextmanager
    async def _open(self, episode_stats: EpisodeStats) -> AsyncIterator[Mapping[str, RolloutSetup]]:
        """Open the connection to the API, or else the sampler and the episode runner. Yields the setups, by
        environment."""
        orchestrator, model = self._config.orchestrator, self._model
        made = {plan.env: (plan.config, plan.environment) for plan in self._plans}
        slots = asyncio.Semaphore(self._concurrency)
        if model.api is not None:
            for plan in self._plans:
                if plays_elsewhere(orchestrator, plan.config):
                    raise UsageError(
                        f"environment {plan.env!r} plays in other processes, but with {model.label}, a model behind an "
                        "API, episodes must be played in this process; add --orchestrator.rollout.backend local, and "
                        "isolated = false"
                    )
            async with model.api.connect() as connection:
                runner = ChatRunner(connection=connection, extra_body=self._settings.extra_body)
                yield {
                    label: chat_setup(
                        label,
                        environment,
                        runner,
                        params=(env.sampling or orchestrator.sampling).params,
                        limits=limits_of(orchestrator, env),
                        slots=slots,
                        episode_stats=episode_stats,
                    )
                    for label, (env, environment) in made.items()
                }
            return
        from verbatim.models.loading import load_tokenizer  # this imports torch, which an API does not need

        check_backend(self._config)
        renderer = make_renderer(orchestrator.renderer, load_tokenizer(model.source))
        check_tools(self._config, self._environments, renderer)
        sampler = await make_sampler(resolve_sampler(self._config, model.source), model.source)
        try:
            async with open_runner(
                orchestrator, {"eval": made}, sampler, renderer, cluster=self._config.cluster
            ) as local:
                yield make_setups(
                    orchestrator, made, sampler, renderer, slots, runner=local, episode_stats=episode_stats
                )
        finally:
            await sampler.close()

    async def _play(self, plan: EnvPlan, setup: RolloutSetup) -> None:
        """Play every unit that is left, as many at a time as the concurrency allows."""
        # All workers share the iterator, so each takes the next unit when it is free.
        units = plan.units(self._played[plan.env])

        async def work() -> None:
            for index, samples in units:
                await turn_limiter().enter()  # starting many episodes at once would block the event loop
                group = await GroupRun(
                    setup,
                    plan.examples[index],
                    index=index,
                    size=plan.episodes_each,
                    samples=samples,
                    run_seed=self._settings.seed,
                    purpose="eval",
                ).run()
                for trajectory in group.trajectories:
                    self._take(plan, trajectory)
                group_is_over()

        with seldom_collected():
            checks = asyncio.create_task(spot_checks(), name="spot-checks")
            try:
                await run_together(work() for _ in range(min(self._concurrency, plan.num_episodes)))
            finally:
                checks.cancel()

    def _take(self, plan: EnvPlan, trajectory: Trajectory) -> None:
        """Store a finished episode, and report progress."""
        verdict = succeeded(plan.environment, trajectory)
        outcome = self._log.write(self._conditions[plan.env], trajectory, verdict)
        played = self._played[plan.env]
        self._done += (outcome.example_id, outcome.sample_index) not in played
        played[outcome.example_id, outcome.sample_index] = outcome
        self._num_failed += outcome.error is not None
        self._streak = self._streak + 1 if outcome.error is not None else 0
        self._progress(self._model, self._done, self._total, self._num_failed)
        if self._model.api is not None and self._streak >= max(LONGEST_LOSING_STREAK, 2 * self._concurrency):
            kept = "" if self._log.path is None else "; the same command continues with what is left"
            raise RunStopped(
                f"{self._streak} episodes in a row failed with {self._model.label}; the last: {outcome.error}{kept}"
            )


def _conditions(config: RunConfig, model: EvalModel, plan: EnvPlan, settings: EvalSettings) -> Conditions:
    """Everything that the episodes depend on. A stored episode counts only if all of this is unchanged."""
    orchestrator, env = config.orchestrator, plan.config
    depends: dict[str, Any] = {
        "seed": settings.seed,
        "environment": env.id or env.import_path,
        "args": env.args,
        **{
            f"sampling.{name}": value
            for name, value in (env.sampling or orchestrator.sampling).model_dump(exclude_none=True).items()
            if (name, value) != ("stop", ())
        },
        "max_turns": env.max_turns,
        "seq_len": orchestrator.seq_len,
        "tool_output_limit": orchestrator.tool_output_limit,
        "tool_error": orchestrator.tool_error,
        "max_malformed_retries": orchestrator.max_malformed_retries,
        **{f"renderer.{name}": value for name, value in orchestrator.renderer.model_dump(exclude_none=True).items()},
    }
    if env.max_total_completion_tokens is not None:
        depends["max_total_completion_tokens"] = env.max_total_completion_tokens
    if plan.scores_together:
        depends["episodes_per_example"] = plan.episodes_each
    if model.api is not None and settings.extra_body:
        depends["extra_body"] = dict(settings.extra_body)
    digests = {example.id: digest_of(example) for example in plan.examples}
    as_json = json.loads(json.dumps(depends, default=str))  # in the form in which the log returns them, for comparison
    return Conditions(model=model, env=plan.env, settings=as_json, digests=digests)


def digest_of(example: Example) -> str:
    """A digest of an example's content, to detect a different example with the same id."""
    text = json.dumps(dataclasses.asdict(example), sort_keys=True, default=repr)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
