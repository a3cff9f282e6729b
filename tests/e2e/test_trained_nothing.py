"""A run that learns from no token says so, says why, and ends with a status of its own; what fails is said at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from e2e.tiny_runs import TOML, assert_ledger_adds_up, build_tiny_model, train_lines, workplace
from verbatim.cli import exit_status
from verbatim.cli.exit_status import FINISHED, NOTHING_TRAINED, STOPPED, USAGE
from verbatim.cli.main import main
from verbatim.logs.checkpoints import read_json
from verbatim.logs.monitors.metric_table import about
from verbatim.logs.monitors.trajectory_log import read_trajectories

SILENT = '''
from verbatim import Example
from verbatim.environments import Episode


class Said(Episode):
    messages = ({"role": "user", "content": "go"},)

    def __init__(self, environment, example, seed):
        self.environment, self.example, self.seed = environment, example, seed

    async def score(self, trajectory):
        return self.environment.score(self.example, self.seed)


class Fails:
    """Raises on the share of the seeds that is given."""

    def __init__(self, share: float = 1.0):
        self.share = share

    def examples(self, split):
        return [Example(id=f"e{n}", payload={"number": n}) for n in range(5)]

    async def start(self, example, seed):
        return Said(self, example, seed)

    def score(self, example, seed):
        if seed % 1000 < 1000 * self.share:
            raise LookupError(f"no answer to question {seed}")
        return seed % 100 / 100


class Flat(Fails):
    def score(self, example, seed):
        return 0.25


class Unscored(Fails):
    def score(self, example, seed):
        return None


class Texts(Fails):
    def score(self, example, seed):
        return "1"


class Parts(Fails):
    def score(self, example, seed):
        return {"right": float(seed % 2), "short": 0.25}
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with workplace(tmp_path_factory.mktemp("silent"), {"silent": SILENT}) as folder:
        model = build_tiny_model(folder / "model")
        (folder / "run.toml").write_text(TOML.format(model=model) + 'import_path = "silent.Fails"\n')
        yield folder


@pytest.fixture
def run(place, capsys, request):
    """Runs with an environment and options: the status, what was printed and logged as one line, the run's folder."""

    def go(environment, *options):
        folder = f"{request.node.name}-{environment}-{len(options)}"
        status = main(
            [
                "rl",
                "run.toml",
                "--orchestrator.train.env.0.import-path",
                f"silent.{environment}",
                "--run-dir",
                folder,
                *options,
            ]
        )
        printed = capsys.readouterr()
        file = place / folder / "logs" / "orchestrator.log"  # none where the run was refused
        log = file.read_text() if file.exists() else ""
        return status, " ".join((printed.out + printed.err + log).split()), place / folder

    return go


@pytest.mark.slow
def test_one_batch_in_which_every_rollout_failed(run):
    status, printed, folder = run("Fails", "--max-steps", "1")
    assert status == NOTHING_TRAINED == 3
    assert "trained nothing: in 1 step no token was trained." in printed
    assert re.search(r"of (\d+) sampled tokens: \1 error", printed)
    assert "8 of 8 train episodes failed: 8 x environment: score raised LookupError" in printed
    assert "trained model" not in printed and not (folder / "final").exists()
    assert_ledger_adds_up(folder)
    summary = read_json(folder / "summary.json")
    assert (summary["rollouts"], summary["failed_rollouts"], summary["trained_tokens"]) == (8, 8, 0)


@pytest.mark.slow
def test_a_run_that_goes_on_failing_stops(run):
    status, printed, _ = run("Fails", "--max-steps", "9")
    assert status == STOPPED == 1
    assert "every rollout of the last" in printed


@pytest.mark.slow
def test_the_first_failure_of_a_kind_is_in_the_log_at_once_with_its_example_and_where_it_was_raised(run):
    status, printed, folder = run("Fails", "--orchestrator.train.env.0.args", "{ share = 0.5 }", "--max-steps", "3")
    assert status == FINISHED == 0
    log = (folder / "logs" / "orchestrator.log").read_text()
    (first,) = [line for line in log.splitlines() if "score raised LookupError: no answer to question" in line]
    assert re.search(r"WARNING train episode train-\d+-\d of environment 'silent.Fails', example 'e\d':", first)
    assert 'silent.py", line' in log and "raise LookupError" in log  # the traceback's tail
    steps = [line["metrics"] for line in train_lines(folder)]
    failed = sum(metrics["rollouts/failed"] for metrics in steps)
    assert 0 < failed < 24
    assert [metrics["rollouts/failed_share"] for metrics in steps] == [m["rollouts/failed"] / 8 for m in steps]
    assert f"{failed} of 24 train episodes failed: {failed} x environment: score raised LookupError" in printed
    assert read_json(folder / "summary.json")["failed_rollouts"] == failed
    assert re.search(r"step reward success failed turns", printed)


