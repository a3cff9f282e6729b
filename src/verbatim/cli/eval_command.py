"""`verbatim eval FILE`: measure a model on the environments of a configuration."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
from pathlib import Path
from typing import Any

from verbatim.cli import exit_status
from verbatim.cli.interrupts import two_presses
from verbatim.config import load_config
from verbatim.config.schema import EvalConfig, RunConfig
from verbatim.errors import ConfigError, RunStopped
from verbatim.monitors.console import eval_line
from verbatim.plain_console import PlainConsole
from verbatim.rollouts import EpisodeTally
from verbatim.rollouts.main_loop import run_main
from verbatim.run.environments import check_environments, check_tools, make_environments
from verbatim.run.logs import log_to_console
from verbatim.run.rollouts import make_renderer, make_sampler, make_setups, open_runner
from verbatim.run.tables import component_tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare FILE, --model and --out."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the run's TOML file")
    parser.add_argument("--model", metavar="FOLDER", help="the model to measure, instead of the file's model.name")
    parser.add_argument("--out", type=Path, metavar="JSONL", help="write every trajectory there")


def run(args: argparse.Namespace) -> int:
    """Evaluate, print one line and one JSON object for each environment.

    Raises:
        ConfigError: there is no model to measure.
        RunStopped: every episode of an environment failed.
    """
    log_to_console(PlainConsole(stderr=True), logging.WARNING)
    config = load_config(args.file, args.overrides, component_tables())
    model = args.model or config.model.name
    if model is None:
        raise ConfigError(f"{args.file} builds its model when it is trained; name a trained one: --model "
                          f"runs/{args.file.stem}/latest/final")  # fmt: skip
    if args.out is not None and args.out.exists():
        raise ConfigError(f"--out {args.out} exists; name another file, or remove it")
    results = run_main(_evaluate(config, model, args.out), two_presses(), ends_without_memory=True)
    console = PlainConsole()
    for env, metrics in results.items():
        console.print(eval_line(0, env, metrics).replace("after step 0", model), soft_wrap=True)
    console.print_json(json.dumps(results))
    failed = [env for env, metrics in results.items() if metrics["failed"] == metrics["episodes"]]
    if failed:
        raise RunStopped(f"every episode failed in {', '.join(failed)}: nothing was measured")
    return exit_status.FINISHED


async def _evaluate(config: RunConfig, model: str, out: Path | None) -> dict[str, dict[str, Any]]:
    from verbatim.models.loading import load_tokenizer
    from verbatim.monitors.trajectory_log import TrajectoryLog
    from verbatim.orchestrator.evaluate import evaluate

    orchestrator = config.orchestrator
    settings = orchestrator.eval or EvalConfig()
    environments = make_environments(config)
    check_environments(config, environments)
    renderer = make_renderer(orchestrator.renderer, load_tokenizer(model))
    check_tools(config, environments, renderer)
    log = TrajectoryLog(out) if out is not None else None
    sampler = make_sampler(config, model)
    slots = asyncio.Semaphore(orchestrator.max_concurrent)
    made = environments.eval or environments.train
    results: dict[str, dict[str, Any]] = {}
    try:
        async with open_runner(orchestrator, {"eval": made}, sampler, renderer) as runner:
            tally = EpisodeTally("eval")
            setups = make_setups(orchestrator, made, sampler, renderer, slots, runner=runner, tally=tally)
            for env, setup in setups.items():
                found = await evaluate(setup, episodes=settings.episodes, seed=settings.seed)
                results[env] = {**found.metrics, "episodes": found.num_episodes, "failed": found.num_failed}
                if log is not None:
                    for trajectory in found.trajectories:
                        log.write(0, trajectory)
            tally.log_summary()
    finally:
        await sampler.close()
        if log is not None:
            log.close()
    return results
