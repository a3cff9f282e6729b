"""Plays episodes again, later and in another process. The seed should determine an episode, so any difference is a
fault."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verbatim.core.children import run_program, text_of
from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.imports import child_environment
from verbatim.core.types import Example
from verbatim.environments.resolve import create_environment, examples_of
from verbatim.inspection.envcheck.findings import CheckFinding
from verbatim.inspection.envcheck.play import CheckedEnvironment, PlayedEpisode
from verbatim.inspection.envcheck.players import RandomPlayer

PAIR = (RandomPlayer, RandomPlayer)
"""Two players, so that two episodes of an example run at the same time."""
_PATIENCE = 120.0
"""Time limit for the other process in seconds."""


async def play_probes(
    stage: CheckedEnvironment, examples: Sequence[Example], *, keep: bool = False
) -> list[PlayedEpisode]:
    """Play the episodes that are compared (the probes): two per example, one example at a time."""
    plays: list[PlayedEpisode] = []
    for example in examples:
        plays += await stage.play("random", PAIR, example, keep=keep)
    return plays


async def play_probes_together(stage: CheckedEnvironment, examples: Sequence[Example]) -> list[PlayedEpisode]:
    """Play the same episodes as `play_probes`, but all of them at the same time."""
    groups = await asyncio.gather(*(stage.play("random", PAIR, example, keep=False) for example in examples))
    return [play for group in groups for play in group]


def play_elsewhere(name: str, args: Mapping[str, Any], ids: Sequence[str], limits: EpisodeLimits) -> list[str] | str:
    """Play the same episodes as `play_probes` in a new process. Returns the transcripts, or the reason why there are
    none."""
    with tempfile.TemporaryDirectory(prefix="verbatim-env-check-") as folder:
        out = Path(folder) / "transcripts.json"
        job = {"name": name, "args": dict(args), "ids": list(ids), "limits": asdict(limits), "out": str(out)}
        try:
            done = run_program(
                [sys.executable, "-c", "from verbatim.inspection.envcheck.replay import main; main()"],
                given=json.dumps(job).encode(),
                # The hash seed is different, so that episodes that depend on the order of a set differ.
                environment={**child_environment(), "PYTHONHASHSEED": str(1 + os.getpid() % 1000)},
                timeout=_PATIENCE,
            )
        except subprocess.TimeoutExpired:
            return f"it took more than {_PATIENCE:g} s"
        if not out.exists():
            return f"it ended with status {done.returncode}: {text_of(done.stderr).strip()[-500:]}"
        transcripts: list[str] = json.loads(out.read_text(encoding="utf-8"))
        return transcripts


def main() -> None:
    """Read a job from standard input, and play its episodes. This is the entry point of the new process."""
    job = json.load(sys.stdin)
    environment = create_environment(job["name"], job["args"])
    examples = {example.id: example for example in examples_of(environment, job["name"], "train")}
    stage = CheckedEnvironment(name=job["name"], environment=environment, limits=EpisodeLimits(**job["limits"]))
    plays = asyncio.run(play_probes(stage, [examples[name] for name in job["ids"]]))
    Path(job["out"]).write_text(json.dumps([play.transcript() for play in plays]), encoding="utf-8")


def compare(
    first: Sequence[PlayedEpisode], later: Sequence[Sequence[PlayedEpisode]], elsewhere: Sequence[str] | None
) -> list[CheckFinding]:
    """Report the first difference between the first episodes and their repetitions.

    Args:
        first: The first episodes of this process.
        later: Repetitions of the same episodes in this process, after other episodes were played.
        elsewhere: The transcripts of the same episodes from another process, where no other episodes were played
            before; None if there are no transcripts.
    """
    if elsewhere is not None:
        for play, transcript in zip(first, elsewhere, strict=True):
            if play.transcript() != transcript:
                return [
                    CheckFinding(
                        kind="nondeterministic",
                        expected="the same episode for the same example, seed and actions",
                        found=f"{_same(play)}, played first in two processes: "
                        f"{_difference(play.transcript(), transcript)}",
                        change="take all randomness from random.Random(seed), with the seed passed to `start`; do not "
                        "use the clock, and sort sets before showing them",
                    )
                ]
    for again in later:
        for play, other in zip(first, again, strict=True):
            if play.transcript() != other.transcript():
                return [
                    CheckFinding(
                        kind="shared_state",
                        expected="episodes that are independent of each other",
                        found=f"{_same(play)}, differs after other episodes were played: "
                        f"{_difference(play.transcript(), other.transcript())}",
                        change="keep all changing state on the episode (self.x = ... in its __init__), not on the "
                        "environment, the class or the module; copy lists and dicts that come from these",
                    )
                ]
    return []


def _same(play: PlayedEpisode) -> str:
    return f"an episode of example {play.example.id!r} with seed {play.trajectory.seed}"


def _difference(one: str, other: str) -> str:
    """Describe the first difference between two transcripts."""
    a, b = json.loads(one), json.loads(other)
    for number, (x, y) in enumerate(zip(a["messages"], b["messages"], strict=False)):
        if x != y:
            return f"message {number} ({x['role']}) was {_short(x)} and then {_short(y)}"
    if len(a["messages"]) != len(b["messages"]):
        return f"it had {len(a['messages'])} messages and then {len(b['messages'])}"
    key = next(key for key in a if a[key] != b[key])
    return f"its {key} was {a[key]!r:.120} and then {b[key]!r:.120}"


def _short(message: Mapping[str, Any]) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return f"{calls or message.get('content')!r:.160}"
