"""Numbers the formats of the files that a run writes and reads, and refuses files of another version with an error.

JSON files have the number under `format` (JSON lines files on each line); Parquet and safetensors files have the number
in their metadata, under `verbatim_format`. Increase the number whenever a format changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verbatim.core.errors import FormatError

FORMATS: Mapping[str, int] = {
    "verbatim_run.json": 1,
    "precision.json": 1,
    "module_folders.json": 1,
    "forked_from.json": 1,
    "metrics.jsonl": 1,
    "alarms.jsonl": 1,
    "step-*.parquet": 3,
    "manifest.json": 1,
    "orchestrator.json": 1,
    "trainer.json": 1,
    "optimizer*.safetensors": 1,
    "base_model.json": 1,
    "summary.json": 1,
    "trajectory lines": 1,
}
"""The format number of each kind of file, by file name pattern."""
LINES = "trajectory lines"
"""The kind for JSON lines with one trajectory each, in files of any name: exports, results, episodes, traces."""
KEY = "format"
METADATA_KEY = "verbatim_format"


def stamped(kind: str, content: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object to write: the content, preceded by the format number of its kind."""
    return {KEY: FORMATS[kind], **content}


def content_of(kind: str, value: Any, where: object) -> dict[str, Any]:
    """Check the format number and return the content; the inverse of `stamped`.

    Args:
        kind: A key of `FORMATS`.
        value: The JSON value that was read.
        where: The file (and the line, if it has several), for the message.

    Raises:
        FormatError: the format number is different or missing.
    """
    found = dict(value) if isinstance(value, Mapping) else {}
    _check(kind, found.pop(KEY, None), where)
    return found


def metadata_of(kind: str) -> dict[str, str]:
    """The metadata of a file of tensors or columns, with its format number."""
    return {METADATA_KEY: str(FORMATS[kind])}


def check_metadata(kind: str, found: str | bytes | None, where: object) -> None:
    """Refuse a file of tensors or columns whose metadata has a different format number or no format number.

    Raises:
        FormatError: the format number is different or missing; the message names the number found and the number
            expected.
    """
    _check(kind, int(found) if found is not None and found.isdigit() else None, where)


def _check(kind: str, found: Any, where: object) -> None:
    number = found if type(found) is int else None
    if number != FORMATS[kind]:
        has = "no format number" if number is None else f"format {number}"
        who = "version or program" if number is None else "version"
        raise FormatError(
            f"{where} has {has}; this version of Verbatim reads format {FORMATS[kind]} of {kind}. Another {who} "
            f"wrote the file: read the file with that {who}",
            number,
        )
