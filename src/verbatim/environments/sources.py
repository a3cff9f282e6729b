"""Reads examples from lists, files and data sets. The error about an invalid row names its file and line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from verbatim.core.errors import UsageError
from verbatim.core.types import Example, Message
from verbatim.core.user_values import why_refused

if TYPE_CHECKING:
    import datasets

INSTALL = "Hugging Face data sets need the datasets package: pip install 'verbatim-rl[data]'"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Names of those fields of a row that have a fixed meaning. All other fields become the payload.

    Example:
        The row `{"id": 7, "messages": [{"role": "user", "content": "2 + 2?"}], "answer": 4}` becomes
        `Example(id="7", messages=({"role": "user", "content": "2 + 2?"},), payload={"answer": 4})`.
    """

    id: str = "id"
    """Field with the unique id. If no row has it, the rows are numbered from 0."""
    messages: str = "messages"
    """Field with the opening messages; rows may lack it."""
    tools: str = "tools"
    """Field with the tool schemas, as a list or as JSON text; rows may lack it."""
    prompt: str | None = None
    """Field whose text becomes the only message of a row without messages. The text also stays in the payload."""

    def ids(self, values: Sequence[Any], where: Callable[[int], str]) -> tuple[str, ...]:
        """Return the ids of the examples, given the values of the id field. `where` names a row in errors.

        Raises:
            UsageError: only some rows have an id, or two rows have the same id.
        """
        if all(value is None for value in values):
            return tuple(str(index) for index in range(len(values)))
        seen: dict[str, str] = {}
        for index, value in enumerate(values):
            place = where(index)
            if not isinstance(value, str | int) or isinstance(value, bool):
                raise UsageError(
                    f"{place}: {self.id}: found {value!r:.80}, expected a text or a whole number, as in "
                    "other rows; or name another field as the id"
                )
            if str(value) in seen:
                raise UsageError(f"{place}: {self.id}: {value!r:.80} is at {seen[str(value)]} too; ids must be unique")
            seen[str(value)] = place
        return tuple(seen)

    def example(self, row: Mapping[str, Any], example_id: str, where: str) -> Example:
        """Create the example of one row. `where` names the row in errors.

        Raises:
            UsageError: the messages or tools are invalid, or a field has no JSON form.
        """
        if (why := why_refused(row, of_json=False)) is not None:
            raise UsageError(f"{where}: {why}")
        messages = _messages(row.get(self.messages), f"{where}: {self.messages}")
        if self.prompt is not None:
            text = row.get(self.prompt)
            if not isinstance(text, str) or messages:
                found = f"{self.messages} as well" if messages else f"{text!r:.80}"
                raise UsageError(
                    f"{where}: {self.prompt}: found {found}, expected a string: the text of the prompt's single message"
                )
            messages = ({"role": "user", "content": text},)
        payload = {name: row[name] for name in row if name not in (self.id, self.messages, self.tools)}
        for name, value in payload.items():
            _check_json(value, f"{where}: {name}")
        tools = _tools(row.get(self.tools), f"{where}: {self.tools}")
        return Example(id=example_id, messages=messages, tools=tools, payload=payload)


class _Source(Sequence[Example]):
    """A sequence that creates each example from its row on access, so that a large data set can stay on disk."""

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], where: Callable[[int], str], ids: Sequence[Any], columns: Columns
    ) -> None:
        self._rows = rows
        self._where = where
        self._columns = columns
        self._ids = columns.ids(ids, where)

    def __len__(self) -> int:
        return len(self._ids)

    def row(self, index: int) -> Mapping[str, Any]:
        """Return one row as it was read."""
        return self._rows[index]

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        place = range(len(self))[index]
        return self._columns.example(self._rows[place], self._ids[place], self._where(place))


class ListExamples(_Source):
    """Examples from rows in memory. All rows are checked when the object is created.

    Args:
        rows: The rows, as mappings.
        what: The name of the rows in errors: with "data", an error names "data[3]".
        id_field: The same as `Columns.id`. Each other `..._field` argument is the same as a field of `Columns`.

    Raises:
        UsageError: a row is invalid; the error names its index.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        what: str = "data",
        id_field: str = "id",
        messages_field: str = "messages",
        tools_field: str = "tools",
        prompt_field: str | None = None,
    ) -> None:
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise UsageError(f"{what}[{number}]: found {row!r:.80}, expected a mapping, as the first row is")
        columns = Columns(id=id_field, messages=messages_field, tools=tools_field, prompt=prompt_field)
        super().__init__(rows, partial("{}[{}]".format, what), [row.get(id_field) for row in rows], columns)
        for _ in self:  # create each example once: an invalid row raises now, not in the middle of a run
            pass


class JsonlExamples(_Source):
    """Examples from the lines of a JSONL file, which is read and checked when the object is created.

    Example:
        >>> class Sums:  # doctest: +SKIP
        ...     def examples(self, split):
        ...         return JsonlExamples(f"sums/{split}.jsonl", prompt_field="question")

    Args:
        path: The file, in UTF-8, with one JSON object per line. Empty lines are skipped.
        id_field: The same as `Columns.id`. Each other `..._field` argument is the same as a field of `Columns`.

    Raises:
        UsageError: the file does not exist, or a line is invalid; the error names the file and the line.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        id_field: str = "id",
        messages_field: str = "messages",
        tools_field: str = "tools",
        prompt_field: str | None = None,
    ) -> None:
        columns = Columns(id=id_field, messages=messages_field, tools=tools_field, prompt=prompt_field)
        lines = read_json_lines(Path(path))
        where = [f"{path}:{number}" for number in lines]
        rows = list(lines.values())
        super().__init__(rows, where.__getitem__, [row.get(id_field) for row in rows], columns)
        for _ in self:  # create each example once: an invalid line raises now, not in the middle of a run
            pass


