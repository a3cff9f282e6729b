"""What `verbatim config` and `verbatim env check` accept reaches its first optimizer step. What `verbatim config`
refuses, `verbatim rl` refuses before it makes a folder."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from campaigns import sized
from e2e.tiny_runs import build_tiny_model, train_lines, workplace
from inspection.envcheck.forked_replay import warm_replay
from run.drawn_projects import PLAYED, TASK, Project, draw, write_models
from stored_runs import light_runs
from verbatim.cli.main import main
from verbatim.config import load_config
from verbatim.core.errors import ComponentError
from verbatim.environments import Episode, Reply
from verbatim.environments.environment import tool_exchange
from verbatim.environments.resolve import wrong_conversation, wrong_episode
from verbatim.run.check import renderer_of
from verbatim.run.environments import check_imitation, make_environments, to_imitate
from verbatim.run.tables import component_tables

__all__ = ["warm_replay"]


@pytest.fixture(autouse=True)
def runs_are_light() -> Iterator[None]:
    """They draw no picture, and look for no garbage among all that earlier tests have left."""
    with light_runs():
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(build_tiny_model(folder / "tiny"), folder)
    return folder


def broken_promise(project: Project, folder: Path, capsys: pytest.CaptureFixture[str]) -> str | None:
    """How a project does otherwise than `verbatim config` says of it; None = it does as said."""
    with workplace(folder, {"task": TASK}):
        project.write(folder)
        accepted = main(["config", "run.toml"])
        if project.flaw in PLAYED:
            plays = main(["env", "check", "run.toml", "--examples", "1"])
            return f"env check found nothing: {capsys.readouterr()}" if plays == 0 else None
        said = capsys.readouterr().err
        try:
            trained = main(["rl", "run.toml"])
        except Exception as error:  # noqa: BLE001  that of a fault of ours
            return f"config {accepted}, rl raised {error!r}"
        done = "".join(capsys.readouterr())
        made = Path("run").exists()
        if accepted == 0 and (trained != 0 or len(train_lines(Path("run"))) != 1):
            return f"accepted, and rl ended with {trained}: {done}"
        if accepted != 0 and ((accepted, trained) != (2, 2) or made or "Traceback" in said):
            return f"refused with {accepted}, and rl ended with {trained}{' in a folder' * made}: {said}\n{done}"
    shutil.rmtree(folder)
    return None


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.campaign
def test_what_config_accepts_trains_and_what_it_refuses_leaves_nothing(
    models: Path, tmp_path: Path, capsys, campaign, warm_replay
):
    row = campaign("drawn projects")
    broken = {}
    for seed in range(sized(20, 200)):
        why = broken_promise(draw(seed, models), tmp_path / str(seed), capsys)
        row.add(wrong=why is not None)
        if why is not None:
            broken[seed] = why
    assert not broken


@pytest.mark.slow
@pytest.mark.realtime
def test_a_check_that_is_left_out_is_found(models: Path, tmp_path: Path, capsys, monkeypatch):
    """The planted fault: an episode is started, and nobody looks whether it can be scored."""
    monkeypatch.setattr("verbatim.rollouts.openings.wrong_episode", lambda episode: None)
    projects = (draw(seed, models) for seed in itertools.count())
    suspects = (project for project in projects if project.flaw == "a plain score")
    assert any(broken_promise(next(suspects), tmp_path / str(n), capsys) for n in range(3))


SHOWN = """\
max_steps = 1
[model]
name = "{model}"
[warm_start]
steps = 1
conversations = 40
[orchestrator]
seq_len = 384
[[orchestrator.train.env]]
import_path = "task.Shown"
args = {{ shape = "tools", demonstrated = "{demonstrated}", at = 37 }}
"""


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.parametrize(
    ("demonstrated", "found"),
    [
        ("a list", "message 2 (tool) has the content ['a', 'b']; expected a text"),
        ("a table", "message 2 (tool) has the content {'a': 1}; expected a text"),
        ("a number", "message 2 (tool) has the content 7; expected a text"),
        ("an answer as a number", "message 3 (assistant) has the content 3; expected a text"),
        ("a thought as a list", "message 3 (assistant) has the reasoning_content ['hm']; expected a text"),
        ("arguments as a list", "message 1: its tool_calls are [{'id': 'call_0'"),
        ("calls as a table", "message 1: its tool_calls are {'function': "),
        ("no question", "cannot write a conversation without messages"),
        ("an unknown role", "does not write a message of the role 'narrator'"),
    ],
)
@pytest.mark.parametrize("command", [["config"], ["rl"], ["env", "check"]])
def test_a_demonstration_far_down_that_cannot_be_imitated_is_named(
    models: Path, tmp_path: Path, capsys, warm_replay, command, demonstrated, found
):
    with workplace(tmp_path, {"task": TASK}):
        (tmp_path / "run.toml").write_text(SHOWN.format(model=models / "its-own", demonstrated=demonstrated))
        assert main([*command, "run.toml"]) == (1 if command[0] == "env" else 2)
        said = " ".join("".join(capsys.readouterr()).split())
        assert "environment 'task.Shown': number 37 of demonstrations(" in said
        assert found in said
        assert not (tmp_path / "runs").exists()


def conversation(**changed):
    call = tool_exchange("look", {"at": "Bonn"}, "rain")
    call[0]["tool_calls"][0]["function"] |= changed
    return [{"role": "user", "content": "go"}, *call], [{"type": "function", "function": {"name": "look"}}]


def test_calls_may_have_arguments_as_json_and_no_text():
    messages, tools = conversation(arguments='{"at": "Bonn"}')
    assert wrong_conversation(messages, tools) is None
    messages[1]["content"] = None
    assert wrong_conversation(messages, tools) is None
    del messages[1]["content"]
    assert wrong_conversation(messages, tools) is None
    assert "its tool_calls are" in wrong_conversation(*conversation(arguments='["Bonn"]'))
    assert "its tool_calls are" in wrong_conversation(*conversation(arguments="{"))
    del messages[0]["content"]
    assert wrong_conversation(messages, tools) == "message 0 (user) has no content; expected a text"


class Whole(Episode):
    async def score(self, trajectory):
        return 1.0


def test_an_episode_that_cannot_be_scored_or_answered_is_known_before_it_is_played():
    def without(name):
        return SimpleNamespace(**{key: getattr(Whole(), key) for key in ("score", "reply", "close") if key != name})

    class Plain(Whole):
        def reply(self, message):
            return Reply(done=True)

    class Wrapped(Whole):
        @functools.wraps(Whole.score)
        def score(self, *given):
            return super().score(*given)

    class Owning(Plain):
        async def run(self, agent): ...

    assert wrong_episode(Whole()) is wrong_episode(Wrapped()) is wrong_episode(Owning()) is None
    assert wrong_episode(Episode()) == (
        "the episode, a Episode, has no `score`; expected `async def score(self, trajectory)`"
    )
    assert wrong_episode(without("score")).startswith("the episode, a SimpleNamespace, has no `score`")
    assert wrong_episode(without("reply")).endswith("has no `reply`; expected `async def reply(self, message)`")
    assert wrong_episode(without("close")).endswith("has no `close`; expected `async def close(self)`")
    assert wrong_episode(Plain()) == (
        "the episode, a Plain: reply is a plain method; expected `async def reply(self, message)`"
    )


ONE = """\
[model]
name = "{model}"
[orchestrator]
seq_len = {seq_len}
[[orchestrator.train.env]]
import_path = "task.Task"
args = {{ shape = "{shape}", flaw = "{flaw}", words = [3, 30] }}
"""


@pytest.mark.slow
@pytest.mark.parametrize("flaw", ["no score", "the base's score", "a plain score", "no reply", "a start that raises"])
@pytest.mark.parametrize("command", ["config", "rl"])
def test_an_environment_of_which_no_episode_can_begin_is_refused(models: Path, tmp_path: Path, capsys, command, flaw):
    with workplace(tmp_path, {"task": TASK}):
        text = ONE.format(model=models / "its-own", seq_len=384, shape="single turn", flaw=flaw)
        (tmp_path / "run.toml").write_text(text)
        assert main([command, "run.toml"]) == 2
        said = "".join(capsys.readouterr())
        assert "environment 'task.Task', split \"train\": no episode can begin: example '0': " in said
        assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_prompts_are_measured_with_the_tools_and_the_renderer_of_the_run(models: Path, tmp_path: Path, capsys):
    """By the tiny model's tokenizer, which knows how guess_number is written; the tool's schema is longer than 3 words.
    Whether one example fits is what the run itself looks at."""
    with workplace(tmp_path, {"task": TASK}):
        sizes = {}
        for shape in ("single turn", "tools"):
            text = ONE.format(model=models / "its-own", seq_len=8, shape=shape, flaw="")
            (tmp_path / "run.toml").write_text(text)
            assert main(["config", "run.toml"]) == main(["rl", "run.toml"]) == 2
            said = "".join(capsys.readouterr())
            assert said.count("opening prompts of 2 of 2 examples leave no room in seq_len = 8, tools included") == 2
            sizes[shape] = int(re.search(r"'0' \((\d+) tokens\)", said)[1])
        assert sizes["tools"] > sizes["single turn"] + 50
        (tmp_path / "run.toml").write_text(
            ONE.format(model=models / "its-own", seq_len=sizes["single turn"] + 1, shape="single turn", flaw="")
        )
        assert main(["config", "run.toml"]) == 0
        assert "'1' (" in capsys.readouterr().err


MIXED = """\
[model]
name = "{model}"
[warm_start]
steps = 1
conversations = 4
[orchestrator]
seq_len = 384
[[orchestrator.train.env]]
import_path = "task.Shown"
name = "silent"
args = {{ shape = "single turn", demonstrated = "none with these settings" }}
[[orchestrator.train.env]]
import_path = "task.Shown"
args = {{ shape = "single turn", demonstrated = "" }}
"""


@pytest.mark.slow
def test_an_environment_that_shows_nothing_is_passed_over_where_another_shows_something(
    models: Path, tmp_path: Path, capsys
):
    with workplace(tmp_path, {"task": TASK}):
        (tmp_path / "run.toml").write_text(MIXED.format(model=models / "its-own"))
        assert main(["config", "run.toml"]) == 0


@pytest.mark.slow
@pytest.mark.realtime
def test_the_first_run_of_the_gateways_page_is_accepted(
    models: Path, tmp_path: Path, capsys, monkeypatch, nothing_blocks
):
    """It shows no demonstrations, and a pretrained model needs none; its programs are not played without a sampler."""
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text("utf-8")
    table = re.search(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    program = re.search(r"^```python\n(# my_agent.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent.py").write_text(program)
    (tmp_path / "tasks.jsonl").write_text('{"question": "2 + 2?", "answer": "4"}\n')
    (tmp_path / "run.toml").write_text(
        f'model.name = "{models / "its-own"}"\norchestrator.seq_len = 384\n{table}sandbox = false\n'
    )
    assert main(["config", "run.toml"]) == 0
    assert main(["env", "check", "run.toml"]) == 0
    assert "were not played; to run a program, use `verbatim gateway check COMMAND`" in capsys.readouterr().out


@pytest.mark.slow
def test_what_a_start_keeps_in_the_check_is_not_kept_for_the_run(models: Path, tmp_path: Path):
    """A connection that is opened by the first episode belongs to the event loop of the check, which ends."""
    lazy = TASK + (
        "\n\nclass Lazy(Task):\n    lock = None\n\n    async def start(self, example, seed):\n"
        "        import asyncio\n        self.loop = getattr(self, 'loop', None) or asyncio.get_running_loop()\n"
        "        assert self.loop is asyncio.get_running_loop()\n        return await super().start(example, seed)\n"
    )
    with workplace(tmp_path, {"task": lazy}):
        text = ONE.format(model=models / "its-own", seq_len=384, shape="single turn", flaw="")
        (tmp_path / "run.toml").write_text(
            'max_steps = 1\nrun_dir = "run"\ntrainer.separate_process = false\n'
            + text.replace(
                "seq_len = 384",
                "seq_len = 384\nbatch_size = 4\ngroup_size = 2\nfilters = []\nsampling = { max_tokens = 8 }",
            ).replace("task.Task", "task.Lazy")
        )
        assert main(["rl", "run.toml"]) == 0
        assert train_lines(tmp_path / "run")[0]["metrics"]["rollouts/failed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("conversations", "refused"), [(40, True), (120, False)])
def test_fifty_conversations_are_tried_and_the_rest_is_the_trainers(
    models: Path, tmp_path: Path, conversations: int, refused: bool
):
    """Number 37 is wrong; of 120 every third is tried."""
    with workplace(tmp_path, {"task": TASK}):
        text = SHOWN.format(model=models / "its-own", demonstrated="no question")
        (tmp_path / "run.toml").write_text(text)
        overrides = ["--warm-start.conversations", str(conversations)]
        config = load_config("run.toml", overrides, tables=component_tables())
        environments = make_environments(config)
        given = to_imitate(config, environments)
        assert len(given) == conversations
        renderer = renderer_of(config, environments)
        with (
            pytest.raises(ComponentError, match=rf"number 37 of demonstrations\({conversations}, ")
            if refused
            else contextlib.nullcontext()
        ):
            check_imitation(config, given, renderer)
