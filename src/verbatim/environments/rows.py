"""Reads a user's data (rows in memory, a JSONL file, or a Hugging Face data set) as training and held-out examples."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verbatim.core.errors import UsageError
from verbatim.core.imports import find_file
from verbatim.core.texts import shown
from verbatim.core.types import Example
from verbatim.environments.sources import HuggingFaceExamples, JsonlExamples, ListExamples, read_json_lines

EXPECTED = (
    'a list of rows [{"prompt": ..., ...}], a JSONL file "tasks.jsonl", a data set of the hub or a folder of '
    'save_to_disk "openai/gsm8k", a table { path = "openai/gsm8k", name = "main", split = "train" }, or a '
    "datasets.Dataset"
)
FEWEST = 20
"""Minimum number of rows for holding out some of them. If there are fewer rows, no row is held out."""
_TABLE = ("path", "name", "split", "revision")
"""The keys of a table that names a data set."""


def read_splits(
    data: Any, eval_data: Any = None, *, prompt: str = "prompt", eval_share: float = 0.1
) -> dict[str, Sequence[Example]]:
    """Read the examples of "train" and "eval".

    With `eval_share = 0.1` every tenth row is held out, beginning with the first. If there are fewer than 20 rows, or
    the share is 0, no row is held out, and evaluation uses the training rows.

    Args:
        data: Rows, a file or a data set, as for `read_rows`.
        eval_data: The held-out rows, in any of the same forms. By default a share of `data` is held out.
        prompt: The field with the prompt.
        eval_share: The share of rows to hold out, from 0 to 0.5. One row in `round(1 / eval_share)` is held out.

    Raises:
        UsageError: the data cannot be read, or the share is not between 0 and 0.5.
    """
    if isinstance(eval_share, bool) or not isinstance(eval_share, int | float) or not 0 <= eval_share <= 0.5:
        raise UsageError(f"eval_share: found {shown(eval_share, 80)}, expected a share from 0 to 0.5")
    rows = read_rows(data, prompt=prompt, split="train")
    if eval_data is not None:
        return {"train": rows, "eval": read_rows(eval_data, prompt=prompt, split="test", what="eval_data")}
    if eval_share == 0 or len(rows) < FEWEST:
        return {"train": rows, "eval": rows}
    every = round(1 / eval_share)
    return {"train": [row for i, row in enumerate(rows) if i % every], "eval": list(rows)[::every]}


def read_rows(data: Any, *, prompt: str, split: str, what: str = "data") -> Sequence[Example]:
    """Convert rows to examples. The field `prompt` (a string, or messages) opens the episode; the rest is the payload.

    Args:
        data: Rows, a JSONL file (in the current directory, or next to the run's TOML file), or a data set.
        prompt: The field with the prompt. A row without this field is opened by its `messages`.
        split: The split of a data set, if `data` does not name one.
        what: Name of the argument in errors.

    Raises:
        UsageError: `data` does not have a supported form, has no rows, or has an invalid row, which the error names.
    """
    if isinstance(data, Mapping):
        unknown = [key for key in data if key not in _TABLE]
        if unknown or not isinstance(data.get("path"), str):
            found = f"the key {unknown[0]!r}" if unknown else "no path"
            raise UsageError(f"{what}: found {found} in {shown(data, 80)}, expected the keys {', '.join(_TABLE)}")
        return _data_set(data["path"], prompt, data.get("split", split), data.get("name"), data.get("revision"))
    if isinstance(data, str | Path):
        path = find_file(data)
        if path is not None and path.is_file():
            return _read_file(path, prompt)
        if str(data).endswith((".jsonl", ".json")):
            raise UsageError(
                f"{what}: there is no file {data}; looked in the current directory, {Path.cwd()}, and "
                "next to the run's TOML file; give its path"
            )
        return _data_set(str(path or data), prompt, split, None, None)
    # `data` can be a `Dataset` only if the module has been imported already, and importing it here would be slow.
    if "datasets" in sys.modules and isinstance(data, sys.modules["datasets"].Dataset):
        if not len(data):
            raise UsageError(f"{what}: the data set has no rows; expected at least one")
        return HuggingFaceExamples(data, **_fields(data[0], prompt))
    if not isinstance(data, Sequence) or not data or not isinstance(data[0], Mapping):
        empty = isinstance(data, Sequence) and not data
        found = "an empty list" if empty else f"{shown(data, 80)} ({type(data).__name__})"
        raise UsageError(f"{what}: found {found}, expected {EXPECTED}")
    return ListExamples(data, what=what, **_fields(data[0], prompt))


def _fields(first: Any, prompt: str) -> dict[str, Any]:
    """Return the arguments for `Columns`. The first row decides whether prompts are strings or lists of messages."""
    if prompt not in first:
        return {}
    return {"prompt_field": prompt} if isinstance(first[prompt], str) else {"messages_field": prompt}


def _read_file(path: Path, prompt: str) -> Sequence[Example]:
    rows = read_json_lines(path, "row")
    return JsonlExamples(path, **_fields(next(iter(rows.values())), prompt))


def _data_set(source: str, prompt: str, split: str, name: str | None, revision: str | None) -> Sequence[Example]:
    rows = HuggingFaceExamples(source, split, name=name, revision=revision)
    if not len(rows):
        raise UsageError(f"the data set {source}, {split}, has no rows; expected at least one")
    return HuggingFaceExamples(source, split, name=name, revision=revision, **_fields(rows.row(0), prompt))
