"""`verbatim eval FILE`: evaluates models on the environments of a configuration, and compares them in pairs."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verbatim.cli import exit_status
from verbatim.cli.argument_types import COUNT, json_object
from verbatim.cli.eval_results import Results
from verbatim.config import RunConfig, load_config
from verbatim.config.schema import EvalConfig
from verbatim.core.ctrl_c import two_presses
from verbatim.core.disk import refuse_link
from verbatim.core.errors import ConfigError, RunStopped, UsageError
from verbatim.core.plain_console import PlainConsole
from verbatim.inference.chat.client import OpenAI
from verbatim.logs.checkpoints import CONFIG, load_stored_config
from verbatim.logs.monitors.live import LiveView, ProgressStage
from verbatim.rollouts.main_loop import run_main
from verbatim.run.check import warn_of_unread_tables
from verbatim.run.environments import make_environments
from verbatim.run.episode_log import EpisodeLog
from verbatim.run.eval_models import EvalModel, find_models
from verbatim.run.evaluation.play import EvalSettings, evaluate_models
from verbatim.run.logs import log_to_console
from verbatim.run.recipes import run_file
from verbatim.run.tables import component_tables


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: FILE, the models, how much to play, and where results go."""
    parser.epilog = (
        "exit status: 0 everything was played, 1 all episodes of an environment failed or an API is dead, 2 usage error"
    )
    add = parser.add_argument
    add(
        "file",
        type=run_file,
        metavar="FILE",
        help="the run's TOML file, a recipe's name, or a run folder: its environments are played",
    )
    add(
        "--model",
        action="append",
        metavar="MODEL",
        dest="models",
        help="the model to evaluate, instead of the file's model.name: a folder or hub id; a run folder (its trained "
        "model); RUN@latest, RUN@best or RUN@120 (a checkpoint); NAME@URL (behind an OpenAI-compatible server, "
        "gpt-5-mini@https://api.openai.com/v1); repeatable",
    )
    add("--examples", type=COUNT, metavar="N", help="the first N examples of each environment (eval.examples)")
    add(
        "--episodes-per-example",
        type=COUNT,
        metavar="N",
        help="episodes per example (as many as orchestrator.eval.episodes allows)",
    )
    add("--seed", type=int, metavar="N", help="seed of all episodes (orchestrator.eval.seed)")
    add(
        "--history",
        choices=("verbatim", "template"),
        help='"template": render every prompt from scratch, as a chat endpoint does (orchestrator.renderer.history)',
    )
    add("--k", type=_counts, metavar="K,K", help="the values of k for pass@k and pass^k (1, 2, 4, 8)")
    add(
        "--concurrency",
        type=COUNT,
        metavar="N",
        help="maximum number of concurrent episodes (orchestrator.max_concurrent; 8 with an API)",
    )
    add(
        "--out",
        type=Path,
        metavar="JSONL",
        help="append every episode to this file; the same command, run again, plays only missing episodes",
    )
    add("--per-example", type=Path, metavar="JSONL", help="write one line per example and model into this file")
    add("--report", type=Path, metavar="MD", help="write a Markdown report into this file")
    add("--json", action="store_true", help="print the results as JSON on standard output, and nothing else")
    add(
        "--api-key-env",
        action="append",
        metavar="[HOST=]NAME",
        help="the environment variable with the key of all servers, or of HOST (OPENAI_API_KEY, for OpenAI's)",
    )
    add("--request-timeout", type=float, metavar="SECONDS", help="timeout of one attempt at an API request (600)")
    add("--max-retries", type=int, metavar="N", help="retries of an API request (5)")
    add(
        "--extra-body",
        type=json_object,
        metavar="JSON",
        help='added to every API request; null removes a key: {"seed": null}',
    )
    add(
        "--price",
        action="append",
        type=_price,
        metavar="[NAME=]IN,OUT",
        default=[],
        help="price of a million prompt tokens and of a million completion tokens, for all models or for NAME: 0.25,2",
    )


