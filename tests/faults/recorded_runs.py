"""Tiny runs that were recorded, and what is left of them resumed."""

from __future__ import annotations

import ast
import contextlib
import io
import logging
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from e2e.tiny_runs import LOTS, TOML, build_tiny_model, train_lines, workplace
from faults.lost_power import after_loss
from faults.recorder import Op
from faults.struck import Server
from verbatim.cli.main import main
from verbatim.logs.monitors import learning_curve
from verbatim.logs.monitors.trajectory_log import read_trajectories

STEPS = 3
MODULES = {
    "lots": LOTS,
    "shown": """
from lots import Lots
from verbatim.environments import Demonstration


class Shown(Lots):
    def demonstrations(self, count, seed):
        words = ["one", "two", "three", "four"]
        return [Demonstration(messages=({"role": "user", "content": "go"},
                                        {"role": "assistant", "content": words[(seed + n) % 4]})) for n in range(count)]
""",
}
"""What the runs train on; the second shows what to imitate."""

MODEL = """\
build = { hidden_size = 32, num_layers = 1, num_heads = 2, num_kv_heads = 1, intermediate_size = 64, vocab_size = 300 }
[warm_start]
steps = 2
batch_size = 4
conversations = 8
"""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A run that was recorded from its start to its end, without an interruption."""

    ops: list[Op]
    toml: str
    weights: bytes
    """Of the trained model."""
    trajectories: list[tuple[int, str, list[int]]]
    """Step, id and sampled ids of each one."""

    promised_before: int | None = None
    """The newest checkpoint that was there when it started."""

    def promised(self, prefix: int) -> int | str | None:
        """The newest checkpoint that the run has announced after so many operations, or "finished"."""
        done = reversed(self.ops[:prefix])
        return next((op[1] for op in done if op[0] == "promise"), self.promised_before)

    def moments(self, count: int) -> list[int]:
        """How many operations are done when the power goes out: spread over the run, its end among them."""
        first, last = self.ops.index(("start",)) + 1, len(self.ops)
        return sorted({round(first + (last - first) * number / count) for number in range(1, count + 1)})

    def after(self, promise: int | str) -> int:
        """How many operations lead to a promise."""
        return next(number for number, op in enumerate(self.ops, start=1) if op[:2] == ("promise", promise))


def sampled(run: Path) -> list[tuple[int, str, list[int]]]:
    """Step, id and sampled ids of every trajectory in a run's log."""
    return sorted(
        (step, trajectory.trajectory_id, [token for turn in trajectory.turns for token in turn.completion_ids.tolist()])
        for step, trajectory in read_trajectories(run)
    )


def run_of(place: Path) -> Path:
    """The folder of the only run."""
    (run,) = (path for path in (place / "runs" / "run").iterdir() if not path.is_symlink())
    return run


def record(server: Server, place: Path, toml: str, *arguments: str) -> list[Op]:
    """Run `verbatim rl run.toml` in a process of its own; its trace."""
    place.mkdir(exist_ok=True)
    for name, source in MODULES.items():
        (place / f"{name}.py").write_text(source)
    (place / "run.toml").write_text(toml)
    trace, out = place.with_name(f"{place.name}.trace"), place.with_name(f"{place.name}.said")
    two = "separate_process = true" in toml
    ended = server.run(["rl", "run.toml", *arguments], place=place, out=out, trace=trace, two=two)
    assert ended.status == 0, ended.said
    ops: list[Op] = ast.literal_eval(trace.read_text())
    return ops


def recorded(server: Server, place: Path, toml: str) -> Recorded:
    """A new run, to its end."""
    ops = record(server, place, toml)
    run = run_of(place)
    weights = (run / "final" / "model.safetensors").read_bytes()
    return Recorded(ops=ops, toml=toml, weights=weights, trajectories=sampled(run))


def plain_run(server: Server, place: Path) -> Recorded:
    """A model that is there, and a checkpoint after each of three batches."""
    model = build_tiny_model(place / "model")
    return recorded(server, place / "run", _toml(f'name = "{model}"', "lots.Lots"))


