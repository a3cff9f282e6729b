"""What is kept of each trained token: the logprob before the step, and the loss's derivative by it."""

from dataclasses import replace

import numpy as np
import pytest
from trainer_helpers import make_batch, make_sample, num_trained, shared_prefixes

from verbatim.algorithms.losses import LOSSES, Loss, LossOutputs
from verbatim.config.schema import OptimConfig, TrainerConfig
from verbatim.core.records.trained_tokens import TrainedTokens
from verbatim.trainer.trainer import Trainer


def trainer_of(folder, loss, **settings):
    config = TrainerConfig(optim=OptimConfig(lr=1e-2), device="cpu", **settings)
    return Trainer(folder, config, loss=loss, total_optimizer_steps=9, dtype="float64")


def kept_of(trainer, samples):
    found = []
    metrics = trainer.train_batch(samples, found.append)
    (tokens,) = found
    assert len(tokens.logprobs) == len(tokens.gradients) == num_trained(samples) == metrics["trained_tokens"]
    return tokens


@pytest.mark.parametrize(
    ("loss", "packing", "samples"),
    [
        ("default", "rows", make_batch()),
        ("default", "tree", shared_prefixes()),
        ("gspo", "rows", make_batch()),
        ("gspo", "tree", shared_prefixes()),
        ("ipa", "rows", make_batch()),
        ("sft", "tree", shared_prefixes()),
    ],
)
def test_logprobs_are_those_before_the_step_in_the_order_of_the_batch(qwen, loss, packing, samples):
    trainer = trainer_of(qwen, LOSSES[loss], packing=packing, micro_batch_tokens=40)
    before = [logprobs[sample.loss_mask] for logprobs, sample in zip(trainer.logprobs(samples), samples, strict=True)]
    np.testing.assert_allclose(kept_of(trainer, samples).logprobs, np.concatenate(before), rtol=0, atol=1e-6)


def weighted(inputs):
    """Each token's derivative is its advantage."""
    return LossOutputs((inputs.trainer_logprobs * inputs.advantages * inputs.loss_mask).sum(), {})


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("steps", [1, 3])
def test_gradients_are_the_losss_own_before_it_is_divided(qwen, level, steps):
    samples = make_batch()
    trainer = trainer_of(qwen, Loss(weighted, level=level), micro_batch_tokens=40, optimizer_steps_per_batch=steps)
    expected = np.concatenate([sample.advantages[sample.loss_mask] for sample in samples])
    np.testing.assert_allclose(kept_of(trainer, samples).gradients, expected, rtol=1e-6)


def test_a_sample_without_a_trained_token_moves_nothing(qwen):
    samples = make_batch()
    silent = replace(samples[1], loss_mask=np.zeros_like(samples[1].loss_mask))
    changed = [samples[0], silent, *samples[2:]]
    assert changed[0].trajectory_id == silent.trajectory_id
    trainer = trainer_of(qwen, Loss(weighted, level="token"))
    expected = np.concatenate([sample.advantages[sample.loss_mask] for sample in changed])
    np.testing.assert_allclose(kept_of(trainer, changed).gradients, expected, rtol=1e-6)


def test_tokens_are_told_by_turn():
    """Samples with turns 0 and 2 of one trajectory, and 1."""
    first, second = make_sample(6, "a", seed=1), make_sample(4, "a", seed=2)
    mask = np.array([False, True, True, False, True, True])
    first = replace(first, loss_mask=mask, chunk_ids=np.array([-1, 0, 0, -1, 2, 2], dtype=np.int32))
    second = replace(
        second, loss_mask=np.array([False, False, True, True]), chunk_ids=np.array([-1, -1, 1, 1], dtype=np.int32)
    )
    values = np.arange(6, dtype=np.float32)
    found = list(TrainedTokens(logprobs=-values, gradients=values).by_turn([first, second]))
    assert [(turn, logprobs.tolist(), gradients.tolist()) for _, turn, logprobs, gradients in found] == [
        (0, [0, -1], [0, 1]),
        (2, [-2, -3], [2, 3]),
        (1, [-4, -5], [4, 5]),
    ]
    with pytest.raises(AssertionError, match="6 tokens of a batch that has 4"):
        list(TrainedTokens(logprobs=values, gradients=values).by_turn([first]))
