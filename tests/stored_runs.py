"""Small runs that are made once per session and machine; a test works on a copy of their folder.

The workers of pytest-xdist share them: the first that asks for a folder makes it, the others wait until it is made.

    @pytest.fixture(scope="module")
    def place(tmp_path_factory):
        with forkable_place(tmp_path_factory) as folder:  # holds `whole`, a finished run
            yield folder
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from e2e.tiny_runs import LOTS, TOML, build_tiny_model, snapshot, workplace
from waiting import HANGS

SPOKEN = '''
import zlib

from lots import Lot, Lots


class Speech(Lot):
    """Earns something between 0 and 1 by what is said: another policy earns another mean."""

    async def score(self, trajectory):
        said = b"".join(turn.completion_ids.tobytes() for turn in trajectory.turns)
        return zlib.crc32(said) % 1000 / 1000


class Spoken(Lots):
    async def start(self, example, seed):
        return Speech(seed)
'''
MODULES = {"lots": LOTS, "spoken": SPOKEN}

FORKABLE_STEPS = 6
FORKABLE = """
[orchestrator.eval]
interval = 2
episodes = 10
[checkpoint]
interval = 1
keep_last = 10
keep_best = { metric = "reward/mean", mode = "min" }
"""
"""A checkpoint after each step, evaluations after the steps 0, 2, 4 and 6, of which neither end is the "best"."""

MEASURED_STEPS = 7
METRIC = "reward/mean"
MEASURED = f"""
[orchestrator.eval]
interval = 1
episodes = 10
[checkpoint]
interval = 100
keep_last = 1
keep_best = {{ metric = "{METRIC}" }}
"""
"""An evaluation after each step; the checkpoints that stay are that of the best one and the last."""


# ---- what is stored


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Of this session, for all of its workers."""
    own = factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "stored"


def stored(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder of this name; `make` fills it, once in the session. It is only to be read: `copy_of` to work on."""
    shared = shared_folder(factory)
    shared.mkdir(exist_ok=True)
    folder, made = shared / name, shared / f"{name}.json"
    with open(shared / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)  # its maker has ended half-way
            folder.mkdir()
            make(folder)
            made.write_text(json.dumps(snapshot(folder)))
    return folder


def assert_untouched(folder: Path) -> None:
    """A stored folder is still what was made: otherwise one test has changed what the next one begins with."""
    assert snapshot(folder) == json.loads(folder.with_name(f"{folder.name}.json").read_text())


def tiny_model(factory: pytest.TempPathFactory) -> Path:
    """The model of the tiny runs: `build_tiny_model`."""
    return stored(factory, "tiny_model", lambda folder: build_tiny_model(folder / "model")) / "model"


@contextlib.contextmanager
def copy_of(
    factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object], modules: Mapping[str, str]
) -> Iterator[Path]:
    """Work in a copy of a stored folder, beside these modules, in which runs are light.

    All of it is copied: a run that is resumed cuts its logs in place, and tests damage files in place.
    """
    source = stored(factory, name, make)
    copy = factory.mktemp(name) / "place"
    shutil.copytree(source, copy, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    with workplace(copy, modules), light_runs():
        yield copy
    assert_untouched(source)


@contextlib.contextmanager
def light_runs() -> Iterator[None]:
    """Runs in this process draw no picture."""
    from verbatim.logs.monitors import learning_curve

    draw, learning_curve.draw_curve = learning_curve.draw_curve, lambda *_args, **_options: None
    try:
        yield
    finally:
        learning_curve.draw_curve = draw


# ---- places with a run


def tiny_toml(model: Path, tables: str, *, steps: int, env: str) -> str:
    """A deterministic run of `tiny_runs.TOML`, whose processes may stand still for a while."""
    text = TOML.format(model=model).replace("max_steps = 2", f"max_steps = {steps}")
    text = text.replace("[orchestrator]\n", f"[orchestrator]\nheartbeat_timeout = {HANGS}\n")
    text = text.replace("[inference.torch]", "[inference.torch]\ndeterministic = true")
    return f'{text}import_path = "{env}"\n{tables}'


def make_place(folder: Path, model: Path, tables: str, *, steps: int, run: str) -> None:
    """`model`, `run.toml`, and the run of it."""
    from verbatim.cli.main import main

    shutil.copytree(model, folder / "model")
    with workplace(folder, MODULES), light_runs():
        text = tiny_toml(folder / "model", tables, steps=steps, env="spoken.Spoken")
        (folder / "run.toml").write_text(text)
        assert main(["rl", "run.toml", "--run-dir", run]) == 0


@contextlib.contextmanager
def forkable_place(factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Work where `whole` is a run of `FORKABLE_STEPS` with a checkpoint of each, and `run.toml` its configuration."""

    def make(folder: Path) -> None:
        make_place(folder, tiny_model(factory), FORKABLE, steps=FORKABLE_STEPS, run="whole")

    with copy_of(factory, "forkable", make, MODULES) as place:
        yield place


@contextlib.contextmanager
def measured_place(factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Work where `measured` is a run of `MEASURED_STEPS` with an evaluation after each, and `run.toml` its
    configuration."""

    def make(folder: Path) -> None:
        make_place(folder, tiny_model(factory), MEASURED, steps=MEASURED_STEPS, run="measured")

    with copy_of(factory, "measured", make, MODULES) as place:
        yield place
