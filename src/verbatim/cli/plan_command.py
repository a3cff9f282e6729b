"""`verbatim plan FILE [--gpu NAME] [--gpus N]`: predicts whether a run fits into memory, and how long a step takes.

The command trains nothing and reads no weights: the trainer's step runs on fake tensors.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from verbatim.cli import exit_status
from verbatim.cli.argument_types import COUNT, SHARE
from verbatim.cli.patience import told_if_slow
from verbatim.cli.rl_command import add_strategy
from verbatim.config import load_config
from verbatim.config.schema import RunConfig
from verbatim.core.errors import UsageError
from verbatim.core.plain_console import PlainConsole
from verbatim.core.texts import printable
from verbatim.run.cluster import look_at_cluster
from verbatim.run.recipes import run_file
from verbatim.run.tables import component_tables

DOES_NOT_FIT = exit_status.STOPPED
"""Exit status if the run does not fit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare FILE, --trajectory-strategy, --gpu, --gpus, --from-run, the assumptions, and --json."""
    parser.epilog = f"exit status: 0 it fits, {DOES_NOT_FIT} it does not, 2 the trainer would refuse it"
    parser.add_argument("file", type=run_file, metavar="FILE", help="the run's TOML file, or a recipe's name")
    add_strategy(parser)
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="4090, a100-40, a100-80, b200, h100, h200, l40s, or cpu for this "
        "machine; by default what this machine has",
    )
    parser.add_argument(
        "--gpus",
        type=COUNT,
        metavar="N",
        help="number of devices; the trainer takes those that the sampler leaves, unless the file has a number",
    )
    parser.add_argument(
        "--from-run", type=Path, metavar="FOLDER", help="a run with trajectories of the expected lengths"
    )
    parser.add_argument(
        "--utilisation",
        type=SHARE,
        metavar="SHARE",
        help="share of the devices' peak FLOP/s that the run reaches (0.3)",
    )
    parser.add_argument(
        "--bandwidth-utilisation",
        type=SHARE,
        metavar="SHARE",
        help="share of their memory bandwidth that it reaches (0.6)",
    )
    parser.add_argument(
        "--memory-share", type=SHARE, metavar="SHARE", help="share of their memory that tensors may take (0.9)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the plan.

    Raises:
        UsageError: the device is unknown, there are too few devices, there are no trajectories, or a share is outside 0
            to 1; or the trainer would refuse something, such as the model or a number of processes that it cannot use;
            or the cluster cannot hold the run.
    """
    with told_if_slow(f"reading {args.file} and what it names"):
        config = load_config(args.file, args.overrides, component_tables())
    with told_if_slow("asking the cluster what it has"):
        placed = look_at_cluster(config)
    with told_if_slow("importing torch"):
        from verbatim.inspection.plan.as_json import plan_as_json
        from verbatim.inspection.plan.batches import assumed_batch, batch_of_run
        from verbatim.inspection.plan.changes import tried_changes
        from verbatim.inspection.plan.devices import device_here, find_device
        from verbatim.inspection.plan.placement import place
        from verbatim.inspection.plan.predict import Assumptions, Case, model_source, predict
        from verbatim.inspection.plan.show import show_changes, show_plan
        from verbatim.run.machine import OnCuda
        from verbatim.run.precision import resolve_dtypes

    device = find_device(args.gpu) if args.gpu is not None else device_here(_has_cuda(config))
    if not device.is_cuda and args.gpus is not None:
        raise UsageError(
            f"--gpus {args.gpus} without --gpu: this machine has no CUDA device; name a device, for example --gpu h100"
        )
    shares = {name: getattr(args, name) for name in ("utilisation", "bandwidth_utilisation", "memory_share")}
    with told_if_slow("choosing the precision"):
        config, choices = resolve_dtypes(config, machine=OnCuda() if device.is_cuda else None)
    with model_source(config) as source:
        case = Case(
            config=config,
            source=source,
            device=device,
            batch=assumed_batch(config) if args.from_run is None else batch_of_run(config, args.from_run),
            placement=place(config, is_cuda=device.is_cuda, gpus=args.gpus),
            assumed=Assumptions(**{name: share for name, share in shares.items() if share is not None}),
        )
        with told_if_slow("predicting the trainer's step, on fake tensors"):
            plan = predict(case)
        console = PlainConsole()
        if not args.json:
            show_plan(plan, console)
            for choice in choices:
                console.print(f"precision      {choice}", soft_wrap=True)
            for line in placed:
                console.print(printable(line.replace("cluster", "cluster   ", 1)), soft_wrap=True)
        with told_if_slow("trying what would make it fit"):
            changes = [] if plan.fits else tried_changes(plan)
    if args.json:
        json.dump({**plan_as_json(plan, changes), "cluster": placed}, sys.stdout, indent=2)
        sys.stdout.write("\n")
    elif changes:
        show_changes(changes, console)
    return exit_status.FINISHED if plan.fits else DOES_NOT_FIT


def _has_cuda(config: RunConfig) -> bool:
    if config.trainer.device == "cpu":
        return False
    import torch

    return torch.cuda.is_available()
