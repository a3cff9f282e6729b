"""The trainer takes the same optimizer steps, by the same learning rates, whatever the strategy and the packer."""

import dataclasses
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from campaigns import sized
from drawn import drawn
from properties import reference
from properties.episodes import batches, limits, random_batch
from properties.grid import LEVELS, levels, samples_of, some_layouts
from verbatim import build_samples
from verbatim.config.schema import OptimConfig, TrainerConfig
from verbatim.trainer.trainer import Trainer

TOTAL = 30
PAIRS = (
    (("interleaved", "rows"), ("branching", "tree")),
    (("interleaved", "tree"), ("branching", "rows")),
)
"""Strategies and packers that are compared with each other."""


def make_trainer(folder, loss, packing, limit, **config):
    optim = OptimConfig(lr=1e-3, schedule="cosine", warmup_steps=2)
    config = TrainerConfig(optim=optim, packing=packing, micro_batch_tokens=limit, device="cpu", **config)
    return Trainer(folder, config, loss=loss, total_optimizer_steps=TOTAL, dtype="float64")


@pytest.mark.slow
@given(batch=batches(), limit=limits, level=levels, layouts=some_layouts, recomputed=st.booleans())
@drawn("optimizer steps: norms", 5, 1000)
def test_the_loss_and_the_gradients_norm_are_divided_alike(model, batch, limit, level, layouts, recomputed):
    loss, formula = LEVELS[level]
    oracle = reference.model_in(model)
    turns = reference.trained_turns(oracle, batch)
    by_tokens = loss.normalizer == "tokens"
    denominator = sum(len(turn.pi) for turn in turns) if by_tokens else len({turn.trajectory_id for turn in turns})
    expected = formula(turns) / denominator
    norm = torch.nn.utils.get_total_norm(reference.gradient_of(oracle, expected).values()).item()
    for strategy, packing in layouts:
        trainer = make_trainer(model, loss, packing, limit, gradient_checkpointing=recomputed)
        metrics = trainer.train_batch(samples_of(batch, strategy))
        assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-12, abs=1e-12)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-12)
        assert metrics["trained_tokens"] == sum(len(turn.pi) for turn in turns)


@pytest.mark.slow
@given(
    run=st.lists(batches(), min_size=2, max_size=3),
    limit=limits,
    level=levels,
    steps=st.integers(1, 4),
    pair=st.sampled_from(PAIRS),
)
@drawn("optimizer steps: numbers and rates", 5, 1000)
def test_optimizer_steps_and_learning_rates_do_not_depend_on_the_number_of_samples(
    model, run, limit, level, steps, pair
):
    """As many steps as configured, or as there are trajectories with a trained token."""
    loss, _ = LEVELS[level]
    taken, weights = [], []
    for strategy, packing in sized(pair, PAIRS[0] + PAIRS[1]):
        trainer = make_trainer(model, loss, packing, limit, optimizer_steps_per_batch=steps)
        metrics = [trainer.train_batch(samples_of(batch, strategy)) for batch in run]
        taken.append([(m["num_optimizer_steps"], m["lr"], trainer.schedule.num_done) for m in metrics])
        weights.append(torch.cat([p.detach().ravel() for p in trainer.model.parameters()]))
    trajectories = [len({s.trajectory_id for s in samples_of(batch, "branching")}) for batch in run]
    assert [count for count, _, _ in taken[0]] == [min(steps, count) for count in trajectories]
    assert all(other == taken[0] for other in taken)
    for other in weights:
        torch.testing.assert_close(other, weights[0], rtol=0, atol=1e-9)


@pytest.mark.slow
@given(batch=batches(), limit=limits, layouts=some_layouts)
@drawn("optimizer steps: logprobs", 5, 1000)
def test_the_trainers_logprobs_are_those_of_each_turn_by_itself(model, batch, limit, layouts):
    for strategy, packing in layouts:
        trainer = make_trainer(model, LEVELS["token"][0], packing, limit)
        for trajectory in batch:
            is_right(trainer, model, trajectory, build_samples(trajectory, strategy))


def is_right(trainer, model, trajectory, samples):
    """The trainer's logprobs of the samples are those of the trajectory's turns."""
    for sample, found in zip(samples, trainer.logprobs(samples), strict=True):
        assert (np.isnan(found) == ~sample.loss_mask).all()
        for index in set(sample.chunk_ids[sample.loss_mask].tolist()):
            wanted = reference.logprobs_of(reference.model_in(model), trajectory.turns[index]).detach().numpy()
            assert found[sample.chunk_ids == index] == pytest.approx(wanted, rel=1e-6)


def test_a_temperature_that_is_left_out_is_found(model):
    """The campaign can fail."""
    trainer = make_trainer(model, LEVELS["token"][0], "rows", 10_000)
    (trajectory, *_) = (t for t in random_batch(Random(1)) if any(turn.temperature != 1 for turn in t.turns))
    samples = [dataclasses.replace(s, temperatures=np.ones_like(s.temperatures)) for s in build_samples(trajectory)]
    with pytest.raises(AssertionError):
        is_right(trainer, model, trajectory, samples)
