"""Logs go with the checkpoints."""

import asyncio
import logging
import os
import shutil
import threading
import time
import zlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from verbatim import Trajectory, Turn
from verbatim.config import load_config
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.core.trajectory_json import NOT_WRITTEN
from verbatim.environments.guess_number import GuessNumber
from verbatim.logs.checkpoints import CheckpointStore, Origin, RunFolder, read_json, write_origin
from verbatim.logs.monitors import Alarm, read_alarms
from verbatim.logs.monitors.jsonl import JsonlWriter, measure, read_jsonl
from verbatim.logs.monitors.trajectory_log import read_evaluated, read_trajectories
from verbatim.logs.outcomes.files import OutcomeFolder, files_in, read_outcomes
from verbatim.logs.outcomes.retention import Retention
from verbatim.run import run_log
from verbatim.run.orchestrator.evaluate import Evaluation
from verbatim.run.run_log import RunLog
from verbatim.run.summary import summary_of
from waiting import HANGS

# ---- the logs and the checkpoints


class NoTrainer:
    """Leaves one file."""

    async def save(self, folder: Path, version: int) -> None:
        (folder / "weights").write_text(str(version))


STATE = {"dispatcher": {"schedule": {"pools": {"easy": [], "hard": []}}}, "evaluations": {"best": None}}


@pytest.fixture
def folder(tmp_path: Path):
    (tmp_path / "run.toml").write_text('[model]\nname = "x"\n[[orchestrator.train.env]]\nid = "guess_number"\n')
    config = load_config(tmp_path / "run.toml", ["--run-dir", str(tmp_path / "mine")])
    with RunFolder.create(config, name="x", now=datetime(2026, 1, 31)) as folder:
        yield folder


def log_of(
    folder: RunFolder, first_step: int, *, evaluates: bool | tuple[str, ...] = False, saves: bool = True
) -> RunLog:
    labels = evaluates if isinstance(evaluates, tuple) else ("game",) * evaluates
    return RunLog(
        folder,
        title="x",
        max_steps=9,
        first_step=first_step,
        trajectories=Retention() if saves else None,
        store=CheckpointStore(folder.checkpoints),
        environments={label: GuessNumber() for label in labels},
        earlier_seconds=0.0,
        started=time.monotonic(),
    )


def evaluate(log: RunLog, step: int, env: str = "game", **fields: object) -> None:
    trajectories = tuple(
        Trajectory(**{"example_id": f"{step}-{n}", "env": env, "reward": 1.0, **fields}) for n in range(2)
    )
    log.on_eval(
        step,
        Evaluation(
            env=env,
            num_episodes=2,
            num_failed=0,
            metrics={"success": 1.0, "episodes": 2, "failed": 0},
            trajectories=trajectories,
        ),
    )


def train(log: RunLog, step: int) -> None:
    trajectories = tuple(Trajectory(example_id="x", trajectory_id=f"{step}-{n}", reward=0.5) for n in range(2))
    outcomes = [TrajectoryOutcome(trajectory=t, turns=("trained",) * len(t.turns)) for t in trajectories]
    log.on_step(step, {"loss": 0.5, "rollouts": 2}, outcomes)


def save(log: RunLog, step: int) -> None:
    asyncio.run(log.save(step, NoTrainer(), STATE))


def steps_of(folder: RunFolder) -> tuple[list[int], list[int]]:
    """In the metrics, and in the trajectories."""
    records = [record["step"] for record in read_jsonl(folder.metrics)]
    kept = read_trajectories(folder.path) if files_in(folder.trajectories) else ()
    return records, [step for step, _ in kept]


@pytest.fixture
def four_steps(folder: RunFolder) -> RunFolder:
    """Checkpoints of the steps 1 and 3; killed after step 4."""
    log = log_of(folder, 0)
    for step in (1, 2, 3, 4):
        train(log, step)
        if step % 2:
            save(log, step)
    log.close()
    return folder


