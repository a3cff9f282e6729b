"""Training steps of the recipe smollm2_calculator, by this checkout and by another one, in turns.

    python benchmarks/recipe_step.py --against PATH [--steps 4] [--threads 1] [--dtype bfloat16]

Two kinds of steps: the warm start's (all weights, 8 conversations) and the run's (adapters, 12 conversations with
random advantages, about as many tokens as a batch has after the filter). Each checkout has a process of its own, which
takes a step whenever it is told to, so that both see the same load on the machine. The first step of each kind includes
the check of trees. Prints one JSON line: seconds of processor time and of the clock, and ratios of pairs, this checkout
to the other one (least, median, most).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
RECIPE = Path("src/verbatim/cli/recipes/smollm2_calculator.toml")
CONVERSATIONS = {"warm_start": 8, "run": 12}


class Child:
    """A checkout's process, which takes one step for each line that it reads."""

    def __init__(self, checkout: Path, kind: str, args: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--serve", kind, "--threads", str(args.threads), "--dtype", args.dtype]
        environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=checkout
        )

    def step(self) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.communicate()


def serve(kind: str, args: argparse.Namespace) -> None:
    """Take a step for each line of standard input, and print what it took."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import numpy as np
    import torch

    from verbatim.algorithms.losses import LOSSES
    from verbatim.config import load_config
    from verbatim.models.catalog import folder_of
    from verbatim.models.loading import load_tokenizer
    from verbatim.run.environments import demonstrations, imitated_samples, make_environments
    from verbatim.run.rollouts import make_renderer
    from verbatim.trainer.trainer import Trainer

    torch.set_num_threads(args.threads)
    config = load_config(RECIPE)
    model = folder_of(str(config.model.name))
    shown = demonstrations(make_environments(config), 96, 0)
    renderer = make_renderer(config.orchestrator.renderer, load_tokenizer(model))
    conversations = [built.samples for built in imitated_samples(config, shown, renderer)]
    count, rng = CONVERSATIONS[kind], np.random.default_rng(0)
    settings = config.trainer.model_copy(update={"dtype": args.dtype})
    if kind == "warm_start":
        settings = settings.model_copy(update={"lora": None, "optim": config.warm_start.optim})
    loss = LOSSES["sft" if kind == "warm_start" else "default"]
    trainer = Trainer(model, settings, loss=loss, total_optimizer_steps=1000, seq_len=config.orchestrator.seq_len)

    def batch(number: int) -> list[Any]:
        chosen = [conversations[(number * count + i) % len(conversations)] for i in range(count)]
        samples = [replace(s, trajectory_id=str(i)) for i, conversation in enumerate(chosen) for s in conversation]
        if kind == "warm_start":
            return samples
        return [
            replace(
                s,
                logprobs=np.where(s.loss_mask, -0.2, np.nan).astype(np.float32),
                advantages=np.where(s.loss_mask, rng.choice([-0.5, 0.5]), 0).astype(np.float32),
            )
            for s in samples
        ]

    for number, _ in enumerate(sys.stdin):
        samples = batch(number)
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        metrics = trainer.train_batch(samples)
        seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        found = {"cpu": used, "wall": seconds, "tokens": metrics["num_tokens"], "loss": metrics["loss"]}
        print(json.dumps(found), file=results, flush=True)


def pairs(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """Steps of one kind, in turns."""
    children = {"this": Child(HERE, kind, args), "other": Child(args.against.resolve(), kind, args)}
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in children}
    for number in range(1 + args.steps):
        for name in list(children) if number % 2 else list(children)[::-1]:
            steps[name].append(children[name].step())
    for child in children.values():
        child.close()
    ratios = {
        unit: [a[unit] / b[unit] for a, b in zip(steps["this"][1:], steps["other"][1:], strict=True)]
        for unit in ("cpu", "wall")
    }
    medians = {name: {u: statistics.median(s[u] for s in found[1:]) for u in ratios} for name, found in steps.items()}
    return {
        "first_step_cpu": {name: round(found[0]["cpu"], 2) for name, found in steps.items()},
        "cpu": {name: round(found["cpu"], 2) for name, found in medians.items()},
        "wall": {name: round(found["wall"], 2) for name, found in medians.items()},
        "computed_tokens": {name: found[-1]["tokens"] for name, found in steps.items()},
        "loss": {name: round(found[-1]["loss"], 4) for name, found in steps.items()},
        "ratio_cpu": [round(f(ratios["cpu"]), 3) for f in (min, statistics.median, max)],
        "ratio_wall": [round(f(ratios["wall"]), 3) for f in (min, statistics.median, max)],
        "ten_steps_cpu": {name: round(found[0]["cpu"] + 9 * medians[name]["cpu"], 1) for name, found in steps.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="the other checkout")
    parser.add_argument("--steps", type=int, default=4, help="pairs of steps, after the first")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--kinds", nargs="+", default=list(CONVERSATIONS), choices=CONVERSATIONS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args)
    else:
        found = {kind: pairs(kind, args) for kind in args.kinds}
        print(json.dumps({"threads": args.threads, "dtype": args.dtype, **found}))


if __name__ == "__main__":
    main()
