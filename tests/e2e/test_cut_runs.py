"""A run that samples from a cut distribution trains on that distribution."""

from __future__ import annotations

import pytest

from e2e.tiny_runs import LOTS, TOML, assert_ledger_adds_up, build_tiny_model, train_lines, workplace
from inference.vllm.double_server import fake_python
from verbatim.cli.exit_status import FINISHED
from verbatim.cli.main import main
from verbatim.logs.monitors.trajectory_log import read_trajectories

SETTINGS = {
    "top_k": "top_k = 20",
    "top_p": "top_p = 0.8",
    "min_p": "min_p = 0.5",
    "all": "top_k = 9, top_p = 0.9, min_p = 0.1",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with workplace(tmp_path_factory.mktemp("cut"), {"lots": LOTS}) as folder:
        model = build_tiny_model(folder / "model")
        (folder / "run.toml").write_text(TOML.format(model=model) + 'import_path = "lots.Lots"\n')
        yield folder


def run(name, sampling, *options):
    given = ["--run-dir", name, "--orchestrator.sampling", f"{{ max_tokens = 8, temperature = 0.7, {sampling} }}"]
    return main(["rl", "run.toml", *given, *options])


@pytest.mark.slow
@pytest.mark.realtime
@pytest.mark.parametrize("name", SETTINGS)
def test_sampler_and_trainer_agree_on_tokens_of_a_cut_distribution(place, name):
    assert run(name, SETTINGS[name]) == FINISHED
    lines = train_lines(place / name)
    for line in lines:
        metrics = line["metrics"]
        assert abs(metrics["mismatch_kl"]) < 1e-8
        assert metrics["importance_ratio_mean"] == pytest.approx(1, abs=5e-5)
        assert metrics["kept_ids/cut"] > 0.5 and "truncation_mismatch" not in metrics
    assert_ledger_adds_up(place / name)
    kept = [turn.kept_sets for _, trajectory in read_trajectories(place / name) for turn in trajectory.turns]
    assert all(sets is not None for sets in kept) and len(kept) > 0
    assert max(int(sets.counts.max()) for sets in kept) >= lines[0]["metrics"]["kept_ids/max"] > 1


@pytest.mark.slow
@pytest.mark.realtime
def test_logprobs_of_the_whole_vocabulary_are_a_bias_that_is_named(place):
    assert run("biased", "top_p = 0.8, accept_truncation_mismatch = true") == FINISHED
    for line in train_lines(place / "biased"):
        assert line["metrics"]["mismatch_kl"] > 0.005 and line["metrics"]["truncation_mismatch"] == 1
        assert line["metrics"]["importance_ratio_mean"] < 0.9
        assert not any(name.startswith("kept_ids") for name in line["metrics"])


@pytest.mark.slow
@pytest.mark.realtime
def test_a_teacher_that_is_loaded_here_scores_over_the_same_sets(place):
    """The policy's own weights as its teacher: before the first update the two agree on every token."""
    teacher = f'{{ model = "{place / "model"}", device = "cpu" }}'
    assert (
        run("taught", "top_p = 0.8", "--orchestrator.training-mode", "opd", "--orchestrator.teacher", teacher)
        == FINISHED
    )
    first = train_lines(place / "taught")[0]["metrics"]
    assert abs(first["teacher_kl"]) < 1e-5 and first["kept_ids/cut"] > 0.5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--inference.backend", "vllm"],
            "orchestrator.sampling.top_k = 0, and this run trains on a cut distribution (top_p, top_k or min_p): a "
            "vLLM server that returns kept sets refuses requests without top_k, which bounds their size; set top_k "
            "= 512",
        ),
        (
            [
                *("--orchestrator.training-mode", "opd"),
                *("--orchestrator.teacher", '{ model = "m", base_url = "http://127.0.0.1:1/v1" }'),
                *("--orchestrator.sampling", "{ top_p = 0.8 }"),
            ],
            "orchestrator.teacher.base_url returns logprobs of the full distribution",
        ),
    ],
)
def test_where_kept_sets_cannot_be_had_the_run_is_refused_by_name(place, capsys, options, said):
    assert run("refused", "top_p = 0.8", *options) not in (FINISHED, None)
    printed = " ".join(capsys.readouterr().err.split())
    assert said in printed and "accept_truncation_mismatch = true" in printed