def test_a_checkpoint_knows_how_long_the_logs_are_and_they_are_synced_before_it_is_there(four_steps, monkeypatch):
    manifest = read_json(four_steps.checkpoints / "step_000003" / "manifest.json")
    mark = measure(four_steps.metrics, manifest["logs"]["metrics.jsonl"]["size"])
    assert manifest["logs"]["metrics.jsonl"] == {"size": mark.size, "records": 3, "crc32": mark.crc32}
    assert manifest["logs"]["trajectories"] == {
        str(step): {"size": path.stat().st_size, "crc32": zlib.crc32(path.read_bytes())}
        for step, path in files_in(four_steps.trajectories).items()
        if step <= 3
    }
    synced: list[str] = []
    fsync, rename = os.fsync, os.rename

    def traced(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def placed(source: Path, target: Path) -> None:
        synced.append(f"-> {Path(target).name}")
        rename(source, target)

    log = log_of(four_steps, 3)
    monkeypatch.setattr(os, "fsync", traced)
    monkeypatch.setattr(os, "rename", placed)
    train(log, 4)
    save(log, 4)
    log.close()
    order = [name for name in synced if name in ("metrics.jsonl", ".step-000004.parquet.tmp", "-> step_000004")]
    assert order[:3] == [".step-000004.parquet.tmp", "metrics.jsonl", "-> step_000004"]


def test_a_resumed_run_cuts_its_logs_to_the_checkpoint(four_steps: RunFolder, caplog):
    log_of(four_steps, 3).close()
    assert steps_of(four_steps) == ([1, 2, 3], [1, 1, 2, 2, 3, 3])
    log_of(four_steps, 1).close()  # the newer checkpoint was damaged
    assert steps_of(four_steps) == ([1], [1, 1])
    log_of(four_steps, 0).close()
    assert steps_of(four_steps) == ([], [])
    assert caplog.records == []


@pytest.mark.slow
def test_damage_is_told_once_and_not_at_the_next_resume(four_steps: RunFolder, caplog):
    lines = four_steps.metrics.read_bytes().splitlines(keepends=True)
    four_steps.metrics.write_bytes(lines[0] + b"nonsense\n" + lines[2])
    shutil.rmtree(four_steps.trajectories)
    with caplog.at_level(logging.WARNING):
        log_of(four_steps, 3).close()
    assert [record.getMessage() for record in caplog.records] == [
        f"{four_steps.metrics} is damaged: line 2 is not a record; 2 of 3 records up to step 3 are left, none of step "
        f"2. What was found is kept as {four_steps.metrics}.damaged-1",
        f"{four_steps.trajectories}: the files of steps 1-3 are missing",
    ]
    caplog.clear()
    log = log_of(four_steps, 3)
    train(log, 4)
    log.close()
    assert steps_of(four_steps) == ([1, 3, 4], [4, 4])
    log_of(four_steps, 3).close()
    assert steps_of(four_steps) == ([1, 3], [])
    log_of(four_steps, 1).close()
    assert steps_of(four_steps) == ([1], [])
    assert caplog.records == []


def test_a_summary_says_how_many_steps_its_sums_do_not_have(four_steps: RunFolder):
    assert "steps_missing_in_log" not in summary_of(four_steps.metrics, {})
    lines = four_steps.metrics.read_bytes().splitlines(keepends=True)
    four_steps.metrics.write_bytes(lines[0] + lines[3])
    assert summary_of(four_steps.metrics, {})["steps_missing_in_log"] == 2


def test_a_log_that_cannot_be_synced_costs_no_checkpoint(four_steps: RunFolder, caplog, monkeypatch):
    log, sync = log_of(four_steps, 3), JsonlWriter.sync

    def refuse(writer: JsonlWriter) -> object:
        if writer.path.name == "metrics.jsonl":
            raise OSError(5, "Input/output error")
        return sync(writer)

    monkeypatch.setattr(JsonlWriter, "sync", refuse)
    train(log, 4)
    save(log, 4)
    kept = CheckpointStore(four_steps.checkpoints, read_only=True).logs(4)
    assert sorted(kept) == ["alarms.jsonl", "evaluations", "trajectories"]
    assert "metrics.jsonl could not be written to the disk: Input/output error" in caplog.text


@pytest.mark.slow
def test_episodes_of_evaluations_are_outcome_files_that_go_back_with_the_checkpoints(folder: RunFolder):
    log = log_of(folder, 0, evaluates=True)
    evaluate(log, 0)
    for step in (1, 2):
        train(log, step)
        evaluate(log, step)
        save(log, step)
    evaluate(log, 3)
    log.close()
    log = log_of(folder, 2, evaluates=True)
    evaluate(log, 4)
    log.close()
    assert list(files_in(folder.evaluations)) == [0, 1, 2, 4]
    logged = [(step, t.example_id) for step, t in read_evaluated(folder.path)]
    assert logged == [(0, "0-0"), (0, "0-1"), (1, "1-0"), (1, "1-1"), (2, "2-0"), (2, "2-1"), (4, "4-0"), (4, "4-1")]
    assert steps_of(folder)[1] == [1, 1, 2, 2]


def test_every_evaluated_token_has_the_outcome_evaluation_and_none_is_trained(folder: RunFolder):
    log = log_of(folder, 0, evaluates=True)
    turn = Turn(prompt_ids=[1, 2], completion_ids=[3, 4, 5], logprobs=[-0.5, -0.25, -0.125])
    evaluate(log, 7, turns=(turn,))
    ((step, outcome), _) = read_outcomes(folder.evaluations)
    assert (step, outcome.reason, outcome.turns, outcome.num_tokens) == (
        7,
        "evaluation",
        ("evaluation",),
        {"evaluation": 3},
    )
    assert outcome.num_trained_tokens == 0
    assert outcome.trajectory.turns[0].logprobs.tolist() == [-0.5, -0.25, -0.125]
    log.close()


@pytest.mark.slow
def test_the_environments_of_an_evaluation_share_a_file_that_is_written_once(folder: RunFolder):
    log = log_of(folder, 0, evaluates=("game", "other"))
    evaluate(log, 3, "game")
    assert list(files_in(folder.evaluations)) == []
    evaluate(log, 3, "other")
    assert [t.env for _, t in read_evaluated(folder.path)] == ["game", "game", "other", "other"]
    evaluate(log, 5, "game")  # the run ends before the other environment was evaluated
    log.close()
    assert [(step, t.env) for step, t in read_evaluated(folder.path)][4:] == [(5, "game"), (5, "game")]


def test_an_evaluated_episode_that_is_not_json_is_kept_without_its_messages(folder: RunFolder, caplog):
    log = log_of(folder, 0, evaluates=True)
    evaluate(log, 1, messages=({"role": "user", "content": {1}},))
    log.close()
    read = [trajectory for _, trajectory in read_evaluated(folder.path)]
    assert [(len(t.messages), t.reward) for t in read] == [(0, 1.0), (0, 1.0)]
    assert read[1].info[NOT_WRITTEN] == (
        "messages and info were not written: TypeError: Object of type set is not JSON serializable"
    )
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        f"evaluated episodes of step 1 are in {folder.evaluations} without their messages and info, which are not JSON",
        "2 trajectories were logged without their messages and info, which are not JSON",
    ]


