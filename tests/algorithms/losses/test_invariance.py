"""Every loss of the table gives one gradient, however trajectories are cut into samples, packed and run."""

from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
import torch

from campaigns import sized
from drawn import counted
from properties import reference
from properties.episodes import random_batch
from trainer.trainer_helpers import gradients, largest_difference, num_trained, write_model
from verbatim.algorithms.losses import LOSSES, LossInputs
from verbatim.core.trajectories import STRATEGIES, build
from verbatim.trainer.packing import PACKERS

LAYOUTS = list(product(sorted(STRATEGIES), sorted(PACKERS)))
LIMITS = {18: 10_000, 17: 1, 20: 37, 16: 90}
"""Seeds of batches, and the tokens of a micro-batch."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("qwen"))


def teacher_of(logprobs):
    """Some teacher: a function of what every layout knows of a token."""
    return (0.9 * logprobs - 0.05).astype(np.float32)


def samples_of(batch, strategy, loss):
    built = (build(t, strategy=strategy, needs_logprobs=loss.needs_inference_logprobs) for t in batch)
    return [replace(s, teacher_logprobs=teacher_of(s.logprobs)) for b in built for s in b.samples]


def units(loss, samples):
    """What the trainer divides by."""
    return num_trained(samples) if loss.normalizer == "tokens" else len({s.trajectory_id for s in samples})


def one_turn_at_a_time(folder, batch, loss):
    """The loss on each trajectory's turns, whose logprobs `transformers` computes from each turn's own prompt."""
    oracle, total = reference.model_in(folder), 0.0
    for trajectory in batch:
        turns = [
            (k, turn)
            for k, turn in enumerate(trajectory.turns)
            if len(turn.completion_ids) and (turn.logprobs is not None or not loss.needs_inference_logprobs)
        ]
        if not turns:
            continue
        trainer = torch.cat([reference.logprobs_of(oracle, turn) for _, turn in turns])
        counts = torch.tensor([len(turn.completion_ids) for _, turn in turns])
        missing = np.full(counts.max(), np.nan, dtype=np.float32)
        inference = np.concatenate(
            [missing[: len(t.completion_ids)] if t.logprobs is None else t.logprobs for _, t in turns]
        )
        advantages = [(trajectory.advantage or 0.0) if t.advantage is None else t.advantage for _, t in turns]
        total = (
            total
            + loss(
                LossInputs(
                    trainer_logprobs=trainer,
                    inference_logprobs=torch.tensor(inference).double(),
                    teacher_logprobs=torch.tensor(teacher_of(inference)).double(),
                    advantages=torch.tensor(advantages).double().repeat_interleave(counts),
                    loss_mask=torch.ones(len(trainer), dtype=torch.bool),
                    chunk_ids=torch.tensor([k for k, _ in turns]).repeat_interleave(counts),
                )
            ).loss
        )
    return oracle, total


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("name", LOSSES)
def test_strategy_packing_and_micro_batches_leave_the_gradient_alone(model, name, campaign):
    """With each batch all layouts; with all tests two, so that each loss, and each batch, has every layout."""
    row, first = campaign("losses by layouts"), list(LOSSES).index(name)
    for number, seed in enumerate(LIMITS):
        two = [LAYOUTS[(2 * (first + number) + more) % len(LAYOUTS)] for more in range(2)]
        with counted(row):
            check(model, LOSSES[name], seed, sized(two, LAYOUTS))


@pytest.mark.slow
def test_samples_that_leave_a_token_out_are_found(model):
    """The campaign can fail."""

    def without_one(sample):
        mask = sample.loss_mask.copy()
        mask[np.flatnonzero(mask)[-1]] = False
        return replace(sample, loss_mask=mask, chunk_ids=np.where(mask, sample.chunk_ids, -1))

    for name in LOSSES:
        with pytest.raises(AssertionError):
            check(model, LOSSES[name], 18, LAYOUTS[:1], without_one)


def check(model, loss, seed, layouts, spoil=lambda sample: sample):
    """The gradient and the loss of these layouts are those of one turn at a time; `spoil` changes each sample."""
    batch = random_batch(Random(seed))
    oracle, expected_loss = one_turn_at_a_time(model, batch, loss)
    denominator = units(loss, samples_of(batch, "branching", loss))
    expected = reference.gradient_of(oracle, expected_loss / denominator)
    assert any(gradient.norm() > 0 for gradient in expected.values())
    for strategy, packing in layouts:
        samples = [spoil(sample) for sample in samples_of(batch, strategy, loss)]
        assert spoil(samples[0]) is not samples[0] or units(loss, samples) == denominator
        found, total, _ = gradients(
            model, samples, loss=loss, packing=packing, micro_batch_tokens=LIMITS[seed], denominator=denominator
        )
        assert largest_difference(found, expected) < 1e-12, (strategy, packing)
        assert total == pytest.approx(expected_loss.item(), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_micro_batches_leave_the_metrics_alone(model, name):
    batch, loss = random_batch(Random(11)), LOSSES[name]
    samples = samples_of(batch, "interleaved", loss)
    _, _, expected = gradients(model, samples, loss=loss)
    for limit in (1, 40):
        _, _, found = gradients(model, samples, loss=loss, micro_batch_tokens=limit)
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)