@pytest.mark.slow
def test_rewards_that_are_all_equal(run):
    status, printed, folder = run("Flat")
    assert status == NOTHING_TRAINED
    assert re.search(r"of (\d+) sampled tokens: \1 filter:zero_advantage", printed)
    assert "the rewards of each group were equal" in printed
    for line in train_lines(folder):
        assert (line["metrics"]["reward/mean"], line["metrics"]["reward/std"]) == (0.25, 0.0)


@pytest.mark.slow
def test_a_run_that_trained_nothing_says_so_again_when_it_is_resumed(run, place, capsys):
    _, _, folder = run("Flat")
    assert (
        main(
            [
                "rl",
                "run.toml",
                "--orchestrator.train.env.0.import-path",
                "silent.Flat",
                "--run-dir",
                str(folder),
                "--resume",
            ]
        )
        == NOTHING_TRAINED
    )
    assert "the rewards of each group were equal" in " ".join(capsys.readouterr().err.split())
    assert not (folder / "final").exists()


@pytest.mark.slow
def test_advantages_that_are_all_zero_and_no_filter_that_says_so(run):
    status, printed, _ = run("Flat", "--orchestrator.filters", "[]")
    assert status == NOTHING_TRAINED
    assert re.search(r"\d+ tokens were trained, but the advantage of every one was 0: nothing was learned", printed)


@pytest.mark.slow
def test_a_teacher_that_the_loss_does_not_read_teaches_nothing(run):
    status, printed, _ = run(
        "Flat", "--orchestrator.filters", "[]", "--orchestrator.teacher", '{ model = "model" }', "--max-steps", "1"
    )
    assert status == NOTHING_TRAINED
    assert "the advantage of every one was 0: nothing was learned" in printed


@pytest.mark.slow
@pytest.mark.parametrize(("environment", "weight"), [("Flat", 1.0), ("Flat", 0.0), ("Unscored", 0.0)])
def test_a_teacher_that_the_loss_reads_teaches_whatever_was_earned(run, environment, weight):
    """Every advantage is 0; with `adv_tau = 0` no reward is read, so that none has to be there."""
    loss = f'{{ type = "default", adv_tau = {weight}, teacher_tau = 1.0 }}'
    status, _, folder = run(
        environment, "--trainer.loss", loss, "--orchestrator.teacher", '{ model = "model" }', "--max-steps", "1"
    )
    assert status == FINISHED
    last = assert_ledger_adds_up(folder)
    assert last["ledger/trained"] == last["ledger/sampled"] > 0


@pytest.mark.slow
def test_a_context_in_which_no_turn_has_room_is_refused_before_anything_starts(run):
    status, printed, folder = run("Unscored", "--orchestrator.seq-len", "2", "--max-steps", "1")
    assert (status, folder.exists()) == (USAGE, False)
    assert "examples leave no room in seq_len = 2, tools included: " in " ".join(printed.split())


@pytest.mark.slow
def test_a_score_that_is_a_text_is_refused_with_what_to_write(run):
    status, printed, _ = run("Texts", "--max-steps", "1")
    assert status == NOTHING_TRAINED
    assert "score returned '1'; expected a number" in printed
    assert "write float(...) around it" in printed


@pytest.mark.slow
def test_parts_of_the_reward_and_what_was_not_filtered_are_metrics_and_lines_have_a_time(run):
    _, _, folder = run("Parts")
    rewards = {}
    for step, trajectory in read_trajectories(folder):
        rewards.setdefault(step, []).append(float(trajectory.seed % 2))
    for line in train_lines(folder):
        metrics, right = line["metrics"], rewards[line["step"]]
        share = sum(right) / 8
        assert metrics["reward_part/silent.Parts/right/mean"] == pytest.approx(share)
        assert metrics["reward_part/silent.Parts/right/std"] == pytest.approx((share * (1 - share)) ** 0.5)
        assert metrics["reward_part/silent.Parts/short/mean"] == 0.25
        assert metrics["reward_part/silent.Parts/short/std"] == 0
        assert metrics["reward/silent.Parts/std"] == pytest.approx(metrics["reward_part/silent.Parts/right/std"])
        assert [metrics[f"filtered_rollouts/silent.Parts/{kind}"] for kind in ("easy", "hard", "flat")] == [0, 0, 0]
        assert "valid_format" not in metrics  # there are no tools
        assert "truncation_mismatch" not in metrics
        assert line["time"] > 1.7e9
    summary = read_json(folder / "summary.json")
    assert "valid_format_before_rl" not in summary and "success_best_constant_policy" not in summary