def prepared_run(server: Server, place: Path) -> Recorded:
    """A model that is built in the run folder and warm-started there; checkpoints at the start and at the end."""
    toml = _toml(MODEL, "shown.Shown").replace("interval = 1", "interval = 100")
    return recorded(server, place / "run", toml)


def run_of_two_processes(server: Server, place: Path) -> Recorded:
    """As `plain_run`, with the trainer in a process of its own; it is resumed in one process, which is quicker."""
    model = build_tiny_model(place / "model")
    toml = _toml(f'name = "{model}"', "lots.Lots")
    two = toml.replace("separate_process = false", "separate_process = true")
    return replace(recorded(server, place / "run", two), toml=toml)


def resumed_run(server: Server, place: Path, run: Recorded) -> Recorded:
    """The rest of a run that was killed while it wrote its last checkpoint."""
    killed = run.after(STEPS) - 10
    (place / "run").mkdir()
    after_loss(run.ops[:killed], "all", random.Random(0)).write(place / "run")
    promised = run.promised(killed)
    assert promised == STEPS - 1
    ops = record(server, place / "run", run.toml, "--resume")
    assert what_differs(run_of(place / "run"), run) is None
    return replace(run, ops=ops, promised_before=promised)


def _toml(model: str, environment: str) -> str:
    toml = TOML.format(model="MODEL").replace('name = "MODEL"', model).replace("max_steps = 2", f"max_steps = {STEPS}")
    toml = toml.replace("[inference.torch]", "[inference.torch]\ndeterministic = true")
    return f'{toml}import_path = "{environment}"\n[checkpoint]\ninterval = 1\n'


def type_(*arguments: str) -> tuple[int, str]:
    """Status and words of `verbatim rl run.toml ...`, warnings among them, in this process."""
    said = io.StringIO()
    warnings = logging.StreamHandler(said)
    logging.getLogger().addHandler(warnings)
    try:
        # A fifth of such a run's time is spent on drawing its learning curve.
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            patch.setattr(learning_curve, "is_installed", lambda package: False)
            status = main(["rl", "run.toml", *arguments])
    finally:
        logging.getLogger().removeHandler(warnings)
    return status, said.getvalue()


def what_differs(found: Path, run: Recorded) -> str | None:
    """From the run that was not interrupted; None if it came to the same end."""
    if [line["step"] for line in train_lines(found)] != list(range(1, STEPS + 1)):
        return "the metrics do not have every step once"
    if sampled(found) != run.trajectories:
        return "the trajectories are others"
    if (found / "final" / "model.safetensors").read_bytes() != run.weights:
        return "the weights are others"
    return None


def left_over(found: Path) -> list[str]:
    """Temporary files and folders of killed processes."""
    names = sorted(path.relative_to(found).as_posix() for path in found.rglob("*"))
    return [name for name in names if name.rpartition("/")[2].startswith(".") or name.startswith("states/")]


def resume(place: Path, promised: int | str | None, run: Recorded) -> str | None:
    """Go on with what the disk of `place` holds; what went wrong, None if everything is as it was promised."""
    with workplace(place, MODULES):
        (place / "run.toml").write_text(run.toml)  # the person's own file, which is no part of the run
        if promised == "finished" and (run_of(place) / "final" / "model.safetensors").read_bytes() != run.weights:
            return "the trained model of a finished run is damaged"
        status, said = type_("--resume")
        if status == 2 and "there is no run to resume" in said and promised is None:
            left = [path.parent for path in place.glob("runs/run/*/config.toml")]
            status, said = type_("--resume", str(left[0])) if left else type_()
        if status != 0:
            return f"status {status}: {said}"
        runs = [path for path in (place / "runs" / "run").iterdir() if (path / "final").exists()]
        (found,) = (path for path in runs if not path.is_symlink())
        if list(found.rglob("*.damaged-*")):
            return f"something was damaged: {said}"
        if left_over(found):
            return f"left over: {left_over(found)}"
        return what_differs(found, run)
