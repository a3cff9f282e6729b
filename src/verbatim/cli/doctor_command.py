"""`verbatim doctor FILE.jsonl`: finds prompts that do not extend what was sampled, with the reason and the cost.

With `--template` instead of a file, it reports what a chat template allows a renderer to guarantee. With `--machine`,
it reports whether the package's C files compile here and whether they support a model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from verbatim.cli import exit_status
from verbatim.cli.argument_types import FROM_ZERO
from verbatim.core.disk import read_regular, refuse_link
from verbatim.core.errors import UsageError
from verbatim.core.plain_console import PlainConsole
from verbatim.inspection.doctor import (
    BreakClass,
    Doctor,
    LogFile,
    OutcomeFormat,
    detect_format,
    is_outcome_path,
    known_formats,
)
from verbatim.inspection.doctor.as_json import JsonReport
from verbatim.inspection.doctor.diagnosis import ShownBreaks, TemplateLine
from verbatim.inspection.doctor.logs import Format
from verbatim.inspection.doctor.show import ConsoleReport
from verbatim.inspection.doctor.text import TokenText
from verbatim.models.catalog import kept_model

_SHOWN = 10
"""Number of breaks that are printed in full by default."""
_LARGEST = 2**26
"""Maximum size in bytes of a file that is parsed as one JSON value."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: FILE, --template, --machine, --model, --json and --limit."""
    parser.epilog = (
        "exit status: 0 no breaks except in sub-agents' first turns, 1 breaks, 2 something could not be read or "
        "checked; with --template: 0 every kind of message can be appended and tools are written and read, 1 if not; "
        "with --machine: 0 everything compiles, agrees with PyTorch and supports MODEL, 1 if not"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "file",
        type=Path,
        nargs="?",
        metavar="FILE",
        help="a run folder, or a log of trajectories: of Verbatim, vLLM or verifiers",
    )
    what.add_argument(
        "--template",
        metavar="MODEL_OR_FILE",
        help="instead, print where a model's chat template lets prompts be continued exactly",
    )
    what.add_argument(
        "--machine",
        nargs="?",
        const="",
        metavar="MODEL",
        help="instead, print whether the C files compile here and agree with PyTorch, and whether they support MODEL",
    )
    parser.add_argument(
        "--model", metavar="FOLDER_OR_ID", help="the model whose tokenizer decodes the ids (by default the run's)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object, with every break")
    parser.add_argument(
        "--limit", type=FROM_ZERO, metavar="N", help="number of breaks to show in full (10; with --json all)"
    )


def run(args: argparse.Namespace) -> int:
    """Check the log, the template or the machine, and print the report.

    Raises:
        UsageError: the file is missing or is not a log, the tokenizer does not fit the file, or options exclude each
            other.
        ModelError: a model cannot be loaded, or has no chat template.
    """
    if args.machine is not None:
        _refuse_options_of_logs(args, "--machine", *filter(None, [args.machine]))
        from verbatim.cli.doctor_machine import report as report_machine

        return int(not report_machine(model=args.machine, as_json=args.json))
    if args.template is not None:
        _refuse_options_of_logs(args, "--template", args.template)
        from verbatim.cli.doctor_template import report as report_template

        return int(not report_template(args.template, as_json=args.json))
    file = LogFile(args.file)
    known = _recognised(file)
    model, note = _find_model(args.model, args.file)
    text = None
    if model is not None:
        from verbatim.models.loading import load_tokenizer

        text = TokenText(load_tokenizer(model))
    doctor = Doctor(text, _template_lines(text))
    report = JsonReport(sys.stdout.write) if args.json else ConsoleReport(PlainConsole())
    limit = args.limit if args.limit is not None else sys.maxsize if args.json else _SHOWN
    trajectories = known.read(file)
    first = next(trajectories, None)  # formats learn from the first lines what `known.about` reports, so read them now
    report.begin(file=str(args.file), format_name=known.name, note=known.about, tokenizer=model, tokenizer_note=note)
    chosen = ShownBreaks(limit)
    for logged in chain([] if first is None else [first], trajectories):
        for diagnosis in doctor.examine(logged):
            if limit == sys.maxsize:
                report.add(diagnosis)
            else:
                chosen.add(diagnosis)
    for diagnosis in chosen.breaks():
        report.add(diagnosis)
    report.close(doctor.summary, file.problems)
    if file.problems.count or not doctor.summary.checked:
        return exit_status.USAGE
    return int(doctor.summary.breaks > doctor.summary.by_design)


