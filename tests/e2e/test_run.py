"""`verbatim rl` from a file to a trained model, and to the same model when it is stopped or killed on the way."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shlex
import signal
import struct
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from e2e.tiny_runs import (
    LOTS,
    TOML,
    assert_ledger_adds_up,
    build_tiny_model,
    lines,
    num_sampled,
    train_lines,
    trajectory_lines,
    workplace,
)
from verbatim.cli.exit_status import NOTHING_TRAINED
from verbatim.cli.main import main
from verbatim.config import load_config
from verbatim.logs.checkpoints import read_json
from verbatim.logs.monitors.trajectory_log import read_trajectories
from verbatim.logs.outcomes.files import read_outcomes
from verbatim.run.tables import component_tables
from waiting import HANGS, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.realtime]

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "guess_number.toml"
CONFIGURATION = ROOT / "docs" / "configuration.md"
GROUP = 8
BATCH = 2 * GROUP
STEPS = 3
SECRETS = 15
SMALL = [
    "--max-steps", str(STEPS),
    "--model.build", "{hidden_size = 32, num_layers = 1, num_heads = 2, num_kv_heads = 1, intermediate_size = 64, "
    "vocab_size = 512}",
    "--warm-start.steps", "150", "--warm-start.conversations", "200", "--warm-start.optim.lr", "1e-2",
    "--orchestrator.batch-size", str(BATCH), "--orchestrator.group-size", str(GROUP),
    "--orchestrator.eval.interval", "2", "--orchestrator.eval.episodes", str(SECRETS),
]  # fmt: skip


# ---- one run, from start to end


@dataclass(frozen=True)
class Finished:
    """A run that ended by itself."""

    place: Path
    folder: Path
    printed: str
    seconds: float
    """From outside."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Iterator[Finished]:
    """The recipe with a model and batches that are small, in a folder of its own."""
    with workplace(tmp_path_factory.mktemp("finished"), {}) as place:
        out, began = io.StringIO(), time.monotonic()
        with contextlib.redirect_stdout(out):
            assert main(["rl", str(RECIPE), *SMALL]) == 0
        seconds = time.monotonic() - began
        folder = (place / "runs" / "guess_number" / "latest").resolve()
        yield Finished(place=place, folder=folder, printed=out.getvalue(), seconds=seconds)


def test_the_run_folder_is_stamped_below_the_current_directory_and_latest_names_it(finished: Finished):
    latest = finished.place / "runs" / "guess_number" / "latest"
    assert latest.is_symlink()
    assert not os.path.isabs(os.readlink(latest))
    assert [p.name for p in finished.place.iterdir()] == ["runs"]
    (only,) = [p for p in latest.parent.iterdir() if not p.is_symlink()]
    assert only.resolve() == finished.folder
    time.strptime(only.name, "%Y%m%d-%H%M%S")
    assert f"runs/guess_number/{only.name}" in finished.printed


def test_the_run_folder_holds_what_the_documentation_lists(finished: Finished):
    section = CONFIGURATION.read_text().partition("## The run folder")[2]
    listed = re.findall(r"^([\w.]+/?)(?: |$)", section.split("```")[1], re.MULTILINE)
    assert {"config.toml", "metrics.jsonl", "trajectories/", "final/"} <= set(listed)
    assert [name for name in listed if not (finished.folder / name).exists()] == []
    undocumented = {p.name for p in finished.folder.iterdir()} - {name.rstrip("/") for name in listed}
    assert undocumented <= {"orchestrator.lock", "trainer.lock", "warm_start"}


def test_the_stored_configuration_is_the_one_that_was_run(finished: Finished):
    tables = component_tables()
    asked = load_config(RECIPE, SMALL, tables).model_copy(update={"name": "guess_number"})  # the file's own name
    assert load_config(finished.folder / "config.toml", tables=tables) == asked


