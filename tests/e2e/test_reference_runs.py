"""Whole runs with a reference: warm-started, held near the model they began with, stopped, resumed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.tiny_runs import assert_ledger_adds_up, train_lines, warm_started_workplace
from verbatim.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

STEPS = 5
REFERENCE = """
[trainer.loss]
kl_ref_tau = 0.1
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Iterator[Path]:
    """`run.toml` builds a model, trains it on conversations, and keeps it near what it was then."""
    with warm_started_workplace(tmp_path_factory.mktemp("reference"), REFERENCE) as folder:
        yield folder


@pytest.fixture(scope="module")
def unstopped(place: Path) -> Path:
    assert main(["rl", "run.toml", "--run-dir", "unstopped", "--max-steps", str(STEPS)]) == 0
    return place / "unstopped"


def ref_kl(run: Path) -> list[float]:
    return [line["metrics"]["ref_kl"] for line in train_lines(run)]


def test_a_run_begins_at_its_reference_and_says_how_far_it_has_gone(unstopped: Path):
    """The first step trains the warm-started model itself: no distance at all."""
    first, *later = ref_kl(unstopped)
    assert first == 0.0
    assert all(value > 0 for value in later)
    assert_ledger_adds_up(unstopped)


def test_a_resumed_run_keeps_the_model_it_began_with_and_not_its_checkpoint(place: Path, unstopped: Path):
    """Bit for bit the run that never stopped; against its checkpoint the third step's distance would be 0."""
    assert main(["rl", "run.toml", "--run-dir", "short", "--max-steps", "2"]) == 0
    assert main(["rl", "run.toml", "--run-dir", "short", "--resume", "--max-steps", str(STEPS)]) == 0
    assert ref_kl(place / "short") == ref_kl(unstopped)
    assert ref_kl(place / "short")[2] > 0
    name = "final/model.safetensors"
    assert (place / "short" / name).read_bytes() == (unstopped / name).read_bytes()


def test_a_run_is_not_resumed_with_another_reference(place: Path, unstopped: Path, capsys):
    shutil.copytree(unstopped, place / "changed", symlinks=True)
    extra = ["--trainer.reference.model", str(place / "changed" / "model")]
    assert main(["rl", "run.toml", "--run-dir", "changed", "--resume", "--max-steps", "6", *extra]) != 0
    assert "the reference model of this run had other weights" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--trainer.loss.kl_ref", "k4"], "trainer.loss.kl_ref: found \"k4\", expected 'k1', 'k2' or 'k3'"),
        (["--trainer.reference.model", "no/such/model"], "trainer.reference.model: "),
        (["--trainer.reference.modle", "m"], "trainer.reference.modle"),
        (["--trainer.loss.type", "gspo", "--trainer.loss.kl_ref_tau", "-1"], "trainer.loss.kl_ref_tau: found -1"),
    ],
)
def test_a_reference_that_cannot_be_is_refused_before_a_folder_is_made(place: Path, extra, said, capsys):
    assert main(["rl", "run.toml", "--run-dir", "refused", *extra]) == 2
    found = capsys.readouterr()
    assert said in found.out + found.err
    assert not (place / "refused").exists()
