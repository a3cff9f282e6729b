"""Runs that take a second: a model of some twenty thousand weights, a one-turn environment, a folder to run them in."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from verbatim.config.recipe_files import recipes
from verbatim.config.schema import BuildConfig
from verbatim.core.trajectory_json import plain, trajectory_to_json
from verbatim.logs.monitors.trajectory_log import read_trajectories

LOTS = '''
import asyncio

from verbatim import Example
from verbatim.environments import Episode


class Lot(Episode):
    """Hears one thing; earns something between 0 and 1 by its seed, whatever it says: every group has a gradient."""

    messages = ({"role": "user", "content": "go"},)

    def __init__(self, seed):
        self.reward = seed % 100 / 100

    async def score(self, trajectory):
        return self.reward


class Lots:
    """`delay` seconds before each episode, so that a test can stop a run between two steps."""

    def __init__(self, delay: float = 0.0):
        self.delay = delay

    def examples(self, split):
        return [Example(id=f"lot-{n}") for n in range(5)]

    async def start(self, example, seed):
        await asyncio.sleep(self.delay)
        return Lot(seed)
'''

DEMONSTRATED = '''
from verbatim.environments.environment import Demonstration

class Shown(Lots):
    """Lots with conversations to begin with."""

    def demonstrations(self, count, seed):
        return [Demonstration(messages=[{"role": "user", "content": "go"},
                                        {"role": "assistant", "content": f"number {n}"}]) for n in range(count)]
'''

WARM_STARTED = """
[checkpoint]
interval = 2
[warm_start]
steps = 3
batch_size = 4
conversations = 20
"""

FILTERS = """\
[[orchestrator.filters]]      # not those by default: what random weights say is gibberish
type = "zero_advantage"
"""

TOML = f"""\
max_steps = 2
[model]
name = "{{model}}"
[orchestrator]
batch_size = 8
group_size = 4
seq_len = 384
max_async_level = 0
sampling = {{{{ max_tokens = 8 }}}}
[trainer]
separate_process = false
[trainer.optim]
lr = 1e-2
[inference.torch]
max_batch_size = 8
{FILTERS}[[orchestrator.train.env]]
"""

SIZES = BuildConfig(
    hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64, vocab_size=512, context_length=384
)


def build_tiny_model(folder: Path, context_length: int = SIZES.context_length) -> Path:
    """Random weights, and a tokenizer that knows how guess_number is written."""
    from verbatim.environments.guess_number import GuessNumber
    from verbatim.models.build import build_model
    from verbatim.models.trained_tokenizer import chat_text

    texts = [chat_text(shown.messages, shown.tools) for shown in GuessNumber().demonstrations(100, seed=0)]
    build_model(folder, SIZES.model_copy(update={"context_length": context_length}), texts, seed=0)
    return folder


@contextlib.contextmanager
def warm_started_workplace(folder: Path, tables: str) -> Iterator[Path]:
    """Work in a folder whose `run.toml` builds a model, trains all of it on conversations of `Shown`, and then trains
    with these tables, deterministically."""
    with workplace(folder, {"lots": LOTS + DEMONSTRATED}):
        sizes = "\n".join(f"{key} = {value}" for key, value in SIZES.model_dump().items())
        text = TOML.replace('[model]\nname = "{model}"', f"[model.build]\n{sizes}").format()
        text = text.replace("[inference.torch]", "[inference.torch]\ndeterministic = true")
        (folder / "run.toml").write_text(text + 'import_path = "lots.Shown"' + WARM_STARTED + tables)
        yield folder


@contextlib.contextmanager
def workplace(folder: Path, modules: Mapping[str, str]) -> Iterator[Path]:
    """Work in a folder that holds these modules. What was imported from it is forgotten afterwards; what earlier tests
    have imported from the recipes' folder is forgotten before."""
    folder.mkdir(parents=True, exist_ok=True)
    forget_modules_of_recipes()
    for name, source in modules.items():
        (folder / f"{name}.py").write_text(source)
        sys.modules.pop(name, None)
    path = list(sys.path)
    try:
        with contextlib.chdir(folder):
            yield folder
    finally:
        sys.path[:] = path
        for name in modules:
            sys.modules.pop(name, None)


def forget_modules_of_recipes() -> None:
    """A run stores the folders of such modules, so it must not find those of another test."""
    folder = os.path.dirname(recipes()["guess_number"])
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if "." not in name and isinstance(file, str) and os.path.dirname(file) == folder:
            del sys.modules[name]


def snapshot(folder: Path) -> dict[str, str]:
    """Everything in a folder: digest of each file, target of each link, "folder" for a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if "__pycache__" in name:
            continue
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        else:
            found[name] = "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    """Every line of a JSONL file; a torn one is an error."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def train_lines(run: Path) -> list[dict[str, Any]]:
    """The steps of a run's metrics."""
    return [line for line in lines(run / "metrics.jsonl") if line["kind"] == "train"]


def steps_so_far(run: Path) -> list[dict[str, Any]]:
    """`train_lines` of a run that goes on: there may be no file yet, and its last line may be half written."""
    path = run / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [line for line in map(json.loads, whole.splitlines()) if line["kind"] == "train"]


def trajectory_lines(run: Path) -> list[dict[str, Any]]:
    """The training trajectories of a run, as JSON."""
    return [json.loads(json.dumps(plain(trajectory_to_json(t)))) for _, t in read_trajectories(run)]


def num_sampled(trajectory: Mapping[str, Any]) -> int:
    """Sampled tokens of a trajectory, counted in the file."""
    return sum(len(turn["completion_ids"]) for turn in trajectory["turns"])


def assert_ledger_adds_up(run: Path) -> dict[str, Any]:
    """The ledger's last line against the trajectories in the file; returns that line's metrics.

    Tokens that a stop or a killed process threw away are in no trajectory, and are booked as cancelled; nor are those
    that a replica had drawn when it was lost.
    """
    last: dict[str, Any] = train_lines(run)[-1]["metrics"]
    dropped = {name: n for name, n in last.items() if name.startswith("ledger/dropped/")}
    assert last["ledger/sampled"] == last["ledger/trained"] + last["ledger/pending"] + sum(dropped.values())
    in_file = sum(map(num_sampled, trajectory_lines(run)))
    nowhere = sum(dropped.get(f"ledger/dropped/{reason}", 0) for reason in ("cancelled", "lost_replica"))
    assert last["ledger/sampled"] == in_file + nowhere + last["ledger/pending"]
    return last
