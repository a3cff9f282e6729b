import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from trainer_helpers import VOCAB, gradients, largest_difference, make_batch, make_sample, num_trained
from transformers import AutoModelForCausalLM

from verbatim.algorithms.losses import LOSSES, Loss, LossOutputs, default_loss
from verbatim.config.schema import OptimConfig, TrainerConfig
from verbatim.core.errors import ComponentError, RunStopped, UsageError
from verbatim.trainer.trainer import Trainer


def make_trainer(folder, *, loss=LOSSES["default"], total=10, dtype="float32", lr=1e-2, optim=None, **config):
    settings = TrainerConfig(optim=OptimConfig(lr=lr, **(optim or {})), device="cpu", **config)
    return Trainer(folder, settings, loss=loss, total_optimizer_steps=total, dtype=dtype)


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_batch_reports_what_was_done(qwen):
    samples = make_batch()
    trainer = make_trainer(qwen, micro_batch_tokens=60)
    metrics = trainer.train_batch(samples)
    assert metrics["trained_tokens"] == num_trained(samples)
    assert metrics["num_tokens"] == sum(len(s) for s in samples) == 103
    assert (metrics["num_micro_batches"], metrics["num_optimizer_steps"]) == (2, 1)
    assert metrics["lr"] == 1e-2
    assert 0 < metrics["entropy"] < np.log(VOCAB)
    assert metrics["tokens_per_second"] == pytest.approx(103 / metrics["seconds"])
    assert trainer.schedule.num_done == 1
    assert all(np.isfinite(value) for value in metrics.values())


def test_a_batch_reports_what_its_packing_saved_and_repeated(qwen):
    """Three samples of 12 share 10 tokens; two of them fit into 15 tokens. A sample of nobody's is a row by itself."""
    shared, alone = make_sample(12, "a", seed=1), make_sample(15, "b", seed=2)
    siblings = [replace(shared, token_ids=np.append(shared.token_ids[:10], [i, i]).astype(np.int32)) for i in range(3)]
    metrics = make_trainer(qwen, micro_batch_tokens=15, packing="tree").train_batch([*siblings, alone])
    assert metrics["packing/sample_tokens"] == 3 * 12 + 15
    assert metrics["packing/repeated_tokens"] == 10
    assert metrics["num_tokens"] == (10 + 2 + 2) + (10 + 2) + 15
    assert metrics["packing/tree"] == pytest.approx(14 / 41)
    rows = make_trainer(qwen, packing="rows").train_batch([*siblings, alone])
    assert (rows["packing/sample_tokens"], rows["packing/repeated_tokens"], rows["packing/tree"]) == (51, 0, 0)


def test_loss_and_gradient_are_divided_by_all_trained_tokens_of_the_step(qwen):
    samples = make_batch()
    grads, loss, _ = gradients(qwen, samples)
    norm = sum(float(g.square().sum()) for g in grads.values()) ** 0.5
    metrics = make_trainer(qwen, dtype="float64", micro_batch_tokens=30).train_batch(samples)
    assert metrics["loss"] == pytest.approx(loss / num_trained(samples), rel=1e-12)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-12)


def test_a_loss_may_be_divided_by_trajectories(qwen):
    """One unit of loss per trajectory is a mean of 1, in every packing."""

    def one(inputs):
        return LossOutputs(inputs.trainer_logprobs.sum() * 0 + 1, {"num_seen": 1})

    loss = Loss(one, level="sequence", normalizer="trajectories")
    for budget in (10_000, 40):
        metrics = make_trainer(qwen, loss=loss, micro_batch_tokens=budget).train_batch(make_batch())
        assert (metrics["loss"], metrics["num_seen"]) == (1.0, 4)


def test_the_trained_policy_moves_towards_good_tokens(qwen):
    samples = [replace(s, advantages=np.where(s.loss_mask, 1, 0).astype(np.float32)) for s in make_batch()]
    trainer = make_trainer(qwen)
    before = trainer.logprobs(samples)
    trainer.train_batch(samples)
    after = trainer.logprobs(samples)
    assert sum(np.nansum(a - b) for a, b in zip(after, before, strict=True)) > 1


def test_logprobs_are_those_of_transformers_at_the_sample_temperature(sliding_qwen):
    samples = make_batch()
    found = make_trainer(sliding_qwen, micro_batch_tokens=40).logprobs(samples)
    model = AutoModelForCausalLM.from_pretrained(sliding_qwen, attn_implementation="eager")
    for sample, logprobs in zip(samples, found, strict=True):
        ids = torch.tensor(sample.token_ids).long()
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1] / torch.tensor(sample.temperatures[1:, None])
        expected = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
        assert np.isnan(logprobs).tolist() == (~sample.loss_mask).tolist()
        np.testing.assert_allclose(logprobs[1:][sample.loss_mask[1:]], expected[sample.loss_mask[1:]], atol=1e-5)


