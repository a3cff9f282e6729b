"""However samples are packed, the gradient is the same."""

import math
from dataclasses import replace

import pytest
import torch
from trainer_helpers import (
    VOCAB,
    gradients,
    largest_difference,
    make_batch,
    make_sample,
    reference_gradients,
    shared_prefixes,
)

from verbatim.algorithms.losses import LOSSES, Loss, LossOutputs

MODELS = ["qwen", "sliding_qwen"]


@pytest.fixture(params=MODELS)
def model(request):
    return request.getfixturevalue(request.param)


def test_float32_gradient_is_that_of_transformers_itself(model):
    samples = make_batch()
    expected, expected_loss = reference_gradients(model, samples)
    found, loss, _ = gradients(model, samples, dtype="float32")
    assert largest_difference(found, expected) < 1e-5
    assert loss == pytest.approx(expected_loss, rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"singly": True},
        {"micro_batch_tokens": 40},
        {"micro_batch_tokens": 33},
        {"micro_batch_tokens": 1},
        {"chunk": 1},
        {"chunk": 5, "micro_batch_tokens": 60},
    ],
    ids=str,
)
def test_packing_and_chunks_leave_the_gradient_alone(model, settings):
    samples = make_batch()
    expected, expected_loss, expected_metrics = gradients(model, samples)
    found, loss, metrics = gradients(model, samples, **settings)
    assert largest_difference(found, expected) < 1e-12
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert metrics == pytest.approx(expected_metrics, rel=1e-12)
    found32, _, _ = gradients(model, samples, dtype="float32", **settings)
    expected32, _, _ = gradients(model, samples, dtype="float32")
    assert largest_difference(found32, expected32) < 1e-5


def test_the_order_of_the_samples_leaves_the_gradient_alone(model):
    samples = make_batch()
    expected, _, _ = gradients(model, samples)
    found, _, _ = gradients(model, samples[::-1], micro_batch_tokens=50)
    assert largest_difference(found, expected) < 1e-12


def test_unused_parameters_have_no_gradient_in_any_packing(sliding_qwen):
    """Only ids below 10 are read or predicted: the untied embedding has no gradient above."""
    samples = [replace(s, token_ids=s.token_ids % 10) for s in make_batch()]
    for settings in ({}, {"singly": True}):
        found, _, _ = gradients(sliding_qwen, samples, **settings)
        embedding = found["model.embed_tokens.weight"]
        assert embedding[10:].abs().sum() == 0 and embedding[:10].abs().sum() > 0
        assert found["lm_head.weight"].shape == (VOCAB, 32)


def test_a_token_loss_does_not_ask_how_many_samples_a_trajectory_was_cut_into(model):
    """The same two turns as one sample, or as two whose contexts are the same."""
    whole = make_sample(20, "a", seed=3, trained=0.6)
    first = _part(whole, 0, 12)
    second = replace(whole, loss_mask=_outside(whole.loss_mask, 12))
    expected, expected_loss, _ = gradients(model, [whole])
    found, loss, _ = gradients(model, [first, second])
    assert largest_difference(found, expected) < 1e-12
    assert loss == pytest.approx(expected_loss, rel=1e-12)


def _part(sample, start, end):
    fields = ("token_ids", "loss_mask", "logprobs", "advantages", "chunk_ids", "policy_versions", "temperatures")
    return replace(sample, **{name: getattr(sample, name)[start:end] for name in fields})


def _outside(mask, start):
    mask = mask.copy()
    mask[:start] = False
    return mask


# ---- losses that see a trajectory whole


def sequence_loss(inputs):
    """Nonlinear in the trajectory: its tokens' gradients depend on one another, and on where they stand."""
    mean_log_ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).sum() / inputs.loss_mask.sum()
    place = torch.linspace(1, 2, len(inputs.loss_mask), dtype=inputs.trainer_logprobs.dtype)
    surprise = (inputs.trainer_logprobs * place).sum() ** 2 / len(inputs.loss_mask)
    advantage = inputs.advantages[inputs.loss_mask].mean()
    metrics = {"length": torch.tensor(float(len(inputs.loss_mask))), "num_turns": inputs.chunk_ids.unique().numel() - 1}
    return LossOutputs(-advantage * mean_log_ratio.exp() + 1e-2 * surprise, metrics)


SEQUENCE = Loss(sequence_loss, level="sequence", normalizer="trajectories")


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_tokens": 54},
        {"micro_batch_tokens": 40},
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 35, "chunk": 4},
    ],
    ids=str,
)
def test_a_trajectory_in_several_micro_batches_has_the_gradient_of_a_whole_one(model, settings):
    samples = make_batch()
    expected, expected_loss, expected_metrics = gradients(model, samples, loss=SEQUENCE)
    found, loss, metrics = gradients(model, samples, loss=SEQUENCE, **settings)
    assert largest_difference(found, expected) < 1e-12
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert metrics == pytest.approx(expected_metrics, rel=1e-12)
    # Trajectories of 26, 2, 54 and 21 tokens and of 2, 1, 3 and 1 turns; every one counts once.
    assert metrics["length"] == pytest.approx((26 + 2 + 54 + 21) / 4)


def test_a_whole_trajectory_is_seen_with_zeros_outside_its_mask(qwen):
    seen = []

    def look(inputs):
        seen.append(inputs)
        return LossOutputs(inputs.trainer_logprobs.sum())

    samples = [make_sample(6, "a", seed=1, chunk=0), make_sample(4, "a", seed=2, chunk=5)]
    gradients(qwen, samples, loss=Loss(look, level="sequence"), micro_batch_tokens=7)
    (inputs,) = seen
    mask = [bool(x) for sample in samples for x in sample.loss_mask]
    logprobs = [0.0 if math.isnan(x) else float(x) for sample in samples for x in sample.logprobs]
    assert inputs.loss_mask.tolist() == mask
    assert inputs.inference_logprobs.tolist() == logprobs
    assert inputs.chunk_ids.tolist() == [int(x) for sample in samples for x in sample.chunk_ids]
    assert inputs.advantages.tolist() == [float(x) for sample in samples for x in sample.advantages]
    assert [x != 0 for x in inputs.trainer_logprobs.tolist()] == mask


def test_a_token_loss_given_whole_trajectories_is_the_same_loss(model):
    samples = make_batch()
    expected, expected_loss, _ = gradients(model, samples)
    as_sequence = replace(LOSSES["default"], level="sequence")
    found, loss, _ = gradients(model, samples, loss=as_sequence, micro_batch_tokens=40)
    assert largest_difference(found, expected) < 1e-12
    assert loss == pytest.approx(expected_loss, rel=1e-12)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("budget", [10_000, 60, 25])
def test_a_tree_has_the_gradient_of_one_sample_at_a_time(model, level, budget):
    samples, loss = shared_prefixes(), replace(LOSSES["default"], level=level)
    expected, expected_loss, _ = gradients(model, samples, loss=loss, singly=level == "token")
    found, found_loss, _ = gradients(model, samples, loss=loss, packing="tree", micro_batch_tokens=budget)
    assert largest_difference(found, expected) < 1e-12
    assert found_loss == pytest.approx(expected_loss, rel=1e-12)
    found32, _, _ = gradients(model, samples, loss=loss, packing="tree", micro_batch_tokens=budget, dtype="float32")
    assert largest_difference(found32, expected) < 1e-5
