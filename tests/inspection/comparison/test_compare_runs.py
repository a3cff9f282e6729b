"""Runs side by side: what their folders say, also of runs that go on, failed, were resumed, or measured otherwise."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from verbatim import Trajectory
from verbatim.cli.main import main
from verbatim.config import dump_config, load_config
from verbatim.core.errors import UsageError
from verbatim.core.plain_console import PlainConsole
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.inspection.comparison.compared import compare_runs, comparison_to_json, state_line
from verbatim.inspection.comparison.configs import config_differences, told
from verbatim.inspection.comparison.evals import compare_evals
from verbatim.inspection.comparison.figures import figures, seconds_per_step
from verbatim.inspection.comparison.read_run import alarm_counts, read_run
from verbatim.inspection.comparison.show import show_comparison
from verbatim.inspection.comparison.text_plot import text_plot
from verbatim.logs.checkpoints.lock import FolderLock
from verbatim.logs.checkpoints.origin import Origin, write_origin
from verbatim.logs.monitors import MetricsLog
from verbatim.logs.monitors.alarm import Alarm
from verbatim.logs.monitors.alarm_log import AlarmLog
from verbatim.logs.outcomes.files import OutcomeFolder
from verbatim.run.evaluation.intervals import paired_share

TOML = '[model]\nname = "x"\n[[orchestrator.train.env]]\nid = "guess_number"\n'


def make_run(
    folder: Path,
    *overrides: str,
    rewards: Sequence[float] = (0.1, 0.2, 0.3),
    wins: dict[int, int] | None = None,
    keeps: bool = True,
    finished: bool = True,
    env: str = "guess_number",
    log: Sequence[str] = (),
    metrics: dict[str, float] | None = None,
) -> Path:
    """A run of some steps; `wins` of the 20 episodes (10 examples of 2) of the evaluation after each step succeed."""
    folder.mkdir()
    (folder / "run.toml").write_text(TOML)
    config = load_config(folder / "run.toml", ["--max-steps", str(max(1, len(rewards))), *overrides]).named("mine")
    (folder / "config.toml").write_text(dump_config(config))
    clock = iter(range(0, 10**6, 5))
    lines = MetricsLog(folder / "metrics.jsonl", now=lambda: float(next(clock)))
    for step, reward in enumerate(rewards, start=1):
        ledger = {
            "ledger/sampled": 100.0 * step,
            "ledger/trained": 60.0 * step,
            "ledger/pending": 10.0 * step,
            "ledger/dropped/stale": 30.0 * step,
        }
        lines.on_step(step, {"reward/mean": reward, "tokens_per_second": 50.0, **ledger, **(metrics or {})})
    for step, count in (wins or {}).items():
        lines.on_eval(
            step,
            env,
            {
                "success": count / 20,
                "episodes": 20,
                "failed": 0,
                "reward/mean": count / 20,
                "success/low": count / 20 - 0.1,
                "success/high": count / 20 + 0.1,
            },
        )
        if keeps:
            OutcomeFolder(folder / "evaluations").write(
                step,
                [
                    TrajectoryOutcome.of_evaluated(
                        Trajectory(
                            example_id=str(index // 2),
                            sample_index=index % 2,
                            seed=index,
                            env=env,
                            reward=float(index < count),
                        )
                    )
                    for index in range(20)
                ],
            )
    lines.close()
    (folder / "logs").mkdir()
    (folder / "orchestrator.lock").write_text("1\n")
    started = "2026-01-31 10:00:00,000 INFO started (process 7)"
    (folder / "logs" / "orchestrator.log").write_text("\n".join([started, *log]) + "\n")
    if finished:
        (folder / "summary.json").write_text('{"format": 1, "seconds": 61.5}')
    return folder


def shown(folders: Sequence[Path], width: int = 300, **options) -> str:
    out = io.StringIO()
    show_comparison(compare_runs(folders, **options), PlainConsole(file=out, width=width))
    return out.getvalue()


# ---- one run


def test_a_run_is_told_as_it_is(tmp_path: Path):
    resumed = [
        "2026-01-31 11:00:00,000 INFO started (process 8)",
        "2026-01-31 11:00:01,000 WARNING the configuration changed since this run started: max_steps: 2 -> 3",
    ]
    stopped = read_run(make_run(tmp_path / "a", finished=False, log=resumed))
    assert state_line(stopped) == "stopped, 3 of 3 steps, resumed once"
    assert stopped.changed == ["max_steps: 2 -> 3"]
    assert state_line(read_run(make_run(tmp_path / "b"))) == "finished, 3 of 3 steps, 62 s"
    failed = make_run(tmp_path / "c", finished=False, log=["2026-01-31 10:00:09,000 ERROR ended: the disk is full"])
    assert state_line(read_run(failed)).startswith("failed, 3 of 3 steps")
    lock = FolderLock(failed, "orchestrator.lock")
    assert state_line(read_run(failed)).startswith("running, ")
    lock.release()
    write_origin(failed, Origin(run="/runs/first", step=40, changes=("seed: 0 -> 1",)))
    assert "forked from /runs/first after step 40" in state_line(read_run(failed))
    assert "changed by the fork: seed: 0 -> 1" in shown([failed, tmp_path / "b"])
    (failed / "forked_from.json").write_text('{"format": 1}')
    assert "forked_from.json is damaged" in shown([failed, tmp_path / "b"])


def test_a_run_that_has_just_begun_is_no_mistake(tmp_path: Path):
    begun = make_run(tmp_path / "a", rewards=(), finished=False)
    with (begun / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "kind": "tr')  # being written
    text = shown([begun, make_run(tmp_path / "b")])
    assert "stopped, 0 of 1 steps" in text and "reward/mean" in text
    (begun / "metrics.jsonl").unlink()
    assert "there is no metrics.jsonl yet" in shown([begun, tmp_path / "b"])


def test_damaged_files_are_left_out_and_told(tmp_path: Path):
    run = make_run(tmp_path / "a", wins={3: 4})
    (run / "metrics.jsonl").write_text("nonsense\n" + (run / "metrics.jsonl").read_text())
    (run / "config.toml").write_text("= broken")
    (run / "evaluations" / "step-000003.parquet").write_text("nonsense")
    text = shown([run, make_run(tmp_path / "b", wins={3: 8})])
    assert "metrics.jsonl, byte 0: not JSON" in text
    assert "config.toml is missing or damaged: its keys are not compared" in text
    assert "evaluations/step-000003.parquet cannot be read as a file of Verbatim's trajectories" in " ".join(
        text.split()
    )


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda place: place / "nowhere", "there is no folder "),
        (
            lambda place: place / "empty",
            "is not a run folder: it has none of config.toml, metrics.jsonl, checkpoints; found nothing",
        ),
        (lambda place: place / "file.txt", " is a file"),
        (lambda place: place / "notes", "found a.txt, b.txt"),
    ],
)
def test_a_folder_without_a_run_is_refused_with_what_was_found(tmp_path: Path, capsys, make, said: str):
    make_run(tmp_path / "run")
    for name in ("empty", "notes"):
        (tmp_path / name).mkdir()
    for name in ("file.txt", "notes/a.txt", "notes/b.txt"):
        (tmp_path / name).write_text("")
    assert main(["compare", str(tmp_path / "run"), str(make(tmp_path))]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert said in told
    assert "such as runs/NAME/latest" in told or f"Type verbatim compare {tmp_path / 'run'}" in told


def test_mistakes_are_told(tmp_path: Path, capsys):
    run, other = make_run(tmp_path / "run"), make_run(tmp_path / "other")
    for typed, said in (
        ([run], "needs at least two runs"),
        ([run, other, f"{other}/../run"], "are the same run"),
        ([run, other, "--metric", "nope"], "no step of these runs has the metric 'nope'; they have ledger/"),
        ([run, other, "--plot", tmp_path], "exists already; name a new file"),
        ([run, other, "--seed", "3"], "verbatim compare has no option --seed"),
    ):
        assert main(["compare", *map(str, typed)]) == 2
        assert said in " ".join(capsys.readouterr().err.split())


# ---- configuration


def test_only_keys_that_differ_are_listed_with_their_places_and_without_secrets(tmp_path: Path):
    first = make_run(tmp_path / "a", "--trainer.optim.lr", "1e-4")
    args = ["--orchestrator.train.env.0.args", '{ api_key = "sk-canary" }']
    second = make_run(tmp_path / "b", "--seed", "3", "--keys-in-config", *args)
    runs = [read_run(first), read_run(second)]
    found = {each.key: each for each in config_differences(runs)}
    assert set(found) == {"seed", "keys_in_config", "trainer.optim.lr", "orchestrator.train.env.0.args.api_key"}
    rate = found["trainer.optim.lr"]
    assert (rate.values, rate.default) == ([1e-4, 1e-6], 1e-6)
    assert not rate.is_default(0) and rate.is_default(1)
    line = (first / "config.toml").read_text().splitlines()[rate.lines[0] - 1]
    assert line == "lr = 0.0001"
    assert found["orchestrator.train.env.0.args.api_key"].values == [None, "[redacted]"]
    text = shown([first, second])
    assert "1e-06 (default)" in text and "sk-canary" not in text


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("key", ["answer", "question"], ["answer", "question"]),
        ("password", ["swordfish"] * 2, None),
        ("password", ["swordfish", "marlin"], ["[redacted]", "[redacted]"]),
    ],
)
def test_settings_are_compared_before_they_are_redacted(tmp_path: Path, name: str, values: list[str], told):
    runs = [
        read_run(
            make_run(
                tmp_path / str(place),
                "--keys-in-config",
                "--orchestrator.train.env.0.args",
                f'{{ {name} = "{value}" }}',
            )
        )
        for place, value in enumerate(values)
    ]
    found = {each.key: each.values for each in config_differences(runs)}
    assert found == ({} if told is None else {f"orchestrator.train.env.0.args.{name}": told})
    assert "swordfish" not in repr(runs)


def test_defaults_of_a_table_that_a_run_does_not_have_are_one_row(tmp_path: Path):
    first, second = make_run(tmp_path / "a", "--warm-start.steps", "100"), make_run(tmp_path / "b")
    third = make_run(tmp_path / "c", "--warm-start.steps", "7")
    runs = [read_run(run) for run in (first, second, third)]
    every = config_differences(runs[:2])
    assert len(every) > 8 and all(each.key.startswith("warm_start.") for each in every)
    assert [(each.key, each.values) for each in told(every)] == [
        ("[warm_start]", ["there", None]),
        ("warm_start.optim.lr", [1e-3, None]),
    ]
    assert [each.key for each in told(config_differences(runs[1:]))] == ["warm_start.steps", "warm_start.optim.lr"]


# ---- evaluations


def test_last_evaluations_are_compared_in_pairs_and_shared_ones_too(tmp_path: Path):
    """By hand: 4 and 14 of 20 win at the end, so examples 2 to 6 gain both episodes; after step 2 1 and 3 win."""
    runs = [
        read_run(make_run(tmp_path / "a", wins={0: 2, 2: 1, 3: 4})),
        read_run(make_run(tmp_path / "b", rewards=[0.1] * 5, wins={0: 2, 2: 3, 5: 14})),
    ]
    last, shared = compare_evals(runs, problems := [])
    assert (last.at, last.steps, shared.at, shared.steps, problems) == ("last", [3, 5], "shared", [2, 2], [])
    (pair,) = last.pairs
    found = pair.environments["guess_number"]
    expected = paired_share({str(example): [float(2 <= example <= 6)] * 2 for example in range(10)})
    assert (found.success, found.num_pairs, found.gained, found.lost) == (expected, 20, 10, 0)
    assert [result.success.value for result in last.results] == [0.2, 0.7]
    assert shared.pairs[0].environments["guess_number"].gained == 2
    text = shown([tmp_path / "a", tmp_path / "b"])
    assert "guess_number: last evaluation (A after step 3, B after step 5)" in text
    assert "evaluation after step 2, which all runs have" in text and "10 gained, 0 lost of 20" in text


def test_evaluations_without_episodes_have_what_the_metrics_say(tmp_path: Path):
    runs = [make_run(tmp_path / "a", wins={3: 4}), make_run(tmp_path / "b", wins={3: 14}, keeps=False)]
    (evals,) = compare_evals([read_run(run) for run in runs], [])
    assert evals.pairs == [] and evals.results[1].success.value == 0.7
    assert (evals.results[1].success.low, evals.results[1].success.high) == pytest.approx((0.6, 0.8))
    text = shown(runs)
    assert "0.700 [0.600, 0.800]" in text and "B: the episodes were not kept" in text


def test_environments_that_one_run_does_not_have_stand_alone(tmp_path: Path):
    runs = [make_run(tmp_path / "a", wins={3: 4}), make_run(tmp_path / "b", wins={3: 14}, env="other")]
    first, second = compare_evals([read_run(run) for run in runs], [])
    assert (first.env, first.steps, second.env, second.steps) == ("guess_number", [3, None], "other", [None, 3])
    assert first.results[1] is None and first.pairs == []
    assert "other: last evaluation (B after step 3)" in shown(runs)


# ---- figures


def test_figures_are_of_the_last_steps_and_ledgers_are_shares(tmp_path: Path):
    rewards = [0.0] * 10 + [1.0] * 5
    runs = [read_run(make_run(tmp_path / "a", rewards=rewards)), read_run(make_run(tmp_path / "b", metrics={"x": 2.0}))]
    final, speed, ledger = figures(runs, ["x"])
    rows = dict(final.rows)
    assert rows["reward/mean"] == pytest.approx([0.5, 0.2])  # the last ten of fifteen, and all three
    assert math.isnan(rows["x"][0]) and rows["x"][1] == 2.0
    assert "entropy" not in rows
    assert dict(speed.rows)["seconds per step"] == [5.0, 5.0] and dict(speed.rows)["seconds"] == [61.5, 61.5]
    assert dict(ledger.rows) == {
        "trained": pytest.approx([0.6, 0.6]),
        "pending": pytest.approx([0.1, 0.1]),
        "dropped: stale": pytest.approx([0.3, 0.3]),
    }


def test_seconds_per_step_leave_out_pauses(tmp_path: Path):
    run = make_run(tmp_path / "a", rewards=())
    lines = [
        {"format": 1, "step": step, "kind": "train", "time": time, "metrics": {}}
        for step, time in ((1, 0), (2, 4), (3, 8), (4, 1000), (5, 1004))
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert seconds_per_step(read_run(run)) == 4.0


def test_alarms_are_counted_by_name_and_environment(tmp_path: Path):
    run = make_run(tmp_path / "a")
    log = AlarmLog(run / "alarms.jsonl")
    for name, state, env in (
        ("dry", "raised", None),
        ("dry", "cleared", None),
        ("dry", "raised", None),
        ("starved", "raised", "game"),
        ("starved", "cleared", "game"),
    ):
        log.on_alarm(Alarm(name=name, step=1, state=state, message="m", cause="c", advice="a", env=env))
    log.close()
    assert alarm_counts(read_run(run)) == {"dry": (2, True), "starved (game)": (1, False)}
    assert "2, still raised" in shown([run, make_run(tmp_path / "b")])


# ---- shown


def test_a_plot_has_a_letter_for_each_run():
    """Three columns of the plot: A is low and rises to meet B, which stays high."""
    plot = text_plot([[(1, 0.0), (2, 0.5), (3, 1.0)], [(1, 1.0), (3, 1.0)], []], width=50, height=3)
    assert plot is not None
    lines = plot.plain.splitlines()
    assert lines[0].startswith("1.000 |B") and lines[0].endswith("*")
    assert lines[1].rstrip()[-1] == "A" and lines[2].startswith("0.000 |A")
    assert lines[4].split() == ["step", "1", "3"]
    assert max(map(len, lines)) <= 50
    assert text_plot([[], []]) is None
    flat = text_plot([[(5, 2.0)]], width=50, height=3)
    assert flat is not None and "A" in flat.plain.splitlines()[1]


@pytest.mark.parametrize("width", [80, 120])
def test_what_is_shown_fits_the_terminal(tmp_path: Path, width: int):
    folders = [make_run(tmp_path / f"r{n}", "--seed", str(n), "--name", "n" * 20, wins={3: 4 + n}) for n in range(5)]
    text = shown(folders, width=width)
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= width
    assert "E - A" in text and "E - D" not in text  # of many runs each is compared with the first


@pytest.mark.slow
def test_json_has_all_of_it_and_the_plot_is_a_picture(tmp_path: Path, capsys):
    runs = [make_run(tmp_path / "a", wins={0: 2, 3: 4}), make_run(tmp_path / "b", "--seed", "3", wins={0: 2, 3: 14})]
    picture = tmp_path / "curves.png"
    assert main(["compare", *map(str, runs), "--json", "--plot", str(picture), "--metric", "ledger/trained"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == comparison_to_json(compare_runs(runs, ["ledger/trained"]))
    assert [run["state"] for run in found["runs"]] == ["finished", "finished"]
    assert found["config"] == [{"key": "seed", "default": 0, "values": {"A": 0, "B": 3}, "lines": {"A": 3, "B": 3}}]
    assert found["curves"]["ledger/trained"]["A"] == [[1, 60.0], [2, 120.0], [3, 180.0]]
    assert found["evaluations"][0]["pairs"][0]["success"]["value"] == 0.5
    assert found["evaluations"][0]["results"]["B"]["success"]["value"] == 0.7
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_runs_are_only_read(tmp_path: Path):
    runs = [make_run(tmp_path / name, wins={3: 4}) for name in "ab"]
    before = {path: path.stat().st_mtime_ns for run in runs for path in sorted(run.rglob("*"))}
    shown(runs)
    assert {path: path.stat().st_mtime_ns for run in runs for path in sorted(run.rglob("*"))} == before


def test_a_run_is_refused_where_a_metric_log_is_all_that_is_there_only_if_it_is_none(tmp_path: Path):
    """A folder that was copied without its configuration is still a run."""
    run = make_run(tmp_path / "a")
    (run / "config.toml").unlink()
    assert read_run(run).last_step == 3
    (run / "metrics.jsonl").unlink()
    with pytest.raises(UsageError, match="is not a run folder"):
        read_run(run)