def test_gradient_is_clipped_to_the_largest_norm(qwen):
    """With one step of plain Adam the direction is a sign, so the clip shows in Adam's first moment: 0.1 of the
    clipped gradient."""
    trainer = make_trainer(qwen, optim={"max_grad_norm": 0.05})
    assert trainer.train_batch(make_batch())["grad_norm"] > 0.05
    first_moments = [state["exp_avg"] for state in trainer.optimizer.state.values()]
    norm = sum(float(m.square().sum()) for m in first_moments) ** 0.5
    assert norm == pytest.approx(0.1 * 0.05, rel=1e-4)


def test_weight_decay_leaves_norms_alone(qwen):
    """Zero advantages and no KL: no gradient, so decay alone moves what it moves, by lr * decay."""
    samples = [replace(s, advantages=np.zeros_like(s.advantages)) for s in make_batch()]
    trainer = make_trainer(
        qwen, loss=replace(LOSSES["default"], parameters={"kl_tau": 0.0}), optim={"weight_decay": 0.5}
    )
    before = weights(trainer)
    trainer.train_batch(samples)
    for name, after in weights(trainer).items():
        factor = 1.0 if after.ndim == 1 else 1 - 1e-2 * 0.5
        torch.testing.assert_close(after, before[name] * factor, rtol=1e-6, atol=0)


def test_optimizer_steps_per_batch_train_every_token_once(qwen):
    seen = []

    def spy(inputs):
        seen.append(sorted(inputs.inference_logprobs.tolist()))
        return default_loss(inputs)

    samples = make_batch()
    trainer = make_trainer(
        qwen, loss=Loss(spy, level="token"), optimizer_steps_per_batch=3, optim={"schedule": "linear"}, total=6
    )
    metrics = trainer.train_batch(samples)
    everything = sorted(float(x) for s in samples for x in s.logprobs[s.loss_mask])
    assert len(seen) == metrics["num_optimizer_steps"] == trainer.schedule.num_done == 3
    assert sorted(x for part in seen for x in part) == everything
    assert metrics["trained_tokens"] == num_trained(samples)
    assert metrics["lr"] == pytest.approx(1e-2 * 4 / 6)  # the third of six steps


def test_several_steps_are_the_steps_on_the_parts(qwen):
    """Two trajectories in two steps are the same as two batches of one."""
    a, b = make_sample(20, "a", seed=1), make_sample(10, "b", seed=2)
    together, apart = make_trainer(qwen, optimizer_steps_per_batch=2), make_trainer(qwen)
    both = together.train_batch([b, a])
    first, second = apart.train_batch([a]), apart.train_batch([b])  # the larger trajectory goes first
    assert same(weights(together), weights(apart))
    tokens = a.num_trained_tokens, b.num_trained_tokens
    assert both["loss"] == pytest.approx(np.average([first["loss"], second["loss"]], weights=tokens), rel=1e-5)
    assert both["entropy"] == pytest.approx(np.average([first["entropy"], second["entropy"]], weights=tokens), rel=1e-5)


def test_a_batch_without_a_trained_token_takes_no_step(qwen):
    trainer = make_trainer(qwen)
    before = weights(trainer)
    masked = replace(make_sample(5, "a", seed=0), loss_mask=np.zeros(5, dtype=bool))
    for samples in ([], [masked]):
        metrics = trainer.train_batch(samples)
        assert metrics["trained_tokens"] == metrics["num_optimizer_steps"] == 0
        assert all(math.isnan(metrics[name]) for name in ("loss", "grad_norm", "lr"))  # 0 would be drawn as a value
    assert same(weights(trainer), before) and trainer.schedule.num_done == 0 and not trainer.optimizer.state


def test_missing_inference_logprobs_are_for_sft_only(qwen):
    sample = make_sample(9, "a", seed=0)
    missing = replace(sample, logprobs=np.full(9, np.nan, dtype=np.float32))
    with pytest.raises(AssertionError, match=r"'a'.*no inference logprob"):
        make_trainer(qwen).train_batch([sample, missing])
    trainer = make_trainer(qwen, loss=LOSSES["sft"])
    (logprobs,) = trainer.logprobs([missing])
    metrics = trainer.train_batch([missing])
    assert metrics["loss"] == pytest.approx(-np.nanmean(logprobs), rel=1e-5)
    assert "mismatch_kl" not in metrics


