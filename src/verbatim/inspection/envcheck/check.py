"""Checks an environment without a model: plays it with several players and reports its faults."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verbatim.core.episode_limits import EpisodeLimits
from verbatim.core.types import Example
from verbatim.environments.environment import Demonstration, Environment
from verbatim.environments.resolve import create_environment
from verbatim.inspection.envcheck import judge
from verbatim.inspection.envcheck.examples import compare_splits, read_demonstrations, read_examples
from verbatim.inspection.envcheck.findings import CheckFinding, Report
from verbatim.inspection.envcheck.play import CheckedEnvironment, MakePlayer, PlayedEpisode
from verbatim.inspection.envcheck.players import RandomPlayer, SolutionPlayer, WrittenPlayer, assistant_messages
from verbatim.inspection.envcheck.replay import compare, play_elsewhere, play_probes, play_probes_together
from verbatim.inspection.envcheck.watch import LoopWatch, Stuck
from verbatim.models.renderers.renderer import Renderer
from verbatim.rollouts.openings import Openings, measure_openings

_PROBES = 3
"""Number of examples whose episodes are played a second time."""
_SIDE_BY_SIDE = 4
"""Number of episodes that the random player plays at the same time for each example."""
_NOT_PLAYED = (
    "its episodes are programs that query a model themselves, so they were not played; to run a program, use "
    "`verbatim gateway check COMMAND`"
)


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """The number of examples to play, and the limits of the run in which the environment will be used."""

    num_examples: int = 8
    """Number of training examples to play."""
    max_turns: int = EpisodeLimits.max_turns
    """Maximum number of turns per episode, as in [[orchestrator.train.env]]."""
    seq_len: int = 2048
    """Maximum number of tokens per sample, as in [orchestrator]."""
    renderer: Renderer | None = None
    """The renderer that counts the tokens of opening prompts. If it is None, the counts are estimated from the numbers
    of characters."""
    timeout: float = 20.0
    """Time limit for one episode in seconds."""


def check_environment(name: str, args: Mapping[str, Any], settings: CheckSettings) -> Report:
    """Play an environment and report its faults.

    Args:
        name: The id of a bundled environment, or an import path.
        args: The arguments with which the environment is created.
        settings: The number of examples to play, and the limits.

    Raises:
        ComponentError: the environment cannot be created.
        ModelError: only a model can play the environment.
    """
    environment = create_environment(name, args)
    check = _Check(name=name, args=args, environment=environment, settings=settings)
    watch = LoopWatch(1.2 * settings.timeout, own=_package_of(environment))
    if check.read():
        try:
            watch.run(check.play())
            check.play_again()
        except Stuck as stuck:
            check.findings.append(_blocking(stuck.place, None))
            watch.blocked.pop(stuck.place, None)
    check.findings += [_blocking(place, seconds) for place, seconds in watch.blocked.items()]
    return check.report()


@dataclass(kw_only=True)
class _Check:
    """A check in progress."""

    name: str
    args: Mapping[str, Any]
    environment: Environment
    settings: CheckSettings
    findings: list[CheckFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = EpisodeLimits(
            max_turns=self.settings.max_turns, timeout=self.settings.timeout, tool_timeout=self.settings.timeout / 2
        )
        self._stage = CheckedEnvironment(name=self.name, environment=self.environment, limits=limits)
        self._examples: dict[str, Sequence[Example]] = {}
        self._demonstrations: Sequence[Demonstration] = ()
        self._openings: dict[str, Openings] = {}
        self._again: tuple[list[PlayedEpisode], list[list[PlayedEpisode]]] | None = None

    def read(self) -> bool:
        """Read the examples and demonstrations; return True if there is anything to play."""
        for split in ("train", "eval"):
            self._examples[split], wrong = read_examples(self.environment, self.name, split)
            self.findings += wrong
        self.notes += compare_splits(self._examples["train"], self._examples["eval"])
        self._demonstrations, wrong = read_demonstrations(self.environment, self.name, self.settings.renderer)
        self.findings += wrong
        if getattr(self.environment, "only_by_sampler", False):
            self.notes.append(_NOT_PLAYED)
            return False
        return bool(self._examples["train"])

    async def play(self) -> None:
        """Play all episodes, but stop once an episode has timed out."""
        stage, examples = self._stage, _spread(self._examples["train"], self.settings.num_examples)
        probes = examples[:_PROBES]
        first = await play_probes(stage, probes, keep=True)
        for index, example in enumerate(examples, start=1):
            if self._is_too_slow():
                return
            plays = await stage.play("random", [RandomPlayer] * _SIDE_BY_SIDE, example, index=index)
            if any(play.has_solution for play in plays):
                await stage.play("solution", [lambda seed: SolutionPlayer()], example, index=index)
            if imitated := _imitators(self._demonstrations, plays):
                await stage.play("demonstration", imitated, example, index=index)
        if not self._is_too_slow():
            for split, rows in self._examples.items():
                self._openings[split] = await measure_openings(
                    self.environment,
                    rows,
                    seq_len=self.settings.seq_len,
                    renderer=self.settings.renderer,
                    seconds=self.settings.timeout,
                )
            self._again = (first, [await play_probes(stage, probes), await play_probes_together(stage, probes)])

    def play_again(self) -> None:
        """Compare the first episodes with two repetitions of the same episodes: one that was played later in this
        process, and one that is played now in a new process."""
        if self._again is None:
            return
        first, later = self._again
        ids = list(dict.fromkeys(play.example.id for play in first))
        elsewhere = play_elsewhere(self.name, self.args, ids, self._stage.limits)
        if isinstance(elsewhere, str):
            self.notes.append(f"episodes could not be replayed in another process: {elsewhere}")
        self.findings += compare(first, later, None if isinstance(elsewhere, str) else elsewhere)

    def report(self) -> Report:
        """Judge the played episodes, and return the report with all findings and notes."""
        plays = self._stage.plays
        said = [
            *judge.errors(plays),
            *judge.tool_faults(plays),
            *judge.schemas(plays),
            *judge.prompts(self._openings),
            *judge.scores(plays, self.environment),
            *judge.ends(plays, self.settings.max_turns),
            *judge.demonstrated_tools(plays, self._demonstrations),
        ]
        return Report(
            environment=self.name,
            num_examples={split: len(rows) for split, rows in self._examples.items()},
            findings=(*self.findings, *(item for item in said if isinstance(item, CheckFinding))),
            notes=(*self.notes, *(item for item in said if isinstance(item, str))),
            players=judge.earned(plays, self.environment),
        )

    def _is_too_slow(self) -> bool:
        return any((play.trajectory.error or "").startswith("timeout") for play in self._stage.plays)


def _spread(examples: Sequence[Example], most: int) -> list[Example]:
    """At most `most` examples, spread evenly from the first to the last."""
    step = max(1, len(examples) // most)
    return list(examples)[::step][:most]


def _imitators(demonstrations: Sequence[Demonstration], plays: Sequence[PlayedEpisode]) -> list[MakePlayer]:
    """Players that repeat the demonstrations whose opening messages are the same as in these episodes."""
    openings = [list(play.opening) for play in plays[:1]]
    fitting = [shown for shown in demonstrations if judge.opening_of(shown) in openings][:_SIDE_BY_SIDE]
    return [_imitator(shown) for shown in fitting]


def _imitator(shown: Demonstration) -> MakePlayer:
    said = assistant_messages(shown.messages)
    return lambda seed: WrittenPlayer(said)


def _blocking(place: str, seconds: float | None) -> CheckFinding:
    how = "and was abandoned" if seconds is None else f"for {seconds:.1f} s"
    return CheckFinding(
        kind="blocks",
        found=f"{place} blocked the event loop {how}: no other episode could make progress meanwhile",
        expected="code on the event loop that takes milliseconds or awaits",
        change="if a tool waits or computes, make it a plain `def` without inline=True, so that it runs in a thread; "
        "in `async def`, use `await asyncio.sleep(...)` or `await asyncio.to_thread(function)`; if the whole "
        "environment is compute-heavy, set isolated = true in its table",
    )


def _package_of(environment: Environment) -> Path | None:
    """The folder of the environment's top-level package; None if the environment is a single module or a part of
    Verbatim."""
    top = sys.modules.get(type(environment).__module__.partition(".")[0])
    folders = list(getattr(top, "__path__", ()))
    return Path(folders[0]) if folders and top is not None and top.__name__ != "verbatim" else None