@pytest.mark.slow
def test_an_accepted_truncation_is_a_metric(run):
    sampling = "{ max_tokens = 8, top_p = 0.9, accept_truncation_mismatch = true }"
    never = ["--orchestrator.train.env.0.args", "{ share = 0.0 }"]
    _, _, folder = run("Fails", *never, "--orchestrator.sampling", sampling)
    assert [line["metrics"]["truncation_mismatch"] for line in train_lines(folder)] == [1.0, 1.0]


@pytest.mark.slow
def test_an_evaluation_in_which_everything_failed_is_no_success(place, capsys, caplog):
    toml = (place / "run.toml").read_text()
    (place / "eval.toml").write_text(f"{toml}\n[orchestrator.eval]\nepisodes = 5\n")
    assert main(["eval", "eval.toml"]) == STOPPED
    printed = " ".join(capsys.readouterr().err.split())
    assert "every episode failed in silent.Fails: nothing was measured" in printed
    first, summary = caplog.messages[-2:]
    assert first.startswith("eval episode eval-") and "score raised LookupError" in first
    assert summary == "5 of 5 eval episodes failed: 5 x environment: score raised LookupError"
    assert main(["eval", "eval.toml", "--orchestrator.train.env.0.import-path", "silent.Flat"]) == FINISHED


@pytest.mark.slow
def test_every_metric_of_a_run_is_documented(run):
    _, _, folder = run("Fails", "--orchestrator.train.env.0.args", "{ share = 0.3 }")
    reported = {name for line in train_lines(folder) for name in line["metrics"]}
    assert len(reported) > 50
    assert sorted(name for name in reported if about(name) is None) == []


def test_every_exit_status_is_documented():
    docs = Path(__file__).parents[2] / "docs"
    table = (docs / "reliability.md").read_text().partition("## Exit statuses")[2]
    listed = [int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)]
    assert listed == [value for name, value in vars(exit_status).items() if name.isupper()]


ADVANTAGES = """
from types import SimpleNamespace


def forgets(inputs):
    sum(inputs.rewards)


def too_few(inputs):
    return SimpleNamespace(advantages=inputs.rewards[1:])
"""


@pytest.mark.parametrize(("name", "found"), [("forgets", "NoneType"), ("too_few", "1 advantages")])
@pytest.mark.parametrize("command", ["rl", "config"])
def test_an_advantage_without_a_result_is_refused_before_there_is_a_folder(place, capsys, command, name, found):
    (place / "bad_advantages.py").write_text(ADVANTAGES)
    typed = ["--orchestrator.advantage.type", f"bad_advantages.{name}", "--run-dir", "never"]
    assert main([command, "run.toml", *typed]) == exit_status.USAGE
    printed = " ".join(capsys.readouterr().err.split())
    assert f"advantage {name}, tried on two made-up rollouts: returned {found}; expected Advantage" in printed
    assert not (place / "never").exists()


LOSSES = """
def forgets(inputs):
    inputs.trainer_logprobs.sum()


def bare(inputs):
    return -inputs.trainer_logprobs.sum()
"""


@pytest.mark.parametrize(("name", "found"), [("forgets", "None"), ("bare", "a bare tensor of shape ()")])
@pytest.mark.parametrize("command", ["rl", "config"])
def test_a_loss_without_a_result_is_refused_before_there_is_a_folder(place, capsys, command, name, found):
    (place / "bad_losses.py").write_text(LOSSES)
    loss = f'{{ type = "custom", import_path = "bad_losses.{name}" }}'
    assert main([command, "run.toml", "--trainer.loss", loss, "--run-dir", "never"]) == exit_status.USAGE
    printed = " ".join(capsys.readouterr().err.split())
    assert f"trainer.loss: the loss {name} returned {found}; return LossOutputs(loss=...), with a scalar" in printed
    assert not (place / "never").exists()
