"""`verbatim rl --fork`: a run that begins at another one's checkpoint, and goes on as that one would have."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import verbatim
from e2e.tiny_runs import (
    assert_ledger_adds_up,
    lines,
    snapshot,
    train_lines,
    trajectory_lines,
    warm_started_workplace,
)
from faults.tiny_places import deterministic, is_leftover
from stored_runs import FORKABLE_STEPS, forkable_place, light_runs
from verbatim.cli.exit_status import INTERRUPTED
from verbatim.cli.main import main
from verbatim.core.errors import UsageError
from verbatim.logs.checkpoints import find_checkpoint, find_damage, read_json, read_origin
from verbatim.logs.monitors.trajectory_log import read_evaluated
from verbatim.logs.outcomes.files import files_in
from verbatim.run import fork as forking
from verbatim.run.training_run import TrainingRun
from waiting import HANGS

pytestmark = pytest.mark.slow

STEPS, AT = FORKABLE_STEPS, 3


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with forkable_place(tmp_path_factory) as folder:
        yield folder


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    return place / "whole"


def begun(place: Path, source: str, name: str, *typed: str) -> Path:
    """The folder of a fork that ended before its first step, as after Ctrl-C: what it begins with."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainingRun, "run", lambda *_args, **_options: None)
        assert main(["rl", "--fork", source, "--run-dir", name, *typed]) == INTERRUPTED
    return place / name


def weights(run: Path, step: int) -> bytes:
    return (run / f"checkpoints/step_{step:06d}/weights/model.safetensors").read_bytes()


def assert_same(mine: Path, theirs: Path) -> None:
    """The same run, to the bit: weights, optimizer, metrics of every step, evaluations, trajectories."""
    optimizer = f"checkpoints/step_{STEPS:06d}/trainer/optimizer.safetensors"
    for name in ("final/model.safetensors", "best/model.safetensors", optimizer):
        assert (mine / name).read_bytes() == (theirs / name).read_bytes(), name
    own, other = (
        [(line["step"], line["kind"], deterministic(line["metrics"])) for line in lines(run / "metrics.jsonl")]
        for run in (mine, theirs)
    )
    assert own == other
    said, told = ([{**t, "run_id": ""} for t in trajectory_lines(run)] for run in (mine, theirs))
    for trajectory in (*said, *told):
        for turn in trajectory["turns"]:
            turn["timing"] = None
    assert said == told
    evaluated = [[(step, t.trajectory_id, t.reward) for step, t in read_evaluated(run)] for run in (mine, theirs)]
    assert evaluated[0] == evaluated[1] and evaluated[0]
    best = [read_json(run / "summary.json")["best"] for run in (mine, theirs)]
    assert best[0] == best[1]
    assert_ledger_adds_up(mine)


def test_an_untouched_fork_goes_on_bit_for_bit_as_the_run_did_and_stands_alone(place: Path, whole: Path):
    before = snapshot(whole)
    copy = place / "copy"
    shutil.copytree(whole, copy, symlinks=True)
    reasons = [
        {"key": key, "dtype": dtype, "reason": "measured"}
        for key, dtype in (("trainer.dtype", "float32"), ("inference.torch.dtype", "bfloat16"))
    ]
    # The second is not what the run computes in.
    (copy / "precision.json").write_text(json.dumps({"format": 1, "choices": reasons}))
    assert main(["rl", "--fork", f"{copy}@{AT}", "--run-dir", "alone", "--max-steps", str(AT + 1)]) == 0
    shutil.rmtree(copy)  # from here on it needs nothing of that run
    run = place / "alone"
    assert main(["rl", "alone/config.toml", "--run-dir", "alone", "--max-steps", str(STEPS), "--resume"]) == 0
    assert_same(run, whole)
    assert snapshot(whole) == before
    assert [path for path in run.rglob("*") if is_leftover(path) or path.name == ".forking"] == []
    assert read_json(run / "precision.json") == {"format": 1, "choices": reasons[:1]}
    origin = read_origin(run)
    assert (origin.run, origin.step, origin.fresh, origin.forked_from) == (str(copy.resolve()), AT, (), None)
    assert origin.changes == (f"max_steps: {STEPS} -> {AT + 1}",)


