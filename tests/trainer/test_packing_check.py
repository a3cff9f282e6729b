"""A trainer takes a model only with a packing that has the logprobs and the gradient of its own attention."""

import logging

import numpy as np
import pytest
import torch
from test_trainer_steps import make_trainer
from trainer_helpers import gradients, largest_difference, make_batch, reference_gradients, shared_prefixes, write_llama

from models.architectures import Architecture, tiny_model
from verbatim.core.errors import ModelError
from verbatim.trainer.attention.rows import RowsPlan
from verbatim.trainer.attention.tree import TreePlan


@pytest.fixture
def folder(tmp_path):
    def write(name):
        tiny_model(Architecture(name)).save_pretrained(tmp_path)
        return tmp_path

    return write


NARROW = ["deepseek_v3", "youtu", "jetmoe", "afmoe"]
"""Values narrower than queries; the last two take a view of what attention returns."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("packing", ["rows", "tree"])
def test_values_of_another_width_than_queries(name, packing, folder):
    path, samples = folder(name), shared_prefixes()
    assert make_trainer(path).packer.packing == "auto"
    expected, expected_loss = reference_gradients(path, samples)
    found, loss, _ = gradients(path, samples, packing=packing, dtype="float32")
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    reached = {k: v for k, v in expected.items() if v is not None}  # some experts get no token
    norm = max(g.norm() for g in reached.values())
    for key, want in reached.items():
        assert (found[key] - want).norm() <= 1e-4 * max(want.norm(), 1e-2 * norm), key


class Ahead(RowsPlan):
    """Every row sees the first token of the one before it instead of its own: nobody crashes."""

    def attend(self, layer_index, query, key, value, call):
        return super().attend(layer_index, query, key, value.roll(1, dims=2), call)


class AllBranches(TreePlan):
    """Every branch sees the ones before it."""

    def __init__(self, position_ids, ends, device):
        super().__init__(position_ids, np.full_like(ends, len(ends)), device)


class Broken(TreePlan):
    """It does not run."""

    def attend(self, *args, **options):
        raise RuntimeError("a shape that is not known")


def test_rows_that_are_another_model_are_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("verbatim.trainer.device_batch.RowsPlan", Ahead)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM cannot be trained: .* logprobs differ by"):
        make_trainer(write_llama(tmp_path))


@pytest.mark.parametrize(("plan", "what"), [(AllBranches, "logprobs differ by"), (Broken, "a shape that is not known")])
def test_wrong_trees_are_refused_and_auto_takes_rows(tmp_path, monkeypatch, caplog, plan, what):
    path = write_llama(tmp_path)
    monkeypatch.setattr("verbatim.trainer.attention.forest.TreePlan", plan)
    with pytest.raises(ModelError, match=f'{what}.* set trainer.packing = "rows"'):
        make_trainer(path, packing="tree")
    with caplog.at_level(logging.WARNING, logger="verbatim.trainer.model_check"):
        trainer = make_trainer(path, packing="auto")
    assert trainer.packer.packing == "rows" and what in caplog.text
    assert trainer.train_batch(shared_prefixes())["packing/tree"] == 0


def test_a_gradient_alone_that_differs_is_found(tmp_path, monkeypatch):
    """The forward pass is right."""

    class Halved(TreePlan):
        def attend(self, layer_index, query, key, value, call):
            half = 0.5 * value + 0.5 * value.detach()
            return super().attend(layer_index, query, key, half, call)

    path = write_llama(tmp_path)
    monkeypatch.setattr("verbatim.trainer.attention.forest.TreePlan", Halved)
    with pytest.raises(ModelError, match="the gradient differs by"):
        make_trainer(path, packing="tree")


def test_the_check_leaves_the_model_and_the_random_numbers_as_they_were(tmp_path):
    path = write_llama(tmp_path)
    before = torch.random.get_rng_state()
    trainer = make_trainer(path)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(p.grad is None for p in trainer.model.parameters())
    found, *_ = gradients(path, make_batch())
    assert largest_difference(found, reference_gradients(path, make_batch(), "float64")[0]) < 1e-12
