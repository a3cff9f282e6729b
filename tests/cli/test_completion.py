"""A shell that asks gets commands, options, keys, recipes and environments; asking loads no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from verbatim.cli.completion import SHELLS
from verbatim.cli.main import COMMANDS, main
from verbatim.environments import ENVIRONMENTS

pytestmark = pytest.mark.realtime


def completions(line: str, folder: Path) -> list[str]:
    """What a shell is given for a line, as bash asks."""
    words, _ = asked(line, folder, "-m", "verbatim.cli")
    return words


def asked(line: str, folder: Path, *python: str) -> tuple[list[str], str]:
    """The words, and what is on the standard error."""
    out = folder / "completions"
    env = {
        **os.environ,
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "COMP_TYPE": "9",
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(out),
        "_ARGCOMPLETE_SHELL": "bash",
        "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n",
        "_ARGCOMPLETE_IFS": "\n",
    }
    done = subprocess.run([sys.executable, *python], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [word.strip() for word in out.read_text().split("\n")], done.stderr


@pytest.mark.slow
def test_asking_for_a_key_imports_no_torch(tmp_path: Path):
    with warm.cold("it tells what is imported"):
        words, imported = asked(
            "verbatim rl mine.toml --trainer.optim.l", tmp_path, "-X", "importtime", "-m", "verbatim.cli"
        )
    assert words == ["--trainer.optim.lr"]
    names = {line.rpartition("|")[2].strip().partition(".")[0] for line in imported.splitlines()}
    assert "pydantic" in names
    assert names.isdisjoint({"torch", "transformers"})


@pytest.mark.slow
def test_commands_are_completed(tmp_path: Path):
    assert set(completions("verbatim ", tmp_path)) >= set(COMMANDS)
    assert completions("verbatim rol", tmp_path) == ["rollout"]


@pytest.mark.slow
def test_a_run_is_a_recipe_or_a_file(tmp_path: Path):
    (tmp_path / "mine.toml").touch()
    (tmp_path / "notes.txt").touch()
    found = completions("verbatim rl ", tmp_path)
    assert {"guess_number", "mine.toml"} <= set(found)
    assert "notes.txt" not in found


def test_keys_of_the_configuration_are_options(tmp_path: Path):
    found = completions("verbatim rl mine.toml --trainer.optim.l", tmp_path)
    assert found == ["--trainer.optim.lr"]
    found = completions("verbatim config mine.toml --orchestrator.train", tmp_path)
    assert "--orchestrator.train.env.0.max-turns" in found


def test_the_values_of_a_key_are_completed_where_they_are_few(tmp_path: Path):
    assert completions("verbatim rl mine.toml --trainer.optim.schedule ", tmp_path) == ["constant", "linear", "cosine"]
    assert completions("verbatim rl mine.toml --trainer.compile ", tmp_path) == ["true", "false"]


def test_environments_are_completed(tmp_path: Path):
    (tmp_path / "my_env.py").touch()
    assert {*ENVIRONMENTS, "my_env.py"} <= set(completions("verbatim env check ", tmp_path))


def test_an_open_quote_is_no_fault(tmp_path: Path):
    completions("verbatim env check 'my", tmp_path)


def test_other_commands_have_no_keys(tmp_path: Path):
    assert completions("verbatim recipes list --trainer", tmp_path) == [""]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_lines_for_a_shell_are_printed(shell: str, capsys: pytest.CaptureFixture[str]):
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert "_ARGCOMPLETE" in printed and "verbatim" in printed


@pytest.mark.slow
@warm.cold("bash starts a program of the path")
def test_bash_reads_its_lines_and_completes(tmp_path: Path):
    """The registered function is called as bash calls it, with a `verbatim` on the path."""
    command = tmp_path / "bin" / "verbatim"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m verbatim.cli "$@"\n')
    command.chmod(0o755)
    lines = subprocess.run([command, "completion", "bash"], capture_output=True, text=True, check=True)
    script = lines.stdout + (
        "\nset -- $(complete -p verbatim)\nwhile [ $# -gt 0 ]; do [ $1 = -F ] && f=$2; shift; done\n"
        "COMP_LINE='verbatim rec' COMP_POINT=12 COMP_WORDS=(verbatim rec) COMP_CWORD=1 COMP_TYPE=9\n"
        '$f verbatim rec verbatim\necho "${COMPREPLY[@]}"\n'
    )
    bash = shutil.which("bash")
    assert bash is not None
    env = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}
    done = subprocess.run([bash, "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["recipes"], done.stderr


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        main(["completion", "csh"])
    assert end.value.code == 2
    assert "bash" in capsys.readouterr().err