@pytest.mark.slow
def test_damage_of_the_evaluated_episodes_names_the_evaluations(folder: RunFolder, caplog):
    log = log_of(folder, 0, evaluates=True)
    evaluate(log, 0)
    train(log, 1)
    evaluate(log, 1)
    save(log, 1)
    log.close()
    shutil.rmtree(folder.evaluations)
    log_of(folder, 1, evaluates=True).close()
    missing = f"{folder.evaluations}: the files of steps 0-1 are missing"
    assert [record.getMessage() for record in caplog.records] == [missing]
    log_of(folder, 1, evaluates=True).close()
    assert len(caplog.records) == 1  # it is told once


def test_without_evaluations_or_kept_trajectories_no_episode_is_kept(folder: RunFolder):
    log_of(folder, 0).close()
    assert folder.trajectories.exists() and not folder.evaluations.exists()
    log = log_of(folder, 0, evaluates=True, saves=False)
    evaluate(log, 0)
    log.close()
    assert not folder.evaluations.exists()


def test_a_run_that_begins_again_keeps_no_evaluation_of_before(folder: RunFolder):
    log = log_of(folder, 0, evaluates=True)
    evaluate(log, 0)
    log.close()
    log_of(folder, 0, evaluates=True).close()
    assert list(read_evaluated(folder.path)) == []


def test_a_run_that_kept_no_episodes_goes_on_and_keeps_those_of_now_on(four_steps: RunFolder, caplog):
    log = log_of(four_steps, 3, evaluates=True)
    evaluate(log, 4)
    log.close()
    assert caplog.records == []
    assert [step for step, _ in read_evaluated(four_steps.path)] == [4, 4]


# ---- monitors and alarms


