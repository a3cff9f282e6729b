"""What counts as rounding where a step was trained again: a number beside NaN or infinity never does."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from verbatim import Trajectory, Turn
from verbatim.core.trajectories import TrajectoryOutcome
from verbatim.run.replay import Replay, as_json
from verbatim.run.replay_compare import MetricDifference, TokenDifference, compare_tokens, compare_weights

LOOSE = 0.05


@pytest.mark.parametrize(
    ("stored", "replayed", "within"),
    [
        (1.0, 1.04, True),
        (1.0, 1.1, False),
        (100.0, 104.0, True),
        (math.inf, 3.0, False),
        (3.0, math.inf, False),
        (math.nan, 3.0, False),
        (math.inf, -math.inf, False),
        (math.inf, math.inf, True),
        (math.nan, math.nan, True),
    ],
)
def test_a_metric_is_the_same_up_to_rounding(stored: float, replayed: float, within: bool):
    assert MetricDifference(stored=stored, replayed=replayed).is_within(LOOSE) is within


@pytest.mark.parametrize(("stored", "replayed"), [(math.inf, 1.0), (-math.inf, math.inf), (1.0, math.nan)])
def test_a_token_beside_infinity_is_another_one(stored: float, replayed: float):
    turn = Turn(prompt_ids=[1], completion_ids=[7, 8])
    outcome = TrajectoryOutcome(
        trajectory=Trajectory(example_id="x", trajectory_id="a", turns=[turn]),
        turns=("trained",),
        trainer_logprobs=(np.zeros(2, dtype=np.float32),),
        gradients=(np.array([0.5, stored], dtype=np.float32),),
    )
    now = {("a", 0): np.array([0.5, replayed], dtype=np.float32)}
    with np.errstate(invalid="ignore"):
        found = compare_tokens([outcome], lambda outcome: outcome.gradients, now, {("a", 0): turn.completion_ids})
    assert (found.num_different, found.position, found.is_within(LOOSE)) == (1, 1, False)


def test_weights_of_which_one_became_nan_are_other_weights(tmp_path: Path):
    """The first parameter differs by rounding alone, which must not hide the second."""
    for name, a, b in (("then", 1.0, 2.0), ("now", 1.0 + 2**-20, math.nan)):
        (tmp_path / name).mkdir()
        save_file({"a": torch.tensor([a]), "b": torch.tensor([b, 1.0])}, tmp_path / name / "model.safetensors")
    found = compare_weights(tmp_path / "then", tmp_path / "now")
    assert (found.num_different, found.largest, found.parameter) == (2, math.inf, "b")


def test_what_a_program_reads_is_json_whatever_the_step_came_to():
    """A metric that averages nothing is NaN, and Python would write that as it is."""
    same = TokenDifference(num_compared=1, num_different=0, largest=0.0, scale=1.0)
    replayed = Replay(
        step=2,
        run=Path("r"),
        checkpoint=1,
        changes=(),
        num_tokens=1,
        gradients=same,
        weights=None,
        rounding=1e-4,
        metrics={"ref_kl": MetricDifference(stored=math.nan, replayed=math.nan)},
        logprobs=TokenDifference(num_compared=1, num_different=1, largest=math.inf, scale=1.0),
    )
    read = json.loads(json.dumps(as_json(replayed), allow_nan=False))
    assert read["metrics"] == {"ref_kl": {"stored": "NaN", "replayed": "NaN"}}
    assert (read["logprobs"]["largest"], read["logprobs"]["stored"], read["is_same"]) == ("Infinity", None, False)
