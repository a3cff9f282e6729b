"""The kit for a machine with a GPU (benchmarks/gpu_kit) at its smallest sizes: it is right, and faults are found."""

import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import warm
from verbatim.trainer.packing import PACKERS

ROOT = Path(__file__).parents[2]
NAMES = (
    "__main__",
    "attention_checks",
    "build",
    "comparison",
    "correctness",
    "record",
    "reference",
    "setting",
    "speed",
)


@pytest.fixture(scope="module")
def kit():
    """Its modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield SimpleNamespace(
            **{name: importlib.import_module(f"gpu_kit.{name}") for name in (*NAMES, "watch", "whole_run")}
        )


@pytest.fixture(scope="module")
def setting(kit, tmp_path_factory):
    return kit.setting.Setting(device="cpu", tiny=True, folder=tmp_path_factory.mktemp("kit"))


def check_named(kit, name):
    (found,) = [check for check in kit.correctness.CHECKS if check.name == name]
    return found


# ---- correctness


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(
    "name", ["gradients: window", "sampler: soft caps", "flex attention", "experts", "adapters", "kept sets", "offload"]
)
def test_a_check_passes_where_nothing_is_wrong(kit, setting, name):
    record = kit.record.run_check(check_named(kit, name), setting)
    assert (record["status"], record.get("error")) == ("passed", None)
    assert record["figures"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gradients: dense", "cut micro-batches"])
def test_a_loss_that_is_wrong_by_a_percent_is_found(kit, setting, name, monkeypatch):
    from verbatim.trainer import step

    right = step.checked_outputs

    def wrong(outputs, loss):
        total, metrics = right(outputs, loss)
        return total * 1.01, metrics

    monkeypatch.setattr(step, "checked_outputs", wrong)
    record = kit.record.run_check(check_named(kit, name), setting)
    assert record["status"] == "failed"
    assert "rows float32: 0.01, expected at most" in record["error"]


@pytest.mark.slow
def test_a_window_that_is_too_wide_is_found(kit, setting, monkeypatch):
    right = kit.attention_checks.sees
    monkeypatch.setattr(
        kit.attention_checks, "sees", lambda depths, ends, window: right(depths, ends, window and window + 1)
    )
    record = kit.record.run_check(check_named(kit, "flex attention"), setting)
    assert record["status"] == "failed" and "window 256 float32" in record["error"]
    assert "plain 256 float32" not in record["error"]


def test_a_gradient_that_lacks_a_parameter_or_holds_nan_has_no_small_error(kit):
    one, two = torch.ones(3), torch.full((3,), 2.0)
    error = kit.reference.largest_error
    assert error({"a": one}, {"a": one, "b": two}) == float("inf")
    assert np.isnan(error({"a": one * float("nan"), "b": one}, {"a": one, "b": two}))
    assert error({"a": one, "b": one}, {"a": one, "b": two}) == pytest.approx(0.5)


# ---- records


def test_what_did_not_run_is_not_green(kit, setting):
    def cannot(setting, out):
        raise kit.record.NotRun("no such thing here")

    check = kit.record.Check(name="a", about="b", run=cannot)
    passes = kit.record.Check(name="c", about="d", run=lambda setting, out: out.at_most("error", 1.0, 2.0))
    records = [kit.record.run_check(each, setting) for each in (check, passes)]
    assert records[0]["status"] == "NOT RUN" and records[0]["reason"] == "no such thing here"
    part = kit.record.part_record("correctness", setting, records, 1.0)
    assert (part["status"], part["counts"]) == ("NOT RUN", {"passed": 1, "failed": 0, "NOT RUN": 1})
    assert kit.record.EXIT_OF[part["status"]] == 3
    assert kit.record.worst([]) == "NOT RUN"
    assert part["packages"]["torch"] and part["tiny"] is True and json.loads(json.dumps(part)) == part


@pytest.mark.parametrize("error", [2.5, float("nan"), float("inf")])
def test_a_figure_above_its_bound_fails_and_is_kept(kit, setting, error):
    check = kit.record.Check(name="a", about="b", run=lambda setting, out: out.at_most("x", error, 2.0))
    record = kit.record.run_check(check, setting)
    assert record["status"] == "failed" and record["error"].startswith("x: ")
    assert record["figures"]["x"]["bound"] == 2.0


def test_an_exception_is_a_failed_check_with_its_traceback(kit, setting):
    record = kit.record.run_check(kit.record.Check(name="a", about="b", run=lambda setting, out: 1 / 0), setting)
    assert record["status"] == "failed" and record["error"] == "ZeroDivisionError: division by zero"
    assert "1 / 0" in record["traceback"]


def test_without_a_gpu_nothing_runs_and_the_record_says_so(kit, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main = importlib.import_module("gpu_kit.__main__").main
    assert main(["speed", "--out", str(tmp_path)]) == 3
    part = json.loads((tmp_path / "speed.json").read_text())
    assert part["counts"] == {"passed": 0, "failed": 0, "NOT RUN": len(kit.speed.CHECKS)}
    assert {check["reason"].partition(";")[0] for check in part["checks"]} == {"torch sees no CUDA device"}


@pytest.mark.slow
@pytest.mark.realtime
def test_a_check_that_takes_too_long_is_ended_and_the_next_one_runs(kit, setting, monkeypatch):
    monkeypatch.setattr(kit.watch, "subprocess", SimpleNamespace(Popen=warm.Popen))
    slow = dataclasses.replace(check_named(kit, "flat memory"), seconds=0.0)
    records = kit.watch.watched("correctness", [slow, check_named(kit, "kept sets")], setting, 1e6)
    assert [(each["name"], each["status"]) for each in records] == [("flat memory", "failed"), ("kept sets", "passed")]
    assert records[0]["error"] == "not done after 0 s"


def test_checks_that_the_time_of_a_part_does_not_reach_did_not_run(kit, setting):
    (record,) = kit.watch.watched("correctness", [check_named(kit, "kept sets")], setting, 0.0)
    assert (record["status"], record["reason"]) == ("NOT RUN", "the part's 0 s were spent")


def test_a_slow_machine_has_longer_limits_in_the_child_too(kit, setting, monkeypatch):
    class Started(Exception):
        pass

    def start(command, **_):
        raise Started(command)

    monkeypatch.setattr(kit.watch.subprocess, "Popen", start)
    with pytest.raises(Started) as started:
        kit.watch.watched("correctness", [check_named(kit, "kept sets")], setting, 10 * kit.watch.SECONDS)
    (command,) = started.value.args
    assert kit.watch.patience_of(float(command[command.index("--seconds") + 1])) == pytest.approx(10)
    assert kit.watch.patience_of(1.0) == 1.0


def test_the_names_of_all_checks_are_different_and_their_limits_fit(kit):
    for part in kit.__main__.PARTS:
        checks = importlib.import_module(f"gpu_kit.{part}").CHECKS
        assert len({check.name for check in checks}) == len(checks) > 0
        assert max(check.seconds for check in checks) <= 244


# ---- speed


@pytest.mark.parametrize("packing", ["rows", "tree"])
def test_the_tokens_and_pairs_of_a_load_are_those_that_are_packed(kit, packing):
    load = kit.speed.Load(length=64)
    packed = PACKERS[packing](load.samples(512, 0), micro_batch_tokens=10_000, keep_whole=False)
    pairs = sum(int((each.position_ids + 1).sum()) for each in packed)
    assert (sum(each.num_tokens for each in packed), pairs) == load.computed(packing)
    assert sum(len(each.targets) for each in packed) == load.targets


def test_the_operations_of_mfu_are_those_that_torch_counts(kit, tmp_path):
    """With all pairs, which attention written out computes, and the head for all tokens. Rotations add a little."""
    shape, length = kit.speed.TINY, 48
    kit.speed.write_model(shape, tmp_path, "cpu")
    model = kit.reference.plain_model(tmp_path, torch.float32)
    with FlopCounterMode(display=False) as counted:
        model(input_ids=torch.arange(length)[None], use_cache=False).logits.sum().backward()
    assert counted.get_total_flops() == pytest.approx(kit.speed.operations(shape, length, length, length**2), rel=0.01)


@pytest.mark.slow
def test_a_step_is_measured_on_all_sides(kit, setting):
    record = kit.record.run_check(kit.speed.CHECKS[0], setting)
    assert record["status"] == "passed", record
    for side in ("tree", "rows", "plain"):
        assert record["figures"][side]["seconds"] > 0 and record["figures"][side]["mfu"] > 0
    assert record["figures"]["tree"]["planned_bytes"] < record["figures"]["rows"]["planned_bytes"]


# ---- a whole run


def test_a_run_has_learned_when_its_last_five_rewards_are_high(kit, tmp_path):
    lines = [json.dumps({"kind": "train", "metrics": {"reward/mean": reward}}) for reward in (0.2, *[0.91] * 5)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"kind": "tr']))
    steps = kit.whole_run.train_metrics(tmp_path)
    assert len(steps) == 6 and kit.whole_run.has_learned(steps)
    assert not kit.whole_run.has_learned(steps[:5]) and not kit.whole_run.has_learned(steps[2:])
    assert kit.whole_run.train_metrics(tmp_path / "none") == []


# ---- comparison


def test_without_trl_the_comparison_with_it_did_not_run(kit, setting, monkeypatch):
    monkeypatch.setattr(kit.comparison.importlib.util, "find_spec", lambda name: None)
    (check,) = [check for check in kit.comparison.CHECKS if check.name == "beside TRL"]
    record = kit.record.run_check(check, setting)
    assert record["status"] == "NOT RUN" and record["reason"].startswith("trl is not installed; make gpu-kit TRL=yes")


# ---- the folder


def test_a_kit_that_is_too_large_is_refused(kit, tmp_path):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "large.whl").write_bytes(bytes(3 << 20))
    assert kit.build.refuse_too_large(tmp_path) == 3 << 20
    with pytest.raises(kit.build.CannotBuild, match=r"has 3\.0 MiB, and may have 2; the largest files: large\.whl"):
        kit.build.refuse_too_large(tmp_path, 2 << 20)


def test_packages_of_the_machine_are_taken_at_their_versions(kit):
    assert kit.build.there("# large\ntorch==2.11.0\npyarrow\n", {"pyarrow": "26.0.1"}) == {
        "torch": "2.11.0",
        "pyarrow": "26.0.1",
    }
    limits = kit.build.constraints({"torch": "2.11.0"}).splitlines()
    assert "torch==2.11.0+there" in limits and sum(line.startswith("torch==") for line in limits) == 1
    assert "pydantic==" + kit.build.pins()["pydantic"] in limits


def test_the_kit_has_all_that_its_parts_import(kit, tmp_path):
    kit.build.copy_parts(tmp_path, kit.build.TRL)
    there = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.py")}
    assert {f"benchmarks/gpu_kit/{part}.py" for part in kit.__main__.PARTS} <= there
    assert "benchmarks/gpu_kit/build.py" not in there
    job = (ROOT / "benchmarks" / "beside_trl.py").read_text()
    for name in ("PUBLISHED", "WITH_BLOCKS"):
        template = job.partition(f'{name} = "')[2].partition('"')[0]
        assert (tmp_path / "tests/models/renderers/data/trl_templates" / template).is_file()


@pytest.mark.realtime
def test_a_part_that_is_not_there_is_refused_with_what_is():
    done = subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu_kit/run.sh"), "all"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("Runs a part of the kit") and "all-1 is the first two" in done.stderr


@pytest.mark.slow
@pytest.mark.realtime
def test_run_sh_installs_without_an_index_and_sees_the_packages_of_an_environment(kit, tmp_path):
    """The Python here is that of an environment; torch is there, and not in the kit."""
    (tmp_path / "wheels").mkdir()
    kit.build.write_stub(tmp_path / "wheels", "stand-in", "1.0")
    (tmp_path / "install.txt").write_text("stand-in\n")
    shutil.copy2(ROOT / "benchmarks/gpu_kit/run.sh", tmp_path)
    part = tmp_path / "benchmarks" / "gpu_kit"
    part.mkdir(parents=True)
    (part / "__main__.py").write_text(
        "import sys\n"
        "from importlib.metadata import version\n"
        "print(version('torch'), version('stand-in'), sys.argv[1:])\n"
        "sys.exit(3)\n"
    )
    (part / "__init__.py").touch()
    own = {"PYTHON": sys.executable, "OUT": str(tmp_path / "out"), "GPU_KIT_VENV": str(tmp_path / "venv")}
    command = ["bash", str(tmp_path / "run.sh"), "speed", "--cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **own})
    arguments = ["speed", "--out", str(tmp_path / "out"), "--cpu"]
    assert done.stdout == f"{torch.__version__} 1.0+there {arguments}\n", done.stderr
    assert done.returncode == 3 and (tmp_path / "out" / "speed.log").read_text() == done.stdout


def test_a_folder_that_is_not_a_kit_is_not_replaced(kit, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(kit.build.CannotBuild, match="exists and is not a kit, so it is not replaced"):
        kit.build.build(tmp_path, "3.12", ())
    assert (tmp_path / "mine.txt").read_text() == "mine"
