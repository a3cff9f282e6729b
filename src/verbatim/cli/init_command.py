"""`verbatim init DIR`: writes a new project with an environment, a run, a test and a README."""

from __future__ import annotations

import argparse
import shlex
from importlib.resources import files
from pathlib import Path

from verbatim.cli import exit_status
from verbatim.core.errors import UsageError
from verbatim.core.plain_console import PlainConsole

KINDS = {
    "tools": "the agent calls tools (the default)",
    "chat": "a user answers what the agent says, over several turns",
    "subagents": "the environment owns the control flow, and several agents take turns",
    "program": "an agent program that uses OpenAI's SDK against the gateway and knows nothing of Verbatim",
}
"""The kinds of projects, with a description of what each kind demonstrates."""
GATEWAY_CHECK = """verbatim gateway check "python agent.py" --lines --example '{"state": "dry"}'"""
"""The command that checks a new project of kind "program"."""
_WHOLE = ("program",)
"""Kinds that do not use the common template files."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: DIR and --kind."""
    parser.epilog = "kinds: " + "; ".join(f"{name}: {about}" for name, about in KINDS.items())
    parser.add_argument("folder", type=Path, metavar="DIR", help="a new or empty folder")
    parser.add_argument("--kind", choices=tuple(KINDS), default="tools", metavar="KIND", help=f"{', '.join(KINDS)}")


def run(args: argparse.Namespace) -> int:
    """Write the files, and print what to type next.

    Raises:
        UsageError: the folder is not empty.
    """
    written = write_project(args.folder, args.kind)
    console = PlainConsole()
    console.print(f"wrote {', '.join(written)} in {args.folder}; next:", soft_wrap=True)
    checks = ("pip install openai", GATEWAY_CHECK) if args.kind in _WHOLE else ("verbatim env check my_env:MyEnv",)
    for command in (shlex.join(["cd", str(args.folder)]), *checks, "verbatim rl run.toml"):
        console.print(f"  {command}", soft_wrap=True)
    return exit_status.FINISHED


def write_project(folder: Path, kind: str) -> list[str]:
    """Write a project into a new or empty folder, and return the names of its files.

    Raises:
        UsageError: the folder is not empty, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file; name a new folder")
    if folder.is_dir() and (found := sorted(path.name for path in folder.iterdir())):
        raise UsageError(
            f"{folder} is not empty: it holds {', '.join(found[:3])}{' and more' * (len(found) > 3)}; name a new folder"
        )
    folder.mkdir(parents=True, exist_ok=True)
    templates = files("verbatim.cli").joinpath("templates")
    texts = {
        item.name: item.read_text(encoding="utf-8")
        for part in ((kind,) if kind in _WHOLE else (kind, "common"))
        for item in templates.joinpath(part).iterdir()
        if item.is_file()
    }
    for name, text in sorted(texts.items()):
        (folder / name).write_text(text, encoding="utf-8")
    return sorted(texts)
