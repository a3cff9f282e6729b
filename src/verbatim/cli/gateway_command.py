"""`verbatim gateway check COMMAND`: runs an agent program against a scripted model, and reports what was recorded."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from verbatim.cli import exit_status
from verbatim.cli.argument_types import SECONDS, json_object
from verbatim.core.errors import UsageError
from verbatim.core.plain_console import PlainConsole
from verbatim.environments.sources import read_json_lines
from verbatim.inspection.envcheck.program_check import ProgramReport, check_program
from verbatim.rollouts.gateway.program.environment import HARMLESS, Program


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: COMMAND, the example and the model's responses."""
    parser.epilog = (
        "needs no model: a script calls the tools that the program offers, and then finishes; exit status: 0 "
        "everything that was sampled can be trained, 1 something is wrong, 2 the program cannot be started"
    )
    parser.add_argument("what", choices=("check",), help="the action")
    parser.add_argument("command", metavar="COMMAND", help='the program in quotes: "python agent.py"')
    parser.add_argument(
        "--example", type=json_object, metavar="JSON", default={}, help="""the program's input: '{"question": "..."}'"""
    )
    parser.add_argument(
        "--answers",
        type=Path,
        metavar="FILE",
        help="the model's responses: JSON lines of assistant messages, the last one repeated",
    )
    parser.add_argument("--reasoning", action="store_true", help="give the model's responses reasoning")
    parser.add_argument("--lines", action="store_true", help="the program reads examples as lines (reuse = true)")
    parser.add_argument("--sandbox", action="store_true", help="run it in a sandbox")
    _add_arguments_of_the_environment(parser)
    parser.add_argument("--timeout", type=SECONDS, default=120.0, metavar="S", help="seconds for the program (120)")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def _add_arguments_of_the_environment(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("as in the environment's args").add_argument
    add(
        "--reward",
        choices=("last_line", "file", "score", "post"),
        default="last_line",
        help="where the reward is (last_line)",
    )
    add("--score", metavar="COMMAND", help="with --reward score: the command to run after the program")
    add("--example-in", choices=("stdin", "file"), default="stdin", help="how the program gets the example (stdin)")
    add("--cwd", metavar="FOLDER", default=".", help="where the program runs (the current folder)")
    add(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an environment variable for the program; repeatable",
    )
    add("--env-from", action="append", default=[], metavar="NAME", help="a variable to pass on from this shell")
    add("--memory-mb", type=int, default=4096, metavar="N", help="memory limit in MiB, per process and in total (4096)")
    add("--processes", type=int, default=128, metavar="N", help="maximum number of processes in the sandbox (128)")
    add("--disk-mb", type=int, default=64, metavar="N", help="MiB of files that the program may write (64)")
    add("--connections", type=int, default=512, metavar="N", help="in the sandbox, connections to the gateway (512)")
    add("--max-body-mb", type=int, default=32, metavar="N", help="maximum size of a request in MiB (32)")
    add("--visible", action="append", default=[], metavar="FOLDER", help="a folder visible in the sandbox, read-only")
    add("--unsafe-allow", action="store_true", help="run without a sandbox if none works here")
    add("--sampling", choices=("run", "client"), default="run", help="whose sampling parameters apply (run)")
    add("--restores-reasoning", choices=("true", "false"), help="accept responses sent back without reasoning")
    add("--unenforced", metavar="NAMES", default=",".join(HARMLESS), help="request fields to accept without effect")


def _program(args: argparse.Namespace) -> Program:
    """The environment that runs the program."""
    parted = {name: value for name, equals, value in (given.partition("=") for given in args.env) if name and equals}
    if len(parted) != len(args.env):
        raise UsageError("--env: expected NAME=VALUE, each name once")
    restores = None if args.restores_reasoning is None else args.restores_reasoning == "true"
    return Program(
        args.command,
        [args.example or {"id": "0"}],
        cwd=args.cwd,
        env=parted,
        env_from=args.env_from,
        example=args.example_in,
        reward=args.reward,
        score=args.score,
        timeout=args.timeout,
        memory_mb=args.memory_mb,
        connections=args.connections,
        max_body_mb=args.max_body_mb,
        processes=args.processes,
        disk_mb=args.disk_mb,
        sandbox=args.sandbox,
        visible=args.visible,
        unsafe_allow=args.unsafe_allow,
        reuse=args.lines,
        sampling=args.sampling,
        restores_reasoning=restores,
        unenforced=[name.strip() for name in args.unenforced.split(",") if name.strip()],
    )


def run(args: argparse.Namespace) -> int:
    """Check the program, and print the report.

    Raises:
        UsageError: the program cannot be started, or an option does not fit.
    """
    if args.overrides:
        raise UsageError(
            f"verbatim gateway check has no option {args.overrides[0]}; options of the program belong "
            'inside the quotes: "python agent.py --its-option"'
        )
    if not args.command.strip():
        raise UsageError('COMMAND is empty; type for example: verbatim gateway check "python agent.py"')
    responses = list(read_json_lines(args.answers, "message").values()) if args.answers is not None else []
    report = check_program(_program(args), responses, reasoning=args.reasoning, seconds=args.timeout)
    console = PlainConsole()
    if args.json:
        console.print(json.dumps({**dataclasses.asdict(report), "clean": report.is_clean}), soft_wrap=True)
    else:
        for line in told(report):
            console.print(line, soft_wrap=True)
    return exit_status.FINISHED if report.is_clean else exit_status.STOPPED


def told(report: ProgramReport) -> list[str]:
    """The report as readable text, one line per item."""
    counts = report.counts
    first, agents = report.seconds_to_first_request, ", ".join(report.agents) or "-"
    how, words = ("ended well", "") if report.error is None else _parted(report.error)
    lines = [
        f"program   {how}; reward {report.reward}; "
        f"{report.seconds:.1f} s" + (f", {first:.1f} s to its first request" if first is not None else ""),
        *(f"          | {line}" for line in words.splitlines()),
        f"recorded  {counts.get('requests', 0)} requests, {report.num_turns} turns of {agents}, "
        f"{report.num_samples} training samples",
        f"tokens    {report.num_sampled_tokens} sampled, {report.num_trained_tokens} of them can be trained; "
        f"{report.num_differences} differ from what was sampled",
    ]
    lines += [
        f"branch    turn {b['turn']} ({b['agent']}): {str(b['reason']).replace('_', ' ')}: {b['found']}"
        for b in report.branches
    ]
    lines += [
        f"rewritten turn {turn} came back in another form, and was recognised: {', '.join(ways)}"
        for turn, ways in report.rewritten.items()
    ]
    kinds: dict[str, Any] = {
        "refused": "was refused",
        "unenforced": "was accepted without effect",
        "overridden": 'is decided by the run; sampling = "client" lets requests decide',
    }
    for name, count in counts.items():
        kind, _, field = name.partition("/")
        if kind in kinds:
            lines.append(f"field     {field} {kinds[kind]} ({count} times)")
    for name, what in (("repeated", "answered once, from the first"), ("left", "left by their client, and cancelled")):
        if counts.get(name):
            lines.append(f"requests  {counts[name]} {what}")
    return lines


def _parted(error: str) -> tuple[str, str]:
    r"""Return (1) how a program ended and (2) its last output, "" if the error quotes no output.

    >>> _parted("program_crashed: the program ended with exit status 1; it said 'Oh\\nno'")
    ('program_crashed: the program ended with exit status 1', 'Oh\nno')
    """
    how, *quoted = re.split("; (?:so far )?it said ", error, maxsplit=1)
    try:
        words = ast.literal_eval("".join(quoted))
    except (ValueError, SyntaxError):  # nothing is quoted, or the error was cut off within the quote
        return error, ""
    return (how, words) if isinstance(words, str) else (error, "")
