"""Models beside the one in training: their logprobs reach the loss, and they stay what they were."""

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from test_trainer_steps import same, weights
from trainer_helpers import VOCAB, make_batch, shared_prefixes, write_llama, write_qwen_moe

from verbatim.algorithms.losses import LOSSES, Loss, LossInputs, LossOutputs
from verbatim.config.schema import LoraConfig, OptimConfig, TrainerConfig
from verbatim.core.errors import CheckpointError, ModelError
from verbatim.models.loading import load_model
from verbatim.trainer.attention.tree import TreePlan
from verbatim.trainer.device_memory import DeviceMemory
from verbatim.trainer.frozen import load_frozen
from verbatim.trainer.trainer import Trainer

KL = dataclasses.replace(LOSSES["default"], parameters={"kl_ref_tau": 0.5})


def make_trainer(folder, *, loss=KL, dtype="float32", frozen=None, compute="float32", **config):
    settings = TrainerConfig(optim=OptimConfig(lr=1e-2), device="cpu", dtype=compute, **config)
    return Trainer(folder, settings, loss=loss, total_optimizer_steps=10, dtype=dtype, frozen=frozen)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model of another architecture with the same vocabulary."""
    return write_llama(tmp_path_factory.mktemp("other"))


def scored(samples, folder, name, dtype="float32"):
    """The samples with a stream of that model's logprobs, computed by a trainer of it."""
    found = make_trainer(folder, loss=LOSSES["default"], dtype=dtype, packing="rows").logprobs(samples)
    return [
        dataclasses.replace(s, logprob_streams={name: np.nan_to_num(x)}) for s, x in zip(samples, found, strict=True)
    ]


@pytest.mark.parametrize("packing", ["rows", "tree"])
def test_a_frozen_model_in_the_trainer_gives_what_the_same_stream_in_the_samples_gives(qwen, other, packing):
    samples = shared_prefixes()
    held = make_trainer(qwen, frozen={"reference": other}, packing=packing, micro_batch_tokens=30)
    given = make_trainer(qwen, packing="rows")
    before = held.train_batch(samples), given.train_batch(scored(samples, other, "reference"))
    assert before[0]["ref_kl"] == pytest.approx(before[1]["ref_kl"], rel=1e-4)
    assert before[0]["loss"] == pytest.approx(before[1]["loss"], rel=1e-4)
    assert before[0]["grad_norm"] == pytest.approx(before[1]["grad_norm"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "reference"), [("dense", "experts"), ("experts", "dense"), ("experts", "experts")])
def test_in_bfloat16_a_frozen_model_is_computed_with_as_if_it_were_trained(policy, reference, qwen, tmp_path):
    """A mixture of experts is autocast on a CPU; of a dense model the products alone are rounded."""
    folders = {"dense": qwen, "experts": write_qwen_moe(tmp_path)}
    read = []

    def reads_reference(inputs: LossInputs) -> LossOutputs:
        read.append(inputs.logprob_streams["reference"][inputs.loss_mask].numpy())
        return LossOutputs(loss=inputs.trainer_logprobs.sum())

    frozen = {"reference": folders[reference]}
    held = make_trainer(
        folders[policy], loss=Loss(reads_reference, level="token"), frozen=frozen, packing="rows", compute="bfloat16"
    )
    alone = make_trainer(folders[reference], loss=LOSSES["default"], packing="rows", compute="bfloat16")
    exact = make_trainer(folders[reference], loss=LOSSES["default"], packing="rows")
    samples = shared_prefixes()[:8]
    for sample in samples:
        held.train_batch([sample])
    scores = ([trainer.logprobs([sample])[0] for sample in samples] for trainer in (alone, exact))
    as_trained, in_float32 = (np.concatenate([x[~np.isnan(x)] for x in scored]) for scored in scores)
    found = np.concatenate(read)
    if (policy, reference) != ("experts", "dense"):  # that is autocast too, where it is not what is trained
        assert np.allclose(found, as_trained)
    assert 1e-4 < np.mean(np.abs(found - in_float32)) < 0.1


@pytest.mark.slow
def test_packing_leaves_the_gradient_of_the_term_alone_in_float64(qwen, other):
    """The norm of the gradient, whose term to the reference is more than half of it."""
    norms = {
        (packing, limit): make_trainer(
            qwen, frozen={"reference": other}, dtype="float64", packing=packing, micro_batch_tokens=limit
        ).train_batch(shared_prefixes())["grad_norm"]
        for packing, limit in [("rows", 1000), ("rows", 15), ("tree", 1000), ("tree", 25)]
    }
    assert list(norms.values()) == pytest.approx([norms["rows", 1000]] * 4, rel=1e-12)
    alone = make_trainer(qwen, loss=LOSSES["default"], dtype="float64").train_batch(shared_prefixes())
    assert alone["grad_norm"] < 0.5 * norms["rows", 1000]


