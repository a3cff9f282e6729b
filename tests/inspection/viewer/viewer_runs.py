"""Run folders with trajectories that a test knows, written by the writers of a run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.core.types import Trajectory, Turn
from verbatim.inspection.viewer.assets import Asset
from verbatim.inspection.viewer.run_view import RunView
from verbatim.inspection.viewer.serve import serve_runs
from verbatim.logs.monitors.metrics_log import MetricsLog
from verbatim.logs.outcomes.files import OutcomeFolder

PAGE = {"index.html": Asset(b"<!doctype html><title>a page</title>", "text/html")}
CONFIG = 'name = "tries"\nmax_steps = 7\nseed = 0\n[model]\nname = "somewhere/else"\n'


def trajectory(name: str, **fields: Any) -> Trajectory:
    """One turn of three prompt ids and two sampled ones, unless `turns` are given."""
    turns = (Turn(prompt_ids=[1, 2, 3], completion_ids=[4, 5], logprobs=[-0.5, -0.25]),)
    return Trajectory(
        **{
            "example_id": f"example of {name}",
            "trajectory_id": name,
            "env": "game",
            "turns": turns,
            "group_id": "g",
            "run_id": "tries",
            "stop_reason": "stop",
            **fields,
        }
    )


def trained(each: Trajectory, **fields: Any) -> TrajectoryOutcome:
    return TrajectoryOutcome(trajectory=each, turns=("trained",) * len(each.turns), **fields)


def make_run(
    folder: Path,
    steps: Mapping[int, Sequence[TrajectoryOutcome]] | None = None,
    *,
    evaluated: Mapping[int, Sequence[Trajectory]] | None = None,
    metrics: Sequence[tuple[int, Mapping[str, Any]]] = (),
    config: str = CONFIG,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(config)
    files = OutcomeFolder(folder / "trajectories")
    for step, outcomes in (steps or {}).items():
        files.write(step, outcomes)
    for step, found in (evaluated or {}).items():
        OutcomeFolder(folder / "evaluations").write(step, [TrajectoryOutcome.of_evaluated(each) for each in found])
    if metrics:
        lines = MetricsLog(folder / "metrics.jsonl", now=lambda: 0.0)
        for step, values in metrics:
            lines.on_step(step, values)
        lines.close()
    return folder


def read(folder: Path) -> RunView:
    """The run, indexed."""
    run = RunView(folder)
    run.read_all()
    return run


@contextlib.asynccontextmanager
async def serving(*folders: Path) -> AsyncIterator[Client]:
    """A server over these run folders, indexed; no thread follows them."""
    runs = [read(folder) for folder in folders]
    for run in runs:
        run.start = lambda: None  # type: ignore[method-assign]
    async with serve_runs(runs, PAGE) as url, aiohttp.ClientSession() as session:
        yield Client(url, session, runs)


class Client:
    def __init__(self, url: str, session: aiohttp.ClientSession, runs: Sequence[RunView]) -> None:
        self.url, self.session, self.runs = url, session, runs

    async def get(self, path: str, /, status: int = 200, **query: Any) -> Any:
        """The JSON of an answer with this status; `path` stands behind /api/runs/0/."""
        lists = {name: value if isinstance(value, list) else [value] for name, value in query.items()}
        pairs = [(name, one) for name, values in lists.items() for one in values]
        async with self.session.get(f"{self.url}/api/runs/0/{path}", params=pairs) as answer:
            text = await answer.text()
            assert answer.status == status, text
            return json.loads(text)

    async def names(self, **query: Any) -> list[str]:
        """The ids of the trajectories that pass, in order."""
        return [row["trajectory_id"] for row in (await self.get("trajectories", **query))["rows"]]
