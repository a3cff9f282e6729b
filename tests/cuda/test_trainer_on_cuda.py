"""The trainer computes on CUDA devices: no operation of its optimizer steps meets a tensor of another device."""

import dataclasses

import numpy as np
import pytest
import torch

from trainer.trainer_helpers import make_batch, routed_samples, shared_prefixes
from verbatim.algorithms.losses import LOSSES
from verbatim.config.schema import LoraConfig, TrainerConfig
from verbatim.trainer import device_batch
from verbatim.trainer.trainer import Trainer

KL = dataclasses.replace(LOSSES["default"], parameters={"kl_ref_tau": 0.5})


def make_trainer(folder, *, loss="default", frozen=None, **config):
    loss = LOSSES[loss] if isinstance(loss, str) else loss
    settings = TrainerConfig(device="cuda", **config)
    return Trainer(folder, settings, loss=loss, total_optimizer_steps=2, frozen=frozen)


def train(folder, samples, **config):
    """One batch; its metrics."""
    trainer = make_trainer(folder, **config)
    found = trainer.train_batch(samples)
    weights = dict(trainer.models.named_parameters())
    assert {p.device.type for p in weights.values()} == {"cuda"}
    state = [x for s in trainer.optimizer.state.values() for x in s.values()]
    assert state and {x.device.type for x in state} == {"cuda"}
    assert found["trained_tokens"] == sum(sample.num_trained_tokens for sample in samples)
    return found


def with_teacher(samples):
    return [dataclasses.replace(s, logprob_streams={"teacher": np.full(len(s), -2.0, np.float32)}) for s in samples]


def test_a_tensor_on_the_wrong_device_is_found(cuda, folders, monkeypatch):
    def on_the_host(micro_batch, device, sequence=None):
        made = device_batch.DeviceBatch(micro_batch, device, sequence)
        made.position_ids_T = made.position_ids_T.cpu()
        return made

    monkeypatch.setattr("verbatim.trainer.logprobs.DeviceBatch", on_the_host)
    with pytest.raises(RuntimeError, match=r"at least two devices|found two different devices"):
        train(folders("dense"), make_batch(), packing="rows")


def test_a_gradient_on_the_wrong_device_is_found(cuda, folders, monkeypatch):
    def loss(inputs):
        outputs = LOSSES["default"](inputs)
        return dataclasses.replace(outputs, loss=outputs.loss.cpu())

    monkeypatch.setattr("verbatim.trainer.step.checked_outputs", lambda outputs, _: (_Astray.apply(outputs.loss), {}))
    with pytest.raises(AssertionError, match="on cuda:0 gets a gradient on cpu"):
        train(folders("dense"), make_batch(), packing="rows")


class _Astray(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros(grad.shape, device="cpu")


@pytest.mark.parametrize("name", ["dense", "window", "sinks", "softcap", "two windows", "experts"])
@pytest.mark.parametrize("packing", ["rows", "tree"])
def test_every_kind_of_attention(cuda, folders, name, packing):
    found = train(folders(name), shared_prefixes(), packing=packing)
    assert found["packing/tree"] == (packing == "tree")


@pytest.mark.parametrize("loss", sorted(LOSSES))
def test_every_loss_on_trajectories_that_are_cut(cuda, folders, loss):
    samples = with_teacher(make_batch()) if loss == "opd" else make_batch()
    assert train(folders("dense"), samples, loss=loss, packing="rows", micro_batch_tokens=20, logprob_chunk=4)


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16"},
        {"gradient_checkpointing": True},
        {"lora": LoraConfig(r=4)},
        {"lora": LoraConfig(r=4), "dtype": "bfloat16", "gradient_checkpointing": True},
    ],
    ids=["bfloat16", "checkpointing", "adapters", "all of them"],
)
@pytest.mark.parametrize("packing", ["rows", "tree"])
def test_numbers_memory_and_adapters(cuda, folders, settings, packing):
    train(folders("dense"), shared_prefixes(), packing=packing, **settings)


@pytest.mark.parametrize(
    ("reference", "settings"),
    [
        ("other", {}),
        ("dense", {"lora": LoraConfig(r=4)}),
        ("dense", {"dtype": "bfloat16"}),
    ],
    ids=["another model", "the base under adapters", "bfloat16"],
)
def test_a_reference_and_its_term(cuda, folders, reference, settings):
    frozen = {"reference": folders(reference)}
    found = train(folders("dense"), shared_prefixes(), loss=KL, frozen=frozen, packing="tree", **settings)
    assert "ref_kl" in found


@pytest.mark.parametrize("packing", ["rows", "tree"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_experts_are_balanced_and_replayed(cuda, folders, packing, checkpointing):
    found = train(
        folders("experts"),
        routed_samples(known=0.5),
        packing=packing,
        router_aux_loss_coef=0.01,
        gradient_checkpointing=checkpointing,
    )
    assert found.keys() >= {"router/aux_loss", "router/replayed"}


@pytest.mark.parametrize("packing", ["rows", "tree"])
def test_logprobs_come_back_to_the_host(cuda, folders, packing):
    samples = shared_prefixes()
    found = make_trainer(folders("dense"), packing=packing).logprobs(samples)
    for sample, logprobs in zip(samples, found, strict=True):
        assert (np.isfinite(logprobs) == sample.loss_mask).all()