def test_changed_keys_are_listed_and_change_what_comes_after(place: Path, whole: Path, capsys):
    typed = ["rl", "run.toml", "--fork", f"whole@{AT}", "--run-dir", "changed", "--trainer.optim.lr", "0.003"]
    assert main(typed) == 0
    out = capsys.readouterr().out
    assert f"fork        of {whole.resolve()} after step {AT}" in out
    assert "fork        trainer.optim.lr: 0.01 -> 0.003" in out
    run = place / "changed"
    lr = [line["metrics"]["lr"] for line in train_lines(run)]
    assert lr == [0.01] * AT + [0.003] * (STEPS - AT)
    mine, theirs = (train_lines(folder) for folder in (run, whole))
    assert [deterministic(line["metrics"]) for line in mine[:AT]] == [
        deterministic(line["metrics"]) for line in theirs[:AT]
    ]
    # Step AT + 1 begins with the same weights: the same batch and loss, and another optimizer step.
    assert mine[AT]["metrics"]["loss"] == theirs[AT]["metrics"]["loss"]
    assert weights(run, AT) == weights(whole, AT)
    assert weights(run, AT + 1) != weights(whole, AT + 1)
    assert read_json(run / "summary.json")["steps"] == STEPS


def test_a_fork_of_a_fork_says_both_and_best_and_latest_are_steps_too(place: Path, whole: Path):
    best = find_checkpoint(whole, "best").step
    first = begun(place, f"{whole}@best", "first", "--max-steps", str(STEPS + 1))
    second = begun(place, f"{first}", "second", "--max-steps", str(STEPS + 2))
    latest = begun(place, f"{whole}", "latest", "--max-steps", str(STEPS + 1))
    origins = [read_origin(run) for run in (first, second, latest)]
    assert [origin.step for origin in origins] == [best, best, STEPS] and 0 < best < STEPS
    assert origins[1].run == str(first.resolve())
    assert origins[1].forked_from == origins[0] and origins[0].forked_from is None


def test_a_fork_begins_with_the_logs_and_episodes_up_to_its_step(place: Path, whole: Path):
    run = begun(place, f"whole@{AT}", "beginning")
    assert [(line["kind"], line["step"]) for line in lines(run / "metrics.jsonl")] == [
        ("eval", 0),
        ("train", 1),
        ("train", 2),
        ("eval", 2),
        ("train", 3),
    ]
    assert list(files_in(run / "trajectories")) == [1, 2, 3] and list(files_in(run / "evaluations")) == [0, 2]


def test_the_checkpoint_of_the_best_evaluation_comes_along(place: Path, whole: Path):
    at = STEPS - 1  # not evaluated itself
    best = read_json(whole / f"checkpoints/step_{at:06d}/manifest.json")["best"]["step"]
    assert best in (0, 2, 4)
    run = begun(place, f"whole@{at}", "with-best")
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [f"step_{best:06d}", f"step_{at:06d}"]
    assert read_json(run / f"checkpoints/step_{at:06d}/manifest.json")["best"]["step"] == best
    assert weights(run, best) == weights(whole, best)
    assert find_checkpoint(run, "best").step == best


def test_a_fresh_optimizer_begins_without_moments_and_keeps_its_place_in_the_schedule(place: Path, whole: Path):
    """From Python."""
    result = verbatim.run(
        "run.toml", fork=f"{whole}@{AT}", fresh=["optimizer"], run_dir="fresh", max_steps=AT + 1, quiet=True
    )
    run = place / "fresh"
    assert result.folder.resolve() == run.resolve() and result.summary["steps"] == AT + 1
    assert (read_origin(run).step, read_origin(run).fresh) == (AT, ("optimizer",))
    for step, count in ((AT, AT), (AT + 1, AT + 1)):
        state = run / f"checkpoints/step_{step:06d}/trainer"
        assert read_json(state / "trainer.json")["num_optimizer_steps"] == count
    from safetensors.numpy import load_file

    moments = load_file(run / f"checkpoints/step_{AT + 1:06d}/trainer/optimizer.safetensors")
    assert {float(value) for name, value in moments.items() if name.endswith("/step")} == {1.0}
    assert load_file(run / f"checkpoints/step_{AT:06d}/trainer/optimizer.safetensors") == {}
    assert (whole / f"checkpoints/step_{AT:06d}/trainer/optimizer.safetensors").stat().st_size > 1000
    with pytest.raises(UsageError, match="give fork, or resume"):
        verbatim.run("run.toml", fork=whole, resume=True)


