"""Every strategy, packer and micro-batching gives the loss and the gradient of one turn at a time.

`pytest tests/properties --whole` tries each property on 1000 random batches for each model; without it they are few.
"""

import dataclasses
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawn import drawn
from properties import reference
from properties.episodes import batches, limits, random_batch
from properties.grid import LAYOUTS, LEVELS, levels, samples_of
from trainer.trainer_helpers import gradients, largest_difference, num_trained
from verbatim.algorithms.losses import LOSSES


def check(model, turns, formula, samples_by, tolerance, **settings):
    """The gradient and the loss of each layout are the oracle's."""
    oracle, denominator = reference.model_in(model), sum(len(turn.pi) for turn in turns)
    expected_loss = formula(turns)
    expected = reference.gradient_of(oracle, expected_loss / denominator)
    for strategy, packing in LAYOUTS:
        samples = samples_by(strategy)
        assert num_trained(samples) == denominator
        found, loss, _ = gradients(model, samples, packing=packing, **settings)
        assert largest_difference(found, expected) < tolerance, (strategy, packing)
        assert loss == pytest.approx(expected_loss.item(), rel=tolerance, abs=tolerance), (strategy, packing)


@pytest.mark.slow
@given(batch=batches(), level=levels, limit=limits, chunk=st.sampled_from([1, 5, 1000]))
@drawn("one gradient: float64", 10, 1000)
def test_the_gradient_is_that_of_one_turn_at_a_time(model, batch, level, limit, chunk):
    loss, formula = LEVELS[level]
    turns = reference.trained_turns(reference.model_in(model), batch)
    options = {"loss": loss, "micro_batch_tokens": limit, "chunk": chunk}
    check(model, turns, formula, partial(samples_of, batch), 1e-12, **options)


@pytest.mark.slow
@given(batch=batches(), level=levels, limit=limits)
@drawn("one gradient: float32", 5, 1000)
def test_in_float32_it_is_the_same_but_for_rounding(model, batch, level, limit):
    loss, formula = LEVELS[level]
    turns = reference.trained_turns(reference.model_in(model), batch)
    options = {"loss": loss, "micro_batch_tokens": limit, "dtype": "float32"}
    check(model, turns, formula, partial(samples_of, batch), 1e-5, **options)


@pytest.mark.slow
@given(batch=batches(), limit=limits)
@drawn("one gradient: supervised", 5, 1000)
def test_supervised_training_reads_every_completion_with_or_without_logprobs(model, batch, limit):
    turns = reference.trained_turns(reference.model_in(model), batch, needs_logprobs=False)
    samples = partial(samples_of, batch, needs_logprobs=False)
    check(model, turns, reference.supervised_formula, samples, 1e-12, loss=LOSSES["sft"], micro_batch_tokens=limit)


def test_an_advantage_of_another_token_is_found(model):
    """The campaign can fail: in each sample, the first trained token has the advantage of the last one."""

    def moved(batch, strategy):
        for sample in samples_of(batch, strategy):
            (at,) = np.nonzero(sample.loss_mask)
            advantages = sample.advantages.copy()
            advantages[at[0]] = advantages[at[-1]]
            yield dataclasses.replace(sample, advantages=advantages)

    def is_found(seed):
        batch = random_batch(Random(seed))
        turns = reference.trained_turns(reference.model_in(model), batch)
        try:
            check(
                model,
                turns,
                reference.default_formula,
                lambda s: list(moved(batch, s)),
                1e-12,
                loss=LOSSES["default"],
                micro_batch_tokens=10_000,
            )
        except AssertionError:
            return True
        return False

    assert any(map(is_found, range(20)))


def test_the_oracle_is_transformers_own_attention_and_norms_but_in_float64(model):
    for trajectory in random_batch(Random(0)):
        for turn in trajectory.turns:
            exact, theirs = (
                reference.logprobs_of(reference.model_in(model, exact=exact), turn).detach() for exact in (True, False)
            )
            assert exact.numpy() == pytest.approx(theirs.numpy(), abs=1e-5)
