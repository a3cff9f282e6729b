"""Adapts environments of the package `verifiers`: uses its tasks, programs and rewards with our sampler and
recorder."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from verbatim.core.errors import ComponentError, EnvironmentFault, UsageError
from verbatim.core.types import Example, StopReason, Trajectory
from verbatim.environments.environment import Episode, Score, check_split
from verbatim.models.renderers.renderer_spec import renderer_spec
from verbatim.rollouts.agent_loop import AgentLoop
from verbatim.rollouts.gateway.chat import MODEL
from verbatim.rollouts.gateway.verifiers import trace as verifiers_trace
from verbatim.rollouts.gateway.verifiers.serving import VerifiersServing
from verbatim.rollouts.loop import EpisodeOver

HARNESS = "verbatim-chat"
"""Id of the harness with our chat loop, which needs no network access (`harnesses/verbatim_chat.py`)."""
_NO_KEY = "VERBATIM_NO_KEY"
"""Name of an environment variable that is never set. The URL has the gateway's key, and verifiers must not send another
key."""


class VerifiersEnvironment:
    """A taskset of the package verifiers (0.4), played by verifiers' own agents.

    verifiers renders the conversations itself, with the package `renderers`, and sends exact ids to a gateway. Every
    turn is recorded when it is sampled. At the end, verifiers' own trace must have the same ids and logprobs.

    Args:
        taskset: Id of the taskset, which is the module that exports it.
        tokenizer: Folder or hub id from which verifiers loads the tokenizer; None for the tokenizer of the model from
            which the run samples.
        renderer: A family of the package `renderers`; None for the family of the run's renderer.
        harness: Id of the harness, unless `config` sets a different one.
        env: Id of verifiers' environment around the taskset; "" for the taskset's own environment.
        train: Selection of training tasks, in the format of verifiers' `select`: `{"limit": 100}`. By default all
            tasks.
        eval: Selection of evaluation tasks, in the same format. By default all tasks.
        config: Additional keys of verifiers' `[env]` table.

    Raises:
        UsageError: the extra `verifiers` is not installed, or verifiers refuses the configuration.
    """

    only_by_sampler: ClassVar[bool] = True
    """True because verifiers' requests go through the gateway to the run's sampler; a teacher cannot answer them."""

    def __init__(
        self,
        taskset: str,
        tokenizer: str | None = None,
        renderer: str | None = None,
        harness: str = HARNESS,
        env: str = "",
        train: Mapping[str, Any] | None = None,
        eval: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._config = _read_config(taskset, env, harness, dict(config or {}))
        self._selected = {"train": _tasks(self._config, train), "eval": _tasks(self._config, eval)}
        self._tasks = {_example_id(task): task for tasks in self._selected.values() for task in tasks}
        self._serving: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, VerifiersServing] = (
            weakref.WeakKeyDictionary()
        )

    def examples(self, split: str) -> Sequence[Example]:
        """Return the tasks that are selected for "train" or "eval", as examples."""
        check_split("verifiers", split)
        return [Example(id=_example_id(task), payload={"key": task.key}) for task in self._selected[split]]

    async def start(self, example: Example, seed: int) -> VerifiersEpisode:
        """Create the episode of the example's task. `seed` is unused, because verifiers' tasks take none."""
        return VerifiersEpisode(self, self._tasks[example.id])

    def serving(self) -> VerifiersServing:
        """Return the servers of the running event loop."""
        from verifiers.v1.utils.loaders import load_environment

        loop = asyncio.get_running_loop()
        if loop not in self._serving:
            self._serving[loop] = VerifiersServing(load_environment(self._config))
        return self._serving[loop]

    def context(self, base_url: str, loop: AgentLoop) -> Any:
        """Return the client and the sampling settings that verifiers' agents use."""
        from renderers.configs import config_from_name
        from verifiers.v1.clients import ModelContext, TrainClientConfig
        from verifiers.v1.types import SamplingConfig

        name = self._renderer or loop.renderer.name
        if name == "template":
            raise EnvironmentFault(
                "verifiers cannot use the run's chat template; name one of its renderers: "
                'args.renderer = "qwen3", for example'
            )
        params = loop.params
        return ModelContext(
            model=MODEL,
            client=TrainClientConfig(
                base_url=base_url,
                api_key_var=_NO_KEY,
                renderer=config_from_name(name),
                renderer_model_name=self._tokenizer or _name_of_tokenizer(loop),
            ),
            sampling=SamplingConfig.model_validate(
                {
                    "temperature": params.temperature,
                    "max_tokens": params.max_tokens,
                    "top_p": params.top_p,
                    "top_k": params.top_k,
                    "min_p": params.min_p,
                }
            ),
        )