def test_fresh_examples_forget_what_is_gone_and_groups_count_on(place: Path, whole: Path):
    """The fork plays another environment, whose examples the run did not have."""
    (place / "others.py").write_text(
        "from verbatim import Example\nfrom spoken import Spoken\n\n\nclass Others(Spoken):\n"
        "    def examples(self, split):\n        return [Example(id=f'other-{n}') for n in range(3)]\n"
    )
    fork = [
        "rl",
        "--fork",
        f"whole@{AT}",
        "--run-dir",
        "others",
        "--max-steps",
        str(AT + 1),
        "--fresh",
        "examples",
        "--orchestrator.train.env.0.import-path",
        "others.Others",
    ]
    assert main(fork) == 0
    later = [t for t in trajectory_lines(place / "others") if t["env"] == "others.Others"]
    assert later and {t["example_id"] for t in later} <= {"other-0", "other-1", "other-2"}
    groups = [t["group_id"] for t in trajectory_lines(place / "others")]
    assert len(set(groups)) == len(groups) // 4
    assert_ledger_adds_up(place / "others")


# ---- ended in the middle


@pytest.fixture(scope="module")
def killed(place: Path, whole: Path) -> dict[str, Path]:
    """What is there of a fork when its process is killed, by where that happens: the folder is copied as it is then.

    Between these functions the system has all that was written. "never" is the folder of the one that was not killed.
    """
    dying, left = place / "dying", {}

    def copy(moment: str) -> None:
        if moment not in left:
            left[moment] = place / f"killed-{moment.replace(' ', '-')}"
            shutil.copytree(dying, left[moment], symlinks=True, copy_function=link_linked)

    def watched(name: str):
        inner = getattr(forking, name)

        def function(*args, **options):
            copy(f"before {name}")
            result = inner(*args, **options)
            copy(f"after {name}")
            return result

        return function

    with pytest.MonkeyPatch.context() as patched:
        for name in ("_link_outcomes", "write_origin", "_write_checkpoints", "write_changed_state"):
            patched.setattr(forking, name, watched(name))
        left["never"] = begun(place, f"{whole}@{AT}", "dying")
    return left


def link_linked(source: str, target: str) -> None:
    """A file of several names gets one more, as in the folder that is copied."""
    os.link(source, target) if os.stat(source).st_nlink > 1 else shutil.copy2(source, target)


def content(run: Path) -> dict[str, str]:
    """The files of a fork that do not name its own folder."""
    own = ("config.toml", "manifest.json", "orchestrator.lock", "orchestrator.log")
    return {name: found for name, found in snapshot(run).items() if not name.endswith(own)}


@pytest.mark.parametrize(
    "moment", ["before _link_outcomes", "after write_origin", "before _write_checkpoints", "after write_changed_state"]
)
def test_a_fork_that_was_killed_while_it_was_made_is_made_again(place: Path, whole: Path, killed, moment: str):
    run, before = killed[moment], snapshot(whole)
    assert (run / ".forking").exists() and not list((run / "checkpoints").glob("step_*"))
    assert main(["rl", "run.toml", "--run-dir", run.name, "--resume"]) == 2
    begun(place, f"{whole}@{AT}", run.name)
    assert content(run) == content(killed["never"]) and "metrics.jsonl" in content(run)
    assert find_damage(find_checkpoint(run).folder) is None and find_checkpoint(run).step == AT
    assert not (run / ".forking").exists()
    assert snapshot(whole) == before