@pytest.mark.slow
@pytest.mark.realtime
def test_a_replay_trains_over_the_stored_sets(place, capsys):
    assert run("replayed", SETTINGS["all"], "--checkpoint.interval", "1") == FINISHED
    capsys.readouterr()
    assert main(["rl", "--replay", "2", "--run-dir", "replayed"]) == FINISHED
    printed = " ".join(capsys.readouterr().out.split())
    assert "step 2 replays bit for bit" in printed


ENVS = """\
import_path = "lots.Lots"
name = "few"
sampling = { max_tokens = 8, top_k = 3 }
[[orchestrator.train.env]]
import_path = "lots.Lots"
name = "many"
sampling = { max_tokens = 8, top_p = 0.95, top_k = 100, temperature = 1.3 }
[[orchestrator.train.env]]
import_path = "lots.Lots"
name = "rest"
"""


def kept_by_env(folder):
    """The sizes of all kept sets, by environment."""
    found = {}
    for _, trajectory in read_trajectories(folder):
        for turn in trajectory.turns:
            sizes = found.setdefault(trajectory.env, [])
            sizes += [] if turn.kept_sets is None else turn.kept_sets.counts.tolist()
    return found


@pytest.mark.slow
@pytest.mark.realtime
def test_environments_cut_as_they_say_and_are_trained_in_one_batch(place):
    settings = TOML.replace("batch_size = 8", "batch_size = 24").format(model=place / "model")
    (place / "envs.toml").write_text(settings + ENVS)
    assert main(["rl", "envs.toml", "--run-dir", "envs"]) == FINISHED
    for line in train_lines(place / "envs"):
        assert abs(line["metrics"]["mismatch_kl"]) < 1e-8 and 0.3 < line["metrics"]["kept_ids/cut"] < 0.9
    assert_ledger_adds_up(place / "envs")
    found = kept_by_env(place / "envs")
    assert set(found["few"]) == {3} and 3 < max(found["many"]) <= 100 and found["rest"] == []


@pytest.mark.slow
@pytest.mark.realtime
def test_a_run_over_vllm_trains_over_the_sets_that_its_servers_kept(place, tmp_path):
    """Servers that the run starts with what kept sets need; greedy evaluations ask them too."""
    servers = f'[inference]\nbackend = "vllm"\n[inference.vllm]\npython = "{fake_python(tmp_path, warm=True)}"\n'
    settings = TOML.format(model=place / "model").replace("[inference.torch]\nmax_batch_size = 8\n", servers)
    greedy = '[[orchestrator.eval.env]]\nimport_path = "lots.Lots"\nsampling = { max_tokens = 8, temperature = 0.0 }\n'
    envs = ENVS + "sampling = { max_tokens = 8, min_p = 0.2, top_k = 50 }\n[orchestrator.eval]\nepisodes = 2\n" + greedy
    (place / "vllm.toml").write_text(settings.replace("batch_size = 8", "batch_size = 24") + envs)
    assert main(["rl", "vllm.toml", "--run-dir", "vllm"]) == FINISHED
    for line in train_lines(place / "vllm"):
        assert abs(line["metrics"]["mismatch_kl"]) < 1e-8 and line["metrics"]["kept_ids/cut"] == 1
        assert line["metrics"]["rollouts/failed"] == 0
    assert_ledger_adds_up(place / "vllm")
    found = kept_by_env(place / "vllm")
    assert set(found["few"]) == {3} and 3 < max(found["many"]) <= 100 and 1 < max(found["rest"]) <= 50
