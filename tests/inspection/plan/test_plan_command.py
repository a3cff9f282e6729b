"""`verbatim plan`: what it prints, its exit status, and what it refuses."""

import contextlib
import io
import json

import pytest
from plan_helpers import write_model

from verbatim.cli.main import main
from verbatim.inspection.plan.predict import UTILISATION

FILE = """\
[model]
name = "{model}"
[orchestrator]
batch_size = 8
group_size = 4
seq_len = {seq_len}
max_async_level = {level}
sampling = {{ max_tokens = 64 }}
[[orchestrator.train.env]]
id = "guess_number"
max_turns = 2
[trainer]
dtype = "bfloat16"
{trainer}
[inference]
backend = "vllm"
[inference.vllm]
dtype = "bfloat16"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder without weights: one layer of width 64."""
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder, hidden_size=64, layers=1, vocab_size=1000, weights=False)


@pytest.fixture(scope="module")
def file(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("files")

    def write(*, seq_len=256, level=1, trainer=""):
        path = folder / "run.toml"
        path.write_text(FILE.format(model=model, seq_len=seq_len, level=level, trainer=trainer))
        return str(path)

    return write


def planned(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        status = main(["plan", *arguments, "--json"])
    return status, json.loads(said.getvalue())


@pytest.fixture(scope="module")
def usual(file):
    """The exit status and the plan of the file as it stands."""
    return planned(file(), "--gpu", "h100")


@pytest.mark.slow
def test_a_folder_without_weights_is_planned_for(usual):
    status, plan = usual
    parameters = 1000 * 64 + (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 192 + 2 * 64 + 2 * 16) + 64
    assert status == 0 and plan["fits"] is True
    assert plan["parameters"] == plan["trained_parameters"] == parameters
    frequencies = 2 * 4 * 8  # of positions, as used and as made
    assert plan["memory"]["parts"]["weights"] == 4 * parameters + frequencies
    tensors = 1 + 11 + 1
    assert plan["memory"]["parts"]["optimizer"] == 8 * parameters + 4 * tensors  # two moments; a count for each tensor
    assert plan["update_bytes"] == 4 * parameters
    assert plan["batch"]["rollouts"] == 8 and plan["batch"]["sampled_tokens"] == 8 * 128
    assert plan["devices"] == 2  # one for the server


@pytest.mark.slow
def test_gpus_that_the_sampler_leaves_are_the_trainers(file, usual):
    _, plan = planned(file(), "--gpu", "h100", "--gpus", "5")
    assert plan["processes"] == 4
    _, one = usual
    assert plan["memory"]["parts"]["optimizer"] < one["memory"]["parts"]["optimizer"] / 3.5


@pytest.mark.slow
def test_a_step_takes_both_sides_in_turns_or_the_slower_one(file, usual):
    _, plan = usual
    trainer, sampler = plan["trainer"]["seconds"], plan["sampler"]["seconds"]
    assert plan["seconds"]["step"] == max(trainer, sampler)
    assert plan["seconds"]["trainer_waits"] == max(0, sampler - trainer)
    _, plan = planned(file(level=0), "--gpu", "h100")
    assert plan["seconds"]["step"] == plan["trainer"]["seconds"] + plan["sampler"]["seconds"]


@pytest.mark.slow
def test_twice_the_utilisation_is_half_of_the_time(file, usual):
    _, twice = planned(file(), "--gpu", "h100", "--utilisation", str(2 * UTILISATION))
    seconds = [plan["trainer"]["compute_seconds"] for plan in (usual[1], twice)]
    assert seconds[0] == pytest.approx(2 * seconds[1])


@pytest.mark.slow
def test_people_read_what_was_assumed_and_whether_it_fits(file, capsys):
    assert main(["plan", file(), "--gpu", "l40s"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "1 process on l40s, bfloat16, tree, 1 micro-batch of up to" in words
    assert "assumed: each of 8 rollouts has orchestrator.seq_len = 256 tokens, a prompt of 128" in words
    assert "it fits: 0.0" in words


@pytest.mark.slow
def test_compiled_layers_are_said_to_be_measured_as_others(file, capsys):
    assert main(["plan", file(trainer="compile = true"), "--gpu", "h100"]) == 0
    assert "measured as if its layers were not compiled" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_what_does_not_fit_says_what_to_change(file):
    status, plan = planned(file(seq_len=2048), "--gpu", "4090", "--memory-share", "0.001")
    assert "micro-batches of about" in plan["problem"]
    needed = {change["typed"]: change["needed"] for change in plan["changes"]}
    assert status == 1
    assert needed["--trainer.gradient-checkpointing true"] < plan["memory"]["needed"]
    assert needed["--orchestrator.seq-len 1024"] < plan["memory"]["needed"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "h1000"], "--gpu h1000: this device is unknown; expected one of 4090, a100-40"),
        (["--gpu", "h100", "--gpus", "1"], "--gpus 1, but the file requests 2"),
        (["--gpu", "h100", "--from-run", "nowhere"], "--from-run nowhere: there is no folder trajectories"),
        (
            ["--gpu", "h100", "--gpus", "400"],
            "399 processes (trainer.parallel.processes), but the largest parameter of a layer has only 192 rows",
        ),
    ],
    ids=["gpu", "too few", "run", "too many"],
)
def test_bad_input_is_refused(file, capsys, arguments, said):
    assert main(["plan", file(), *arguments]) == 2
    assert said in capsys.readouterr().err
