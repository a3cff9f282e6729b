"""The tiny run of the fault campaigns: where it is made, what it comes to when nothing happens, and how to compare."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from e2e.tiny_runs import (
    FILTERS,
    LOTS,
    assert_ledger_adds_up,
    build_tiny_model,
    lines,
    train_lines,
    trajectory_lines,
)
from faults.strikes import CHANGES, READS
from faults.struck import Ended, Server
from waiting import HANGS

STEPS, BATCH, GROUP = 4, 4, 2
TOML = f"""\
max_steps = {STEPS}
[model]
name = "{{model}}"
[orchestrator]
batch_size = {BATCH}
group_size = {GROUP}
seq_len = 384
max_async_level = {{level}}
renderer = {{{{ name = "qwen3" }}}}
sampling = {{{{ max_tokens = 4 }}}}
heartbeat_timeout = {HANGS:g}
[trainer]
separate_process = {{separate}}
[trainer.optim]
lr = 1e-2
[inference.torch]
max_batch_size = 4
deterministic = true
[checkpoint]
interval = 2
{FILTERS}[[orchestrator.train.env]]
import_path = "lots.Lots"
"""
KINDS = {"one": ("false", 0), "two": ("true", 0), "overlapping": ("true", 1)}
"""`separate_process` and `max_async_level` of each kind of run."""

TRAINER = (
    "verbatim.trainer",
    "verbatim.models",
    "verbatim.algorithms.losses",
    "verbatim.trainer.packing",
    "verbatim.trainer.transport.weights",
    "verbatim.trainer.transport.trainer_messages",
)
LOOP = (
    "verbatim.run.orchestrator",
    "verbatim.core.trajectories",
    "verbatim.algorithms.credit",
    "verbatim.algorithms.filters",
    "verbatim.algorithms.curriculum",
    "verbatim.logs.checkpoints",
    "verbatim.trainer.transport.remote_trainer",
    "verbatim.trainer.transport.exchange",
    "verbatim.run.run_log",
    "verbatim.run.training_run",
    "verbatim.rollouts.group",
)
ENGINE = ("verbatim.inference",)
COUNTED = TRAINER + LOOP + ENGINE
"""Modules whose calls are moments of a run."""

_TIMED = ("time/", "queue/", "loop/", "sampler/")
_TIMES = ("seconds", "tokens_per_second")
_AFTER_A_STOP = ("ledger/sampled", "ledger/dropped/cancelled", "weights/canary", "weights/canary_allowed")
"""What was sampled for a batch that was not handed over when a run was ended in order is thrown away, and counted. The
first step after a stop has seen no weight update whose check it could report."""


@dataclasses.dataclass
class Place:
    """A folder with a configuration of each kind, and the runs that were made there."""

    folder: Path
    numbers: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))
    counted: dict[tuple[Any, ...], list[tuple[str, str]]] = dataclasses.field(default_factory=dict)

    @classmethod
    def make(cls, folder: Path) -> Place:
        """With `one.toml`, `two.toml` and `overlapping.toml`; a server reads `run.toml` once."""
        folder.mkdir()
        model = build_tiny_model(folder / "model")
        (folder / "lots.py").write_text(LOTS)
        for kind, (separate, level) in KINDS.items():
            (folder / f"{kind}.toml").write_text(TOML.format(model=model, separate=separate, level=level))
        (folder / "run.toml").write_text((folder / "one.toml").read_text())
        return cls(folder)

    def new(self) -> Path:
        """A folder for a run that is not there yet."""
        return self.folder / f"run-{next(self.numbers)}"

    def copy(self, run: Path | None) -> Path:
        """`new`, with what is in the other run's folder, if there is one."""
        new = self.new()
        if run is not None:
            shutil.copytree(run, new, symlinks=True)
        return new

    def run(
        self, server: Server, kind: str, run: Path, *, strike: Mapping[str, Any] | None = None, **options: Any
    ) -> Ended:
        """Start the run, or go on with it where there is one."""
        number = next(self.numbers)
        if strike is not None:
            strike = {"where": str(run), "note": str(self.folder / f"note-{number}"), **strike}
        resume = ["--resume"] if (run / "config.toml").exists() else []
        return server.run(
            ["rl", f"{kind}.toml", "--run-dir", run, *resume],
            place=self.folder,
            out=self.folder / f"said-{number}",
            strike=strike,
            two=kind != "one",
            **options,
        )

    def events(
        self, each: Any, kind: str, role: str, *, base: Path | None = None, ops: Collection[str] = CHANGES
    ) -> list[tuple[str, str]]:
        """What happens to the files of a run that nothing happens to, or of one that goes on from `base`: what, and
        where."""
        return [
            event for event in self._count(each, kind, role, base, do="count", ops=CHANGES + READS) if event[0] in ops
        ]

    def calls(self, each: Any, kind: str, role: str, do: str, modules: tuple[str, ...]) -> list[tuple[str, str]]:
        """The calls of functions of these modules, out of `COUNTED`, or of torch's from there: which, and where."""
        return [
            call for call in self._count(each, kind, role, None, do=do, modules=COUNTED) if call[1].startswith(modules)
        ]

    def _count(self, each: Any, kind: str, role: str, base: Path | None, **strike: Any) -> list[tuple[str, str]]:
        """Counted once."""
        key = (kind, role, base, strike["do"])

        def count(server: Server, _: None) -> None:
            run, note = self.copy(base), self.folder / f"events-{next(self.numbers)}"
            ended = self.run(server, kind, run, strike={"role": role, "note": str(note), **strike})
            assert ended.status == 0, ended.said
            found = [line.split(" ", 2) for line in note.read_text().splitlines()]
            self.counted[key] = [(op, where.removeprefix(str(run))) for _, op, where in found]

        if key not in self.counted:
            each(count, [None])
        return self.counted[key]