def test_a_run_begins_at_its_reference_leaves_it_and_does_not_move_it(qwen):
    trainer = make_trainer(qwen, frozen={"reference": qwen})
    metrics = [trainer.train_batch(make_batch(seed)) for seed in range(3)]
    assert metrics[0]["ref_kl"] == 0.0
    assert metrics[2]["ref_kl"] > 1e-4
    trained, first = (make_trainer(folder, loss=LOSSES["default"]) for folder in (qwen, qwen))
    with torch.no_grad():
        for name, parameter in trained.model.named_parameters():
            parameter.copy_(dict(trainer.model.named_parameters())[name])
    samples = make_batch(9)
    policy, reference = (np.concatenate([x[~np.isnan(x)] for x in t.logprobs(samples)]) for t in (trained, first))
    ahead = reference - policy
    expected = (np.exp(ahead) - ahead - 1).mean()
    assert trainer.train_batch(samples)["ref_kl"] == pytest.approx(expected, rel=1e-3)


def test_a_strong_term_holds_the_policy_near_its_reference(qwen):
    def distance(tau):
        trainer = make_trainer(
            qwen, loss=dataclasses.replace(KL, parameters={"kl_ref_tau": tau}), frozen={"reference": qwen}
        )
        return [trainer.train_batch(make_batch()) for _ in range(6)][-1]["ref_kl"]

    assert distance(10.0) < 0.5 * distance(0.0)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_third_stream_is_one_line(qwen, other, level):
    """A loss of one's own reads it beside the reference, also where trajectories are cut over micro-batches."""

    def mine(inputs: LossInputs) -> LossOutputs:
        judge, reference = (inputs.logprob_streams[name][inputs.loss_mask] for name in ("judge", "reference"))
        terms = (judge - reference) * inputs.trainer_logprobs[inputs.loss_mask]
        return LossOutputs(loss=terms.sum(), metrics={"judged": judge.mean()})

    loss, samples = Loss(mine, level=level), make_batch()
    trainer = make_trainer(qwen, loss=loss, frozen={"judge": other, "reference": qwen}, micro_batch_tokens=20)
    metrics = trainer.train_batch(samples)
    pairs = zip(scored(samples, other, "judge"), scored(samples, qwen, "reference"), strict=True)
    both = [dataclasses.replace(a, logprob_streams={**a.logprob_streams, **b.logprob_streams}) for a, b in pairs]
    expected = make_trainer(qwen, loss=loss).train_batch(both)
    assert metrics["judged"] == pytest.approx(expected["judged"], rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@pytest.mark.slow
def test_a_frozen_model_leaves_the_device_with_the_one_in_training(qwen, other, monkeypatch):
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: None)
    trainer, moved = make_trainer(qwen, frozen={"reference": other}), set()

    def move(tensor, place):
        moved.add(tensor.numpy().tobytes())
        return tensor.clone()

    DeviceMemory(trainer.models, trainer.optimizer, torch.device("cuda:0"), move=move).leave()
    for folder in (qwen, other):
        assert {p.detach().numpy().tobytes() for p in load_model(folder, dtype="float32").parameters()} <= moved


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft")
def test_under_adapters_the_reference_is_their_base_at_no_memory(qwen, tmp_path):
    lora = LoraConfig(r=4, alpha=8)
    trainer = make_trainer(qwen, frozen={"reference": qwen}, lora=lora)
    without = make_trainer(qwen, loss=LOSSES["default"], lora=lora)
    assert list(trainer.models) == [trainer.model], "no second model"
    metrics = [trainer.train_batch(make_batch(seed)) for seed in range(4)]
    assert metrics[0]["ref_kl"] == 0.0
    assert metrics[3]["ref_kl"] > 1e-5
    copied = shutil.copytree(qwen, tmp_path / "copied")
    held = make_trainer(qwen, frozen={"reference": copied}, lora=lora)  # of another folder: a model of its own
    assert len(held.models) == 2
    assert [held.train_batch(make_batch(seed))["ref_kl"] for seed in range(4)] == pytest.approx(
        [m["ref_kl"] for m in metrics], rel=1e-3, abs=1e-7
    )
    names = [n for n, p in trainer.model.named_parameters() if p.requires_grad]
    assert names == [n for n, p in without.model.named_parameters() if p.requires_grad]


