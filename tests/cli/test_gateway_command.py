"""`verbatim gateway check` runs a program without a model, and says what was recorded."""

from __future__ import annotations

import doctest
import inspect
import json
import re
import shlex
from pathlib import Path

import pytest

from verbatim.cli import gateway_command
from verbatim.cli.main import main, make_parser
from verbatim.rollouts.gateway.program.environment import Program

PROGRAM = Path(__file__).parents[1] / "rollouts" / "gateway" / "programs" / "asks.py"
COMMAND = shlex.join(["/usr/bin/python3", str(PROGRAM)])


def check(capsys: pytest.CaptureFixture[str], *options: str, command: str = COMMAND) -> tuple[int, dict]:
    status = main(["gateway", "check", command, "--json", *options])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.realtime
def test_a_program_that_only_goes_on_is_one_sample(capsys):
    status, report = check(capsys, "--example", '{"texts": ["a", "b", "c"]}')
    assert (status, report["clean"], report["error"]) == (0, True, None)
    assert (report["num_turns"], report["num_samples"], report["branches"]) == (3, 1, [])
    assert report["num_sampled_tokens"] == report["num_trained_tokens"] > 0
    assert report["reward"] == len("This is the scripted model; it has read 999 tokens.")  # of a length with 3 digits


@pytest.mark.realtime
def test_reasoning_that_does_not_come_back_is_told(capsys):
    status, report = check(capsys, "--example", '{"texts": ["a", "b"]}', "--reasoning")
    assert (status, report["num_samples"], report["branches"]) == (0, 1, [])  # this program sends it back
    status, report = check(capsys, "--example", '{"texts": ["a", "b"], "bare": true}', "--reasoning")
    assert (status, report["num_samples"]) == (0, 2)
    assert [b["reason"] for b in report["branches"]] == ["reasoning_stripped"]


@pytest.mark.realtime
def test_the_models_answers_can_be_given(capsys, tmp_path: Path):
    answers = tmp_path / "answers.jsonl"
    answers.write_text('{"role": "assistant", "content": "12345"}\n')
    status, report = check(capsys, "--example", '{"texts": ["a"]}', "--answers", str(answers))
    assert (status, report["reward"]) == (0, 5.0)


@pytest.mark.realtime
def test_a_program_that_reads_lines(capsys):
    status, report = check(capsys, "--example", '{"texts": ["a"]}', "--lines", command=f"{COMMAND} --lines")
    assert (status, report["num_turns"]) == (0, 1)


@pytest.mark.realtime
def test_what_goes_wrong_is_told_to_people(capsys):
    assert main(["gateway", "check", COMMAND, "--example", '{"texts": ["a"], "how": "late"}']) == 1
    out = capsys.readouterr().out
    assert "program_crashed: the program ended with exit status 3" in out
    assert "1 requests, 1 turns of main, 1 training samples" in out
    assert "counted in errors" not in out  # the report alone says it
    assert main(["gateway", "check", "no-such-program"]) == 2
    assert "there is no program 'no-such-program'" in capsys.readouterr().err


def test_the_example_of_a_docstring_holds():
    assert doctest.testmod(gateway_command) == (0, 1)


@pytest.mark.realtime
def test_a_programs_last_words_are_shown_as_it_wrote_them(capsys, tmp_path: Path):
    (tmp_path / "agent.py").write_text("import sys\nsys.exit('no model\\nno reward')\n")
    assert main(["gateway", "check", shlex.join(["/usr/bin/python3", str(tmp_path / "agent.py")])]) == 1
    out = capsys.readouterr().out
    assert "program   program_crashed: the program ended with exit status 1; reward None;" in out
    assert "\n          | no model\n          | no reward\nrecorded  0 requests" in out


def test_an_empty_command_is_refused_with_one_to_type(capsys):
    assert main(["gateway", "check", " "]) == 2
    assert 'verbatim gateway check "python agent.py"' in capsys.readouterr().err


def test_every_argument_of_the_environment_can_be_typed(capsys):
    """All but those that say what is trained, and how often."""
    with pytest.raises(SystemExit):
        make_parser("gateway").parse_args(["gateway", "--help"])
    given = {name.replace("-", "_") for name in re.findall(r"--([a-z-]+)", capsys.readouterr().out)}
    elsewhere = {
        "data",
        "eval_data",
        "eval_share",
        "failed_reward",
        "max_processes",
        "episodes_per_process",
        "demonstrations",
        "command",
        "train_undelivered",
    }
    otherwise = {"example": "example_in", "reuse": "lines"}
    parameters = set(inspect.signature(Program).parameters) - elsewhere
    assert {otherwise.get(name, name) for name in parameters} <= given


@pytest.mark.realtime
def test_arguments_reach_the_program(capsys, monkeypatch, tmp_path: Path):
    (tmp_path / "agent.py").write_text("""import os, resource, sys
print(os.environ["A"], os.environ["B_KEY"], os.getcwd(), resource.getrlimit(resource.RLIMIT_DATA)[1] >> 20)
sys.exit(3)
""")
    monkeypatch.setenv("B_KEY", "b")
    typed = ["--env", "A=a=1", "--env-from", "B_KEY", "--memory-mb", "512", "--cwd", str(tmp_path)]
    assert main(["gateway", "check", "/usr/bin/python3 agent.py", *typed]) == 1
    assert f"a=1 b {tmp_path} 512" in capsys.readouterr().out


@pytest.mark.parametrize(
    "typed",
    [
        ["--env", "A"],
        ["--env", "A=1", "--env", "A=2"],
        ["--env", "=1"],
        ["--env-from", "NOT_THERE"],
        ["--memory-mb", "0"],
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(typed: list[str], capsys):
    assert main(["gateway", "check", COMMAND, *typed]) == 2
