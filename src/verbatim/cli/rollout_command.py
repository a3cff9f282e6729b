"""`verbatim rollout TASKS.jsonl`: plays conversations with tools, or an environment, with one result per trajectory.

Results are appended as the tasks finish. If the same command is run again, it plays only tasks without a result; failed
tasks are repeated.
"""

from __future__ import annotations

import argparse
import collections
import logging
from collections.abc import Sequence
from pathlib import Path

from verbatim.cli import exit_status
from verbatim.cli.argument_types import COUNT, json_object
from verbatim.cli.rollout_engines import engine_of
from verbatim.cli.rollout_results import ResultFile, RolloutJob
from verbatim.cli.rollout_work import plan_of
from verbatim.core.ctrl_c import two_presses
from verbatim.core.errors import RunStopped
from verbatim.core.plain_console import PlainConsole
from verbatim.core.types import StopReason, Trajectory
from verbatim.rollouts.main_loop import run_main
from verbatim.run.logs import log_to_console

LONGEST_LOSING_STREAK = 16
"""A server counts as dead after this many failures in a row, or after twice the concurrency if that is more."""
_SETTINGS = ("model", "max_turns", "temperature", "max_tokens", "seed")
"""The settings on which results depend. All results in a file share these settings."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: TASKS, the server or engine, the sampling settings, and where results go."""
    parser.epilog = "exit status: 0 every task has its results, 1 some failed or the server is dead, 2 a usage error"
    add = parser.add_argument
    add(
        "file", type=Path, nargs="?", metavar="TASKS", help='JSON lines: {"messages": [...], "tools": [...], "id": ...}'
    )
    add("--base-url", metavar="URL", help="sample from an OpenAI-compatible server: http://localhost:8000/v1")
    add(
        "--inference",
        type=Path,
        metavar="FILE",
        help="instead, sample with the [inference] of this run's TOML file; its keys are options too",
    )
    add(
        "--model",
        metavar="NAME",
        help="the model's name on the server; with --inference, a folder or hub id instead of the file's model.name",
    )
    add("--out", required=True, type=Path, metavar="JSONL", help="append results to this file")
    add("--api-key-env", metavar="NAME", help="the variable with the server's key (OPENAI_API_KEY, for OpenAI's)")
    add("--tools", metavar="MODULE.NAME", help="a list of typed functions, or a function from a task to such a list")
    add("--score", metavar="MODULE.NAME", help="score(trajectory, task) -> number or {part: number}")
    add("--user-model", metavar="NAME", help="a model that plays the user whenever the assistant calls no tool")
    add("--user-base-url", metavar="URL", help="the server of --user-model (--base-url)")
    add("--user-api-key-env", metavar="NAME", help="the variable with its key (--api-key-env, if on the same server)")
    add("--user-prompt", metavar="FILE", help="the system message of --user-model; a task's field `user` is appended")
    add("--env", metavar="NAME", help="play this environment instead of TASKS: a bundled id, or an import path")
    add("--env-args", type=json_object, metavar="JSON", help="the environment's arguments")
    add("--split", choices=("train", "eval"), help='the environment\'s examples ("eval")')
    add("--samples", type=COUNT, default=1, metavar="N", help="trajectories per task (1)")
    add("--max-turns", type=int, default=6, metavar="N", help="maximum number of requests per trajectory (6)")
    add("--temperature", type=float, default=1.0, metavar="T", help="(1.0)")
    add("--max-tokens", type=int, default=4096, metavar="N", help="maximum number of tokens per response (4096)")
    add("--concurrency", type=int, default=8, metavar="N", help="maximum number of concurrent trajectories (8)")
    add("--extra-body", type=json_object, metavar="JSON", help='added to requests: {"return_token_ids": true}')
    add("--seed", type=int, metavar="N", help="base of the requests' seeds; without it, a server gets no seeds")
    add(
        "--request-timeout",
        type=float,
        metavar="SECONDS",
        help="timeout of one attempt at a request, also to --user-model (600)",
    )
    add("--trajectory-timeout", type=float, default=3600.0, metavar="SECONDS", help="(3600)")
    add("--trace-dir", type=Path, metavar="FOLDER", help="also write one file per trajectory")


def run(args: argparse.Namespace) -> int:
    """Play all tasks or episodes that have no result yet, and print a summary.

    Raises:
        UsageError: there is a mistake in TASKS or in an option, or the file of --out contains something else.
        RunStopped: there were many failures in a row.
    """
    console = PlainConsole(stderr=True)
    log_to_console(console, logging.WARNING)
    engine = engine_of(args)
    plan = plan_of(args)
    jobs = plan.jobs
    own = {name: getattr(args, name) for name in _SETTINGS}
    settings = {**own, "model": engine.model, **engine.settings, **plan.settings}
    with ResultFile(args.out, settings) as results:
        left = [job for job in jobs if not results.has(job)]
        if len(left) < len(jobs):
            console.print(f"{len(jobs) - len(left)} of {len(jobs)} done before", soft_wrap=True)
        ends = _Ends(left, results, patience=max(LONGEST_LOSING_STREAK, 2 * args.concurrency))
        if left:
            everything = engine.play(plan.work(left, ends.take), len(jobs) - len(left))
            run_main(everything, two_presses(), ends_without_memory=True)
    counts = ", ".join(f"{count} {reason}" for reason, count in ends.counts.most_common()) or "nothing to do"
    console.print(f"{args.out}: {counts}{ends.earned}", soft_wrap=True)
    if ends.num_failed:
        console.print(
            f"{ends.num_failed} failed, the last: {ends.last_error}\nrun the same command again to retry them",
            soft_wrap=True,
            markup=False,
        )
    return exit_status.STOPPED if ends.num_failed else exit_status.FINISHED


class _Ends:
    """Handles trajectories as they end: stores results and counts failures.

    Raises:
        RunStopped: there were more than `patience` failures in a row.
    """

    def __init__(self, jobs: Sequence[RolloutJob], results: ResultFile, *, patience: int) -> None:
        self._jobs = jobs
        self._results = results
        self._patience = patience
        self._streak = 0
        self.counts: collections.Counter[str] = collections.Counter()
        self.num_failed = 0
        self.last_error = ""
        self._rewards: list[float] = []

    @property
    def earned(self) -> str:
        """The mean reward of the trajectories that have a reward, as the end of a line."""
        if not self._rewards:
            return ""
        return f"; mean reward {sum(self._rewards) / len(self._rewards):.3f} of {len(self._rewards)}"

    def take(self, index: int, trajectory: Trajectory) -> None:
        """Store a finished trajectory. A cancelled trajectory is not stored, so that it is played again."""
        if trajectory.stop_reason is StopReason.CANCELLED:
            return
        self._results.write(self._jobs[index], trajectory)
        self.counts[str(trajectory.stop_reason)] += 1
        if trajectory.error is None and trajectory.reward is not None:
            self._rewards.append(trajectory.reward)
        self._streak = self._streak + 1 if trajectory.error else 0
        if trajectory.error:
            self.num_failed += 1
            self.last_error = trajectory.error
        if self._streak >= self._patience:
            raise RunStopped(f"{self._streak} trajectories failed in a row; the last: {self.last_error}")