def test_a_reference_with_another_vocabulary_is_refused(qwen, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    small = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB - 1,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    small.save_pretrained(tmp_path / "small")
    said = rf"small' has {VOCAB - 1} rows, .* {VOCAB}\. .*resize_token_embeddings\({VOCAB}\)"
    with pytest.raises(ModelError, match=said):
        make_trainer(qwen, frozen={"reference": tmp_path / "small"})


@pytest.mark.slow
def test_a_state_is_continued_with_the_reference_it_was_made_with(qwen, other, tmp_path):
    trainer = make_trainer(qwen, frozen={"reference": qwen})
    trainer.train_batch(make_batch())
    trainer.save_state(tmp_path / "state")
    trainer.save_weights(tmp_path / "weights")
    with pytest.raises(CheckpointError, match=r"the reference model of this run had other weights; put back the model"):
        make_trainer(tmp_path / "weights", frozen={"reference": tmp_path / "weights"}).load_state(tmp_path / "state")
    resumed = make_trainer(tmp_path / "weights", frozen={"reference": qwen})
    resumed.load_state(tmp_path / "state")
    assert resumed.train_batch(make_batch(1)) | {"seconds": 0, "tokens_per_second": 0} == trainer.train_batch(
        make_batch(1)
    ) | {"seconds": 0, "tokens_per_second": 0}
    assert same(weights(resumed), weights(trainer))


@pytest.mark.slow
def test_a_reference_that_comes_or_goes_is_said_and_another_one_is_refused_however_often_a_run_is_resumed(
    qwen, other, tmp_path, caplog
):
    first = make_trainer(qwen, frozen={"reference": qwen})
    first.train_batch(make_batch())
    first.save_state(tmp_path / "with")
    without = make_trainer(qwen, loss=LOSSES["default"])
    without.load_state(tmp_path / "with")
    assert "reference model: this run goes on without it, after 1 optimizer steps" in caplog.text
    without.save_state(tmp_path / "without")
    with pytest.raises(CheckpointError, match="the reference model of this run had other weights"):
        make_trainer(qwen, frozen={"reference": other}).load_state(tmp_path / "without")
    never = make_trainer(qwen, loss=LOSSES["default"])
    never.train_batch(make_batch())
    never.save_state(tmp_path / "never")
    caplog.clear()
    make_trainer(qwen, frozen={"reference": qwen}).load_state(tmp_path / "never")
    assert "reference model: this run had none until now, after 1 optimizer steps" in caplog.text
    caplog.clear()
    make_trainer(qwen, frozen={"reference": qwen}).load_state(tmp_path / "with")
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft")
def test_a_state_of_adapters_knows_the_reference_too(qwen, other, tmp_path):
    """Their base is known by its weights: a copy of it goes on, another model does not."""
    lora = LoraConfig(r=4, alpha=8)
    make_trainer(qwen, frozen={"reference": qwen}, lora=lora).save_state(tmp_path / "state")
    copied = shutil.copytree(qwen, tmp_path / "copied")
    make_trainer(qwen, frozen={"reference": copied}, lora=lora).load_state(tmp_path / "state")
    with pytest.raises(CheckpointError, match="the reference model of this run had other weights"):
        make_trainer(qwen, frozen={"reference": other}, lora=lora).load_state(tmp_path / "state")


class AllBranches(TreePlan):
    """Every token sees all tokens before it, those of other branches too."""

    def __init__(self, position_ids, ends, device="cpu"):
        super().__init__(position_ids, np.full_like(ends, len(ends)), device)


def test_trees_that_are_wrong_for_a_reference_alone_are_not_used(qwen, other, monkeypatch):
    def load(*args, **how):
        monkeypatch.setattr("verbatim.trainer.attention.forest.TreePlan", AllBranches)
        return load_frozen(*args, **how)

    monkeypatch.setattr("verbatim.trainer.frozen.load_frozen", load)
    assert make_trainer(qwen, frozen={"reference": other}, packing="auto").packer.packing == "rows"
    monkeypatch.setattr("verbatim.trainer.attention.forest.TreePlan", TreePlan)
    with pytest.raises(ModelError, match=r"the reference model .*cannot be packed as trees.*trainer\.packing = \"rows"):
        make_trainer(qwen, frozen={"reference": other}, packing="tree")


def test_the_models_of_these_tests_differ(qwen, other):
    (a, _), (b, _) = (make_trainer(x, loss=LOSSES["default"]).logprobs(make_batch()[:2]) for x in (qwen, other))
    assert np.nanmax(np.abs(a - b)) > 0.1