class Heard:
    """Notes every call, without the console's."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.summary: dict = {}

    def on_start(self, config):
        self.calls.append(("start", config))

    def on_step(self, step, metrics, distributions):
        self.calls.append(("step", step))

    def on_trajectories(self, step, outcomes):
        self.calls.append(("trajectories", step, [outcome.trajectory.trajectory_id for outcome in outcomes]))

    def on_eval(self, step, env, metrics):
        self.calls.append(("eval", step, env))

    def on_alarm(self, alarm):
        self.calls.append(("alarm", alarm.name, alarm.step, alarm.state))

    def on_end(self, summary):
        self.calls.append(("end", summary["state"], summary["steps"]))
        self.summary = summary

    def close(self):
        self.calls.append(("close",))


class EverySecondStep:
    """Raises an alarm at even steps, and at every evaluation of step 0."""

    def __init__(self) -> None:
        self.num_seen = 0

    def on_step(self, step, metrics, outcomes):
        self.num_seen += len(outcomes)
        if step % 2 == 0:
            yield Alarm(name="even", step=step, state="raised", message=f"{self.num_seen} seen", cause="", advice="")

    def on_eval(self, step, env, metrics):
        return [Alarm(name="evaluated", step=step, state="raised", message="", cause="", advice="", env=env)]

    def state_dict(self):
        return {"num_seen": self.num_seen}

    def load_state_dict(self, state):
        self.num_seen = state["num_seen"]


def watched(folder: RunFolder, first_step: int, detector: object, heard: Heard, started: float | None = None) -> RunLog:
    return RunLog(
        folder,
        title="x",
        max_steps=9,
        first_step=first_step,
        trajectories=None,
        monitors=[heard],
        detector=detector,
        store=CheckpointStore(folder.checkpoints),
        environments={},
        earlier_seconds=5.0,
        started=time.monotonic() if started is None else started,
    )


def test_monitors_hear_of_a_step_its_trajectories_its_alarms_and_the_end_in_this_order(folder: RunFolder):
    heard = Heard()
    log = watched(folder, 0, EverySecondStep(), heard)
    log.start({"max_steps": 9})
    evaluate(log, 0)
    train(log, 1)
    train(log, 2)
    log.close("finished")
    assert heard.calls == [
        ("start", {"max_steps": 9}),
        ("eval", 0, "game"),
        ("alarm", "evaluated", 0, "raised"),
        ("step", 1),
        ("trajectories", 1, ["1-0", "1-1"]),
        ("step", 2),
        ("trajectories", 2, ["2-0", "2-1"]),
        ("alarm", "even", 2, "raised"),
        ("end", "finished", 2),
        ("close",),
    ]
    assert [(alarm.name, alarm.step, alarm.message, alarm.env) for alarm in read_alarms(folder.alarms)] == [
        ("evaluated", 0, "", "game"),
        ("even", 2, "4 seen", None),
    ]


def test_the_last_summary_has_the_last_metrics_the_evaluations_and_the_ledger(folder: RunFolder, monkeypatch):
    heard, began = Heard(), 1000.0
    monkeypatch.setattr(run_log, "time", SimpleNamespace(monotonic=lambda: began + 7.0))
    log = watched(folder, 0, None, heard, started=began)
    evaluate(log, 0)
    for step in (1, 2):
        log.on_step(step, {"loss": step / 2, "ledger/sampled": 10 * step, "ledger/trained": 8 * step}, [])
    log.close("failed")
    summary = heard.summary
    assert summary.pop("seconds") == 12.0  # 5 of earlier processes
    results = summary.pop("results")
    assert (results["steps"], results["success_before_rl"], results["trained_tokens"]) == (2, 1.0, 16)
    assert summary == {
        "folder": str(folder.path.resolve()),
        "state": "failed",
        "steps": 2,
        "metrics": {"loss": 1.0, "ledger/sampled": 20, "ledger/trained": 16},
        "evals": {"game": {"success": 1.0, "episodes": 2, "failed": 0}},
        "ledger": {"sampled": 20, "trained": 16},
    }


@pytest.mark.parametrize("evaluated", [False, True])
def test_a_fork_that_ends_tells_its_own_evaluations_and_not_those_it_began_with(folder: RunFolder, evaluated: bool):
    write_origin(folder.path, Origin(run="/elsewhere", step=2))
    heard = Heard()
    log = watched(folder, 0, None, heard)
    evaluate(log, 0)
    for step in (1, 2):
        train(log, step)
    evaluate(log, 2)
    train(log, 3)
    if evaluated:
        evaluate(log, 3)
    log.close("stopped")
    own = 1.0 if evaluated else None
    assert list(heard.summary["evals"]) == (["game"] if evaluated else [])
    for figures in (heard.summary["results"], log.summarize()):
        assert (figures["success_before_rl"], figures["success_after_rl"]) == (1.0, own)


def test_alarms_go_back_to_the_checkpoint_and_the_detector_goes_on_from_its_state(folder: RunFolder):
    log = watched(folder, 0, EverySecondStep(), Heard())
    for step in (1, 2, 3, 4):
        train(log, step)
        if step == 3:
            save(log, step)
    log.close("stopped")
    assert [alarm.step for alarm in read_alarms(folder.alarms)] == [2, 4]
    detector = EverySecondStep()
    detector.load_state_dict(read_json(folder.checkpoints / "step_000003" / "orchestrator.json")["alarms"])
    log = watched(folder, 3, detector, Heard())
    train(log, 4)
    log.close("finished")
    assert [(alarm.step, alarm.message) for alarm in read_alarms(folder.alarms)] == [(2, "4 seen"), (4, "8 seen")]


def test_a_detector_that_fails_is_told_once_and_costs_nothing_else(folder: RunFolder, caplog):
    class Failing(EverySecondStep):
        def on_step(self, step, metrics, outcomes):
            yield Alarm(name="first", step=step, state="raised", message="", cause="", advice="")
            raise ZeroDivisionError("no steps")

    heard = Heard()
    log = watched(folder, 0, Failing(), heard)
    train(log, 1)
    train(log, 2)
    save(log, 2)
    log.close("finished")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == [
        "alarms: Failing failed; the run goes on without alarms"
    ]
    assert steps_of(folder)[0] == [1, 2]
    assert read_alarms(folder.alarms) == []


def test_a_metrics_log_that_cannot_be_read_costs_the_last_summary_its_figures(folder: RunFolder, caplog):
    heard = Heard()
    log = watched(folder, 0, None, heard)
    folder.metrics.write_text("nonsense\n")
    log.close("stopped")
    assert (heard.summary["state"], heard.summary["steps"], heard.summary["results"]) == ("stopped", 0, {})
    assert "the summary for the monitors is incomplete" in caplog.text


@pytest.mark.slow
def test_a_resumed_run_that_keeps_no_trajectories_cuts_the_evaluated_ones_all_the_same(folder: RunFolder):
    log = log_of(folder, 0, evaluates=True)
    train(log, 1)
    evaluate(log, 1)
    save(log, 1)
    evaluate(log, 2)
    log.close()
    log_of(folder, 1, evaluates=True, saves=False).close()
    assert [step for step, _ in read_evaluated(folder.path)] == [1, 1]


@pytest.mark.realtime
def test_a_step_does_not_wait_until_its_trajectories_are_written_and_a_checkpoint_does(folder, monkeypatch):
    may_write, written = threading.Event(), []
    write = OutcomeFolder.write

    def slow(files: OutcomeFolder, step: int, outcomes: Sequence[TrajectoryOutcome]) -> None:
        assert may_write.wait(HANGS)
        write(files, step, outcomes)
        written.append(step)

    monkeypatch.setattr(OutcomeFolder, "write", slow)
    log = log_of(folder, 0)
    train(log, 1)
    train(log, 2)
    assert written == []
    may_write.set()
    save(log, 2)
    assert written == [1, 2]
    logs = read_json(folder.checkpoints / "step_000002" / "manifest.json")["logs"]
    assert list(logs["trajectories"]) == ["1", "2"]
    train(log, 3)
    log.close()
    assert written == [1, 2, 3] and list(files_in(folder.trajectories)) == [1, 2, 3]


@pytest.mark.parametrize("watches", [True, False])
def test_alarms_that_stand_are_told_again_by_a_resumed_run_that_looks_for_them(
    folder: RunFolder, capsys, watches: bool
):
    class Raises:
        def on_step(self, step, metrics, outcomes):
            return [Alarm(name="stale", step=step, state="raised", message="9 steps old", cause="", advice="")]

        def on_eval(self, step, env, metrics):
            return []

        def state_dict(self):
            return {}

    log = watched(folder, 0, Raises(), Heard())
    train(log, 1)
    save(log, 1)
    log.close()
    capsys.readouterr()
    watched(folder, 1, Raises() if watches else None, Heard()).close()
    assert ("alarm  stale  since step 1  9 steps old." in capsys.readouterr().out) == watches
