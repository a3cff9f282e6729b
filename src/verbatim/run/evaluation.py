"""Evaluates a model on the environments of a configuration."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from verbatim.config.schema import EvalConfig, RunConfig
from verbatim.rollouts import EpisodeTally
from verbatim.run.check import warn_of_unread_tables
from verbatim.run.environments import check_environments, check_tools, make_environments
from verbatim.run.rollouts import check_backend, make_renderer, make_sampler, make_setups, open_runner


async def evaluate_model(config: RunConfig, model: str, out: Path | None) -> dict[str, dict[str, Any]]:
    """The metrics of each environment, with the number of `episodes` and how many `failed`.

    Args:
        config: Says which environments, how many episodes, and how to sample.
        model: The folder or hub id of what is measured.
        out: Where every trajectory is written; None keeps none.
    """
    from verbatim.models.loading import load_tokenizer
    from verbatim.monitors.trajectory_log import TrajectoryLog
    from verbatim.orchestrator.evaluate import evaluate

    warn_of_unread_tables(config)
    check_backend(config)
    orchestrator = config.orchestrator
    settings = orchestrator.eval or EvalConfig()
    environments = make_environments(config)
    check_environments(config, environments)
    renderer = make_renderer(orchestrator.renderer, load_tokenizer(model))
    check_tools(config, environments, renderer)
    log = TrajectoryLog(out) if out is not None else None
    try:
        sampler = await make_sampler(config, model)
    except BaseException:
        if out is not None and log is not None:  # it is empty, and the command typed again would refuse it
            log.close()
            await asyncio.to_thread(out.unlink, missing_ok=True)
        raise
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
