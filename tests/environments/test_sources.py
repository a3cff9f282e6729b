"""Rows of files and data sets become examples, or are refused with their place."""

import json
import sys

import pytest

from verbatim.core.errors import UsageError
from verbatim.core.types import Example
from verbatim.environments.sources import HuggingFaceExamples, JsonlExamples

USER = {"role": "user", "content": "2 + 2?"}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "tasks.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return path

    return write


def test_a_line_becomes_an_example_and_what_has_no_place_of_its_own_the_payload(write):
    path = write({"id": "q7", "messages": [USER], "tools": [LOOK], "answer": 4, "level": None}, "", {"id": 8})
    examples = JsonlExamples(path)
    assert list(examples) == [
        Example(id="q7", messages=(USER,), tools=(LOOK,), payload={"answer": 4, "level": None}),
        Example(id="8"),
    ]
    assert (len(examples), examples[-1], examples[:1]) == (2, Example(id="8"), [examples[0]])
    with pytest.raises(IndexError):
        examples[2]


def test_fields_may_have_other_names(write):
    path = write({"key": "a", "chat": [USER], "functions": json.dumps([LOOK])})
    (example,) = JsonlExamples(path, id_field="key", messages_field="chat", tools_field="functions")
    assert example == Example(id="a", messages=(USER,), tools=(LOOK,))


def test_a_text_may_be_the_only_message(write):
    (example,) = JsonlExamples(write({"question": "2 + 2?", "answer": 4}), prompt_field="question")
    assert example == Example(id="0", messages=(USER,), payload={"question": "2 + 2?", "answer": 4})


def test_rows_without_ids_are_numbered(write):
    assert [example.id for example in JsonlExamples(write({"a": 1}, "", {"a": 2}))] == ["0", "1"]


def test_a_call_without_words_is_a_message(write):
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    (example,) = JsonlExamples(write({"messages": [USER, called]}))
    assert example.messages[1] == {**called, "content": ""}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"jsonl:3: not valid JSON \(Expecting"),
        ("[1]", r"jsonl:3: found \[1\], expected a JSON object on each line"),
        ({"id": None}, "jsonl:3: id: found None, expected a text or a whole number"),
        ({"id": 1.5}, "jsonl:3: id: found 1.5"),
        ({"id": "1"}, r"jsonl:3: id: '1' is at .*jsonl:1 too"),
        ({"id": 2, "messages": "hi"}, "jsonl:3: messages: found 'hi', expected a list"),
        ({"id": 2, "messages": [USER, {"role": "user"}]}, r"jsonl:3: messages\[1\]: found {'role': 'user'}, expected"),
        ({"id": 2, "messages": [{"role": "user", "content": ["x"]}]}, r"jsonl:3: messages\[0\]: found"),
        ({"id": 2, "tools": [{"name": "look"}]}, r"jsonl:3: tools: found {'name': 'look'}, expected"),
        ({"id": 2, "tools": "look"}, "jsonl:3: tools: not valid JSON"),
    ],
)
def test_a_line_that_is_no_example_is_refused_with_file_and_line(write, line, message):
    with pytest.raises(UsageError, match=message):
        JsonlExamples(write({"id": 1}, "", line))


def test_a_prompt_that_is_missing_or_not_alone_is_refused(write):
    with pytest.raises(UsageError, match=r"jsonl:1: question: found None, expected a string: the text"):
        JsonlExamples(write({"a": 1}), prompt_field="question")
    with pytest.raises(UsageError, match=r"jsonl:1: question: found messages as well"):
        JsonlExamples(write({"question": "x", "messages": [USER]}), prompt_field="question")


def test_files_that_are_not_there_empty_or_no_text_are_refused(write, tmp_path):
    with pytest.raises(UsageError, match=r"none\.jsonl cannot be read: No such file"):
        JsonlExamples(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="contains no example"):
        JsonlExamples(write("", " "))
    (tmp_path / "bytes.jsonl").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        JsonlExamples(tmp_path / "bytes.jsonl")


def test_without_the_datasets_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'verbatim-rl\[data\]'"):
        HuggingFaceExamples("somewhere")


# ---- data sets


CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
ROWS = [
    {"id": "a", "messages": [USER], "answer": 4},
    {"id": "b", "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], "answer": 5},
]


@pytest.fixture
def saved(tmp_path):
    import datasets

    train = datasets.Dataset.from_list(ROWS)
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": train, "test": train.select([1])}).save_to_disk(tmp_path / "both")
    return tmp_path


@pytest.mark.extras
def test_a_saved_data_set_is_read_with_nulls_of_other_rows_left_out(saved):
    import datasets

    expected = [
        Example(id="a", messages=(USER,), payload={"answer": 4}),
        Example(
            id="b", messages=(USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}), payload={"answer": 5}
        ),
    ]
    for source in (saved / "one", saved / "both", datasets.load_from_disk(str(saved / "one"))):
        assert list(HuggingFaceExamples(source)) == expected
    assert HuggingFaceExamples(str(saved / "both"), "test")[:] == expected[1:]
    with pytest.raises(UsageError, match="has no split 'eval'; it has train, test"):
        HuggingFaceExamples(saved / "both", "eval")


@pytest.mark.extras
def test_a_folder_of_files_is_read_as_load_dataset_reads_it(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text('{"question": "2 + 2?"}\n{"question": "1 + 1?"}\n')
    examples = HuggingFaceExamples(tmp_path / "files", prompt_field="question")
    assert [(example.id, example.messages[0]["content"]) for example in examples] == [("0", "2 + 2?"), ("1", "1 + 1?")]
    with pytest.raises(UsageError, match="cannot be loaded"):
        HuggingFaceExamples(tmp_path / "nowhere")


@pytest.mark.extras
def test_a_row_that_is_no_example_is_refused_with_its_number():
    import datasets

    rows = datasets.Dataset.from_list([{"messages": [USER]}, {"messages": [{"role": "user", "content": None}]}])
    examples = HuggingFaceExamples(rows)
    assert examples[0] == Example(id="0", messages=(USER,))
    with pytest.raises(UsageError, match=r"the data set, train, row 1: messages\[0\]: found"):
        examples[1]
    dated = datasets.Dataset.from_list([{"day": "2026-01-01"}]).cast_column("day", datasets.Value("date32"))
    with pytest.raises(UsageError, match="row 0: day: found a date, expected a JSON value"):
        HuggingFaceExamples(dated)[0]
    twice = datasets.Dataset.from_list([{"id": 1}, {"id": 1}])
    with pytest.raises(UsageError, match=r"row 1: id: 1 is at .* row 0 too"):
        HuggingFaceExamples(twice)
