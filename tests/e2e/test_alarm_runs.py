"""Runs by the command that raise alarms: on disk, at the monitors, in checkpoints, and as the end of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from e2e.tiny_runs import LOTS, TOML, build_tiny_model, lines, train_lines, workplace
from verbatim.cli.main import main
from verbatim.logs.checkpoints import read_loop_state
from verbatim.logs.monitors import read_alarms

BROKEN = '''
from lots import Lots


class Broken(Lots):
    """Every episode fails where it is scored."""

    async def start(self, example, seed):
        episode = await super().start(example, seed)

        async def score(trajectory):
            raise KeyError(f"question {seed}")

        episode.score = score
        return episode


class Listener:
    def __init__(self, run):
        self.file = run.folder / "heard.txt"

    def on_alarm(self, alarm):
        with self.file.open("a") as file:
            file.write(f"{alarm.step} {alarm.name} {alarm.env} {alarm.state}\\n")


def short_rollouts(window, limit: float = 0.0):
    """An alarm of one's own: a mean length below the limit."""
    from verbatim.logs.monitors.alarms import Finding

    length = window.metric("completion_tokens")
    if length is None or length >= limit:
        return None
    return Finding(message=f"rollouts have {length:.0f} tokens", cause="none", advice=window.now("max_steps"))
'''

ENVIRONMENTS = """\
import_path = "lots.Lots"
name = "lots"
[[orchestrator.train.env]]
import_path = "broken.Broken"
name = "broken"
[checkpoint]
interval = 1
[monitor.heard]
type = "broken.Listener"
[monitor.alarms.short]
type = "broken.short_rollouts"
limit = 1000.0
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def run(folder: Path, model: Path, tables: str, *arguments: str) -> int:
    """`verbatim rl` of six steps of two groups, of two environments."""
    with workplace(folder, {"lots": LOTS, "broken": BROKEN}):
        text = TOML.format(model=model).replace("max_steps = 2", "max_steps = 6")
        text = text.replace("batch_size = 8", "batch_size = 16")
        Path("run.toml").write_text(text + ENVIRONMENTS + tables)
        return main(["rl", "run.toml", *arguments, *([] if "--resume" in arguments else ["--run-dir", "mine"])])


@pytest.mark.slow
def test_an_environment_that_always_fails_is_named_and_may_end_the_run(tmp_path: Path, model: Path, capsys):
    """Raised at the first step that has, with the one before, eight failures."""
    status = run(tmp_path, model, '[monitor.alarms]\nstop = ["repeated_error"]\n')
    mine = tmp_path / "mine"
    alarms = {alarm.name: alarm for alarm in read_alarms(mine / "alarms.jsonl")}
    error = capsys.readouterr()
    assert status == 4
    failed = [line["metrics"].get("errors/environment", 0) for line in train_lines(mine)]
    enough = next(step for step in range(1, 7) if sum(failed[max(0, step - 2) : step]) >= 8)
    assert alarms["repeated_error"].env == "broken" and alarms["repeated_error"].step == enough
    assert "environment: score raised KeyError" in alarms["repeated_error"].message
    assert alarms["repeated_error"].trajectory_ids
    assert alarms["short"].message.startswith("rollouts have 8 tokens")
    assert alarms["short"].advice == "max_steps (now 6)"
    said = f"stopped by an alarm: repeated_error at step {alarms['repeated_error'].step}"
    assert said in error.err.replace("\n", " "), error.err
    assert enough <= len(failed) < 6
    heard = (mine / "heard.txt").read_text().splitlines()
    assert f"{alarms['repeated_error'].step} repeated_error broken raised" in heard

    before = lines(mine / "alarms.jsonl")
    assert run(tmp_path, model, '[monitor.alarms]\nstop = ["repeated_error"]\n', "--resume", "mine") == 0
    assert lines(mine / "alarms.jsonl") == before  # still raised: it is neither raised nor ends the run a second time
    state = read_loop_state(mine / "checkpoints" / "step_000006")["alarms"]
    assert {entry["name"] for entry in state["raised"]} == {"short", "repeated_error"}
    assert state["steps"]["step"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_alarms_can_be_switched_off(tmp_path: Path, model: Path):
    assert run(tmp_path, model, "[monitor.alarms]\nrepeated_error = false\n") == 0
    assert {alarm.name for alarm in read_alarms(tmp_path / "mine" / "alarms.jsonl")} == {"short"}
