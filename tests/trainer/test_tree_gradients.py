"""A prefix tree has the gradient of one sample at a time by transformers' own attention, for models of all makes."""

import pytest
from trainer_helpers import gradients, largest_difference, reference_gradients, shared_prefixes

from verbatim.trainer.attention import tree as tree_attention
from verbatim.trainer.packing import pack_tree

SAMPLES = shared_prefixes()


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch):
    """Blocks smaller than the trees."""
    monkeypatch.setattr(tree_attention, "BLOCK", 8)
    monkeypatch.setattr(tree_attention, "KEY_MULTIPLE", 4)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("budget", [10_000, 30], ids=["whole", "cut"])
@pytest.mark.parametrize("model", ["qwen", "sliding_qwen", "llama", "tied_llama"])
def test_a_tree_has_the_gradient_of_transformers_itself(model, budget, checkpointing, request):
    """Tied and untied heads, two and four query heads to a key/value head, a sliding window of 7 in one layer."""
    folder = request.getfixturevalue(model)
    expected, expected_loss = reference_gradients(folder, SAMPLES, "float64")
    found, loss, _ = gradients(folder, SAMPLES, packing="tree", micro_batch_tokens=budget, checkpointing=checkpointing)
    assert largest_difference(found, expected) < 1e-12
    assert loss == pytest.approx(expected_loss, rel=1e-12)


def test_the_samples_share_and_are_cut():
    """An opening of 6 tokens, which three of the four trajectories follow by 3; then 2 + 3 + 4 of three turns."""
    assert sum(map(len, SAMPLES)) == 3 * (11 + 13 + 16) + (8 + 10 + 13)
    assert [m.num_tokens for m in pack_tree(SAMPLES, micro_batch_tokens=10_000, keep_whole=False)] == [6 + 3 * 12 + 9]
    assert sum(m.num_repeated_tokens for m in pack_tree(SAMPLES, micro_batch_tokens=30, keep_whole=False)) > 0
