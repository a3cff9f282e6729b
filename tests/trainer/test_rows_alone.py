"""Where something besides attention mixes tokens: rows have the gradient of one sample at a time, trees are refused."""

import pytest
from test_trainer_steps import make_trainer
from trainer_helpers import gradients, largest_difference, make_batch, reference_gradients, shared_prefixes

from models.other_models import write_other
from verbatim.core.errors import ModelError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return lambda name: write_other(name, tmp_path_factory.mktemp(name))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", ["mamba", "bamba", "lfm2"])
def test_rows_have_the_gradient_of_one_sample_at_a_time(folder, name, checkpointing):
    path = folder(name)
    expected, expected_loss = reference_gradients(path, make_batch(), "float64")
    found, loss, _ = gradients(path, make_batch(), micro_batch_tokens=60, checkpointing=checkpointing)
    assert largest_difference(found, expected) < 1e-12
    assert loss == pytest.approx(expected_loss, rel=1e-12)


def test_experts_and_linear_attention_together(folder):
    """Its experts do not compute in float64."""
    path = folder("qwen3_next")
    expected, expected_loss = reference_gradients(path, make_batch())
    found, loss, _ = gradients(path, make_batch(), micro_batch_tokens=60, dtype="float32")
    assert largest_difference(found, expected) < 1e-5
    assert loss == pytest.approx(expected_loss, rel=1e-5)


def test_a_tree_is_refused_by_name_and_auto_is_rows(folder):
    path = folder("qwen3_next")
    with pytest.raises(ModelError, match=r'Qwen3NextForCausalLM mixes .* set trainer.packing = "rows"'):
        make_trainer(path, packing="tree")
    metrics = make_trainer(path, packing="auto").train_batch(shared_prefixes())
    assert metrics["packing/tree"] == 0
    assert metrics["num_tokens"] == metrics["packing/sample_tokens"]
