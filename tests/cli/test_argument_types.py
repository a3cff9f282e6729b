"""Options that are numbers or JSON objects: what cannot be meant is refused by the command's parser."""

from __future__ import annotations

import shlex

import pytest

from verbatim.cli.main import main


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("rollout tasks.jsonl --samples 0", "--samples: '0': expected a whole number of at least 1"),
        ("rl --run-dir run --replay x", "--replay: 'x': expected a whole number of at least 1"),
        ("rl --run-dir run --replay 0", "--replay: '0': expected a whole number of at least 1"),
        ("plan run.toml --gpus 0", "--gpus: '0': expected a whole number of at least 1"),
        ("plan run.toml --utilisation 30", "--utilisation: '30': expected a share above 0, at most 1"),
        ("plan run.toml --memory-share 0", "--memory-share: '0': expected a share above 0, at most 1"),
        ("serve model --context-length 0", "--context-length: '0': expected a whole number of at least 1"),
        ("serve model --max-batch-size -1", "--max-batch-size: '-1': expected a whole number of at least 1"),
        ("serve model --port 70000", "--port: '70000': expected 0 (any free port) to 65535"),
        ("inference run.toml --port 0", "--port: '0': expected 1 to 65535"),
        ("view run --export page.html --trajectories -1", "'-1': expected a whole number of at least 0"),
        ("doctor log.jsonl --limit -1", "--limit: '-1': expected a whole number of at least 0"),
        ("env check guess_number --examples 1.5", "--examples: '1.5': expected a whole number of at least 1"),
        ("env check guess_number --timeout -1", "--timeout: '-1': expected seconds, more than 0"),
        ("env check guess_number --args [1]", "--args: '[1]' is not a JSON object"),
        ("env check guess_number --args {", "--args: '{' is not JSON"),
        ("gateway check agent --timeout 0", "--timeout: '0': expected seconds, more than 0"),
        ("gateway check agent --timeout nan", "--timeout: 'nan': expected seconds, more than 0"),
        ("gateway check agent --timeout inf", "--timeout: 'inf': expected seconds, more than 0"),
        ("gateway check agent --example dry", "--example: 'dry' is not JSON"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused(typed: str, said: str, capsys):
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(typed))
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