def run(args: argparse.Namespace) -> int:
    """Evaluate every model, compare the models in pairs, and print the results.

    Raises:
        ConfigError: there is no model to evaluate.
        RunStopped: every episode of an environment failed, or an API is dead.
    """
    told = PlainConsole(stderr=True)
    log_to_console(told, logging.WARNING)
    config, folder = _config(args)
    models = find_models(_models(args, config, folder), lambda name, url: _api(args, name, url))
    if args.history is not None and all(model.api is not None for model in models):
        raise UsageError("--history is for weights that are sampled here; an API renders every prompt itself")
    asked = config.orchestrator.eval or EvalConfig()
    settings = EvalSettings(
        num_examples=args.examples,
        episodes_per_example=args.episodes_per_example,
        concurrency=args.concurrency,
        seed=asked.seed if args.seed is None else args.seed,
        ks=args.k,
        extra_body=args.extra_body or {},
    )
    for path in (args.per_example, args.report):
        if path is not None and path.is_dir():
            raise UsageError(f"{path} is a folder; name a file")
    warn_of_unread_tables(config)
    environments = make_environments(config)
    console = PlainConsole(quiet=args.json)
    results = Results(config, settings, source=args.file, prices=dict(args.price))
    with EpisodeLog(args.out, models) as log:
        if log.num_failed_before:
            told.print(f"{log.num_failed_before} episodes of {args.out} had failed, and are played again")
        with _EvalBars(told) as progress:

            async def evaluate() -> None:
                async for result in evaluate_models(config, environments, models, settings, log, progress):
                    results.add(result)

            try:
                run_main(evaluate(), two_presses(), ends_without_memory=True)
            except (KeyboardInterrupt, RunStopped):
                _say_how_to_go_on(args, told)
                raise
    results.show(console, where="--per-example FILE" if args.per_example is None else f"see {args.per_example}")
    if args.json:
        sys.stdout.write(json.dumps(results.as_json(), indent=2) + "\n")
    for path, write in ((args.per_example, results.write_examples), (args.report, results.write_report)):
        if path is not None:
            write(path)
            console.print(f"wrote {path}", soft_wrap=True)
    if args.out is not None:
        console.print(f"every episode is in {args.out}", soft_wrap=True)
    if failed := results.nothing_measured():
        raise RunStopped(f"every episode failed in {', '.join(failed)}: nothing was measured")
    return exit_status.FINISHED


def _config(args: argparse.Namespace) -> tuple[RunConfig, Path | None]:
    """The configuration, and the run folder if one was given."""
    folder = args.file if args.file.is_dir() and (args.file / CONFIG).is_file() else None
    file = args.file if folder is None else folder / CONFIG
    if folder is not None:
        refuse_link(file)
    history = [] if args.history is None else ["--orchestrator.renderer.history", args.history]
    overrides = [*args.overrides, *history]
    return load_stored_config(file, lambda path: load_config(path, overrides, component_tables())), folder


def _models(args: argparse.Namespace, config: RunConfig, folder: Path | None) -> Sequence[str]:
    """The models to evaluate: the models of --model, or else the model of the run, or else the model of the file."""
    if args.models:
        models: Sequence[str] = args.models
        return models
    if folder is not None:
        return [str(folder)]
    if config.model.name is None:
        raise ConfigError(
            f"{args.file} builds its model when it is trained; name a trained one: --model runs/{args.file.stem}/latest"
        )
    return [config.model.name]


def _api(args: argparse.Namespace, name: str, url: str) -> OpenAI:
    """The settings of the server at this URL."""
    from urllib.parse import urlsplit

    key = None
    for given in args.api_key_env or ():
        host, _, variable = given.rpartition("=")
        if not host or host == urlsplit(url).hostname:
            key = variable
    given_limits = {"request_timeout": args.request_timeout, "max_retries": args.max_retries}
    limits: dict[str, Any] = {name: value for name, value in given_limits.items() if value is not None}
    api = OpenAI(model=name, base_url=url, api_key_env=key, **limits)
    api.check_key()
    return api


def _say_how_to_go_on(args: argparse.Namespace, told: PlainConsole) -> None:
    hint = "nothing was kept; with --out FILE the same command continues where it stopped"
    if args.out is not None:
        hint = f"the episodes played so far are in {args.out}; to continue:  {shlex.join(['verbatim', *sys.argv[1:]])}"
    told.print(hint, soft_wrap=True, style="bold")


class _EvalBars:
    """One progress bar per model, on a terminal."""

    def __init__(self, console: PlainConsole) -> None:
        self._view, self._label = LiveView(console), ""
        self._bar: ProgressStage | None = None

    def __call__(self, model: EvalModel, done: int, total: int, failed: int) -> None:
        if self._bar is None or model.label != self._label:
            self._view.stop()
            self._label = model.label
            self._bar = self._view.open(f"evaluating {model.label[-30:]}", total, done=done, side_by_side=True)
        self._bar.update(done, note=f"{failed} failed" if failed else "")

    def __enter__(self) -> _EvalBars:
        return self

    def __exit__(self, *_: object) -> None:
        self._view.stop()


def _counts(text: str) -> list[int]:
    return sorted({COUNT(part.strip()) for part in text.split(",")})


def _price(text: str) -> tuple[str, tuple[float, float]]:
    """Return (1) the model's name on its server ("" for all models) and (2) the model's prices."""
    name, _, prices = text.rpartition("=")
    try:
        prompt, completion = (float(part) for part in prices.split(","))
        if not (prompt >= 0 and completion >= 0):
            raise ValueError
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected the prices of a million prompt and completion tokens, such as 0.25,2.0; or, for one "
            "model only, gpt-5-mini=0.25,2.0"
        ) from None
    return name, (prompt, completion)
