"""Writes the command line reference: every command, argument and option, from the parsers that read them."""

from __future__ import annotations

import argparse

from docs_site.markdown import cell, code, table
from verbatim.cli.main import COMMANDS, OVERRIDES_HELP, make_parser

HEAD = f"""# Command line reference

Every command with its arguments and options. This page is generated from the parsers by `make reference`;
`verbatim COMMAND --help` prints the same.

For commands that take a FILE, {OVERRIDES_HELP.replace("FILE", "it")}.
[One table](reliability.md#exit-statuses) has the exit statuses of all commands.
`verbatim --version` prints the version.
[Shell completion](configuration.md#shell-completion) completes commands, options and keys.
"""


def document() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(_command(name, about) for name, (_, about) in COMMANDS.items())]).rstrip() + "\n"


def arguments(command: str) -> list[argparse.Action]:
    """What a command takes, `--help` apart."""
    parser = make_parser(command).commands[command]
    return [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]


def _command(name: str, about: str) -> str:
    actions = arguments(name)
    positional = [action for action in actions if not action.option_strings]
    usage = " ".join(["verbatim", name, *(_placeholder(action) for action in positional), "[options]"])
    lines = [f"## `verbatim {name}`", "", f"{about[0].upper()}{about[1:]}.", "", f"```text\n{usage}\n```", ""]
    if actions:
        rows = [_row(action) for action in actions]
        if any(default not in ("", "required") for _, default, _ in rows):
            lines.append(table(["argument", "default", "meaning"], rows))
        else:
            short = [[name, f"{meaning} (required)" if default else meaning] for name, default, meaning in rows]
            lines.append(table(["argument", "meaning"], short))
    return "\n".join(lines)


def _placeholder(action: argparse.Action) -> str:
    name = _metavar(action)
    if action.nargs in ("?", "*"):
        return f"[{name}{' ...' if action.nargs == '*' else ''}]"
    return f"{name} ..." if action.nargs == "+" else name


def _metavar(action: argparse.Action) -> str:
    if action.metavar is not None:
        return action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper()


def _row(action: argparse.Action) -> list[str]:
    name = ", ".join(code(option) for option in action.option_strings) or code(_metavar(action))
    if action.option_strings and action.nargs != 0:
        name += f" {code(_metavar(action))}"
    help_ = (action.help or "") % {**vars(action), "prog": "verbatim"}
    needed = action.required if action.option_strings else action.nargs not in ("?", "*")
    return [name, "required" if needed else _default(action), cell(help_)]


def _default(action: argparse.Action) -> str:
    if action.default in (None, False, []) or action.nargs == 0:
        return ""
    return code(str(action.default))
