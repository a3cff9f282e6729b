"""What people bring from other trainers is an environment in one line, or is refused with what to type."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import verbatim
from e2e.tiny_runs import TOML, build_tiny_model, train_lines, workplace
from environments.brought import HotCold, Lucky, Pixels, Vault, exact, lucky, make_game
from inspection.envcheck.forked_replay import warm_replay
from verbatim import Message, Trajectory
from verbatim.cli.main import main
from verbatim.core.errors import ComponentError, ConfigError, UsageError
from verbatim.core.imports import search_beside
from verbatim.environments import GymnasiumStyle, SingleTurn, ToolClass, tool_call
from verbatim.environments.resolve import create_environment, examples_of
from verbatim.environments.tools.signature import read_signature
from verbatim.inspection.envcheck import CheckSettings, check_environment
from verbatim.inspection.envcheck.play import CheckedEnvironment
from verbatim.inspection.envcheck.players import WrittenPlayer
from verbatim.rollouts import EpisodeLimits
from waiting import HANGS

__all__ = ["warm_replay"]
SUMS = [{"prompt": f"{n} + 1?", "answer": str(n + 1)} for n in range(3)]
CODES = [{"prompt": "Open the vault.", "code": n} for n in (4, 7)]
SETTINGS: dict[str, Any] = {
    "orchestrator": {
        "batch_size": 8,
        "group_size": 4,
        "seq_len": 384,
        "max_async_level": 0,
        "sampling": {"max_tokens": 8},
        "filters": [{"type": "zero_advantage"}],
    },
    "trainer": {"separate_process": False, "optim": {"lr": 1e-2}},
}


def say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def play(environment: Any, said: Sequence[Message], *, index: int = 0, split: str = "train") -> Trajectory:
    """One episode in which the model says these messages."""
    example = examples_of(environment, "it", split)[index]
    limits = EpisodeLimits(max_turns=8, timeout=2 * HANGS, tool_timeout=HANGS)
    stage = CheckedEnvironment(name="it", environment=environment, limits=limits)
    (played,) = asyncio.run(stage.play("written", [lambda seed: WrittenPlayer(said)], example))
    return played.trajectory


def brought(name: str, **args: Any) -> Any:
    return create_environment(f"environments.brought.{name}", args)


# ---- a class with reset and tool methods


def test_the_methods_of_a_class_are_read_once_for_all_its_objects():
    """An episode that read them anew would take 4 ms of the event loop."""
    environment = brought("Vault", data=CODES)
    before = read_signature.cache_info().misses
    for _ in range(5):
        assert play(environment, [tool_call("hint", {})]).error is None
    assert read_signature.cache_info().misses == before


def test_a_class_as_trl_takes_it_plays_with_its_rows_its_tools_and_its_reward():
    environment = brought("Vault", data=CODES)
    trajectory = play(environment, [tool_call("hint", {}), tool_call("enter", {"code": 4}, call_id="b")])
    assert trajectory.error is None
    assert trajectory.messages[0] == {"role": "user", "content": "Open the vault. The code is below 6."}
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["even", "open"]
    assert trajectory.reward == 1.0


def test_its_tools_are_its_public_methods_but_reset_close_and_the_reward():
    environment = brought("Vault", data=CODES)
    episode = asyncio.run(environment.start(environment.examples("train")[0], 0))
    schemas = {tool.name: tool.schema["function"] for tool in episode.tools}
    assert list(schemas) == ["enter", "hint"]
    assert schemas["enter"]["description"] == "Enter a code."
    properties = schemas["enter"]["parameters"]["properties"]
    assert properties == {"code": {"type": "integer", "description": "The code to try."}}


def test_done_ends_the_episode_and_a_value_error_is_told_to_the_model_and_no_fault():
    wrong = [tool_call("enter", {"code": code}, call_id=str(code)) for code in (-1, 1, 2, 3)]
    trajectory = play(brought("Vault", data=CODES), [*wrong, say("one more")])
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == [
        "Error: enter failed: codes are not negative",
        "closed",
        "closed",
        "closed",
    ]
    assert len(trajectory.turns) == 4
    assert trajectory.reward == 0.0
    assert "tool_faults" not in trajectory.info


def test_its_own_arguments_stand_beside_those_of_the_adapter_and_it_is_closed():
    Vault.closed.clear()
    trajectory = play(brought("Vault", data=CODES, limit=1), [tool_call("enter", {"code": 0}), say("more")])
    assert len(trajectory.turns) == 1
    assert Vault.closed == [-1, 1]  # the one that was looked at first, and the episode's


def test_trls_reward_functions_see_the_environments():
    environment = brought("Vault", data=CODES, reward=["environments.brought.solved", "environments.brought.not_mine"])
    trajectory = play(environment, [tool_call("enter", {"code": 7}), say("done")], index=1)
    assert trajectory.reward == 2.0
    assert trajectory.reward_parts == {"solved": 2.0}


def test_without_data_every_example_is_a_seed_that_reset_may_name():
    environment = brought("Scored")
    assert len(environment.examples("train")) == 100
    assert {e.id for e in environment.examples("train")}.isdisjoint(e.id for e in environment.examples("eval"))
    opening = [play(environment, [say("?")], index=3).messages[0]["content"] for _ in range(2)]
    assert opening[0] == opening[1]  # a group's episodes begin alike
    number = int(opening[0].split()[1])
    assert play(environment, [tool_call("say", {"number": number}), say(".")], index=3).reward == 1.0
    assert play(environment, [say("no call")], index=3).reward == 0.0


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("Silent", {}, "has no reward; expected a method get_reward() or an attribute reward"),
        ("NoTools", {}, "no examples and no start; expected an environment"),
        ("Untyped", {}, "Untyped: tool Untyped.look: parameter at has no type; write for example `at: str`"),
        ("Vault", {"data": CODES, "limits": 3}, 'unknown parameter "limits"'),
        ("Vault", {"data": CODES, "reward": "environments.brought.exact"}, "exact needs answer; fields of the data: c"),
        ("Vault", {"data": CODES, "args": {"limit": 1}}, "args: write its arguments next to the others"),
        ("HotCold", {"environment": "x"}, "environment: the environment is already given by its name"),
        ("Half", {}, "has no start; expected an environment (`examples(split)` and `async start(example, seed)`), "),
    ],
)
def test_a_class_that_fits_nothing_is_refused_with_what_to_write(name: str, args: Mapping[str, Any], words: str):
    with pytest.raises(ComponentError) as refused:
        brought(name, **args)
    assert words in str(refused.value)


def test_an_episode_without_a_task_fails_and_says_where_it_can_come_from():
    with pytest.raises(ComponentError, match="has no reward; expected"):
        brought("Silent")
    environment = brought("Silent", reward="environments.brought.not_mine")
    assert "reset returned no text, and there is no prompt" in str(play(environment, []).error)
    told = brought("Silent", reward="environments.brought.not_mine", user_prompt="Go.", system_prompt="Be brief.")
    assert [m["content"] for m in play(told, [say("ok")]).messages] == ["Be brief.", "Go.", "ok"]


# ---- a Gymnasium-style environment


def test_a_gymnasium_style_environment_plays_by_text():
    environment = brought("HotCold", num_train=5, num_eval=2, size=9)
    assert [e.payload["seed"] for e in environment.examples("eval")] == [5, 6]
    target = random.Random(2).randint(1, 9)
    trajectory = play(environment, [say("0"), say(str(target)), say("never said")], index=2)
    assert trajectory.messages[0] == {"role": "user", "content": "A number from 1 to 9?"}
    assert len(trajectory.turns) == 2
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0]
    assert trajectory.reward == 1.0
    truncated = play(environment, [say("0")] * 5, index=2)
    assert (len(truncated.turns), truncated.reward) == (3, 0.0)


def test_a_function_that_makes_one_is_taken_too():
    environment = brought("make_game", size=2)
    assert play(environment, [say("x")] * 3).messages[0]["content"] == "A number from 1 to 2?"


@pytest.mark.parametrize(
    ("name", "words"),
    [("OldGym", "four values are the interface before Gymnasium 0.26"), ("Pixels", "expected a text: wrap the env")],
)
def test_an_environment_of_another_interface_says_so_in_its_episode(name: str, words: str):
    assert words in str(play(brought(name), [say("1")]).error)


def test_an_object_whose_reset_fails_is_closed():
    environment = brought("Pixels")
    Pixels.closed.clear()
    assert play(environment, [say("1")]).error is not None
    assert Pixels.closed == ["closed"]


# ---- a reward function with a data set


def test_a_reward_function_of_ours_and_one_of_trls_score_the_same_rows():
    assert play(brought("exact", data=SUMS), [say(" 2 ")], index=1).reward == 1.0
    assert play(brought("exact", data=SUMS), [say("3")], index=1).reward == 0.0
    assert play(brought("lengths", data=SUMS), [say("four")]).reward == 0.4
    chats = [{"prompt": [{"role": "user", "content": "Hi"}], "answer": "x"}]
    assert play(brought("lengths", data=chats), [say("hello")]).reward == 0.5


def test_an_assistants_message_of_the_prompt_is_not_what_was_sampled():
    shots = [{"role": "user", "content": "0 + 1?"}, say("1"), {"role": "user", "content": "1 + 1?"}]
    rows = [{"prompt": shots, "answer": "1"}]
    assert play(SingleTurn(rows, exact), [say("2")]).reward == 0.0
    assert play(SingleTurn(rows, "environments.brought.num_said"), [say("2")]).reward == 1.0


def test_a_function_that_makes_an_environment_may_take_prompts():
    assert isinstance(brought("with_prompts", prompts="four"), GymnasiumStyle)


def test_several_functions_are_parts_with_weights_and_none_does_not_apply():
    both = SingleTurn(
        SUMS,
        ["environments.brought.exact", "environments.brought.parts", "environments.brought.not_mine"],
        weights=[2.0, 1.0, 1.0],
    )
    trajectory = play(both, [say("1 please")])
    assert trajectory.reward_parts == {"exact": 0.0, "parts/short": 0.5, "parts/polite": 0.25}
    assert trajectory.reward == 0.75
    assert play(SingleTurn(SUMS, "environments.brought.not_mine"), [say("1")]).reward is None


def test_every_tenth_row_is_held_out_where_there_are_twenty():
    environment = SingleTurn([{"prompt": str(n), "answer": ""} for n in range(30)], exact)
    assert [e.payload["prompt"] for e in environment.examples("eval")] == ["0", "10", "20"]
    assert len(environment.examples("train")) == 27
    assert len(SingleTurn(SUMS, exact).examples("eval")) == 3
    assert len(SingleTurn(SUMS, exact, eval_data=SUMS[:1]).examples("eval")) == 1


def test_a_file_beside_the_toml_file_is_found_and_a_missing_one_named(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("verbatim.core.imports._BESIDE", [])
    monkeypatch.setattr("verbatim.core.imports._FILES_IN", set())
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"data: there is no file sums.jsonl; looked in the current directory"):
        brought("exact", data="sums.jsonl")
    search_beside(folder / "run.toml")
    assert play(brought("exact", data="sums.jsonl"), [say("1")]).reward == 1.0


@pytest.mark.extras
def test_a_hugging_face_data_set_is_taken_as_an_object_and_as_a_folder(tmp_path: Path):
    import datasets

    rows = datasets.Dataset.from_list(SUMS)
    assert play(SingleTurn(rows, exact), [say("3")], index=2).reward == 1.0
    rows.save_to_disk(tmp_path / "sums")
    assert play(brought("exact", data=str(tmp_path / "sums")), [say("1")]).reward == 1.0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "missing: environment"),
        ({"data": []}, "data: found an empty list, expected a list of rows"),
        ({"data": 3}, "data: found 3 (int), expected a list of rows"),
        ({"data": SUMS, "prompts": "x"}, 'unknown parameter "prompts"; did you mean "prompt"?'),
        (
            {"data": [{"question": "?", "answer": "4"}]},
            "rows have no field 'prompt' and no messages; they have question, answer; name the one that holds the "
            'prompt: prompt = "question"',
        ),
        ({"data": [{"prompt": "?", "target": "4"}]}, "exact needs answer; fields of the data: prompt, target"),
        ({"data": {"folder": "x"}}, "data: found the key 'folder'"),
        ({"data": SUMS, "reward": "environments.brought.lucky"}, "reward: the environment's name is"),
        ({"data": SUMS, "eval_share": 2}, "eval_share: found 2.0, expected a share from 0 to 0.5"),
    ],
)
def test_data_that_does_not_fit_is_refused(args: Mapping[str, Any], words: str):
    with pytest.raises(UsageError) as refused:
        brought("exact", **args)
    assert words in str(refused.value)


def test_a_function_that_returns_no_list_fails_its_episode_and_one_of_other_names_is_refused():
    assert "expected a list with one number" in str(play(brought("no_list", data=SUMS), [say("1")]).error)
    with pytest.raises(ComponentError, match=r"\(text, target\) has no parameter for the sampled text; expected `def"):
        SingleTurn(SUMS, "environments.brought.wrong_names")


# ---- one line of Python and of TOML


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.slow
@pytest.mark.realtime
def test_each_trains_from_one_line_of_python(model: Path, tmp_path: Path, monkeypatch):
    """All in one mixture: a turn that is cut off is not stepped, so the tiny model learns from the others."""
    monkeypatch.setattr("verbatim.logs.monitors.learning_curve.is_installed", lambda package: False)
    monkeypatch.chdir(tmp_path)
    given = [
        {"id": Vault, "args": {"data": CODES, "reward": "environments.brought.lucky"}, "name": "class"},
        {"id": ToolClass(Vault, CODES, lucky), "name": "ToolClass"},
        {"id": Lucky, "name": "gymnasium"},
        {"id": make_game, "name": "function"},
        {"id": GymnasiumStyle(Lucky), "name": "GymnasiumStyle"},
        {"id": lucky, "args": {"data": SUMS}, "name": "reward"},
        {"id": SingleTurn(SUMS, lucky), "name": "SingleTurn"},
    ]
    settings = {**SETTINGS, "orchestrator": {**SETTINGS["orchestrator"], "batch_size": 4 * 28}}
    verbatim.train(model=model, environment=given, max_steps=1, quiet=True, run_dir="run", **settings)
    (line,) = train_lines(tmp_path / "run")
    assert line["metrics"]["rollouts/failed"] == 0
    assert {name.split("/")[1] for name in line["metrics"] if name.startswith("success/")} == {
        table["name"] for table in given
    }


def test_an_object_is_refused_with_its_class(model: Path):
    with pytest.raises(ConfigError, match=r"give the class, environment=HotCold, or a function, environment=lambda"):
        verbatim.train(model=model, environment=HotCold(), max_steps=1, **SETTINGS)


TABLES = """
[[orchestrator.train.env]]
import_path = "environments.brought.Vault"
args = { data = "codes.jsonl", reward = "environments.brought.lucky" }
[[orchestrator.train.env]]
import_path = "environments.brought.Lucky"
[[orchestrator.train.env]]
import_path = "environments.brought.lucky"
args = { data = "sums.jsonl" }
[[orchestrator.train.env]]
id = "single_turn"
args = { data = "sums.jsonl", reward = "environments.brought.lucky" }
"""


@pytest.mark.slow
@pytest.mark.realtime
def test_each_trains_from_one_line_of_toml(model: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("verbatim.logs.monitors.learning_curve.is_installed", lambda package: False)
    with workplace(tmp_path, {}) as folder:
        (folder / "codes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CODES))
        (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SUMS))
        (folder / "run.toml").write_text(TOML.format(model=model).replace("[[orchestrator.train.env]]\n", "") + TABLES)
        status = main(["rl", "run.toml", "--run-dir", "run", "--max-steps", "1", "--orchestrator.batch-size", "96"])
        assert status == 0
        metrics = train_lines(folder / "run")[0]["metrics"]
    assert metrics["rollouts/failed"] == 0
    assert len([name for name in metrics if name.startswith("success/")]) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "args"),
    [("Vault", {"data": CODES}), ("HotCold", {"num_train": 6, "num_eval": 2}), ("exact", {"data": SUMS})],
)
@pytest.mark.realtime
def test_env_check_plays_each(name: str, args: Mapping[str, Any], warm_replay: None, nothing_blocks: None):
    report = check_environment(f"environments.brought.{name}", args, CheckSettings(num_examples=2, timeout=HANGS))
    assert [finding.kind for finding in report.findings] in ([], ["score_constant"])
    assert report.players["random"].episodes > 0


@pytest.mark.slow
@pytest.mark.realtime
def test_env_check_finds_the_one_in_a_file(tmp_path: Path, capsys, warm_replay: None):
    source = f"import random\n\n\n{inspect.getsource(HotCold)}"
    with workplace(tmp_path, {"my_game": source}):
        main(["env", "check", "my_game.py", "--examples", "2"])
    assert "my_game.HotCold: " in capsys.readouterr().out
