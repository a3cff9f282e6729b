"""A name and arguments become an environment, or an error that says what to type."""

import sys
import textwrap

import pytest

from verbatim import Example
from verbatim.config.schema import EnvConfig
from verbatim.core.errors import ComponentError, UsageError
from verbatim.environments import Demonstration, Episode, tool_exchange
from verbatim.environments.guess_number import GuessNumber
from verbatim.environments.resolve import corpus, create_environment, demonstrations_of, examples_of
from verbatim.environments.tools import FunctionTool


def len_of(word: str) -> int:
    """Count letters."""
    return len(word)


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_tasks.py").write_text(
        textwrap.dedent(
            """
        from pathlib import Path
        from verbatim.environments import Episode
        constant = 3

        class Good:
            def __init__(self, *, size: int = 1, files: tuple[Path, ...] = (), mode=None):
                if size < 0:
                    raise RuntimeError("too small")
                self.size, self.files = size, files
            def examples(self, split): return []
            async def start(self, example, seed): return Episode()

        def make(**parameters): return Good(**parameters)
        def nothing(): return None

        class Half:
            def examples(self, split): return []

        class Blocking(Good):
            def start(self, example, seed): return Episode()

        class Needs(Good):
            def __init__(self, path: str): pass

        class NoSplit(Good):
            def examples(self): return []

        class NoSeed(Good):
            async def start(self, example): return Episode()

        class Shy(Good):
            def demonstrations(self, count, seed): return [{"messages": []}] * count
        """
        )
    )
    (tmp_path / "my_broken.py").write_text("import module_that_is_not_there\n")
    (tmp_path / "my_typo.py").write_text("# a typo\ndef f(:\n    pass\n")
    (tmp_path / "my_exit.py").write_text("raise SystemExit(3)\n")
    yield tmp_path
    for name in ("my_tasks", "my_broken"):
        sys.modules.pop(name, None)


def test_a_bundled_environment_by_its_id():
    assert create_environment("guess_number", {"high": 7}) == GuessNumber(high=7)


def test_a_module_in_the_current_directory(module):
    made = create_environment("my_tasks.Good", {"size": 2, "files": ["a"]})
    assert (made.size, [str(p) for p in made.files]) == (2, ["a"])
    assert create_environment("my_tasks:make", {"size": 3}).size == 3


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("guess_nummer", {}, r'there is no environment .guess_nummer.*did you mean "guess_number"'),
        ("no_such_module.X", {}, "there is no module 'no_such_module'"),
        ("my_tasks.Godo", {}, "has no 'Godo'.*Good"),
        ("my_broken.X", {}, "importing my_broken failed: .*module_that_is_not_there"),
        ("my_tasks.constant", {}, "is a int; expected a class"),
        ("my_tasks.nothing", {}, "created a NoneType, which has no examples and no start"),
        ("my_tasks.Half", {}, "created a Half, which has no start; expected"),
        ("my_tasks.Blocking", {}, r"start is a plain method; expected `async def start\("),
        ("my_tasks.NoSplit", {}, r"examples\(\) does not fit: .*; expected `def examples\(self, split\)`"),
        ("my_tasks.NoSeed", {}, r"start\(example\) does not fit: .*expected `async def start\(self, example, seed\)`"),
        ("my_tasks", {}, "there is no environment 'my_tasks'"),
        ("my_tasks.py", {}, "has no 'py'; an import_path is the module without .py, followed by the name: my_tasks."),
        ("my_tasks.py:Good", {}, "there is no module 'my_tasks.py'.*without .py: my_tasks.Good"),
        ("elsewhere.Good", {}, "run the command in the folder that holds elsewhere, or install it"),
        ("my_typo.X", {}, r"importing my_typo failed: SyntaxError: .*my_typo.py:2: def f\(:\)"),
        ("my_exit.X", {}, r"importing my_exit failed: SystemExit: 3 \(.*my_exit.py:1\)"),
        ("my_tasks.Good", {"siez": 1}, 'siez: unknown parameter "siez".*"size".*size, files, mode'),
        ("my_tasks.Good", {"size": "many"}, 'size: found "many", expected a valid integer'),
        ("my_tasks.Good", {"size": -1}, r"created with .*, raised RuntimeError: too small .*my_tasks.py:\d+"),
        ("my_tasks.Needs", {}, "path: missing"),
        ("guess_number", {"low": "one"}, 'low: found "one"'),
    ],
)
def test_what_cannot_be_made_is_explained(module, name, args, reason):
    with pytest.raises(ComponentError, match=reason):
        create_environment(name, args)