def test_a_fork_that_was_killed_when_it_had_its_checkpoint_goes_on(place: Path, whole: Path, killed):
    run = killed["after _write_checkpoints"]
    assert (run / ".forking").exists() and find_checkpoint(run).step == AT
    assert main(["rl", "run.toml", "--run-dir", run.name, "--resume"]) == 0
    assert (run / "final/model.safetensors").read_bytes() == (whole / "final/model.safetensors").read_bytes()
    assert [line["step"] for line in train_lines(run)] == list(range(1, STEPS + 1))
    assert not (run / ".forking").exists()


def test_a_disk_that_is_full_leaves_nothing_of_the_fork(place: Path, whole: Path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(forking, "write_changed_state", full)
    assert main(["rl", "--fork", f"{whole}@{AT}", "--run-dir", "full"]) == 1
    assert not (place / "full").exists()


def test_what_cannot_begin_after_all_is_taken_back(place: Path, whole: Path):
    """The trainer refuses the state: the folder is as it was, and can be used again."""
    broken = place / "broken"
    shutil.copytree(whole, broken, symlinks=True)
    state = broken / f"checkpoints/step_{AT:06d}"
    (state / "trainer/optimizer.safetensors").write_bytes(b"no state")
    from verbatim.logs.checkpoints import write_manifest

    manifest = read_json(state / "manifest.json")
    write_manifest(state, {"step": AT, "logs": manifest["logs"]})
    assert main(["rl", "--fork", f"{broken}@{AT}", "--run-dir", "taken-back"]) == 2
    assert sorted(path.name for path in (place / "taken-back").iterdir() if path.suffix != ".lock") == [
        "logs",
        "verbatim_run.json",
    ]
    run = begun(place, f"{whole}@{AT}", "taken-back")
    assert find_checkpoint(run).step == AT


# ---- refused


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--fork", "nowhere@3"], "there is no folder nowhere; expected a run folder, followed by @STEP"),
        (["--fork", "whole@99"], "has no checkpoint of step 99; there are checkpoints of steps 0-6"),
        (["--fork", "whole@x"], "expected latest, best or a step"),
        (["--fork", "model"], "has no checkpoints; expected the folder of a run"),
        (["--fork", "whole@3", "--resume"], "--fork begins a new run, and --resume continues one"),
        (["--fork", "whole@3", "--fresh", "weights"], "--fresh weights: expected optimizer or examples"),
        (["run.toml", "--fresh", "optimizer"], "--fresh optimizer is for --fork RUN[@STEP]"),
        ([], "FILE is missing: the TOML file of the run, or a recipe's name"),
        (["--fork", "whole@3", "--run-dir", "whole"], "is the run that is forked; name another folder"),
        (["--fork", "whole@3", "--max-steps", "3"], "max_steps = 3, but the checkpoint is that of step 3"),
        (["--fork", "whole@3", "--model.name", "other"], "model.name: "),
        (["--fork", "whole@3", "--trainer.lora.r", "8"], "trainer.lora.r: 'not set' -> 8: the checkpoint's adapters"),
        (["--fork", "whole@3", "--warm-start.steps", "8"], "warm_start.steps: 'not set' -> 8: it ran before step 0"),
        (["--fork", "whole@3", "--trainer.optim.lrr", "8"], 'unknown key "lrr"'),
    ],
)
def test_what_cannot_be_forked_is_refused_before_there_is_a_folder(place: Path, typed, said: str, capsys):
    folder = [] if "--run-dir" in typed else ["--run-dir", "refused"]
    kept = snapshot(place / "whole")
    assert main(["rl", *typed, *folder]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (place / "refused").exists()
    assert snapshot(place / "whole") == kept


def test_a_folder_with_other_things_of_these_names_is_left_alone(place: Path, whole: Path, capsys):
    (place / "mine").mkdir()
    (place / "mine" / "metrics.jsonl").write_text("mine")
    assert main(["rl", "--fork", "whole@3", "--run-dir", "mine"]) == 2
    assert "(there is no verbatim_run.json); found metrics.jsonl. A new run takes" in capsys.readouterr().err
    assert (place / "mine" / "metrics.jsonl").read_text() == "mine"
    begun(place, "whole@3", "whole-2")
    assert main(["rl", "--fork", "whole@3", "--run-dir", "whole-2"]) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_groups_in_flight_of_examples_that_are_gone_are_named(place: Path, whole: Path, capsys):
    held = place / "held"
    shutil.copytree(whole, held, symlinks=True)
    folder = held / f"checkpoints/step_{AT:06d}"
    state = read_json(folder / "orchestrator.json")
    state["dispatcher"]["held"] = [
        {"index": 99, "env": "gone", "example_id": "e1"},
        {"index": 98, "env": "spoken.Spoken", "example_id": "lot-77"},
    ]
    (folder / "orchestrator.json").write_text(json.dumps(state))
    from verbatim.logs.checkpoints import write_manifest

    write_manifest(folder, {"step": AT, "logs": read_json(folder / "manifest.json")["logs"]})
    assert main(["rl", "--fork", f"held@{AT}", "--run-dir", "refused"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "2 groups in flight at step 3 play examples" in said
    assert "gone/e1, spoken.Spoken/lot-77; add `--fresh examples`" in said


# ---- adapters, a reference, another process


ADAPTED = """
[trainer.lora]
r = 4
[trainer.loss]
kl_ref_tau = 0.1
"""


@pytest.mark.extras
@pytest.mark.realtime
def test_a_fork_of_adapters_on_a_model_that_the_run_made_stands_alone(tmp_path: Path):
    """Adapters belong to what the run built and warm-started in its folder, and so does the reference."""
    with warm_started_workplace(tmp_path, ADAPTED) as folder, light_runs():
        assert main(["rl", "run.toml", "--run-dir", "old", "--max-steps", "2"]) == 0
        assert main(["rl", "run.toml", "--run-dir", "straight", "--max-steps", "4"]) == 0
        fork = ["rl", "--fork", "old", "--run-dir", "new", "--max-steps", "3", "--trainer.separate-process", "true"]
        assert main([*fork, "--orchestrator.heartbeat-timeout", str(HANGS)]) == 0
        shutil.rmtree(folder / "old")
        again = ["rl", "new/config.toml", "--resume", "new", "--max-steps", "4", "--trainer.separate-process", "false"]
        assert main(again) == 0
        run = folder / "new"
        for name in ("final/adapter_model.safetensors", "warm_start/model.safetensors"):
            assert (run / name).read_bytes() == (folder / "straight" / name).read_bytes(), name
        for config in run.rglob("adapter_config.json"):
            base = Path(read_json(config)["base_model_name_or_path"])
            assert base == run.resolve() / "warm_start", config


def test_a_fork_may_be_held_near_another_model(place: Path, whole: Path, capsys):
    """Resumed, a run refuses another reference; a fork begins to compare with it."""
    kl = ["--trainer.loss.kl-ref-tau", "0.1"]
    first = ["rl", "--fork", f"whole@{AT}", "--run-dir", "near", "--max-steps", str(AT + 1), *kl]
    assert main(first) == 0
    other = ["--trainer.reference.model", str(whole / f"checkpoints/step_{AT:06d}/weights")]
    resumed = ["rl", "near/config.toml", "--resume", "near", "--max-steps", str(AT + 2), *other]
    assert main(resumed) == 2
    assert "the reference model of this run had other weights" in " ".join(capsys.readouterr().err.split())
    assert main(["rl", "--fork", "near", "--run-dir", "nearer", "--max-steps", str(AT + 2), *other]) == 0
    last = train_lines(place / "nearer")[-1]["metrics"]
    assert last["ref_kl"] > 0


def test_configurations_and_logs_of_a_run_and_its_fork_are_for_their_owners_eyes(place: Path, whole: Path):
    fork = begun(place, f"{whole}@{AT}", "fork-private")
    for run in (whole, fork):
        found = [*run.rglob("config.toml"), *(run / "logs").rglob("*.log")]
        assert {path.relative_to(run).parts[0] for path in found} >= {"config.toml", "checkpoints", "logs"}
        assert {oct(path.stat().st_mode & 0o777) for path in found} == {"0o600"}