def test_mismatch_kl_is_reported_for_every_loss_that_has_two_policies(qwen):
    loss = Loss(lambda inputs: LossOutputs(inputs.trainer_logprobs.sum()), level="sequence")
    custom = make_trainer(qwen, loss=loss).train_batch(make_batch())
    default = make_trainer(qwen).train_batch(make_batch())
    assert custom["mismatch_kl"] == pytest.approx(default["mismatch_kl"], rel=1e-5)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_loss_that_is_not_finite_stops_before_a_weight_is_touched(qwen, level):
    good, bad = make_sample(8, "good", seed=1), make_sample(8, "bad-one", seed=2)
    bad = replace(bad, advantages=np.where(bad.loss_mask, np.inf, 0).astype(np.float32))
    trainer = make_trainer(qwen, loss=replace(LOSSES["default"], level=level))
    trainer.train_batch([good])
    before = weights(trainer)
    with pytest.raises(RunStopped, match=r"optimizer step 1: .* on 1 trajectories: bad-one\."):
        trainer.train_batch([good, bad])
    assert same(weights(trainer), before)
    assert trainer.schedule.num_done == 1
    assert all(p.grad is None for p in trainer.model.parameters())


def test_a_gradient_that_is_not_finite_stops_before_a_weight_is_touched(qwen):
    def broken(inputs):  # sqrt at 0 is finite, its gradient is not
        return LossOutputs((inputs.trainer_logprobs - inputs.trainer_logprobs.detach()).abs().sqrt().sum())

    trainer = make_trainer(qwen, loss=Loss(broken, level="token"))
    before = weights(trainer)
    with pytest.raises(RunStopped, match="gradient's norm is nan"):
        trainer.train_batch(make_batch())
    assert same(weights(trainer), before)


def test_a_loss_that_depends_on_nothing_is_explained(qwen):
    def constant(inputs):
        return LossOutputs(torch.zeros(()))

    with pytest.raises(ComponentError, match="constant returned shape"):
        make_trainer(qwen, loss=Loss(constant, level="sequence")).train_batch(make_batch())


def test_samples_without_a_trajectory_are_refused_where_trajectories_matter(qwen):
    samples = [make_sample(5, "", seed=0), make_sample(5, "", seed=1)]
    with pytest.raises(UsageError, match="trajectory_id"):
        make_trainer(qwen, loss=replace(LOSSES["default"], level="sequence")).train_batch(samples)
    assert make_trainer(qwen).train_batch(samples)["trained_tokens"] == num_trained(samples)


def test_a_step_beyond_the_schedule_is_a_broken_invariant(qwen):
    trainer = make_trainer(qwen, total=1)
    trainer.train_batch(make_batch())
    with pytest.raises(AssertionError, match="all 1 optimizer steps"):
        trainer.train_batch(make_batch())


def test_mismatch_kl_is_over_tokens_also_where_the_loss_sees_trajectories(qwen):
    as_sequence = replace(LOSSES["default"], level="sequence")
    a, b = (make_trainer(qwen, loss=loss).train_batch(make_batch()) for loss in (LOSSES["default"], as_sequence))
    assert b["mismatch_kl"] == pytest.approx(a["mismatch_kl"], rel=1e-5)


def test_gradient_checkpointing_leaves_the_step_alone(sliding_qwen):
    plain, recomputed = (make_trainer(sliding_qwen, dtype="float64", gradient_checkpointing=on) for on in (False, True))
    calls = []
    layer = recomputed.model.model.layers[1].mlp
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    a, b = plain.train_batch(make_batch()), recomputed.train_batch(make_batch())
    assert len(calls) == 2  # forward, and again in the backward pass
    assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-12)
    assert largest_difference(weights(recomputed), weights(plain)) < 1e-12


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(qwen):
    exact, rough = make_trainer(qwen), make_trainer(qwen, dtype="float32")
    rough.config = rough.config.model_copy(update={"dtype": "bfloat16"})
    a, b = exact.train_batch(make_batch()), rough.train_batch(make_batch())
    assert a["loss"] != b["loss"]
    assert b["loss"] == pytest.approx(a["loss"], rel=0.05)
    assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=0.05)
    assert {p.dtype for p in rough.model.parameters()} == {torch.float32}


def test_a_cpu_takes_smaller_micro_batches_where_no_trajectory_is_cut_by_it(qwen):
    samples = [make_sample(5000, name, seed=i) for i, name in enumerate("ab")]
    assert [m.num_tokens for m in make_trainer(qwen).packer.pack(samples)] == [5000, 5000]
    assert [m.num_tokens for m in make_trainer(qwen, micro_batch_tokens=2000).packer.pack(samples)] == [5000, 5000]
    whole = replace(LOSSES["default"], level="sequence")
    assert [m.num_tokens for m in make_trainer(qwen, loss=whole).packer.pack(samples)] == [10_000]
