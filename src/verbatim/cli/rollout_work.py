"""Defines what `verbatim rollout` plays: the tasks of a file, with tools, a simulated user and a scorer; or an
environment."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from verbatim.cli.rollout_engines import Work
from verbatim.cli.rollout_results import RolloutJob, read_jobs
from verbatim.config import import_object
from verbatim.core.errors import UsageError
from verbatim.core.types import Trajectory
from verbatim.environments.resolve import create_environment, examples_of
from verbatim.environments.tools import ToolManager
from verbatim.inference.chat.client import OpenAI
from verbatim.rollouts import UserSimulator
from verbatim.rollouts.conversation_episode import Scorer
from verbatim.rollouts.conversation_rollout import ConversationRollout
from verbatim.run.evaluation.play import digest_of

Take: TypeAlias = Callable[[int, Trajectory], object]
"""A function that is called with the index of a job and the job's finished trajectory."""

_OF_USER: tuple[str, ...] = ("user_base_url", "user_api_key_env", "user_prompt")
_OF_TASKS: tuple[str, ...] = ("tools", "score", "user_model", *_OF_USER)
"""Options that apply only to tasks: an environment has its own tools, user and score."""
_OF_ENVIRONMENTS: tuple[str, ...] = ("env_args", "split")


@dataclass(frozen=True, kw_only=True)
class RolloutPlan:
    """The conversations or episodes that the command plays."""

    jobs: Sequence[RolloutJob]
    """The jobs, one per trajectory."""
    settings: Mapping[str, Any]
    """The settings on which results depend, in addition to the engine's settings."""
    work: Callable[[Sequence[RolloutJob], Take], Work]
    """Returns the work that plays these jobs and passes each finished trajectory to `Take`."""


def plan_of(args: argparse.Namespace) -> RolloutPlan:
    """The plan that the options describe, after checking it.

    Raises:
        UsageError: there is a mistake in TASKS, in an option, or in something that an option names.
    """
    if (args.file is None) == (args.env is None):
        raise UsageError(
            "verbatim rollout plays either the tasks of a file or an environment: type TASKS.jsonl, or --env NAME"
        )
    others, why = _OF_ENVIRONMENTS, "it needs --env NAME"
    if args.env is not None:
        others, why = _OF_TASKS, "an environment has its own tools, user and score"
    for name in others:
        if getattr(args, name) is not None:
            raise UsageError(f"--{name.replace('_', '-')}: {why}")
    return _tasks(args) if args.env is None else _environment(args)


def _tasks(args: argparse.Namespace) -> RolloutPlan:
    """The plan for the tasks of a file."""
    user, scorer = _user(args), _scorer(args.score)
    found = None if args.tools is None else import_object(args.tools)

    def work(left: Sequence[RolloutJob], take: Take) -> Work:
        managers = _managers(args.tools, found, left)

        async def play(rollout: ConversationRollout) -> None:
            conversations = [job.conversation for job in left]
            await rollout.run_each(conversations, take, tool_manager=managers, user=user, score=scorer)

        return play

    given = {name: getattr(args, name) for name in ("score", "user_model", "user_prompt")}
    settings = {name: str(value) for name, value in given.items() if value is not None}
    return RolloutPlan(jobs=read_jobs(args.file, args.samples), settings={"tools": args.tools, **settings}, work=work)


def _environment(args: argparse.Namespace) -> RolloutPlan:
    """The plan for the examples of an environment."""
    env_args, split = args.env_args or {}, args.split or "eval"
    environment = create_environment(args.env, env_args)
    examples = {example.id: example for example in examples_of(environment, args.env, split)}
    jobs = []
    for example in examples.values():
        digest = digest_of(example)
        jobs += [RolloutJob(task=example.id, sample=k, digest=digest, conversation={}) for k in range(args.samples)]

    def work(left: Sequence[RolloutJob], take: Take) -> Work:
        async def play(rollout: ConversationRollout) -> None:
            pairs = [(examples[job.task], job.sample) for job in left]
            await rollout.run_environment(environment, pairs, take, env=args.env, seed=args.seed or 0)

        return play

    return RolloutPlan(jobs=jobs, settings={"env": args.env, "env_args": env_args, "split": split}, work=work)


def _user(args: argparse.Namespace) -> UserSimulator | None:
    """The simulated user, if --user-model asks for one."""
    if args.user_model is None:
        if any(getattr(args, name) is not None for name in _OF_USER):
            raise UsageError("a simulated user needs a model: --user-model NAME")
        return None
    url = args.user_base_url or args.base_url
    if url is None:
        raise UsageError("--user-model needs a server: --user-base-url URL")
    key = args.user_api_key_env
    if key is None and url == args.base_url:  # one server's key is never sent to another server
        key = args.api_key_env
    given = {"api_key_env": key, "request_timeout": args.request_timeout}
    api = OpenAI(model=args.user_model, base_url=url, **{name: v for name, v in given.items() if v is not None})
    if args.user_prompt is None:
        return UserSimulator(api=api)
    path = Path(args.user_prompt)
    if not path.is_file():
        raise UsageError(f"--user-prompt: there is no file {path}")
    return UserSimulator(api=api, prompt=path.read_text(encoding="utf-8"))


def _scorer(import_path: str | None) -> Scorer | None:
    if import_path is None:
        return None
    found = import_object(import_path)
    if not callable(found):
        raise UsageError(
            f"--score {import_path} is a {type(found).__name__}; expected a function: "
            "score(trajectory, task) -> number, or {part: number}"
        )
    scorer: Scorer = found
    return scorer


def _managers(import_path: str, found: Any, jobs: Sequence[RolloutJob]) -> ToolManager | list[ToolManager] | None:
    """The tools: one manager for all tasks, or one per task if --tools names a function."""
    if found is None or isinstance(found, ToolManager):
        return found
    if isinstance(found, list | tuple):
        return ToolManager(found)
    if callable(found):
        return [ToolManager(_made(import_path, found(job.conversation))) for job in jobs]
    raise UsageError(
        f"--tools {import_path} is a {type(found).__name__}; expected a list of typed functions, or a "
        "function from a task to such a list"
    )


def _made(import_path: str, tools: object) -> Sequence[object]:
    if not isinstance(tools, list | tuple):
        raise UsageError(f"--tools {import_path} returned {tools!r:.80} for a task; expected a list of typed functions")
    return tools