def deterministic(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that depend neither on the clock nor on whether there was a stop."""
    left_out = {*_TIMES, *_AFTER_A_STOP}
    return {name: value for name, value in metrics.items() if not name.startswith(_TIMED) and name not in left_out}


def differences(run: Path, expected: Path) -> list[str]:
    """Where a run that was stopped, synchronous and deterministic, is not the one that was never stopped."""
    found = []
    for name in (
        "final/model.safetensors",
        f"checkpoints/step_{STEPS:06d}/weights/model.safetensors",
        f"checkpoints/step_{STEPS:06d}/trainer/optimizer.safetensors",
    ):
        if not (run / name).is_file() or (run / name).read_bytes() != (expected / name).read_bytes():
            found.append(f"{name} differs")
    mine, theirs = (
        [(line["step"], line["kind"], deterministic(line["metrics"])) for line in lines(folder / "metrics.jsonl")]
        for folder in (run, expected)
    )
    if mine != theirs:
        found.append(f"metrics: {[m for m, t in itertools.zip_longest(mine, theirs) if m != t][:1]}")
    said = [
        [
            (t["trajectory_id"], t["reward"], [turn["completion_ids"] for turn in t["turns"]])
            for t in trajectory_lines(folder)
        ]
        for folder in (run, expected)
    ]
    if said[0] != said[1]:
        found.append("trajectories differ")
    return found + imbalances(run)


def imbalances(run: Path, *, lost_in_the_engine: bool = False) -> list[str]:
    """What is missing in a finished run, or there twice: steps, groups, tokens; and what should not lie around.

    Args:
        run: Its folder.
        lost_in_the_engine: Whether an engine may have failed: what it drew for a request is counted, and in no file.
    """
    found = []
    steps = [line["step"] for line in train_lines(run)]
    if steps != list(range(1, STEPS + 1)):
        found.append(f"steps {steps}")
    groups = Counter(t["group_id"] for t in trajectory_lines(run))
    if groups != {f"train-{n}": GROUP for n in range(STEPS * BATCH // GROUP)}:
        found.append(f"groups {dict(groups)}")
    last = train_lines(run)[-1]["metrics"] if steps else {}
    dropped = sum(n for name, n in last.items() if name.startswith("ledger/dropped/"))
    if not steps or last["ledger/sampled"] != last["ledger/trained"] + dropped or last["ledger/pending"]:
        found.append(f"the ledger does not add up: { {n: v for n, v in last.items() if n.startswith('ledger/')} }")
    elif not lost_in_the_engine:
        try:
            assert_ledger_adds_up(run)
        except AssertionError:
            found.append("the ledger's tokens are not those of the trajectories")
    if not (run / "final" / "model.safetensors").is_file() or not (run / "summary.json").is_file():
        found.append("no final model, or no summary")
    return found + [f"{path.relative_to(run)} was left" for path in run.rglob("*") if is_leftover(path)]


def is_leftover(path: Path) -> bool:
    """Whether a name is that of something half written."""
    return any(
        mark in path.name
        for mark in (".partial", ".tmp", ".writing-", ".replaced-", ".deleting-", ".probe-", ".trainer_state")
    )