class HuggingFaceExamples(_Source):
    """One split of a data set of the `datasets` library. The rows stay on disk and are checked on access.

    Example:
        >>> HuggingFaceExamples("openai/gsm8k", "train", name="main", prompt_field="question")  # doctest: +SKIP

    Args:
        source: A `datasets.Dataset`; a folder written by `save_to_disk`; or a name or folder for `load_dataset`.
        split: Name of the split. Ignored if `source` is a `Dataset`, or a saved folder that holds only one split.
        name: The data set's configuration, passed to `load_dataset`.
        revision: The data set's version, passed to `load_dataset`.
        id_field: The same as `Columns.id`. Each other `..._field` argument is the same as a field of `Columns`.

    Raises:
        UsageError: the data set cannot be loaded or has no such split. Also raised on access to an invalid row.
    """

    def __init__(
        self,
        source: str | Path | datasets.Dataset,
        split: str = "train",
        *,
        name: str | None = None,
        revision: str | None = None,
        id_field: str = "id",
        messages_field: str = "messages",
        tools_field: str = "tools",
        prompt_field: str | None = None,
    ) -> None:
        columns = Columns(id=id_field, messages=messages_field, tools=tools_field, prompt=prompt_field)
        rows = _load(source, split, name, revision)
        ids = rows[id_field][:] if id_field in rows.column_names else [None] * len(rows)
        label = str(source) if isinstance(source, str | Path) else "the data set"
        super().__init__(rows, partial("{}, {}, row {}".format, label, split), ids, columns)


def _load(source: Any, split: str, name: str | None, revision: str | None) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UsageError(INSTALL) from error
    if isinstance(source, datasets.Dataset):
        return source
    # `load_dataset` refuses a folder written by `save_to_disk`; one of these two files marks such a folder.
    saved = isinstance(source, str | Path) and any(
        (Path(source) / file).exists() for file in ("state.json", "dataset_dict.json")
    )
    try:
        if not saved:
            return datasets.load_dataset(str(source), name, split=split, revision=revision)
        loaded = datasets.load_from_disk(source)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(f"the data set {source} cannot be loaded: {error}") from error
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if split not in loaded:
        raise UsageError(f"the data set {source} has no split {split!r}; it has {', '.join(map(str, loaded))}")
    return loaded[split]


def read_json_lines(path: Path, what: str = "example") -> dict[int, dict[str, Any]]:
    """Read the JSON objects of a JSONL file, keyed by line number, counting from 1. Empty lines are skipped.

    Raises:
        UsageError: the file does not exist or is empty, or a line is invalid; the error names the file and the line.
    """
    rows: dict[int, dict[str, Any]] = {}
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                row = _from_json(line, f"{path}:{number}")
                if not isinstance(row, dict):
                    raise UsageError(f"{path}:{number}: found {line.strip():.80}, expected a JSON object on each line")
                rows[number] = row
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text: {error}") from error
    if not rows:
        raise UsageError(f"{path} contains no {what}")
    return rows


def _messages(value: Any, where: str) -> tuple[Message, ...]:
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise UsageError(f'{where}: found {value!r:.80}, expected a list of {{"role": ..., "content": ...}}')
    return tuple(_message(item, f"{where}[{index}]") for index, item in enumerate(value))


def _message(value: Any, where: str) -> Message:
    message = _without_nulls(value)
    if isinstance(message, dict) and message.get("tool_calls"):
        message.setdefault("content", "")  # OpenAI's format has a null content next to tool calls
    if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
        raise UsageError(f'{where}: found {value!r:.80}, expected {{"role": ..., "content": ...}} with texts')
    return message  # type: ignore[return-value]


def _tools(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    schemas = _without_nulls(_from_json(value, where) if isinstance(value, str) else value)
    for schema in schemas or ():
        function = schema.get("function") if isinstance(schema, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UsageError(
                f"{where}: found {schema!r:.80}, expected "
                '{"type": "function", "function": {"name": ..., "parameters": ...}}'
            )
    return tuple(schemas or ())


def _without_nulls(value: Any) -> Any:
    """Remove the keys whose value is null. They occur because Arrow gives each row of a data set the keys of all
    rows."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _from_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not valid JSON ({error}): {text.strip():.80}") from None


def _check_json(value: Any, where: str) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{where}: found a {type(value).__name__}, expected a JSON value ({error}); leave the "
            "field out, or convert it"
        ) from None
