"""`verbatim env check ENVIRONMENT` plays an environment without a model; `verbatim env list` lists the bundled
environments."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
from collections.abc import Mapping
from typing import Any

from rich.text import Text

from verbatim.cli import exit_status
from verbatim.cli.argument_types import COUNT, SECONDS, json_object
from verbatim.config import RunConfig
from verbatim.core.errors import UsageError
from verbatim.core.imports import import_object
from verbatim.core.plain_console import PlainConsole
from verbatim.core.texts import printable
from verbatim.environments import ENVIRONMENTS, EXTRAS
from verbatim.inspection.envcheck import KINDS, CheckSettings, Report, check_environment
from verbatim.inspection.envcheck.targets import find_targets
from verbatim.models.renderers.continuations import told
from verbatim.models.renderers.renderer import Renderer
from verbatim.run.check import renderer_of
from verbatim.run.environments import make_environments
from verbatim.run.tables import component_tables

_OF_CHECK: Mapping[str, Any] = {
    "args": None,
    "examples": 8,
    "max_turns": None,
    "seq_len": None,
    "timeout": 20.0,
}
"""The options of `check` with their defaults."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: the action, ENVIRONMENT and the limits."""
    parser.epilog = (
        "check plays the environment with a random player, with each episode's solution() and with its demonstrations, "
        "so its tools are run with random arguments; exit status: 0 nothing is wrong, 1 something is, 2 there is no "
        "such environment"
    )
    parser.add_argument("what", choices=("check", "list"), help="play ENVIRONMENT, or list the bundled ones")
    parser.add_argument(
        "environment",
        nargs="?",
        metavar="ENVIRONMENT",
        help="a bundled id (guess_number), an import path (my_env:MyEnv), a file (my_env.py, my_env.py:MyEnv), or a "
        "run's TOML file, for all its environments; list takes the id of one with its own tasks",
    )
    parser.add_argument(
        "--args", type=json_object, metavar="JSON", help="""the environment's arguments: --args '{"high": 20}'"""
    )
    parser.add_argument(
        "--examples",
        type=COUNT,
        default=_OF_CHECK["examples"],
        metavar="N",
        help="number of training examples to play (8)",
    )
    parser.add_argument("--max-turns", type=COUNT, metavar="N", help="turns per episode (16, or the file's)")
    parser.add_argument("--seq-len", type=COUNT, metavar="N", help="tokens per episode (2048, or the file's)")
    parser.add_argument(
        "--timeout", type=SECONDS, default=_OF_CHECK["timeout"], metavar="S", help="seconds per episode (20)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(args: argparse.Namespace) -> int:
    """Check an environment and print the report, or list environments.

    Raises:
        UsageError: no environment was named, or an option does not fit.
    """
    if args.what == "list":
        typed = [name for name, standard in _OF_CHECK.items() if getattr(args, name) != standard]
        if typed:
            raise UsageError(f"--{typed[0].replace('_', '-')} is for verbatim env check ENVIRONMENT; list takes --json")
        return _list(args.environment, as_json=args.json)
    if args.environment is None:
        raise UsageError(
            "verbatim env check: which environment? Type for example: verbatim env check guess_number, "
            "or my_env:MyEnv for the class MyEnv in my_env.py"
        )
    targets = find_targets(args.environment, args.args or {}, component_tables())
    with contextlib.redirect_stdout(sys.stderr):  # environments may print, but stdout is for the report
        renderer = _renderer(targets[0].config)
        standard = CheckSettings()
        reports = [
            check_environment(
                target.name,
                target.args,
                CheckSettings(
                    num_examples=args.examples,
                    timeout=args.timeout,
                    max_turns=args.max_turns or target.max_turns or standard.max_turns,
                    seq_len=args.seq_len or target.seq_len or standard.seq_len,
                    renderer=renderer,
                ),
            )
            for target in targets
        ]
    if args.json:
        found = [report.as_json() for report in reports]
        print(json.dumps(found[0] if len(found) == 1 else found, ensure_ascii=False))
    else:
        for report in reports:
            _show(report)
    config = targets[0].config
    if config is not None and renderer is not None:
        settings = config.orchestrator.renderer
        for sentence in told(renderer, settings.thinking_retention, settings.history):
            print(printable(f"note: {sentence}"), file=sys.stderr)
    return exit_status.FINISHED if all(report.is_clean for report in reports) else exit_status.STOPPED


def _renderer(config: RunConfig | None) -> Renderer | None:
    """The renderer of the run's model; None without a run, or if the model cannot be read here. If the model cannot be
    read, a note is printed, and the environment is played without a renderer."""
    if config is None:
        return None
    try:
        return renderer_of(config, make_environments(config))
    except UsageError as error:
        print(printable(f"note: the tokens of opening prompts are estimated: {error}"), file=sys.stderr)
        return None


def _show(report: Report) -> None:
    """Print a report in readable form."""
    console = PlainConsole()
    wrong = len(report.findings)
    verdict = ("nothing wrong", "green") if report.is_clean else (f"{wrong} thing{'s' * (wrong > 1)} to fix", "red")
    console.print(Text.assemble((report.environment, "bold"), ": ", verdict), soft_wrap=True)
    splits = ", ".join(f"{count} {split}" for split, count in report.num_examples.items())
    console.print(f"  examples: {splits}", soft_wrap=True)
    for name, earned in report.players.items():
        reward = "none" if earned.mean_reward is None else f"{earned.mean_reward:.3f}"
        console.print(
            f"  {name} player: {earned.episodes} episodes, mean reward {reward}, success {earned.success:.2f}",
            soft_wrap=True,
        )
    for finding in report.findings:
        console.print(Text.assemble("\n", (finding.kind, "bold red"), f" ({KINDS[finding.kind]})"), soft_wrap=True)
        for label, text in (("found", finding.found), ("expected", finding.expected), ("change", finding.change)):
            console.print(Text.assemble("  ", (f"{label}: ", "bold"), text.replace("\n", "\n    ")), soft_wrap=True)
    for note in report.notes:
        console.print(f"  note: {note}", soft_wrap=True)


def _list(name: str | None, *, as_json: bool) -> int:
    """List the bundled environments, or the tasks or games of a bundled environment that has many."""
    if name is None:
        about = {id: (import_object(path).__doc__ or "").strip().split("\n\n")[0] for id, path in ENVIRONMENTS.items()}
    else:
        about = _tasks_of(name.replace("-", "_"))
    if as_json:
        print(json.dumps(about))
        return exit_status.FINISHED
    missing = {
        id: f"not installed: pip install 'verbatim-rl[{extra}]'"
        for id, (module, extra) in EXTRAS.items()
        if name is None and importlib.util.find_spec(module) is None
    }
    console = PlainConsole()
    for known, text in about.items():
        note = (f" ({missing[known]})", "yellow") if known in missing else ""
        console.print(Text.assemble((known, "bold"), f": {' '.join(text.split())}", note), soft_wrap=True)
    return exit_status.FINISHED


def _tasks_of(name: str) -> dict[str, str]:
    """The tasks or games of a bundled environment, with their descriptions."""
    listing = getattr(import_object(ENVIRONMENTS[name]), "listing", None) if name in ENVIRONMENTS else None
    if listing is None:
        many = [known for known, path in ENVIRONMENTS.items() if hasattr(import_object(path), "listing")]
        raise UsageError(f"verbatim env list {name}: expected an environment that has tasks: {', '.join(many)}")
    entries = dict(listing())
    if not entries:
        raise UsageError(f"{name} is not installed: pip install 'verbatim-rl[{EXTRAS[name][1]}]'")
    return entries