def _refuse_options_of_logs(args: argparse.Namespace, *instead: str) -> None:
    given = [option for option, value in (("--model", args.model), ("--limit", args.limit)) if value is not None]
    if given:
        raise UsageError(
            f"{' and '.join(given)} cannot be used with {instead[0]}, which reads no log; "
            f"type verbatim doctor {' '.join(instead)}"
        )


def _recognised(file: LogFile) -> Format:
    """The format of the log. A single JSON value is refused, with a message that has the command to convert it to JSON
    lines."""
    if is_outcome_path(file.path):
        return OutcomeFormat()
    try:
        return detect_format(file, known_formats())
    except UsageError:
        if _is_one_value(file.path):
            raise UsageError(
                f"{file.path} is one JSON value over many lines; expected JSON lines, one object each: "
                f"type jq -c '.[]' {file.path} > log.jsonl for a list, jq -c . {file.path} > log.jsonl for an object"
            ) from None
        raise


def _is_one_value(path: Path) -> bool:
    """True if the file as a whole is one JSON value on more than one line."""
    if not path.is_file() or path.stat().st_size > _LARGEST:
        return False
    try:
        text = path.read_text(encoding="utf-8").strip()
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return "\n" in text


def _find_model(asked: str | None, log: Path) -> tuple[str | None, str]:
    """The model whose tokenizer decodes the ids, and a note about it. Without --model it is the run's own model, but
    only if this model is a local folder: the hub is never queried unless the user names a model on it."""
    if asked is not None:
        return asked, asked
    run = _run_of(log)
    for folder in (run / "model", run / "final", run / "warm_start"):
        if (folder / "config.json").is_file():
            _refuse_odd_files(folder)
            return str(folder), f"{folder}, found next to the log"
    config = run / "config.toml"
    name = _configured_model(config) if config.is_file() else None
    places = [Path(name), kept_model(name)] if name is not None else []
    for place in places:
        if place is not None and (place / "config.json").is_file():
            return str(place), f"{name}, named in {config}"
    hint = name or "FOLDER_OR_ID"
    return None, f"none: ids are shown without text, and most breaks without their cause; add --model {hint}"


def _refuse_odd_files(folder: Path) -> None:
    """Refuse a model folder next to the log that is a symbolic link or contains one (it could point anywhere), or that
    contains a pipe (reading it would hang)."""
    for path in (folder, *folder.rglob("*")):
        refuse_link(path)
        if not (path.is_file() or path.is_dir()):
            raise UsageError(f"{path} is not a regular file; remove it, or name another model with --model")


def _run_of(log: Path) -> Path:
    """The run folder of a log. The log is the run folder itself, a file or folder in the run folder, or an outcome
    file."""
    if log.is_dir() and (log / "config.toml").is_file():
        return log
    return log.parent.parent if log.suffix == ".parquet" else log.parent


def _configured_model(config: Path) -> str | None:
    refuse_link(config)
    try:
        model = tomllib.loads(read_regular(config).decode("utf-8")).get("model")
    except ValueError as error:
        raise UsageError(f"{config} next to the log is not TOML ({error}); name the model with --model") from None
    name = model.get("name") if isinstance(model, dict) else None
    return name if isinstance(name, str) else None


def _template_lines(text: TokenText | None) -> Callable[[BreakClass], TemplateLine | None]:
    if text is None or text.chat_template is None:
        return lambda kind: None
    from verbatim.inspection.doctor.template_lines import template_lines

    return template_lines(text.chat_template)