def test_metrics_have_one_line_per_step_and_evaluations_before_during_and_after(finished: Finished):
    order = [(line["kind"], line["step"]) for line in lines(finished.folder / "metrics.jsonl")]
    assert order == [("eval", 0), ("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("eval", 3)]


def test_every_step_reports_what_a_person_looks_for(finished: Finished):
    for line in train_lines(finished.folder):
        metrics = line["metrics"]
        assert metrics["rollouts"] == BATCH
        assert metrics["policy_version"] == line["step"]
        assert 0 <= metrics["success"] <= 1
        assert 1 <= metrics["turns"] <= 16  # max_turns: a call that cannot be read costs no guess
        for name in ("reward/mean", "tool_calls", "valid_format", "sampler/tokens_per_second", "tokens_per_second"):
            assert math.isfinite(metrics[name])
        if metrics["trained_tokens"]:
            assert metrics["grad_norm"] > 0
            assert abs(metrics["mismatch_kl"]) < 1e-3
            assert metrics["entropy"] > 0


def test_every_evaluation_has_the_same_number_of_episodes_for_every_secret(finished: Finished):
    for line in lines(finished.folder / "metrics.jsonl"):
        if line["kind"] == "eval":
            assert (line["env"], line["metrics"]["episodes"], line["metrics"]["failed"]) == ("guess_number", SECRETS, 0)


def test_every_trajectory_reads_back_with_ids_logprobs_and_the_version_that_sampled_it(finished: Finished):
    read = list(read_trajectories(finished.folder))
    assert [step for step, _ in read] == [step for step in (1, 2, 3) for _ in range(BATCH)]
    assert len({t.trajectory_id for _, t in read}) == STEPS * BATCH
    for step, trajectory in read:
        assert trajectory.error is None
        assert trajectory.reward in (0.0, 1.0)
        for turn in trajectory.turns:
            assert len(turn.logprobs) == len(turn.policy_versions) == len(turn.completion_ids) > 0
            assert max(turn.logprobs) <= 0
            # max_async_level = 1: rollouts of batch n = step - 1 start with version n - 1 or newer.
            assert set(turn.policy_versions.tolist()) <= {max(0, step - 2), step - 1}
    groups = groupby(read, key=lambda pair: pair[1].group_id)
    assert [len({t.example_id for _, t in group}) for _, group in groups] == [1] * (STEPS * 2)


def test_a_turns_prompt_is_the_turn_before_it_verbatim_and_what_was_answered(finished: Finished):
    followed = 0
    for _, trajectory in read_trajectories(finished.folder):
        for before, after in zip(trajectory.turns, trajectory.turns[1:], strict=False):
            context = [*before.prompt_ids.tolist(), *before.completion_ids.tolist()]
            assert after.prompt_ids.tolist()[: len(context)] == context
            followed += 1
    assert followed > 0


def test_the_ledger_agrees_with_the_trajectories_in_the_file(finished: Finished):
    """Groups whose rewards are all equal teach nothing and are filtered; every other sampled token is trained."""
    last = assert_ledger_adds_up(finished.folder)
    groups: dict[str, list] = {}
    for trajectory in trajectory_lines(finished.folder):
        groups.setdefault(trajectory["group_id"], []).append(trajectory)
    mixed = [group for group in groups.values() if len({t["reward"] for t in group}) == 2]
    assert last["ledger/trained"] == sum(num_sampled(t) for group in mixed for t in group)
    assert last["ledger/pending"] == 0


def test_the_outcome_of_every_token_is_in_the_files_with_what_the_trainer_said_of_it(finished: Finished):
    """The mismatch KL, mean(w - log w - 1) with w = exp(trainer - sampler), is worked out again from the files."""
    kept = list(read_outcomes(finished.folder / "trajectories"))
    totals: Counter[str] = Counter()
    for _, outcome in kept:
        totals.update(outcome.num_tokens)
    assert totals.pop("trained") == train_lines(finished.folder)[-1]["metrics"]["ledger/trained"]
    assert set(totals) <= {"filter:zero_advantage"}
    for line in train_lines(finished.folder):
        turns = [
            found
            for step, outcome in kept
            if step == line["step"] and outcome.trainer_logprobs
            for found in zip(
                outcome.turns, outcome.trajectory.turns, outcome.trainer_logprobs, outcome.gradients, strict=True
            )
        ]
        assert all((logprobs is None) == (name != "trained") for name, _, logprobs, _ in turns)
        trained = [(turn.logprobs, logprobs) for name, turn, logprobs, _ in turns if name == "trained"]
        if not trained:
            continue
        sampler, trainer = (np.concatenate(arrays).astype(np.float64) for arrays in zip(*trained, strict=True))
        ahead = trainer - sampler
        assert (np.expm1(ahead) - ahead).mean() == pytest.approx(line["metrics"]["mismatch_kl"], rel=1e-3, abs=1e-9)
        gradients = np.concatenate([found for *_, found in turns if found is not None])
        assert np.isfinite(gradients).all() and gradients.any()


def test_the_summary_says_what_was_measured(finished: Finished):
    summary = read_json(finished.folder / "summary.json")
    assert set(summary) == {
        "format",
        "success_before_rl",
        "valid_format_before_rl",
        "success_after_rl",
        "success_best_constant_policy",
        "seconds",
        "steps",
        "rollouts",
        "failed_rollouts",
        "sampled_tokens",
        "trained_tokens",
        "gain",
        "gain_interval_95",
        "evaluated_examples",
        "evaluated_episodes",
    }
    evals = {m["step"]: m["metrics"] for m in lines(finished.folder / "metrics.jsonl") if m["kind"] == "eval"}
    assert summary["success_before_rl"] == evals[0]["success"]
    assert summary["valid_format_before_rl"] == evals[0]["valid_format"]
    assert summary["success_after_rl"] == evals[3]["success"]
    assert (summary["evaluated_examples"], summary["evaluated_episodes"]) == (SECRETS, SECRETS)
    assert summary["success_best_constant_policy"] == pytest.approx(4 / 15)
    assert (summary["steps"], summary["rollouts"], summary["failed_rollouts"]) == (STEPS, STEPS * BATCH, 0)
    assert summary["sampled_tokens"] == sum(map(num_sampled, trajectory_lines(finished.folder)))
    assert summary["trained_tokens"] == train_lines(finished.folder)[-1]["metrics"]["ledger/trained"]
    assert 0 < summary["seconds"] < finished.seconds


def test_the_report_ends_what_is_printed_and_is_kept(finished: Finished):
    kept = (finished.folder / "summary.txt").read_text()
    for part in (
        "guess_number: learning curve",
        "one episode before and after: guess_number",
        "before (step 0)",
        "after (step 3)",
        "success_after_rl",
    ):
        assert part in kept and part in finished.printed
    evaluated = list(read_trajectories(finished.folder / "evaluations"))
    assert [step for step, _ in evaluated] == [step for step in (0, 2, 3) for _ in range(SECRETS)]
    seeds = [{(t.example_id, t.seed) for step, t in evaluated if step == at} for at in (0, 2, 3)]
    assert len(seeds[0]) == SECRETS and seeds[0] == seeds[1] == seeds[2]


def test_the_learning_curve_is_a_png(finished: Finished):
    data = (finished.folder / "learning_curve.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (960, 540)
    assert data[-8:-4] == b"IEND"


def test_the_trained_model_loads_with_transformers_alone_and_is_the_last_checkpoint(finished: Finished):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = finished.folder / "final"
    model = AutoModelForCausalLM.from_pretrained(final)
    tokenizer = AutoTokenizer.from_pretrained(final)
    messages = [{"role": "user", "content": "go"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode(text)])).logits
    assert logits.isfinite().all()
    assert logits.shape[-1] == len(tokenizer)
    last = finished.folder / "checkpoints" / "step_000003" / "weights"
    assert (last / "model.safetensors").read_bytes() == (final / "model.safetensors").read_bytes()


def test_the_trained_model_is_measured_by_eval(finished: Finished, capsys, tmp_path: Path):
    out = tmp_path / "episodes.jsonl"
    assert main(["eval", str(RECIPE), *SMALL, "--model", str(finished.folder / "final"), "--out", str(out)]) == 0
    played = [trajectory for _, trajectory in read_trajectories(out)]
    assert sorted(t.example_id for t in played) == sorted(f"secret-{n}" for n in range(1, SECRETS + 1))
    after = lines(finished.folder / "metrics.jsonl")[-1]["metrics"]["success"]
    # The same weights and seeds, but decoded in batches of other make-up: a token may fall differently.
    assert sum(t.reward for t in played) / SECRETS == pytest.approx(after, abs=0.2)
    assert "success  " in capsys.readouterr().out


# ---- stopped and resumed

MODULES = {
    "lots": LOTS,
    "held": '''
import asyncio
from pathlib import Path

from lots import Lots


class Held(Lots):
    """Half-way through the run no more episodes begin while the file `hold` is there: it cannot end before a test has
    looked."""

    num_started = 0

    async def start(self, example, seed):
        self.num_started += 1
        while self.num_started > 40 and Path("hold").exists():
            await asyncio.sleep(0.01)
        return await super().start(example, seed)
''',
    "stopping": '''
import os
import signal

from lots import Lots


class Stopping(Lots):
    """Types Ctrl-C when its tenth episode starts: in the second batch."""

    started = 0

    async def start(self, example, seed):
        Stopping.started += 1
        if Stopping.started == 10:
            os.kill(os.getpid(), signal.SIGINT)
        return await super().start(example, seed)
''',
    "leaving": '''
import sys

from lots import Lot, Lots


class Leaving(Lot):
    @property
    def info(self):
        return {"seen": {1, 2}} if self.reward < 0.2 else {}

    async def score(self, trajectory):
        if self.reward > 0.8:
            sys.exit(0)
        if self.reward > 0.6:
            raise ValueError("\\x1b]0;owned\\x07 [/red]")
        return self.reward


class Leavings(Lots):
    """A fifth of its episodes fail in each of three ways."""

    async def start(self, example, seed):
        return Leaving(seed)
''',
    "impatient": '''
import os
import signal

from verbatim.environments.guess_number import GuessNumber


class Impatient(GuessNumber):
    """Types Ctrl-C when the warm start asks for conversations, once."""

    interruptions = 1

    def demonstrations(self, count, seed):
        if os.path.exists("impatient/config.toml") and Impatient.interruptions:  # the checks before the run are over
            Impatient.interruptions -= 1
            os.kill(os.getpid(), signal.SIGINT)
        return super().demonstrations(count, seed)
''',
}
RESUMABLE = """
[checkpoint]
interval = 2
"""
LONG = 10
"""Batches: far more than are trained between two looks at the metrics."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("run") / "model")


@pytest.fixture(scope="module")
def place(tmp_path_factory, model: Path) -> Iterator[Path]:
    """`run.toml` trains deterministically; `stopping.toml` is stopped in its second batch."""
    with workplace(tmp_path_factory.mktemp("resume"), MODULES) as folder:
        text = TOML.format(model=model)
        long = text.replace("max_steps = 2", f"max_steps = {LONG}")
        long = long.replace("[inference.torch]", "[inference.torch]\ndeterministic = true")
        (folder / "run.toml").write_text(long + 'import_path = "held.Held"' + RESUMABLE)
        (folder / "stopping.toml").write_text(text + 'import_path = "stopping.Stopping"\n')
        (folder / "impatient.toml").write_text(
            text + 'import_path = "impatient.Impatient"\n[warm_start]\nsteps = 2\nconversations = 20\n'
        )
        (folder / "leaving.toml").write_text(text + 'import_path = "leaving.Leavings"\n')
        yield folder


@pytest.fixture(scope="module")
def unstopped(place: Path) -> Path:
    """What the stopped ones must come to."""
    assert main(["rl", "run.toml", "--run-dir", "unstopped"]) == 0
    return place / "unstopped"


@contextlib.contextmanager
def process(place: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`verbatim ...` in a process of its own, which does not outlive the block."""
    running = subprocess.Popen(
        [sys.executable, "-m", "verbatim.cli", *arguments],
        cwd=place,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


@contextlib.contextmanager
def held(place: Path) -> Iterator[None]:
    """No run comes to its end meanwhile."""
    (place / "hold").touch()
    try:
        yield
    finally:
        (place / "hold").unlink()


def wait_for_step(running: subprocess.Popen[str], metrics: Path, step: int) -> None:
    """Until the metrics have the line of this step."""
    line = f'"step": {step}, "kind": "train"'
    wait_until(lambda: running.poll() is not None or (metrics.exists() and line in metrics.read_text()))
    assert running.poll() is None, f"ended with {running.returncode}: {running.communicate()}"


def command_to_go_on(printed: str) -> list[str]:
    """The arguments of the one command that a run says it can be continued with."""
    (line,) = [line for line in printed.splitlines() if "to continue:" in line]
    command = shlex.split(line.partition("to continue:")[2])
    assert command[0] == "verbatim"
    assert "--resume" in command
    return command[1:]


def assert_same_run(resumed: Path, unstopped: Path) -> None:
    """The same weights to the bit, and every step and trajectory once."""
    for name in ("final/model.safetensors", f"checkpoints/step_{LONG:06d}/trainer/optimizer.safetensors"):
        assert (resumed / name).read_bytes() == (unstopped / name).read_bytes()
    assert [line["step"] for line in train_lines(resumed)] == list(range(1, LONG + 1))
    mine, theirs = trajectory_lines(resumed), trajectory_lines(unstopped)
    said = [[turn["completion_ids"] for turn in t["turns"]] for t in mine]
    assert said == [[turn["completion_ids"] for turn in t["turns"]] for t in theirs]
    assert [t["trajectory_id"] for t in mine] == [t["trajectory_id"] for t in theirs]
    assert_ledger_adds_up(resumed)
    assert read_json(resumed / "summary.json")["steps"] == LONG


def test_the_unstopped_run_learns_something(unstopped: Path, model: Path):
    """Otherwise the tests below would compare weights that nothing ever changed."""
    assert (unstopped / "final" / "model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()
    assert all(line["metrics"]["grad_norm"] > 0 for line in train_lines(unstopped))


def test_a_run_stopped_by_ctrl_c_ends_with_the_weights_of_an_unstopped_one(place: Path, unstopped: Path):
    with held(place), process(place, "rl", "run.toml", "--run-dir", "stopped") as running:
        wait_for_step(running, place / "stopped" / "metrics.jsonl", 1)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=HANGS)
    assert running.returncode == 130
    assert "Traceback" not in out + err
    done = len(train_lines(place / "stopped"))
    assert 1 <= done < LONG
    assert (place / "stopped" / "checkpoints" / f"step_{done:06d}" / "manifest.json").is_file()
    assert not (place / "stopped" / "final").exists()
    assert main(command_to_go_on(out)) == 0
    assert_same_run(place / "stopped", unstopped)


def test_a_run_that_was_killed_ends_with_the_weights_of_an_unstopped_one(place: Path, unstopped: Path):
    """Killed after its third step, with a checkpoint after the second: the third is trained again."""
    with held(place), process(place, "rl", "run.toml", "--run-dir", "killed") as running:
        wait_for_step(running, place / "killed" / "metrics.jsonl", 3)
        running.kill()
        assert running.wait(timeout=HANGS) == -signal.SIGKILL
    lines = (place / "killed" / "metrics.jsonl").read_text()
    assert lines.count('"kind": "train"') < LONG  # the last one may be half a line
    assert main(["rl", "run.toml", "--run-dir", "killed", "--resume"]) == 0
    assert_same_run(place / "killed", unstopped)


def test_the_command_that_a_stopped_run_prints_continues_the_same_run(place: Path, capsys):
    """Options that were typed are part of the run: without them the printed command would continue another one."""
    typed = ["rl", "stopping.toml", "--run-dir", "typed", "--max-steps", "5", "--trainer.optim.lr", "0.003"]
    assert main(typed) == 130
    again = command_to_go_on(capsys.readouterr().out)
    before = (place / "typed" / "config.toml").read_text()
    assert len(train_lines(place / "typed")) < 5
    assert main(again) == 0
    assert [line["step"] for line in train_lines(place / "typed")] == [1, 2, 3, 4, 5]
    assert "stopping: results" in capsys.readouterr().out
    assert (place / "typed" / "config.toml").read_text() == before
    assert_ledger_adds_up(place / "typed")


def test_ctrl_c_while_the_model_is_prepared_ends_a_run_that_can_be_continued(place: Path, capsys):
    assert main(["rl", "impatient.toml", "--run-dir", "impatient"]) == 130
    said = capsys.readouterr()
    assert "Traceback" not in said.out + said.err
    assert not (place / "impatient" / "metrics.jsonl").exists()
    assert main(command_to_go_on(said.out)) == NOTHING_TRAINED  # after two steps of warm start every reward is 0
    assert [line["step"] for line in train_lines(place / "impatient")] == [1, 2]
    assert_ledger_adds_up(place / "impatient")


def test_an_environment_that_exits_and_one_that_writes_to_the_terminal_fail_episodes_and_the_run_goes_on(
    place: Path, capsys
):
    """In a folder whose name reads like markup."""
    assert main(["rl", "leaving.toml", "--run-dir", "m[/red]"]) == 0
    run = place / "m[/red]"
    summary = read_json(run / "summary.json")
    assert summary["steps"] == 2
    logged = [t for _, t in read_trajectories(run)]
    assert len(logged) == summary["rollouts"]
    failed = [t for t in logged if t.error]
    assert len(failed) == summary["failed_rollouts"] < summary["rollouts"]
    assert {t.error for t in failed} == {
        "environment: score raised SystemExit: 0",
        "environment: score raised ValueError: \x1b]0;owned\x07 [/red]",
        "environment: info is not JSON: ['seen'] is a set; expected texts, numbers, booleans, None, lists and mappings",
    }
    out, err = capsys.readouterr()
    written = out + err + (run / "logs" / "orchestrator.log").read_text()
    assert "\x1b" not in written
    assert "\\x1b]0;owned\\x07 [/red]" in written
    assert "m[/red]" in out