def test_several_wrong_arguments_are_named_at_once(module):
    with pytest.raises(ComponentError, match=r"a: unknown.*b: unknown"):
        create_environment("my_tasks.Good", {"a": 1, "b": 2})


def test_an_environments_own_refusal_is_passed_on():
    with pytest.raises(UsageError, match="above high"):
        create_environment("guess_number", {"low": 9, "high": 1})


def test_demonstrations_are_asked_for_and_checked(module):
    assert len(demonstrations_of(create_environment("guess_number"), "guess_number", 3, 0)) == 3
    with pytest.raises(ComponentError, match="'good' has no demonstrations"):
        demonstrations_of(create_environment("my_tasks.Good"), "good", 3, 0)
    with pytest.raises(ComponentError, match=r"number 0 .*: found a dict"):
        demonstrations_of(create_environment("my_tasks.Shy"), "shy", 3, 0)


class Task:
    """An environment that gives what it is told to."""

    def __init__(self, *, examples=None, demonstrations=None):
        self.rows, self.shown = examples, demonstrations

    def examples(self, split):
        if isinstance(self.rows, Exception):
            raise self.rows
        return self.rows

    async def start(self, example, seed):
        return Episode()

    def demonstrations(self, count, seed):
        if isinstance(self.shown, Exception):
            raise self.shown
        return self.shown


SAY = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        (None, "gave None; expected a list of 2"),
        ([], "gave an empty list"),
        (KeyError("x"), r"demonstrations\(2, 0\) raised KeyError: 'x' \(.*\.py:\d+\)"),
        ([Demonstration(messages="hello")], "messages is a str"),
        ([Demonstration(messages=["hello"])], "message 0 is 'hello'; expected for example"),
        ([Demonstration(messages=[{"content": "hello"}])], "message 0 is .*; expected for example"),
        ([Demonstration(messages=SAY), Demonstration(messages=SAY[:1])], "number 1 .* no assistant message"),
        ([Demonstration(messages=SAY, tools=[FunctionTool(len_of)])], r"tool 0 is a FunctionTool; .*`\.schema`"),
        (
            [Demonstration(messages=[SAY[0], *tool_exchange("look", {}, "rain")])],
            r"calls 'look', which is not among its tools \(none\)",
        ),
    ],
)
def test_demonstrations_of_the_wrong_shape_are_refused(shown, reason):
    with pytest.raises(ComponentError, match=f"environment 'mine': .*{reason}"):
        demonstrations_of(Task(demonstrations=shown), "mine", 2, 0)


def test_a_demonstrated_call_of_an_offered_tool_is_taken():
    shown = [Demonstration(messages=[SAY[0], *tool_exchange("look", {}, "rain")], tools=[LOOK])]
    assert demonstrations_of(Task(demonstrations=shown), "mine", 1, 0) == shown


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (None, "gave None; expected a list"),
        ((Example(id=str(i)) for i in range(2)), "gave a generator; expected a list"),
        ([], "is empty"),
        ([{"id": "1"}], "has a dict at index 0; expected a verbatim.Example"),
        ([Example(id="1"), Example(id=2)], "has the id 2 at index 1; expected a string"),
        ([Example(id="1"), Example(id="1")], "has '1' twice"),
        (OSError("no such file"), r"raised OSError: no such file \(.*\.py:\d+\)"),
    ],
)
def test_examples_of_the_wrong_shape_are_refused(rows, reason):
    with pytest.raises(ComponentError, match=rf"environment 'mine': examples\(\"train\"\) {reason}"):
        examples_of(Task(examples=rows), "mine", "train")


def test_examples_that_are_a_coroutine_are_refused():
    class Slow(Task):
        async def examples(self, split):
            return []

    with pytest.raises(ComponentError, match="is async; expected a plain `def examples`"):
        examples_of(Slow(), "mine", "train")


def test_a_corpus_is_the_demonstrations_as_the_template_writes_them():
    (text,) = corpus(GuessNumber().demonstrations(1, seed=0))
    assert text.startswith("<|im_start|>system\nYou play a game.\n\n# Tools\n\n")
    assert '<tool_call>\n{"name": "guess", "arguments": {"number": ' in text


def test_a_bundled_id_may_be_written_with_hyphens(module):
    assert create_environment("alphabet-sort") == create_environment("alphabet_sort")
    assert EnvConfig(id="alphabet-sort").label == "alphabet_sort"
    with pytest.raises(ComponentError, match="there is no module 'my-tasks'"):
        create_environment("my-tasks.Good")