class VerifiersEpisode(Episode):
    """An episode that plays one task: verifiers runs its agents and scores them."""

    def __init__(self, environment: VerifiersEnvironment, task: Any) -> None:
        self._environment = environment
        self._task = task
        self._rewards: dict[str, float] = {}

    async def run(self, agent: Any) -> None:
        """Let verifiers play and score the task.

        Raises:
            SamplerFault, RecordError: one of the episode's requests failed with this error, and then the episode
                failed.
            EnvironmentFault: the episode failed for a different reason, or its trace differs from the sampled turns.
            EpisodeOver: the episode was cut off.
        """
        if not isinstance(agent, AgentLoop):
            raise EnvironmentFault("verifiers' environments need the run's sampler; a teacher cannot answer them")
        serving = self._environment.serving()
        async with serving.use(agent.sampler.context_length) as reception:
            try:
                episode = await serving.env.run_episode(
                    self._task,
                    self._environment.context(reception.base_url, agent),
                    on_trace=lambda trace: reception.connect(trace, agent),
                )
            finally:
                fault = await reception.disconnect(agent)
        agent.tell(verifiers_trace.messages_of(episode))
        problem = verifiers_trace.errors_of(episode)
        if problem is not None:
            raise fault or EnvironmentFault(f"verifiers: {problem}")
        verifiers_trace.check_served(episode.traces, agent.turns)
        self._rewards = verifiers_trace.rewards_of(episode)
        self.info = {"verifiers": verifiers_trace.metrics_of(episode)}
        reason = verifiers_trace.stop_reason_of(episode)
        if reason is not StopReason.STOP:
            raise EpisodeOver(reason)

    async def score(self, trajectory: Trajectory) -> Score:
        """Return verifiers' weighted rewards by name. verifiers' metrics are in `info`."""
        return self._rewards or None


def _name_of_tokenizer(loop: AgentLoop) -> str:
    """Return the folder or hub id from which the run's tokenizer was loaded."""
    name = getattr(getattr(renderer_spec(loop.renderer), "tokenizer", None), "name_or_path", "")
    if not name:
        raise EnvironmentFault(
            "verifiers loads the tokenizer from a folder or hub id, and this run's tokenizer has "
            "neither; set args.tokenizer to the model's folder"
        )
    return str(name)


def _read_config(taskset: str, env: str, harness: str, config: dict[str, Any]) -> Any:
    """Build verifiers' configuration. By default verifiers' agents run as subprocesses on this machine, with our
    harness."""
    try:
        from pydantic import ValidationError
        from verifiers.v1 import harnesses
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import env_config_type, resolve_env_config
    except ImportError as error:
        raise UsageError(f"verifiers' environments need {error.name}: pip install 'verbatim-rl[verifiers]'") from None
    from verbatim.rollouts.gateway.verifiers import harnesses as verifiers_harnesses

    folder = next(iter(verifiers_harnesses.__path__))
    # verifiers finds a harness as a submodule of its own package, so our folder is added to that package's path.
    if folder not in harnesses.__path__:
        harnesses.__path__.append(folder)
    try:
        raw: dict[str, Any] = {**config, "id": env, "taskset": {**config.get("taskset", {}), "id": taskset}}
        for role in agent_config_fields(env_config_type(taskset, env).model_construct()):
            given = config.get(role, {})
            raw[role] = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}, **given}
        return resolve_env_config(raw)
    except (ValidationError, ValueError, TypeError, AttributeError, ImportError) as error:
        raise ComponentError(f"verifiers refuses taskset {taskset!r} or its configuration: {error}") from error


def _tasks(config: Any, select: Mapping[str, Any] | None) -> list[Any]:
    from pydantic import ValidationError
    from verifiers.v1.configs.select import SelectConfig
    from verifiers.v1.utils.loaders import load_taskset

    try:
        chosen = load_taskset(config.taskset).select(SelectConfig.model_validate(dict(select or {})))
    except ValidationError as error:
        raise ComponentError(f"verifiers refuses the selection {dict(select or {})}: {error}") from error
    if not chosen.bounded:
        raise ComponentError(
            f"verifiers' taskset {config.taskset.id!r} is infinite; set a limit in args.train and args.eval: "
            "train = { limit = 1000 }"
        )
    return list(chosen)


def _example_id(task: Any) -> str:
    return f"task-{task.data.idx}"
